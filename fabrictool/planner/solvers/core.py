"""The columns of a problem that matter: those that the relaxation uses in any stage, and those that it nearly uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.formulation import BY_CAPACITY, Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers.capacity_cuts import CapacityCuts
from fabrictool.planner.solvers.leaning import UPRIGHT, leaning
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.stages import TIDYING, TIE_BREAK, TOLERANCE, slack, spared, stage_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.program import ProgramSolution
    from fabrictool.planner.solvers.capacity_cuts import CapacityRow
    from fabrictool.planner.solvers.leaning import Leaning
    from fabrictool.planner.tangents import LoadPrices
    from fabrictool.planner.work import StepwiseWork

NEAREST, WIDE = 4, 12
"""Options a model beyond those that the relaxation uses: the ones that it would cost least, in every stage; and of
stages without loads, whose programs are so much smaller."""
COLUMNS_PER_UNIT = 10_000
"""Of a relaxation: one with fewer takes no time."""
CUT_ROUNDS, GAIN = 6, 2e-4
"""Times that the relaxation of a stage is solved with more rows, at most, and how much of its value the last one gains.
"""
LATE_S = 1.5
"""Seconds that relaxations have at least, however late tables were: without them the first placement is a poor one."""


@dataclass(frozen=True, slots=True)
class Core:
    """What the relaxation says of a problem."""

    problem: PlacementProblem
    relaxed: Formulation
    """That relaxation, with no stage kept."""
    options: Sequence[int]
    """Those that it uses in any stage, those that it nearly uses, and those that rules or habit name."""
    wide: Sequence[int]
    """The same, with more that are nearly used in the stages that do not depend on loads."""
    lowest: dict[str, float]
    """By stage: what it reaches at best when each stage before is at its own least."""
    prices: dict[str, LoadPrices]
    """By stage: those of that relaxation."""
    distance: Mapping[int, float]
    """By option: what a request/s on it would cost the last stage that users feel, at least, or the one leant to."""
    rounded: dict[int, int]
    """By option: whole counts near those of that stage."""
    moved: dict[int, float]
    """By option: counts, not whole ones, with which the least of what runs has to move; none where nothing does."""
    whole: bool
    """Whether all stages that users feel were relaxed; else the search ended before."""
    relaxing_s: float
    """That all of them took once, by the search's clock; 0: it has none."""
    rows: Sequence[CapacityRow]
    """That whole replicas keep: what the relaxation was told of them."""
    leaning: Leaning
    """To a later stage, while the first is lowered."""

    def kept(self, stage: str, name: str) -> float:
        """What one stage was kept within when the one called `name`, after it, was relaxed."""
        return _kept(self.problem, stage, self.lowest.get(stage, 0.0), name)


# Wide: a problem with its relaxation, and how far that is gone into.
def core_of(
    problem: PlacementProblem,
    relaxed: Formulation,
    work: StepwiseWork,
    seed: int,
    *,
    closely: bool,
    leans: bool,
) -> Core:
    """The first stage's relaxation is always solved; of large programs those of the others are steps of the search.
    Then all of them once more, `closely`: with what whole replicas keep. `leans`: see `solvers.leaning`.

    Raises InfeasibleError FT2001 when the relaxation has no solution.
    """
    names = [name for name in stage_names(problem) if name != TIE_BREAK and relaxed.terms(name)]
    felt = [name for name in names if name not in TIDYING]
    units, left_s = relaxed.program.columns // COLUMNS_PER_UNIT, work.left_s()
    late_s = LATE_S + max(0.0, -left_s)
    took: dict[str, float] = {}

    def step(name: str, units: int, late_s: float) -> ProgramSolution | None:
        began = work.left_s()
        answer = _relaxed_step(relaxed, name, work, seed, units, late_s)
        if began < math.inf:  # bounds of stages that come to more take about as long once more, when all else is done
            took[name] = began - work.left_s()
            work.closing_s = sum(took.values())
        return answer

    relaxations = _relaxations(
        problem, relaxed, names, lambda name: step(name, units if name != names[0] else 0, late_s)
    )
    if len(relaxations.lowest) < len(names) and not work.ended:
        raise explain_infeasible(problem)
    rows: Sequence[CapacityRow] = ()
    if closely and not work.ended:
        cuts = CapacityCuts(problem, relaxed)
        if cuts.add(*relaxations.answers):
            close = _relaxations(problem, relaxed, felt, lambda name: _cut(cuts, lambda: step(name, 1 + units, 0.0)))
            # What tidying up comes to at least was computed with earlier stages below what they can be.
            relaxations = close if close.lowest.keys() >= set(felt) and not work.ended else relaxations
        rows = cuts.rows
    lean = UPRIGHT
    if leans and not work.ended:
        lean = leaning(relaxed, felt, relaxations.lowest, lambda name: step(name, 1 + units, 0.0))
    if lean.usage:
        relaxations.usage, relaxations.distance = lean.usage, lean.distance
        relaxations.core |= {i for i, replicas in lean.usage.items() if replicas > TOLERANCE}
    chosen = relaxations.core | named(problem)
    return Core(
        problem,
        relaxed,
        sorted(chosen),
        sorted(chosen | relaxations.wide),
        relaxations.lowest,
        relaxations.prices,
        relaxations.distance,
        rounded(problem, {i: relaxations.usage.get(i, 0.0) for i in sorted(chosen)}, relaxations.distance),
        relaxations.moved,
        whole=all(name in relaxations.lowest for name in felt),
        relaxing_s=sum(took.values()),
        rows=rows,
        leaning=lean,
    )


