"""Healing to what was applied last: a verb of its own, not a new plan (the blueprint may have moved on since).

Each look names the drift, and its plan holds only what may be done. What a healing cannot mend, such as a cluster that
does not answer, needs a new plan, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.address import Address
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.drift import drift_of
from fabrictool.planner.plan import unsolved
from fabrictool.planner.readset import healing_facts
from fabrictool.planner.succession import successions

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.planner.drift import Drift

BACK_OFF_S = 30.0
LONGEST_BACK_OFF_S = 3600.0
"""After a failure the next attempt waits 30 s, after each further one in a row twice as long, at most an hour: a
replica that cannot start must not fill a queue that belongs to others."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How often an address failed in a row, and when last."""

    count: int
    last: float
    """Wall seconds."""


@dataclass(frozen=True, slots=True)
class Healing:
    """What one look leads to."""

    drift: tuple[Drift, ...]
    plan: Plan
    """What heals it, as far as it may be done."""
    held: tuple[str, ...] = ()
    """What was left out of it, and why."""

    def without_deletions(self) -> Plan:
        """For a healing that would stop more than it may."""
        kept = tuple(action for action in self.plan.actions if action.kind != "delete")
        return msgspec.structs.replace(self.plan, actions=kept)


def heal(evidence: Evidence, failures: Mapping[str, Failures], *, now: float, prune: bool = False) -> Healing:
    """Compare with what was applied last; `failures` by address, `now` in wall seconds.

    `prune` allows to stop units of ours that nobody asked for; without it they are only named.
    """
    state = evidence.state
    wanted = {
        address: WantedUnit(address, unit.cluster, unit.spec, unit.summary)
        for address, unit in state.applied_units.items()
        if unit.cluster in evidence.clusters
    }
    expiring = successions(evidence, now)
    drift = drift_of(evidence, expiring)
    chosen, held = [], []
    for action in actions(wanted, evidence, expiring):
        why = _unwanted(action, wanted, prune=prune) or _too_soon(action, failures, now) or _damaged(action, evidence)
        if why:
            held.append(f"{action.kind} {action.address}: {why}")
        elif action.kind != "unknown":
            chosen.append(action)
    facts = healing_facts(state, evidence.observed)
    plan = unsolved(evidence, state.applied_blueprint, facts, tuple(chosen), "heals; forecasts nothing")
    reasons = (f"a look at {now:.3f}", *(f"{change.kind}: {change.text}" for change in drift))
    return Healing(drift, msgspec.structs.replace(plan, reasons=reasons), tuple(held))


def _unwanted(action: Action, wanted: Container[str], *, prune: bool) -> str:
    if action.kind == "delete" and action.address not in wanted and not prune:
        return "nobody asked for it; `fabrictool reconcile --prune` stops it, `fabrictool plan` decides anew"
    return ""


def _too_soon(action: Action, failures: Mapping[str, Failures], now: float) -> str:
    before = failures.get(action.address)
    if before is None or not before.count or action.kind not in ("create", "replace"):
        return ""
    next_at = before.last + min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** min(before.count - 1, 10))
    if next_at <= now:
        return ""
    return f"it failed {before.count} times in a row; the next attempt is in {next_at - now:.0f} s"


def _damaged(action: Action, evidence: Evidence) -> str:
    """A unit whose spec cannot be read still holds its devices, and may serve."""
    start = Address.parse(action.address).operations
    units = [unit for facts in evidence.clusters.values() for unit in facts.units]
    holding = [unit.operation for unit in units if unit.holds and unit.operation.startswith(start)]
    return f"{holding[0]} is damaged and still lives" if action.kind == "create" and holding else ""
