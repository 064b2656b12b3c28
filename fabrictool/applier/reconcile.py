"""Healing to what was applied last: a verb of its own, not a new plan (the blueprint may have moved on since).

Each look names the drift, and its plan holds only what the policy allows. What a healing cannot mend, such as a cluster
that does not answer, needs a new plan, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.applier.fabric import next_operation
from fabrictool.applier.planning import running_specs, unit_facts
from fabrictool.applier.succession import successions
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan, spec_digest
from fabrictool.planner.diff import Succession, Wanted, actions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.applier.fabric import Fabric
    from fabrictool.applier.journal import Entry
    from fabrictool.applier.state import State
    from fabrictool.domain.observed import Observed

DriftKind = Literal["missing", "ended", "changed", "degraded", "ending", "orphan", "unreachable"]
BACK_OFF_S = 30.0
LONGEST_BACK_OFF_S = 3600.0
"""After a failure the next attempt waits 30 s, after each further one in a row twice as long, at most an hour: a
replica that cannot start must not fill a queue that belongs to others."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One way in which what runs is not what was applied."""

    kind: DriftKind
    address: str
    cluster: str
    text: str


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
    drift = _drift(state, observed, wanted, expiring)
    chosen, held = [], []
    for action in found:
        why = _held(action, history, wanted, now, prune=prune)
        if why:
            held.append(f"{action.kind} {action.address}: {why}")
        elif action.kind != "unknown":
            chosen.append(action)
    plan = Plan(
        fabric=fabric.name,
        lineage=lineage,
        blueprint_digest=state.applied_blueprint,
        read_set=unit_facts(observed),
        actions=tuple(chosen),
        placement=Placement(),
        forecast=Forecast(models=(), cost_per_hour=0.0, currency="", power_w=0.0, basis="heals; forecasts nothing"),
        certificate=Certificate(solver="none", seed=0, optimal=True, stages=(), tables_sha256=""),
        reasons=(f"a look at {now:.3f}", *(f"{each.kind}: {each.text}" for each in drift)),
    )
    return Reconciliation(drift, plan, tuple(held))


def _drift(
    state: State,
    observed: Observed,
    wanted: Mapping[str, Wanted],
    expiring: Mapping[str, Succession],
) -> tuple[Drift, ...]:
    found: list[Drift] = []
    kind: DriftKind
    running = observed.running()
    for address, unit in sorted(state.applied_units.items()):
        facts = observed.clusters.get(unit.cluster)
        if facts is None or not facts.known:
            why = facts.reason if facts is not None else "it is not enabled in the inventory"
            found.append(Drift("unreachable", address, unit.cluster, f"{address} is on {unit.cluster}: {why}"))
        elif address not in running:
            dead = facts.unit(address)
            kind = "missing" if dead is None else "ended"
            text = f"{address} is not on {unit.cluster}" if dead is None else f"{address} {dead.state}: {dead.reason}"
            found.append(Drift(kind, address, unit.cluster, text.rstrip(": ")))
    for address, (cluster, here) in sorted(running.items()):
        want = wanted.get(address)
        if want is None:
            if address not in state.applied_units:
                found.append(Drift("orphan", address, cluster, f"{address} is on {cluster}, and was not asked for"))
        elif here.operation in expiring:
            why = expiring[here.operation].reason
            kind = "degraded" if "no sign of life" in why else "ending"
            found.append(Drift(kind, address, cluster, f"{address}: {why}"))
        elif cluster != want.cluster or here.spec_digest != spec_digest(want.spec):
            found.append(Drift("changed", address, cluster, f"{address} is not what was applied"))
        elif here.state == "running" and not here.ready:
            found.append(Drift("degraded", address, cluster, f"{address} does not serve: {here.detail}"))
    return tuple(found)


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