@dataclass(slots=True)
class _Relaxations:
    """Of all stages in turn, or of those that there was time for; what it is, `Core` says."""

    lowest: dict[str, float] = field(default_factory=dict)
    prices: dict[str, LoadPrices] = field(default_factory=dict)
    core: set[int] = field(default_factory=set)
    wide: set[int] = field(default_factory=set)
    distance: Mapping[int, float] = field(default_factory=dict)
    usage: Mapping[int, float] = field(default_factory=dict)
    """By option: its count in the last stage that users feel."""
    moved: dict[int, float] = field(default_factory=dict)
    answers: list[ProgramSolution] = field(default_factory=list)
    """Of stages that users feel."""

    def add(self, problem: PlacementProblem, relaxed: Formulation, name: str, answer: ProgramSolution) -> None:
        """What a stage came to."""
        self.lowest[name], self.prices[name] = answer.objective, relaxed.prices(name, answer)
        used = relaxed.usage(answer)
        self.core |= {i for i, replicas in used.items() if replicas > TOLERANCE}
        if name == "moves":
            self.moved = used
        if name in TIDYING:  # what that costs within the tolerances is not lost before it begins
            return
        self.answers.append(answer)
        self.usage, self.distance = used, {i: relaxed.distance(answer, i) for i in relaxed.chosen}
        self.core |= nearest(problem, self.distance, NEAREST)
        self.wide |= nearest(problem, self.distance, WIDE) if name in BY_CAPACITY else set()


def nearest(problem: PlacementProblem, distance: Mapping[int, float], number: int) -> set[int]:
    """So many options of each model, that it would cost least."""
    return {
        i for need in problem.needs for i in sorted(problem.of(need.model), key=lambda i: (distance[i], i))[:number]
    }


def named(problem: PlacementProblem) -> set[int]:
    """Options that rules or habit name: that are fixed, run, or stand where a model is pinned."""
    options = problem.options
    known = {i for i, option in enumerate(options) if option.key in problem.fixed or option.key in problem.current}
    return known | {
        i
        for need in problem.needs
        if need.pins
        for i in problem.of(need.model)
        if any(options[i].pool.within(*pin) for pin in need.pins)
    }


def _kept(problem: PlacementProblem, stage: str, least: float, name: str) -> float:
    share = spared(problem, [stage]).get(stage, 0.0) if name in TIDYING else 0.0  # moves come first of these
    return least + max(slack(problem, stage, least), share * least)


def _relaxations(
    problem: PlacementProblem,
    relaxed: Formulation,
    names: Sequence[str],
    solved: Callable[[str], ProgramSolution | None],
) -> _Relaxations:
    """Of each stage with those before at their least, as far as `solved` gives them."""
    relaxations = _Relaxations()
    for name in names:
        for stage, least in relaxations.lowest.items():
            relaxed.keep(stage, _kept(problem, stage, least, name))
        answer = solved(name)
        if answer is None:
            break
        relaxations.add(problem, relaxed, name, answer)
    for name in relaxations.lowest:
        relaxed.keep(name, math.inf)
    return relaxations


def _cut(cuts: CapacityCuts, step: Callable[[], ProgramSolution | None]) -> ProgramSolution | None:
    """What a stage comes to with rows that whole replicas keep, as many as raise it; None: there was no time."""
    answer: ProgramSolution | None = None
    for _ in range(CUT_ROUNDS):
        before = answer
        try:
            answer = step() or before
        except FabrictoolError:  # no numbers that can be trusted, of rows that nobody needs
            break
        if answer is None or answer is before:  # no time; or with these rows stages before cannot be at their least
            break
        if before is not None and answer.objective - before.objective <= GAIN * answer.objective:
            break
        if not cuts.add(answer):
            break
    return answer


# Wide: a program, what it is solved for, and what that counts for.
def _relaxed_step(
    relaxed: Formulation, name: str, work: StepwiseWork, seed: int, units: int, late_s: float
) -> ProgramSolution | None:
    """What a relaxation comes to: a step of so many `units`; of none what takes no time, and is no step. It may end so
    long after others.
    """
    if not units:
        return relaxed.minimise(name, seconds=LEAST_LP_S, seed=seed)
    if work.more(late_s):
        try:
            answer = relaxed.minimise(name, seconds=LEAST_LP_S, seed=seed, left_s=lambda: work.for_steps_s() + late_s)
        except FabrictoolError:
            if work.for_steps_s() + late_s > 0.0:
                raise
            work.cut()
        else:
            work.done(units)
            return answer
    return None


def with_sites(problem: PlacementProblem) -> PlacementProblem:
    """Over how many sites models are spread, and what they could be served, is asked of all options, also where only
    some of these take part.
    """
    options = problem.options
    sites = {need.model: len({options[i].pool.site for i in problem.of(need.model)}) for need in problem.needs}
    fair = FAIRNESS in problem.objective
    reach = {n.model: n.reached(options[i] for i in problem.of(n.model)) if fair else 0.0 for n in problem.needs}
    return replace(
        problem, needs=tuple(replace(n, sites=n.sites or sites[n.model], reach=reach[n.model]) for n in problem.needs)
    )
