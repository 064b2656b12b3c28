"""Healing to what was applied last: a verb of its own, not a new plan (the blueprint may have moved on since).

Each look names the drift, and its plan holds only what the policy allows. What a healing cannot mend, such as a cluster
that does not answer, needs a new plan, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool.applier.drift import drift_of
from fabrictool.applier.fabric import next_operation
from fabrictool.applier.readset import running_specs, unit_facts
from fabrictool.applier.succession import successions
from fabrictool.base.canonical import digest
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan
from fabrictool.planner.diff import Wanted, actions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.applier.drift import Drift
    from fabrictool.applier.fabric import Fabric
    from fabrictool.applier.journal import Entry
    from fabrictool.applier.state import State
    from fabrictool.domain.observed import Observed

BACK_OFF_S = 30.0
LONGEST_BACK_OFF_S = 3600.0
"""After a failure the next attempt waits 30 s, after each further one in a row twice as long, at most an hour: a
replica that cannot start must not fill a queue that belongs to others."""


def healing_facts(state: State, observed: Observed) -> dict[str, str]:
    """What a healing relies on: what runs, and what was applied last."""
    return unit_facts(observed) | {"what was applied": digest(msgspec.to_builtins(state.applied_units))}


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What one look found."""

    drift: tuple[Drift, ...]
    plan: Plan
    """What heals it, within the policy."""
    held: tuple[str, ...] = ()
    """What was left out of it, and why."""


def look(fabric: Fabric, history: Sequence[Entry], *, now: float, prune: bool = False) -> Reconciliation:
    """Observe and compare with what was applied last; changes nothing.

    `prune` allows to stop units of ours that nobody asked for; without it they are only named.
    """
    observed, state, lineage = fabric.observe(), fabric.folder.read_state(), fabric.lineage
    specs = running_specs(fabric, observed)
    wanted = {
        address: Wanted(address, unit.cluster, unit.spec, unit.summary)
        for address, unit in state.applied_units.items()
        if unit.cluster in observed.clusters
    }
    expiring = successions(observed, specs, state, now)
    found = actions(
        wanted,
        observed,
        lambda address: next_operation(state, observed, address, lineage),
        running_specs=specs,
        expiring=expiring,
    )
    drift = drift_of(state, observed, expiring)
    chosen, held = [], []
    for action in found:
        why = _held(action, history, wanted, now, prune=prune) or _damaged(action, observed)
        if why:
            held.append(f"{action.kind} {action.address}: {why}")
        elif action.kind != "unknown":
            chosen.append(action)
    plan = Plan(
        fabric=fabric.name,
        lineage=lineage,
        blueprint_digest=state.applied_blueprint,
        read_set=healing_facts(state, observed),
        actions=tuple(chosen),
        placement=Placement(),
        forecast=Forecast(models=(), cost_per_hour=0.0, currency="", power_w=0.0, basis="heals; forecasts nothing"),
        certificate=Certificate(solver="none", seed=0, optimal=True, stages=(), tables_sha256=""),
        reasons=(f"a look at {now:.3f}", *(f"{each.kind}: {each.text}" for each in drift)),
    )
    return Reconciliation(drift, plan, tuple(held))


def _damaged(action: Action, observed: Observed) -> str:
    """A unit whose spec cannot be read still holds its devices, and may serve."""
    start = action.address.replace("/", "-") + "-g"
    units = [unit for facts in observed.clusters.values() for unit in facts.units]
    holding = [unit.operation for unit in units if unit.holds and unit.operation.startswith(start)]
    return f"{holding[0]} is damaged and still lives" if action.kind == "create" and holding else ""


def _held(action: Action, history: Sequence[Entry], wanted: Mapping[str, Wanted], now: float, *, prune: bool) -> str:
    """Why an action is not carried out now; "" when it is."""
    if action.kind == "delete" and action.address not in wanted and not prune:
        return "nobody asked for it; `fabrictool reconcile --prune` stops it, `fabrictool plan` decides anew"
    if action.kind not in ("create", "replace"):
        return ""
    failures, last = 0, 0.0
    for entry in history:
        if entry.address == action.address and entry.kind in ("done", "failed"):
            failures, last = (failures + 1, entry.at) if entry.kind == "failed" else (0, entry.at)
    wait = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (failures - 1)) if failures else 0.0
    if last + wait > now:
        return f"it failed {failures} times in a row; the next attempt is in {last + wait - now:.0f} s"
    return ""
