"""What each rule that a blueprint states costs: the problem is solved again without it.

Within `SMALL` options, and where the placement is proved, by the exact solver; else by the linear relaxation, which
says less, as whole replicas can make a rule dearer than it says. What is solved again has room in its nodes as a plan
has (`planner.apart_search`); where that took more than one search, a rule may cost more than was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.apart_search import searched_apart
from fabrictool.planner.explaining.resolving import COLUMNS_PER_UNIT, LATE, in_parts
from fabrictool.planner.explaining.wording import first_difference, told
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import ResourceLimit
from fabrictool.planner.situation import with_model
from fabrictool.planner.solvers.exact import SMALL, ExactSolver
from fabrictool.planner.stages import NOUNS, TIDYING, in_order, proved, user_stages, values_of
from fabrictool.planner.work import PER_SECOND, units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.planner.explaining.resolving import Resolver
    from fabrictool.planner.problem import PlacementProblem, Solution
    from fabrictool.planner.situation import Situation
    from fabrictool.planner.work import StepwiseWork

MOST_RULES = 20
"""So many are priced, those of the models with the largest demand first."""
SECONDS = 2.0
"""Of work, at most, for solving again without a rule; what takes longer is told by the relaxation."""
NO_MAXIMUM = 100_000
"""The largest `replicas.max` that a blueprint can state."""


@dataclass(frozen=True, slots=True)
class StatedRule:
    """Something that the blueprint states of one model, or a limit."""

    model: str
    """"" of a limit, which is of no model."""
    words: str
    """After "without"."""
    without: Model | ResourceLimit
    """The model's part of the blueprint without it; of a limit, the limit."""
    stage: str = ""
    """Which keeps it, and so says nothing about its price; "": it is a rule of all of them."""


@dataclass(frozen=True, slots=True)
class RulePrice:
    """What would be better without a rule."""

    rule: StatedRule
    stage: str
    """The first that would improve; "" when none would."""
    gain: float
    """By how much its value would fall."""
    exact: bool
    """Solved again as an integer program, not by the relaxation."""
    late: bool = False
    """Whether there was no work left to find it out."""
    at_least: bool = False
    """Whether it may be more: what would be better yet had no room in the nodes as it was put there."""


def rules_of(blueprint: Blueprint, problem: PlacementProblem, solution: Solution) -> list[StatedRule]:
    """The rules that may cost something, those of the models with the largest demand first."""
    rules = [
        StatedRule("", f"limit {limit.name} ({limit.words})", limit)
        for limit in problem.limits
        if limit.most - limit.used(problem.options, solution.counts) < _largest(problem, limit)
    ]
    for need in sorted(problem.needs, key=lambda need: (-need.rate, need.model)):
        name, mine = need.model, problem.of(need.model)
        counts = [(problem.options[i].stable and problem.options[i].serves, solution.counts.get(i, 0)) for i in mine]
        total, stable = sum(k for _, k in counts), sum(k for on_stable, k in counts if on_stable)
        rules += [StatedRule(name, *rest) for rest in _rules(blueprint.models[name], need.rate, total, stable)]
    return rules


def _largest(problem: PlacementProblem, limit: ResourceLimit) -> float:
    """The most that one replica takes of it: where more is left, it stands in nobody's way."""
    return max((limit.used_by(option) for option in problem.options), default=0.0)


def _rules(model: Model, rate: float, total: int, stable: int) -> Iterator[tuple[str, Model] | tuple[str, Model, str]]:
    """(words, the model without it, the stage that keeps it, if one does); `total` replicas are placed, `stable` of
    them on owned capacity.
    """
    replicas = model.replicas

    def but(**changes: object) -> Model:
        return model.model_copy(update=changes)

    if model.trust is not None:
        yield "its trust allowlist", but(trust=None)
    if model.demand is not None and model.demand.groups is not None:
        yield "its demand by group", but(demand=model.demand.model_copy(update={"groups": None}))
    if model.survive is not None:
        yield f"`survive: {model.survive}`", but(survive=None), "survived"
    if model.tier == "owned":
        yield "`tier: owned`", but(tier="scavenger")
    yield from _rules_of_place(model)
    # A demand needs one replica in any case.
    if replicas.min == stable > (1 if rate else 0):
        yield f"`replicas.min: {replicas.min}`", but(replicas=replicas.model_copy(update={"min": 0}))
    if replicas.max == total:
        yield f"`replicas.max: {replicas.max}`", but(replicas=replicas.model_copy(update={"max": NO_MAXIMUM}))
    if model.protect and replicas.min == 0 and stable == 1 and not rate:
        yield "`protect`", but(protect=False)


def _rules_of_place(model: Model) -> Iterator[tuple[str, Model] | tuple[str, Model, str]]:
    place = model.place

    def placed(**changes: object) -> Model:
        return model.model_copy(update={"place": place.model_copy(update=changes)})

    for pin in place.pin:
        there = pin.cluster + (f"/{pin.partition}" if pin.partition else "")
        others = tuple(other for other in place.pin if other != pin)
        yield f"its pin of {pin.replicas} to {there}", placed(pin=others)
    if place.spread != "none":
        yield f"`spread: {place.spread}`", placed(spread="none")
    if place.avoid:
        yield "`avoid`", placed(avoid=()), "preference"
    if place.prefer:
        yield "`prefer`", placed(prefer=()), "preference"


