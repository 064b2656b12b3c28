"""Healing to what was applied last: a verb of its own, not a new plan (the blueprint may have moved on since).

Each look names the drift, and its plan holds only what may be done. What a healing cannot mend, such as a cluster that
does not answer, needs a new plan, and that is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.address import Address
from fabrictool.domain.specs import AgentSpec
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.dormant import dormant, expected_at
from fabrictool.planner.drift import drift_of
from fabrictool.planner.loads import with_loader
from fabrictool.planner.node_parts import with_too_close
from fabrictool.planner.plan import unsolved
from fabrictool.planner.readset import healing_facts
from fabrictool.planner.succession import successions

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.plan import Action, Plan
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.domain.state import State
    from fabrictool.planner.drift import Drift
    from fabrictool.planner.succession import Succession

BACK_OFF_S = 30.0
LONGEST_BACK_OFF_S = 3600.0
"""After a failure the next attempt waits 30 s, after each further one in a row twice as long, at most an hour: a
replica that cannot start must not fill a queue that belongs to others."""
WINDOW_S = 3600.0
MOST_STARTS = 6
"""Units that healing starts at one address in `WINDOW_S`, whatever the cause: what looks dead and is not, what dies as
soon as it starts. More needs a person."""
MOST_STARTS_EACH = 2
"""As many for each unit of the fabric, in all; never fewer than `MOST_STARTS`.

Both are beside those for which allocations end, twice as many as a unit's walltime fits into the window, and those of
replicas that end when nobody asks for them."""


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
    expected: Mapping[str, float] = field(default_factory=dict)
    """Model that requests wait for → wall seconds at which a replica of it is to serve."""
    waiting: tuple[tuple[str, str], ...] = ()
    """(cluster, operation) of the gateways where they wait."""
    dormant: int = 0
    """Replicas that start when somebody asks."""
    extra: int = 0
    """Replicas beyond the planned ones that start while requests wait, as far as they do not run."""
    capped: tuple[str, ...] = ()
    """Addresses that were healed so often that a person must look."""

    def without_deletions(self) -> Plan:
        """For a healing that would stop more than it may."""
        kept = tuple(action for action in self.plan.actions if action.kind != "delete")
        return msgspec.structs.replace(self.plan, actions=kept)


def heal(
    evidence: Evidence,
    failures: Mapping[str, Failures],
    *,
    now: float,
    prune: bool = False,
) -> Healing:
    """Compare with what was applied last; `failures` by address, `now` in wall seconds.

    `prune` allows to stop units of ours that nobody asked for; without it they are only named.
    """
    state = evidence.state
    wanted = {
        address: WantedUnit(address, unit.cluster, _to_start(unit.spec, state), unit.summary)
        for address, unit in state.applied_units.items()
        if unit.cluster in evidence.clusters
    }
    expiring = cannot_stay(evidence, now)
    drift = drift_of(evidence, expiring)
    chosen, held, capped = [], [], []
    late = {address: sum(now - WINDOW_S < at for at in times) for address, times in state.healed.items()}
    usual = {address: _usual_starts(unit) for address, unit in wanted.items()}
    room = max(MOST_STARTS, MOST_STARTS_EACH * len(wanted)) + sum(usual.values()) - sum(late.values())
    for action in actions(wanted, evidence, expiring):
        starting = action.kind in ("create", "replace")
        before = late.get(action.address, 0)
        if starting and (before >= MOST_STARTS + usual[action.address] or room <= 0):
            whose, times = ("the fabric's units", sum(late.values())) if room <= 0 else ("it", before)
            capped.append(action.address)
            held.append(f"{action.kind} {action.address}: {whose} had {times} new starts in the last hour; no more")
            continue
        why = _unwanted(action, wanted, prune=prune) or _too_soon(action, failures, now) or _damaged(action, evidence)
        if why:
            held.append(f"{action.kind} {action.address}: {why}")
        elif action.kind != "unknown":
            chosen.append(action)
            room -= starting
    facts = healing_facts(state, evidence.observed)
    plan = unsolved(evidence, state.applied_blueprint, facts, tuple(chosen), "heals; forecasts nothing")
    reasons = (f"a look at {now:.3f}", *(f"{change.kind}: {change.text}" for change in drift))
    living = evidence.observed.running().values()
    return Healing(
        drift,
        msgspec.structs.replace(plan, reasons=reasons),
        tuple(held),
        expected=expected_at(evidence, now),
        waiting=tuple((cluster, unit.operation) for cluster, unit in living if unit.wanted),
        dormant=sum(
            dormant(evidence, address, unit.cluster) is not None
            for address, unit in wanted.items()
            if not unit.spec.is_extra
        ),
        extra=sum(unit.spec.is_extra and address not in evidence.observed.living() for address, unit in wanted.items()),
        capped=tuple(capped),
    )


def cannot_stay(evidence: Evidence, now: float) -> dict[str, Succession]:
    """Operation → why what was applied needs another unit, or another word, although nothing about it changed."""
    applied = (unit.spec for unit in evidence.state.applied_units.values() if unit.cluster in evidence.clusters)
    return with_too_close(successions(evidence, now), applied, evidence)


def _to_start(spec: UnitSpec, state: State) -> UnitSpec:
    return with_loader(spec, state) if isinstance(spec, AgentSpec) else spec


def _usual_starts(unit: WantedUnit) -> int:
    """Of an hour: for allocations that end, and for requests that come after it ended for want of them."""
    if not isinstance(unit.spec, AgentSpec):
        return 0
    walltime, idle_after = unit.spec.walltime_s, unit.spec.idle_after_s
    usual = 0 if walltime is None else math.ceil(2 * WINDOW_S / walltime)
    return usual if isinstance(idle_after, msgspec.UnsetType) else usual + math.ceil(WINDOW_S / idle_after)


def _unwanted(action: Action, wanted: Container[str], *, prune: bool) -> str:
    if action.kind == "delete" and action.address not in wanted and not prune:
        return "nobody asked for it; `fabrictool reconcile --prune` stops it, `fabrictool plan` decides anew"
    return ""


def _too_soon(action: Action, failures: Mapping[str, Failures], now: float) -> str:
    before = failures.get(action.address)
    if before is None or not before.count or action.kind not in ("create", "update", "replace"):
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
