"""Solve, name, compare: the plan of a fabric as a function of what is wanted and what was seen.

The same call online, from a bundle, in CI and in what-ifs: whatever it reads is an argument.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InfeasibleError, Place, Problem, UnreachableError
from fabrictool.domain.address import Address
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan, inputs_digest
from fabrictool.planner.assign import assign
from fabrictool.planner.build import waiting
from fabrictool.planner.diff import actions, delete, is_gateway
from fabrictool.planner.drift import clock_warnings, out_of_reach
from fabrictool.planner.entitled import unserved_groups
from fabrictool.planner.explaining.explain import explanation, reasons
from fabrictool.planner.explaining.relaxations import explain_conflict
from fabrictool.planner.forecast import certificate, forecast
from fabrictool.planner.gateways import stranded
from fabrictool.planner.judged import ROUNDS, learned_sentences, lessons, shortfall, taught, with_reasons
from fabrictool.planner.problem import replica_key
from fabrictool.planner.readset import ABSENT, read_set
from fabrictool.planner.replay import replay
from fabrictool.planner.situation import placed_option, running_options, situation_of
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.solvers.exact import SMALL, ExactSolver
from fabrictool.planner.stages import clean, values_of
from fabrictool.planner.succession import successions
from fabrictool.planner.units import running_weights, wanted_units
from fabrictool.planner.verify import violations
from fabrictool.planner.weights import planned_rates, weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.observed import Observed
    from fabrictool.planner.build import Tables
    from fabrictool.planner.problem import OptionKey, PlacementProblem, Solution, Solver
    from fabrictool.planner.replay import Played
    from fabrictool.planner.situation import Situation


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a plan is searched for."""

    seed: int = 0
    time_limit_s: float = 60.0
    solver: Solver = field(default_factory=ExactSolver)
    explain: bool = False
    """Adds what rules cost and what was not chosen to the reasons: it solves again, and takes longer."""
    node_loss: bool = False
    """Warns also of whom the loss of any one node would leave without an answer."""
    progress: Callable[[Solution], None] | None = None
    """Is told each better placement; with it, Ctrl-C ends the search and keeps the last one, and ends the explaining
    and keeps what it has."""


def plan(
    blueprint: Blueprint,
    inventory: Inventory,
    evidence: Evidence,
    options: PlanOptions,
    *,
    now: float,
    warnings: Sequence[Problem] = (),
) -> Plan:
    """What should change; `warnings` are the loader's, and stand in the plan. `now` in wall seconds.

    Raises
    ------
    InfeasibleError
        FT200x with what conflicts and what would resolve it.
    """
    evidence = evidence.within(inventory)
    chosen = _best(situation_of(blueprint, inventory, evidence, now), options, evidence)
    situation, problem, solution, placement = chosen.situation, chosen.problem, chosen.solution, chosen.placement
    keys = evidence.keys_of(blueprint)
    expiring = successions(evidence, now) | stranded(blueprint.every_gateway, evidence)
    wanted = wanted_units(blueprint, inventory, placement, evidence, expiring)
    currency = currency_of(inventory)
    sentences = explanation(situation, problem, solution, currency, options.seed) if options.explain else ()
    why, cut = _until_interrupted(sentences, patient=options.progress is None)
    return Plan(
        fabric=evidence.fabric,
        lineage=evidence.lineage,
        blueprint_digest=inputs_digest(blueprint, inventory),
        read_set={f"unit/{address}": ABSENT for address in wanted}
        | read_set(inputs_digest(blueprint, inventory), evidence.observed, keys),
        actions=actions(wanted, evidence, expiring),
        placement=placement,
        forecast=with_reasons(
            forecast(blueprint, problem, solution, chosen.tables, currency, chosen.played),
            problem,
            solution,
            searched_again=chosen.searched_again,
        ),
        certificate=certificate(problem, solution, options.seed),
        reasons=(*reasons(problem, solution, currency), *learned_sentences(situation.learned), *why),
        warnings=(
            *_unrepeatable(solution),
            *(["the search was stopped early: this is the best placement that it found"] if chosen.stopped else ()),
            *(["the explanation was cut short"] if cut else ()),
            *(f"{warning.code} {warning.message}" for warning in warnings),
            *unserved_groups(blueprint, inventory, placement, node_loss=options.node_loss),
            *_mean_traces(blueprint),
            *_unread_keys(blueprint, keys),
            *clock_warnings(evidence),
            *_waiting_pins(blueprint, situation),
            *(trouble.message for trouble in out_of_reach(evidence) if _disabled(trouble, evidence.observed)),
        ),
    )