def price_rules(situation: Situation, resolver: Resolver) -> Iterator[RulePrice]:
    """The first `MOST_RULES` rules with what they cost, one after another, as far as there is work for them."""
    problem, solution = resolver.whole, resolver.solution
    relaxed: dict[str, float] = {}
    rules = rules_of(situation.blueprint, problem, solution)[:MOST_RULES]
    for work, rule in zip(in_parts(resolver.work, len(rules)), rules, strict=False):
        without = replace(_without(situation, problem, rule), crowded={})
        names = [name for name in user_stages(problem) if name != rule.stage]
        exact = _exactly(resolver, without, work) if proved(solution) else None
        before, after = values_of(solution), values_of(exact) if exact is not None else {}
        if exact is None:
            relaxed = relaxed or _relaxed(replace(problem, crowded={}), resolver.seed, work)
            before, after = relaxed, _relaxed(without, resolver.seed, work)
        if not (before and after):
            yield RulePrice(rule, "", 0.0, exact=False, late=True)
            continue
        change = first_difference(problem, before, after, names)
        stage, gain = (change[0], -change[1]) if change is not None and change[1] < 0 else ("", 0.0)
        yield RulePrice(rule, stage, gain, exact is not None, at_least=exact is not None and not proved(exact))


def _without(situation: Situation, problem: PlacementProblem, rule: StatedRule) -> PlacementProblem:
    if isinstance(rule.without, ResourceLimit):
        return replace(problem, limits=tuple(limit for limit in problem.limits if limit != rule.without))
    return with_model(situation, problem, rule.model, rule.without)


def rule_sentences(situation: Situation, resolver: Resolver, currency: str) -> Iterator[str]:
    """A sentence for each rule that costs something, one for those that do not, and one for those that had no time."""
    free: list[str] = []
    unknown: list[str] = []
    late: list[str] = []
    for price in price_rules(situation, resolver):
        rule, how = price.rule, "solved again" if price.exact else "by the relaxation"
        if price.stage:
            gain = told(price.stage, price.gain, currency)
            whose = f"{rule.model}: " if rule.model else ""
            least = "at least " if price.at_least else ""
            yield f"{whose}without {rule.words} {NOUNS[price.stage]} would fall by {least}{gain} ({how})"
        else:
            kind = late if price.late else unknown if price.at_least else free
            kind.append(f"{rule.model} {rule.words}".lstrip())
    if free:
        yield f"rules that cost nothing: {'; '.join(free)}"
    if unknown:
        yield f"rules without which nothing better was seen that has room in the nodes: {'; '.join(unknown)}"
    if late:
        yield f"what these rules cost {LATE}: {'; '.join(late)}"
    left = len(rules_of(situation.blueprint, resolver.whole, resolver.solution)) - MOST_RULES
    if left > 0:
        yield f"{left} more rules, of models with less demand, are not priced"


def _exactly(resolver: Resolver, problem: PlacementProblem, work: StepwiseWork) -> Solution | None:
    """What can be had with so much work, if the first search proves it; the plan is where each search begins."""
    if len(problem.options) > SMALL or not work.more():
        return None
    counts = {resolver.whole.options[i].key: count for i, count in resolver.solution.counts.items()}
    known = {i: counts[option.key] for i, option in enumerate(problem.options) if option.key in counts}
    warm = replace(resolver.solution, counts=known)
    end = min(work.limit, work.spent + units(SECONDS))

    def search(asked: PlacementProblem, _before: float) -> tuple[Solution, bool]:
        if work.spent >= end:
            raise FabrictoolError.of("FT2902", "no work is left to search again")
        last = _searched(asked, resolver.seed, work, end - work.spent, warm)
        work.done(units(last.work))
        if not (asked.crowded or proved(last)):
            raise FabrictoolError.of("FT2902", "there was no time to prove it")
        return last, False

    try:
        _, solution, _ = searched_apart(problem, search)
    except FabrictoolError:  # nothing was found in time
        return None
    return solution


def _searched(problem: PlacementProblem, seed: int, work: StepwiseWork, most: int, warm: Solution) -> Solution:
    """The solution as it was when all stages of users were settled."""
    search = ExactSolver(work.for_steps_s).solve(problem, deadline_s=most / PER_SECOND, seed=seed, warm=warm)
    for solution in search:
        last = solution
        if solution.stages[-1].name in TIDYING:
            break
    return last


def _relaxed(problem: PlacementProblem, seed: int, work: StepwiseWork) -> dict[str, float]:
    """The relaxation's values; none where there is no work left for them."""
    if not work.more():
        return {}
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    result = in_order(relaxed, user_stages(problem), seconds=60.0, seed=seed)
    work.done(len(user_stages(problem)) * relaxed.program.columns // COLUMNS_PER_UNIT)
    return result[0] if result is not None else {}
