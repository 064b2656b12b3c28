"""What runs against what was applied last, in kinds; and what cannot be seen or reached at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import Place, Problem
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.observed import Blocked, ObservedUnit
    from fabrictool.domain.plan import Action
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.planner.succession import Cause, Succession

DriftKind = Literal["missing", "ended", "changed", "degraded", "ending", "stuck", "orphan", "unreachable"]
STUCK_HINTS: Mapping[Blocked, str] = {
    "": "",
    "held": "it starts when the site or you release it; ask the site why",
    "invalid": "correct `job`, `queue` or `walltime` of the partition in the inventory; apply submits it anew",
    "limit": "end other jobs of yours, or ask the site for more",
    "nodes": "ask the site when they are back; `fabrictool doctor SITE` shows the partition",
}


_KINDS: Mapping[Cause, DriftKind] = {
    "silence": "degraded",
    "requeued": "degraded",
    "successors": "changed",
    "nodes": "changed",
}
"""Of those that are not just at their end."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One way in which what runs is not what was applied."""

    kind: DriftKind
    address: str
    cluster: str
    text: str


def drift_of(evidence: Evidence, expiring: Mapping[str, Succession]) -> tuple[Drift, ...]:
    """Every way; `expiring` is what `healing.cannot_stay` says."""
    running = evidence.observed.running()
    drift = [*_not_running(evidence, running)]
    kind: DriftKind
    for address, (cluster, here) in sorted(running.items()):
        want = evidence.state.applied_units.get(address)
        if want is None:
            drift.append(Drift("orphan", address, cluster, f"{address} is on {cluster}, and was not asked for"))
        elif here.operation in expiring:
            succession = expiring[here.operation]
            kind = _KINDS.get(succession.cause, "ending")
            drift.append(Drift(kind, address, cluster, f"{address}: {succession.reason}"))
        elif cluster != want.cluster or here.spec_digest != spec_digest(want.spec):
            drift.append(Drift("changed", address, cluster, f"{address} is not what was applied"))
        elif _told_otherwise(here, evidence.specs.get(here.operation), want.spec):
            drift.append(Drift("changed", address, cluster, f"{address} was not told yet whom it serves now"))
        elif here.in_force == "former":
            text = f"{address} runs by a former spec: {here.detail}".rstrip(": ")
            drift.append(Drift("changed", address, cluster, text))
        elif here.blocked:
            drift.append(Drift("stuck", address, cluster, f"{address} cannot start: {here.detail}"))
        elif here.state == "running" and not here.ready:
            drift.append(Drift("degraded", address, cluster, f"{address} does not serve: {here.detail}"))
    return tuple(drift)


def _not_running(evidence: Evidence, running: Container[str]) -> Iterator[Drift]:
    """Of what was applied; a replica that ended for want of requests is where it should be."""
    kind: DriftKind
    for address, unit in sorted(evidence.state.applied_units.items()):
        facts = evidence.clusters.get(unit.cluster)
        if facts is None or not facts.known:
            why = facts.reason if facts is not None else "it is not enabled in the inventory"
            yield Drift("unreachable", address, unit.cluster, f"{address} is on {unit.cluster}: {why}")
        elif address not in running:
            dead = facts.unit(address)
            if unit.spec.is_extra or (dead is not None and dead.dormant):
                continue
            kind = "missing" if dead is None else "ended"
            text = f"{address} is not on {unit.cluster}" if dead is None else f"{address} {dead.state}: {dead.reason}"
            yield Drift(kind, address, unit.cluster, text.rstrip(": "))


def _told_otherwise(here: ObservedUnit, told: UnitSpec | None, wanted: UnitSpec) -> bool:
    """Whether an agent that can be told was not, such as one that waited in a queue at the time."""
    if not here.in_force or not isinstance(told, AgentSpec) or not isinstance(wanted, AgentSpec):
        return False
    told_now = (told.trust, told.idle_after_s, told.successors)
    return told_now != (wanted.trust, wanted.idle_after_s, wanted.successors)


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


def unanswered(evidence: Evidence, actions: Iterable[Action], pinned: Container[str] = ()) -> list[Problem]:
    """Clusters that a command needs and that did not answer: something of ours is there, or should be."""
    wanted = {action.cluster for action in actions if action.kind == "unknown"}
    there = {placed.cluster for placed in evidence.state.units.values()}
    return [
        Problem(
            "FT5109",
            f"{name} is needed and did not answer: {facts.reason}",
            Place(thing=f"cluster/{name}"),
            facts.hint or "run the command again when it does; nothing on it was touched",
            transient=True,
        )
        for name, facts in sorted(evidence.clusters.items())
        if not facts.known and (name in wanted or name in there or name in pinned)
    ]


def unanswered_then(actions: Iterable[Action]) -> list[Problem]:
    """The same of a saved plan: what it could not decide, by cluster."""
    undecided: dict[str, list[Action]] = {}
    for action in actions:
        if action.kind == "unknown":
            undecided.setdefault(action.cluster, []).append(action)
    hint = "plan again when it answers; nothing on it was touched"
    return [
        Problem(
            "FT5109",
            f"{those[0].reason}; undecided: {', '.join(action.address for action in those)}",
            Place(thing=f"cluster/{cluster}"),
            hint,
        )
        for cluster, those in sorted(undecided.items())
    ]


def stuck(evidence: Evidence) -> dict[str, Problem]:
    """Operation of a job that the scheduler will not start by itself → what to say of it."""
    return {
        unit.operation: cannot_start(unit, cluster)
        for cluster, unit in evidence.observed.running().values()
        if unit.blocked
    }


def cannot_start(unit: ObservedUnit, cluster: str) -> Problem:
    """Of a job that waits for something that will not come by itself."""
    message = f"{unit.address} waits in the queue of {cluster} and cannot start: {unit.detail}"
    return Problem("FT5111", message, Place(thing=unit.address), STUCK_HINTS[unit.blocked])


def clock_warnings(evidence: Evidence) -> list[str]:
    """Of clusters whose clock is not ours."""
    return [
        f"the clock of {name}'s login node is {abs(facts.skew_s):,.0f} s {'ahead of' if facts.skew_s > 0 else 'behind'}"
        f" {evidence.host or 'this machine'}'s; no replica is judged by it"
        for name, facts in sorted(evidence.clusters.items())
        if facts.skew_s
    ]
