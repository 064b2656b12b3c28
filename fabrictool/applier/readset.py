"""The facts that a plan relies on, named and valued so that just those can be compared again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.applier.fabric import Fabric
    from fabrictool.blueprint import Loaded
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.specs import UnitSpec

ABSENT = "absent"


def read_set(loaded: Loaded, observed: Observed, keys: str | None = None) -> dict[str, str]:
    """Fact → value: the resolved blueprint and inventory, the tenants' keys, which clusters answered, and what runs.

    A unit's value names its operation, which has one spec for ever; what is not there counts as `ABSENT`.
    """
    facts = {"blueprint": loaded.digest}
    if keys is not None:
        facts["tenants' keys"] = keys
    for name, cluster in sorted(observed.clusters.items()):
        facts[f"cluster/{name}"] = "known" if cluster.known else "unknown"
    return facts | unit_facts(observed)


def unit_facts(observed: Observed) -> dict[str, str]:
    """``unit/ADDRESS`` → ``OPERATION on CLUSTER``, of all that live."""
    return {
        f"unit/{address}": ", ".join(sorted(f"{unit.operation} on {name}" for name, unit in units))
        for address, units in observed.living().items()
    }


def running_specs(fabric: Fabric, observed: Observed) -> dict[str, UnitSpec]:
    """Operation → what the living unit was told."""
    return {
        unit.operation: fabric.clusters[cluster].spec(unit.operation)
        for units in observed.living().values()
        for cluster, unit in units
        if unit.spec_digest  # without one its files are gone, and only its job is left
    }
