"""What the schedulers say of a plan before it is carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.protocol import NewUnit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.clusters.protocol import Cluster, JobScript
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.plan import Outlook, Plan


def with_outlook(plan: Plan, evidence: Evidence, clusters: Mapping[str, Cluster]) -> Plan:
    """The plan with what is expected of the units that it would start, and warnings of what would be refused."""
    groups = {name: units for name, units in _started(plan).items() if evidence.clusters[name].known}
    outlooks: list[Outlook] = []
    warnings: list[str] = []
    for cluster, units in sorted(groups.items()):
        try:
            expected, refused = clusters[cluster].outlook(units)
        except FabrictoolError as error:
            expected, refused = [], [f"{cluster}: its queue is not known: {error}"]
        outlooks += expected
        warnings += refused
    return msgspec.structs.replace(plan, outlook=tuple(outlooks), warnings=(*plan.warnings, *warnings))


def scripts_of(plan: Plan, clusters: Mapping[str, Cluster], serial: int) -> list[JobScript]:
    """What schedulers would be given if the plan were carried out now; `serial` is that of the state then.

    Raises
    ------
    FabrictoolError
        A cluster does not answer, or a unit cannot run there (FT5403, FT5408).
    """
    groups = sorted(_started(plan, serial).items())
    return [script for cluster, units in groups for script in clusters[cluster].scripts(units)]


def _started(plan: Plan, serial: int = 0) -> dict[str, list[NewUnit]]:
    """Units that the plan starts, by their cluster."""
    groups: dict[str, list[NewUnit]] = {}
    for action in plan.actions:
        if action.kind in ("create", "replace") and action.spec is not None:
            unit = NewUnit(action.operation, action.address, action.spec, {}, plan.lineage, serial)
            groups.setdefault(action.cluster, []).append(unit)
    return groups
