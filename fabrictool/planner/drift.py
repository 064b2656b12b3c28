"""What runs against what was applied last, in kinds; and what cannot be seen or reached at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import Place, Problem
from fabrictool.domain.plan import spec_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.evidence import Evidence
    from fabrictool.planner.succession import Succession

DriftKind = Literal["missing", "ended", "changed", "degraded", "ending", "orphan", "unreachable"]


@dataclass(frozen=True, slots=True)
class Drift:
    """One way in which what runs is not what was applied."""

    kind: DriftKind
    address: str
    cluster: str
    text: str


def drift_of(evidence: Evidence, expiring: Mapping[str, Succession]) -> tuple[Drift, ...]:
    """Every way; `expiring` is what `succession.successions` says."""
    drift: list[Drift] = []
    kind: DriftKind
    running = evidence.observed.running()
    for address, unit in sorted(evidence.state.applied_units.items()):
        facts = evidence.clusters.get(unit.cluster)
        if facts is None or not facts.known:
            why = facts.reason if facts is not None else "it is not enabled in the inventory"
            drift.append(Drift("unreachable", address, unit.cluster, f"{address} is on {unit.cluster}: {why}"))
        elif address not in running:
            dead = facts.unit(address)
            kind = "missing" if dead is None else "ended"
            text = f"{address} is not on {unit.cluster}" if dead is None else f"{address} {dead.state}: {dead.reason}"
            drift.append(Drift(kind, address, unit.cluster, text.rstrip(": ")))
    for address, (cluster, here) in sorted(running.items()):
        want = evidence.state.applied_units.get(address)
        if want is None:
            drift.append(Drift("orphan", address, cluster, f"{address} is on {cluster}, and was not asked for"))
        elif here.operation in expiring:
            succession = expiring[here.operation]
            kind = "degraded" if succession.cause == "silence" else "ending"
            drift.append(Drift(kind, address, cluster, f"{address}: {succession.reason}"))
        elif cluster != want.cluster or here.spec_digest != spec_digest(want.spec):
            drift.append(Drift("changed", address, cluster, f"{address} is not what was applied"))
        elif here.state == "running" and not here.ready:
            drift.append(Drift("degraded", address, cluster, f"{address} does not serve: {here.detail}"))
    return tuple(drift)


def out_of_reach(evidence: Evidence) -> list[Problem]:
    """Each cluster that does not answer or is not enabled, with the units that were started there and not stopped.

    Those without such a unit are warnings, if they do not answer; nothing is said of clusters that are not enabled.
    """
    problems = []
    remembered: dict[str, list[str]] = {}
    for address, placed in sorted(evidence.state.units.items()):
        remembered.setdefault(placed.cluster, []).append(address)
    for name in sorted({*remembered, *evidence.clusters}):
        facts = evidence.clusters.get(name)
        if (facts is None and name in remembered) or (facts is not None and not facts.known):
            why = "is unknown: " + facts.reason if facts is not None else "is not enabled in the inventory"
            hint = (facts.hint if facts is not None else "") or "enable it in the inventory and run the command again"
            units = ", ".join(remembered.get(name, []))
            problems.append(
                Problem(
                    "FT5109",
                    f"{name} {why}; " + (f"started there and not stopped: {units}" if units else "nothing was started"),
                    Place(thing=f"cluster/{name}"),
                    hint,
                    severity="error" if units else "warning",
                )
            )
    return problems