def destruction(blueprint_digest: str, evidence: Evidence) -> tuple[Plan, list[Problem]]:
    """Delete every unit of this fabric on clusters that can be seen, gateways last; and what that leaves out."""
    observed = evidence.observed
    ends = [delete(name, unit, unit.state) for name, facts in observed.clusters.items() for unit in facts.units]
    changes = tuple(sorted(ends, key=lambda action: (is_gateway(action), action.address)))
    facts = read_set(blueprint_digest, observed)
    return unsolved(evidence, blueprint_digest, facts, changes, "nothing is left to forecast"), out_of_reach(evidence)


def unsolved(
    evidence: Evidence, blueprint_digest: str, facts: Mapping[str, str], changes: tuple[Action, ...], basis: str
) -> Plan:
    """A plan that no solver made: it places nothing and forecasts nothing."""
    return Plan(
        fabric=evidence.fabric,
        lineage=evidence.lineage,
        blueprint_digest=blueprint_digest,
        read_set=dict(facts),
        actions=changes,
        placement=Placement(),
        forecast=Forecast(models=(), cost_per_hour=0.0, currency="", power_w=0.0, basis=basis),
        certificate=Certificate(solver="none", seed=0, optimal=True, stages=(), tables_sha256=""),
    )


BROKEN_RULE = "FT2903"


@dataclass(frozen=True, slots=True)
class _Found:
    """A placement, and what the replay says of it."""

    situation: Situation
    problem: PlacementProblem
    tables: Tables
    solution: Solution
    placement: Placement
    played: Mapping[str, Played]
    stopped: bool
    """By Ctrl-C."""
    searched_again: bool = False
    """After a replay that missed: nothing that was found then is better than this."""

    @property
    def lacks(self) -> tuple[float, float, float]:
        """The less, the better, the first ones first."""
        return clean(values_of(self.solution).get("served", 0.0)), *shortfall(self.problem, self.played)


def _best(situation: Situation, options: PlanOptions, evidence: Evidence) -> _Found:
    """Solved, played, and solved again where the replay misses what the closed forms thought met."""
    observed = evidence.observed
    try:
        problem, tables = situation.build()
    except InfeasibleError as error:
        raise _cause_first(error.problems, situation, observed) from error
    try:
        best = last = _found(situation, problem, tables, options, evidence)
    except InfeasibleError as error:
        raise _cause_first([*error.problems, *explain_conflict(situation)], situation, observed) from error
    for _ in range(ROUNDS if len(problem.options) <= SMALL else 0):
        learned = lessons(last.problem, last.solution, last.played)
        if not learned or best.stopped:
            break
        taught_by = replace(situation, learned=(*last.situation.learned, *learned))
        try:
            last = _found(taught_by, taught(problem, taught_by.learned), tables, options, evidence, last)
        except FabrictoolError as error:  # such as FT2902, no time: what was found before is a plan
            if any(problem.code == BROKEN_RULE for problem in error.problems):
                raise
            break
        best = replace(last if last.lacks < best.lacks else best, searched_again=True)
    return best


# Wide: what is asked, how, of what was seen, and what was found before.
def _found(
    situation: Situation,
    problem: PlacementProblem,
    tables: Tables,
    options: PlanOptions,
    evidence: Evidence,
    former: _Found | None = None,
) -> _Found:
    search = options.solver.solve(problem, deadline_s=options.time_limit_s, seed=options.seed)
    solution, stopped = _last(search, options.progress)
    problem = solution.whole(problem)
    solution = settled(problem, solution, options.seed)
    placed = _placed(situation, problem, solution, evidence)
    placement = weighted(problem, solution, placed, running_weights(evidence))
    rates = planned_rates(problem, solution)
    names = sorted(situation.blueprint.models)
    same = {} if former is None else {n: former.played[n] for n in names if _stays(n, placement, rates, former)}
    others = [name for name in names if name not in same]
    played = same | replay(situation.blueprint, situation.inventory, placement, rates, options.seed, others)
    return _Found(situation, problem, tables, solution, placement, played, stopped)


