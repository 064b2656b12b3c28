"""Observe, solve, compare: the plan of a fabric, and the facts that it relies on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fabrictool.applier.drift import out_of_reach
from fabrictool.applier.fabric import next_operation
from fabrictool.applier.readset import ABSENT, read_set, running_specs
from fabrictool.applier.succession import successions
from fabrictool.base.errors import FabrictoolError, InfeasibleError, Place, Problem
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.plan import Action, Certificate, Forecast, Outlook, Placement, Plan, ReplicaPlacement
from fabrictool.domain.specs import AgentSpec, GatewaySpec
from fabrictool.planner.assign import assign
from fabrictool.planner.diff import actions, delete
from fabrictool.planner.explaining.explain import explanation, reasons
from fabrictool.planner.explaining.relaxations import explain_conflict
from fabrictool.planner.explaining.situation import Situation
from fabrictool.planner.forecast import certificate, forecast
from fabrictool.planner.problem import unit_key
from fabrictool.planner.replay import replay
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.units import GATEWAY, wanted_units
from fabrictool.planner.verify import violations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fabrictool.applier.fabric import Fabric
    from fabrictool.applier.state import Placed, State
    from fabrictool.blueprint import Loaded
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.planner.problem import OptionKey, Solution, Solver


def plan_fabric(
    fabric: Fabric,
    loaded: Loaded,
    *,
    seed: int,
    now: float,
    time_limit_s: float = 60.0,
    solver: Solver | None = None,
    keys: str | None = None,
    explain: bool = False,
    progress: Callable[[Solution], None] | None = None,
) -> tuple[Plan, Observed]:
    """The plan, with the observation that it was made from.

    `keys` is the digest of the tenants' keys; None when they cannot be had here: the plan then takes them as unchanged.
    `explain` adds what rules cost and what was not chosen to the reasons: it solves again, and takes longer.
    `progress` is told each better placement; with it, Ctrl-C ends the search and keeps the last one, and ends the
    explaining and keeps what was said.

    Raises
    ------
    InfeasibleError
        FT200x with what conflicts and what would resolve it.
    """
    observed, state, lineage = fabric.observe(), fabric.folder.read_state(), fabric.lineage
    blueprint, inventory = loaded.blueprint, loaded.inventory
    specs = running_specs(fabric, observed)
    agents = _running_agents(specs, observed)
    running = {replica: _key(replica, spec) for replica, spec in agents.items()}
    situation = _situation(loaded, observed, state, running, now)
    unseen = situation.unseen
    problem, tables = situation.build()
    try:
        found = (solver or ExactSolver()).solve(problem, deadline_s=time_limit_s, seed=seed)
        solution, stopped = _last(found, progress)
    except InfeasibleError as error:
        why = [*error.problems, *explain_conflict(situation), *_unknown_clusters(observed)]
        raise InfeasibleError(why) from error
    problem = solution.whole(problem)
    expiring = successions(observed, specs, state, now)
    out_of_sight = {
        address.removeprefix("replica/"): _key(address.removeprefix("replica/"), placed)
        for address, placed in state.units.items()
        if address.startswith("replica/") and placed.cluster not in observed.clusters
    }  # nothing can be said of those on a cluster that is not enabled, but their names are taken
    placement = assign(problem, solution, out_of_sight | running, unseen)
    blind = {name for name, facts in observed.clusters.items() if not facts.known}
    broken = violations(blueprint, inventory, placement, blind | {replica.cluster for replica in unseen}, now)
    if broken:
        hint = "this is a bug of the planner: report it with blueprint and inventory"
        raise FabrictoolError.of("FT2903", f"the placement breaks a rule: {'; '.join(broken)}", hint=hint)
    wanted = wanted_units(
        blueprint,
        inventory,
        placement,
        keys=_running_keys(specs) if keys is None else keys,
        running=agents,
        living=[spec for spec in specs.values() if isinstance(spec, AgentSpec)],
        renewed={a.removeprefix("replica/") for a, (_, u) in observed.running().items() if u.operation in expiring},
    )
    currency = currency_of(inventory)
    sentences = explanation(situation, problem, solution, currency, seed) if explain else ()
    said, cut = _said(sentences, patient=progress is None)
    found_actions = actions(
        wanted,
        observed,
        lambda address: next_operation(state, observed, address, lineage),
        running_specs=specs,
        expiring=expiring,
    )
    outlooks, unlikely = outlook(fabric, observed, found_actions, lineage)
    plan = Plan(
        fabric=fabric.name,
        lineage=lineage,
        blueprint_digest=loaded.digest,
        read_set={f"unit/{address}": ABSENT for address in wanted} | read_set(loaded, observed, keys),
        actions=found_actions,
        placement=placement,
        forecast=forecast(
            blueprint, problem, solution, tables, currency, replay(blueprint, inventory, placement, seed)
        ),
        certificate=certificate(problem, solution, seed),
        reasons=(
            *reasons(problem, solution, currency),
            *said,
        ),
        warnings=(
            *_unrepeatable(solution),
            *(("the search was stopped early: this is the best placement until then",) if stopped else ()),
            *(("the explaining was stopped early",) if cut else ()),
            *(f"{problem.code} {problem.message}" for problem in loaded.warnings),
            *_unread_traces(blueprint),
            *_unread_keys(blueprint, keys),
            *unlikely,
            *(problem.message for problem in out_of_reach(state, observed) if _disabled(problem, observed)),
        ),
        outlook=outlooks,
    )
    return plan, observed


def outlook(
    fabric: Fabric, observed: Observed, found: Iterable[Action], lineage: str
) -> tuple[tuple[Outlook, ...], list[str]]:
    """What the schedulers expect of the units that would be started, side by side, and what they would refuse."""
    groups: dict[str, list[NewUnit]] = {}
    for action in found:
        if action.kind in ("create", "replace") and action.spec is not None and observed.clusters[action.cluster].known:
            unit = NewUnit(action.operation, action.address, action.spec, {}, lineage)
            groups.setdefault(action.cluster, []).append(unit)
    outlooks: list[Outlook] = []
    warnings: list[str] = []
    for cluster, units in sorted(groups.items()):
        try:
            here, said = fabric.clusters[cluster].outlook(units)
        except FabrictoolError as error:
            here, said = [], [f"{cluster}: its queue is not known: {error}"]
        outlooks += here
        warnings += said
    return tuple(outlooks), warnings


def situation_of(fabric: Fabric, loaded: Loaded, now: float) -> Situation:
    """What the planner would start from."""
    observed, state = fabric.observe(), fabric.folder.read_state()
    agents = _running_agents(running_specs(fabric, observed), observed)
    running = {replica: _key(replica, spec) for replica, spec in agents.items()}
    return _situation(loaded, observed, state, running, now)


def _situation(
    loaded: Loaded, observed: Observed, state: State, running: Mapping[str, OptionKey], now: float
) -> Situation:
    return Situation(
        loaded.blueprint,
        loaded.inventory,
        usable=tuple(name for name, facts in observed.clusters.items() if facts.known),
        unseen=_unseen_replicas(state, observed, loaded.inventory),
        current=Counter(running.values()),
        now=now,
    )


def _running_agents(specs: Mapping[str, UnitSpec], observed: Observed) -> dict[str, AgentSpec]:
    youngest = [specs[unit.operation] for _, unit in observed.running().values() if unit.operation in specs]
    return {spec.replica: spec for spec in youngest if isinstance(spec, AgentSpec)}


def _last(found: Iterator[Solution], progress: Callable[[Solution], None] | None) -> tuple[Solution, bool]:
    """The last solution, and whether Ctrl-C made it the last."""
    solution = None
    try:
        for solution in found:
            if progress is not None:
                progress(solution)
    except KeyboardInterrupt:
        if solution is None or progress is None:
            raise
        return solution, True
    if solution is None:
        raise FabrictoolError.of("FT2902", "the solver found nothing")
    return solution, False


def _said(sentences: Iterable[str], *, patient: bool) -> tuple[list[str], bool]:
    """All sentences, and whether Ctrl-C cut them short; the `patient` let it through."""
    said: list[str] = []
    try:
        for sentence in sentences:
            said.append(sentence)  # noqa: PERF402 - what was said before Ctrl-C counts
    except KeyboardInterrupt:
        if patient:
            raise
        return said, True
    return said, False


def destruction_plan(fabric: Fabric, loaded: Loaded) -> tuple[Plan, list[Problem]]:
    """Delete every unit of this fabric on clusters that can be seen, the gateway last; and what that leaves out."""
    observed, state = fabric.observe(), fabric.folder.read_state()
    plan = Plan(
        fabric=fabric.name,
        lineage=fabric.lineage,
        blueprint_digest=loaded.digest,
        read_set=read_set(loaded, observed),
        actions=tuple(sorted(_deletions(observed), key=lambda action: (action.address == GATEWAY, action.address))),
        placement=Placement(),
        forecast=Forecast(models=(), cost_per_hour=0.0, currency="", power_w=0.0, basis="nothing is left to forecast"),
        certificate=Certificate(solver="none", seed=0, optimal=True, stages=(), tables_sha256=""),
    )
    return plan, out_of_reach(state, observed)


def _disabled(problem: Problem, observed: Observed) -> bool:
    return (problem.place.thing or "").removeprefix("cluster/") not in observed.clusters


def _deletions(observed: Observed) -> list[Action]:
    """Everything that a cluster knows of, dead ones included: their folders go too."""
    return [delete(name, unit, unit.state) for name, facts in observed.clusters.items() for unit in facts.units]


def _key(replica: str, where: AgentSpec | Placed) -> OptionKey:
    return unit_key(replica.rsplit("/", 1)[0], (where.cluster, where.partition), where.tp, where.pp, where.phase)


def _unseen_replicas(state: State, observed: Observed, inventory: Inventory) -> tuple[ReplicaPlacement, ...]:
    """Replicas that we started on clusters that do not answer now: unknown is not absent, so they count as there."""
    found = []
    for address, placed in sorted(state.units.items()):
        facts = observed.clusters.get(placed.cluster)
        cluster = inventory.clusters.get(placed.cluster)
        if facts is None or facts.known or cluster is None or not address.startswith("replica/"):
            continue
        partition = cluster.partitions.get(placed.partition)
        replica = address.removeprefix("replica/")
        found.append(
            ReplicaPlacement(
                replica=replica,
                model=replica.rsplit("/", 1)[0],
                provider=inventory.provider_of(placed.cluster),
                site=cluster.site,
                cluster=placed.cluster,
                partition=placed.partition,
                device=partition.device if partition is not None else "cpu",
                tp=placed.tp,
                pp=placed.pp,
                phase=placed.phase,
            )
        )
    return tuple(found)


def _unrepeatable(solution: Solution) -> list[str]:
    if solution.repeatable:
        return []
    return ["the search ran out of time: on another machine the same files may be placed otherwise"]


def _unread_traces(blueprint: Blueprint) -> list[str]:
    return [
        f"{name}: demand.trace is not read by this release; it is planned for replicas.min without a demand"
        for name, model in sorted(blueprint.models.items())
        if model.demand is not None and model.demand.trace is not None
    ]


def _running_keys(specs: Mapping[str, UnitSpec]) -> str:
    return next((spec.keys for spec in specs.values() if isinstance(spec, GatewaySpec)), "")


def _unread_keys(blueprint: Blueprint, keys: str | None) -> list[str]:
    if keys is not None or not blueprint.tenants or blueprint.gateway is None:
        return []
    return ["the tenants' keys cannot be had here; whether one of them has changed is not known"]


def _unknown_clusters(observed: Observed) -> list[Problem]:
    return [
        Problem(
            "FT2005",
            f"{name} is unknown and cannot be planned with: {facts.reason}",
            Place(thing=f"cluster/{name}"),
            facts.hint or None,
        )
        for name, facts in sorted(observed.clusters.items())
        if not facts.known
    ]


def currency_of(inventory: Inventory) -> str:
    """Of all prices; "" without any."""
    prices = [p.price for c in inventory.clusters.values() for p in c.partitions.values() if p.price is not None]
    return prices[0].currency if prices else ""
