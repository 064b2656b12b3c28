"""What is asked of a plan before anything is done: that a planner made it, that it can be started, that it is fresh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import InvalidInputError, Place, Problem, StaleError
from fabrictool.base.ids import is_name
from fabrictool.domain.observed import generation
from fabrictool.domain.specs import AgentSpec
from fabrictool.domain.state import operation_id, same_lineage
from fabrictool.engines.adapter import adapter
from fabrictool.planner.readset import ABSENT, AS

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from fabrictool.applier.journal import Entry
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Plan
    from fabrictool.domain.state import State


def check_sound(plan: Plan, fabric: str, clusters: Container[str]) -> None:
    """Refuse a plan of another fabric, one of clusters that nobody asked, and one that no planner makes: names from
    it become paths.
    """
    if plan.fabric != fabric:
        message = f"the plan is for fabric {plan.fabric}, this is {fabric}"
        raise StaleError.of("FT4005", message, hint="give the blueprint of that fabric")
    if plan.assumed:
        message = "the plan assumes empty clusters, and none was asked: it cannot be carried out"
        raise InvalidInputError.of("FT4023", message, hint="run `fabrictool plan` where the clusters can be reached")
    for action in plan.changes:
        good = action.cluster in clusters
        if action.kind in ("create", "update", "replace"):
            wanted = operation_id(plan.lineage, action.address, generation(action.operation))
            good = good and action.spec is not None and is_name(action.spec.provider)
            good = good and action.operation == wanted
        if not good:
            message = f"the step {action.kind} {action.address} on {action.cluster} is not a step that a plan can have"
            hint = "a plan is not edited; change the blueprint and run `fabrictool plan` again"
            raise InvalidInputError.of("FT4006", message, thing=action.address, hint=hint)


def check_startable(plan: Plan) -> None:
    """Refuse what this release plans and cannot start: FT4008."""
    refusal = unstartable(plan)
    if refusal is not None:
        raise InvalidInputError(refusal)


def unstartable(plan: Plan) -> Problem | None:
    """The first thing of a plan that this release cannot start."""
    for replica in plan.placement.replicas:
        if replica.stages:
            return Problem(
                "FT4008",
                f"{replica.replica} is a pipeline over partitions: it can be planned and forecast, but not started",
                Place(thing=f"replica/{replica.replica}"),
                "plan with another solver than tabu",
            )
    for action in plan.actions:
        if isinstance(action.spec, AgentSpec) and not isinstance(action.spec.kv_precision, msgspec.UnsetType):
            held = adapter(action.spec.engine).capabilities.kv_precisions
            if action.spec.kv_precision not in held:
                engine, wanted = action.spec.engine, action.spec.kv_precision
                return Problem(
                    "FT4008",
                    f"{action.spec.replica}: {engine} hands caches over as it holds them, and holds none in {wanted}",
                    Place(thing=action.address),
                    f"set `handover` to one of {', '.join(sorted(held))}, or leave it out",
                )
    return _unpaired([action.spec for action in plan.actions if isinstance(action.spec, AgentSpec)])


def _unpaired(specs: Sequence[AgentSpec]) -> Problem | None:
    """Prefill and decode replicas of a model that could not work together."""
    halves: dict[str, list[AgentSpec]] = {}
    for spec in specs:
        if spec.phase != "unified":
            halves.setdefault(spec.model, []).append(spec)
    for model, mine in sorted(halves.items()):
        ways = {spec.engine: adapter(spec.engine).capabilities.pairing for spec in mine}
        if len(set(ways.values())) > 1:
            told = " and ".join(f"{engine} ({way})" for engine, way in sorted(ways.items()))
            text = f"{model}: prefill and decode replicas share a request in one way, and here are {told}"
            return Problem("FT4008", text, Place(thing=f"model/{model}"), "let all its replicas have one engine")
        if "together" in ways.values():
            where = {phase: {(s.provider, s.site) for s in mine if s.phase == phase} for phase in ("prefill", "decode")}
            alone = sorted(site for _, site in where["prefill"] ^ where["decode"])
            if alone:
                engine = next(iter(ways))
                text = f"{model}: {engine} needs a prefill and a decode replica at one site; at {alone[0]} is one half"
                hint = "keep the model to one site by `place`, or set its `phases` to unified"
                return Problem("FT4008", text, Place(thing=f"model/{model}"), hint)
    return None


def check_owned(plan: Plan, observed: Observed, lineage: str) -> None:
    """Refuse to start anything where another state runs a fabric of the same name: it would run twice."""
    starts = {action.cluster for action in plan.changes if action.spec is not None}
    problems = []
    for name, facts in sorted(observed.clusters.items()):
        theirs, _, who = facts.owner.partition(" ")
        if name in starts and facts.foreign and theirs and not same_lineage(theirs, lineage):
            count = len(facts.foreign)
            message = (
                f"{who} runs a fabric {plan.fabric} on {name} from another state (lineage {theirs}): "
                f"{count} unit{'s'[: count != 1]}, such as {facts.foreign[0]}; nothing was changed"
            )
            hint = "rename one of the two, share one state (`state` in the blueprint), or `state rebuild`"
            problems.append(Problem("FT5410", message, Place(thing=f"cluster/{name}"), hint))
    if problems:
        raise StaleError(problems)


def check_fresh(
    plan: Plan, observed: Observed, now: Mapping[str, str], entries: Sequence[Entry], state: State, lineage: str
) -> None:
    """Refuse when a fact of the read set changed, but for what our own unfinished run can have changed."""
    first = plan.lineage in ("", lineage) and (state.serial == 0 or entries)
    if plan.lineage != state.lineage and not first:
        message = f"the plan belongs to lineage {plan.lineage or 'none'}, this fabric is {state.lineage or 'new'}"
        raise StaleError.of("FT4005", message, hint="run `fabrictool plan` again")
    begun = {entry.address for entry in entries if entry.kind == "intent"}
    ours: dict[str, set[str]] = {}
    for action in plan.changes:
        if action.address in begun:
            ours.setdefault(f"unit/{action.address}", set()).add(f"{action.operation} on {action.cluster}")
    changed = []
    for fact in sorted({*plan.read_set, *(name for name in now if name.startswith("unit/"))}):
        planned, seen = plan.read_set.get(fact, ABSENT), now.get(fact, ABSENT)
        # What it was updated to by our own run was in the plan.
        mine = fact in ours and _operations(seen) <= _operations(planned) | ours[fact]
        if planned != seen and not mine and not _dozes(fact, plan, observed, seen):
            changed.append((fact, f"{fact} is no longer what the plan relies on"))
    there = {unit.operation for facts in observed.clusters.values() for unit in facts.units}
    blind = {name for name, facts in observed.clusters.items() if not facts.known}
    for action in plan.changes:
        started = 0 < generation(action.operation) <= state.generations.get(action.address, 0)
        if started and action.operation not in there and action.cluster not in blind:
            changed.append((action.address, f"{action.operation} was started before and has ended since"))
    if changed:
        hint = "run `fabrictool plan` again and review the difference; nothing was changed"
        raise StaleError([Problem("FT4004", message, Place(thing=thing), hint) for thing, message in changed])


def _dozes(fact: str, plan: Plan, observed: Observed, seen: str) -> bool:
    """Whether a replica that the plan leaves alone only ended for want of requests since, or started for some."""
    address = fact.removeprefix("unit/")
    kept = [action for action in plan.actions if action.kind == "keep" and action.address == address]
    if not kept:
        return False
    last = observed.clusters[kept[0].cluster].unit(address) if kept[0].cluster in observed.clusters else None
    return not kept[0].former if seen != ABSENT else last is not None and last.dormant


def _operations(fact: str) -> set[str]:
    """The operations that a fact of the read set names, with their clusters."""
    return set() if fact == ABSENT else {unit.partition(AS)[0] for unit in fact.split(", ")}
