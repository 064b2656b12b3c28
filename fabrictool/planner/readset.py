"""The facts that a plan relies on, named and valued so that just those can be compared again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.canonical import digest
from fabrictool.domain.address import Address

if TYPE_CHECKING:
    from fabrictool.domain.observed import Observed, ObservedUnit
    from fabrictool.domain.state import State

ABSENT = "absent"
AS = " as "
KEYS = "tenants' keys"


def read_set(blueprint_digest: str, observed: Observed, keys: str | None = None) -> dict[str, str]:
    """Fact → value: the resolved blueprint and inventory, the tenants' keys, which clusters answered, and what runs.

    A unit's value names its operation, which has one spec for ever, but for gateways; what is not there counts as
    `ABSENT`.
    """
    facts = {"blueprint": blueprint_digest}
    if keys is not None:
        facts[KEYS] = keys
    for name, cluster in sorted(observed.clusters.items()):
        facts[f"cluster/{name}"] = "known" if cluster.known else "unknown"
    return facts | unit_facts(observed)


def healing_facts(state: State, observed: Observed) -> dict[str, str]:
    """What a healing relies on: what runs, and what was applied last."""
    return unit_facts(observed) | {"what was applied": digest(msgspec.to_builtins(state.applied_units))}


def unit_facts(observed: Observed) -> dict[str, str]:
    """``unit/ADDRESS`` → ``OPERATION on CLUSTER``, of all that live; ``as DIGEST`` of a gateway, which can be updated.

    Not of an agent: what can be changed of that is no part of the digest. Whether a unit says by now which spec is in
    force is no fact of a plan either: one that comes up after the plan was made must not make it stale.
    """
    return {
        f"unit/{address}": ", ".join(sorted(_unit_fact(name, unit) for name, unit in units))
        for address, units in observed.living().items()
    }


def _unit_fact(cluster: str, unit: ObservedUnit) -> str:
    fact = f"{unit.operation} on {cluster}"
    gateway = Address.parse(unit.address).kind == "gateway"
    return f"{fact}{AS}{unit.spec_digest}" if gateway else fact