def _stays(model: str, placement: Placement, rates: Mapping[OptionKey, float], former: _Found) -> bool:
    """Whether a model was played in just this way before."""

    def shape(of: Placement, loads: Mapping[OptionKey, float]) -> list[object]:
        return [(replica, loads.get(replica_key(replica), 0.0)) for replica in of.replicas if replica.model == model]

    before = planned_rates(former.problem, former.solution)
    return model in former.played and shape(placement, rates) == shape(former.placement, before)


def _cause_first(why: Iterable[Problem], situation: Situation, observed: Observed) -> FabrictoolError:
    """What does not answer comes before what follows from it; when nothing answers, nothing else is worth a word."""
    unknown = _unknown_clusters(observed)
    return InfeasibleError([*unknown, *why]) if situation.usable else UnreachableError(unknown)


def _placed(situation: Situation, problem: PlacementProblem, solution: Solution, evidence: Evidence) -> Placement:
    """The solution with names; raises FT2903 when it breaks a rule after all."""
    names = _names_out_of_sight(evidence) | running_options(evidence)
    placement = assign(problem, solution, names, situation.unseen)
    blind = {name for name, facts in evidence.clusters.items() if not facts.known}
    unseen = {replica.cluster for replica in situation.unseen}
    broken = violations(situation.blueprint, situation.inventory, placement, blind | unseen, situation.now)
    if broken:
        hint = "this is a bug of the planner: report it with blueprint and inventory"
        raise FabrictoolError.of("FT2903", f"the placement breaks a rule: {'; '.join(broken)}", hint=hint)
    return placement


def _names_out_of_sight(evidence: Evidence) -> dict[str, OptionKey]:
    """Nothing can be said of replicas on a cluster that is not enabled, but their names are taken."""
    remembered = [(Address.parse(address), placed) for address, placed in evidence.state.units.items()]
    return {
        address.name: placed_option(address.name, placed)
        for address, placed in remembered
        if address.kind == "replica" and placed.cluster not in evidence.clusters
    }


def _last(search: Iterator[Solution], progress: Callable[[Solution], None] | None) -> tuple[Solution, bool]:
    solution = None
    try:
        for solution in search:
            if progress is not None:
                progress(solution)
    except KeyboardInterrupt:
        if solution is None or progress is None:
            raise
        return solution, True
    except MemoryError as error:
        hint = "`--solver exact` takes the least; else raise the memory limit"
        raise FabrictoolError.of("FT2904", "the solver ran out of memory", hint=hint) from error
    if solution is None:
        raise FabrictoolError.of("FT2902", "the solver found nothing")
    return solution, False


def _until_interrupted(sentences: Iterable[str], *, patient: bool) -> tuple[list[str], bool]:
    """All sentences, and whether Ctrl-C cut them short; the `patient` let it through."""
    complete: list[str] = []
    try:
        for sentence in sentences:
            complete.append(sentence)  # noqa: PERF402 - what came before Ctrl-C counts
    except KeyboardInterrupt:
        if patient:
            raise
        return complete, True
    return complete, False


def _disabled(trouble: Problem, observed: Observed) -> bool:
    return (trouble.place.thing or "").removeprefix("cluster/") not in observed.clusters


def _unrepeatable(solution: Solution) -> list[str]:
    if solution.repeatable:
        return []
    return ["the search ran out of time: on another machine the same files may be placed otherwise"]


def _mean_traces(blueprint: Blueprint) -> list[str]:
    return [
        f"{name}: of demand.trace its mean rate and its lengths are planned for, not its bursts"
        for name, model in sorted(blueprint.models.items())
        if model.demand is not None and model.demand.trace is not None
    ]


def _unread_keys(blueprint: Blueprint, keys: str | None) -> list[str]:
    if keys is not None or not blueprint.tenants or not blueprint.every_gateway:
        return []
    return ["tenant keys unavailable; key changes not checked"]


def _waiting_pins(blueprint: Blueprint, situation: Situation) -> list[str]:
    unseen = Counter(placed_option(replica.replica, replica) for replica in situation.unseen)
    unknown = {name for name, described in situation.inventory.clusters.items() if described.enabled}
    unknown -= set(situation.usable)
    return [
        f"{name}: {count} more pinned to {'/'.join(filter(None, place))} when it answers again"
        for name, model in sorted(blueprint.models.items())
        for place, count in waiting(
            {(pin.cluster, pin.partition or ""): pin.replicas for pin in model.place.pin},
            {key: n for key, n in unseen.items() if key[0] == name},
            unknown,
        ).items()
    ]


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
