"""The columns of a problem that matter: those that the relaxation uses in any stage, and those that it nearly uses."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.formulation import BY_CAPACITY, Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.stages import TIDYING, TIE_BREAK, TOLERANCE, slack, spared, stage_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.program import ProgramSolution
    from fabrictool.planner.tangents import LoadPrices
    from fabrictool.planner.work import StepwiseWork

NEAREST, WIDE = 4, 12
"""Options a model beyond those that the relaxation uses: the ones that it would cost least, in every stage; and of
stages without loads, whose programs are so much smaller."""
COLUMNS_PER_UNIT = 10_000
"""Of a relaxation: one with fewer takes no time."""
LATE_S = 1.5
"""Seconds that relaxations have at least, however late tables were: without them the first placement is a poor one."""


@dataclass(frozen=True, slots=True)
class Core:
    """What the relaxation says of a problem."""

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
    distance: dict[int, float]
    """By option: what a request/s on it would cost the last stage that users feel, at least."""
    rounded: dict[int, int]
    """By option: whole counts near those of that stage."""
    moved: dict[int, float]
    """By option: counts, not whole ones, with which the least of what runs has to move; none where nothing does."""
    whole: bool
    """Whether all stages that users feel were relaxed; else the search ended before."""


def core_of(problem: PlacementProblem, work: StepwiseWork, seed: int) -> Core:
    """The first stage's relaxation is always solved; of large programs those of the others are steps of the search.

    Raises InfeasibleError FT2001 when the relaxation has no solution.
    """
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    wide: set[int] = set()
    core = {i for i, o in enumerate(problem.options) if o.key in problem.fixed or o.key in problem.current}
    for need in problem.needs:
        core |= {i for i in problem.of(need.model) if any(problem.options[i].pool.within(*pin) for pin in need.pins)}
    lowest: dict[str, float] = {}
    prices: dict[str, LoadPrices] = {}
    distance: dict[int, float] = {}
    usage: dict[int, float] = {}
    moved: dict[int, float] = {}
    names = [name for name in stage_names(problem) if name != TIE_BREAK and relaxed.terms(name)]
    units, left_s = relaxed.program.columns // COLUMNS_PER_UNIT, work.left_s()
    late_s = LATE_S + max(0.0, -left_s)
    for name in names:
        for solved, share in spared(problem, lowest).items() if name == "moves" else ():
            relaxed.keep(solved, lowest[solved] * (1.0 + share))
        answer = _relaxed_step(relaxed, name, work, seed, units if lowest else 0, late_s)
        if work.ended:
            break
        if answer is None:
            raise explain_infeasible(problem)
        if left_s < math.inf:  # bounds of stages that come to more take about as long once more, when all else is done
            work.closing_s = left_s - work.left_s()
        lowest[name], prices[name] = answer.objective, relaxed.prices(name, answer)
        used = relaxed.usage(answer)
        core |= {i for i, replicas in used.items() if replicas > TOLERANCE}
        if name == "moves":
            moved = used
        if name not in TIDYING:
            # What tidying up costs within the tolerances is not lost before it begins.
            usage, distance = used, {i: relaxed.distance(answer, i) for i in relaxed.chosen}
            nearest: dict[str, list[tuple[float, int]]] = defaultdict(list)
            for i, option in enumerate(problem.options):
                nearest[option.model].append((distance[i], i))
            for options in nearest.values():
                options.sort()
                core |= {i for _, i in options[:NEAREST]}
                wide |= {i for _, i in options[:WIDE]} if name in BY_CAPACITY else set()
        relaxed.keep(name, answer.objective + slack(problem, name, answer.objective))
    for name in lowest:
        relaxed.keep(name, math.inf)
    chosen = sorted(core)
    whole = rounded(problem, {i: usage.get(i, 0.0) for i in chosen}, distance)
    complete = all(name in lowest for name in names if name not in TIDYING)
    return Core(relaxed, chosen, sorted(core | wide), lowest, prices, distance, whole, moved, complete)


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
