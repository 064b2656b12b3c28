"""A placement of a large empty fabric before its relaxations are solved: they take seconds, and this some tenths.

What matters first, that nobody is unserved, does not ask how replicas are loaded: its relaxation by capacity alone has
a seventh of the columns. Rounded and filled up, that is a whole plan, if not a good one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import Solution, StageResult
from fabrictool.planner.program import LEAST_LP_S, Program
from fabrictool.planner.solvers.core import NEAREST, named, nearest, with_sites
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.stages import TOLERANCE, clean, in_order, stage_names, user_stages

if TYPE_CHECKING:
    from fabrictool.planner.problem import PlacementProblem

MANY = 2_000
"""Options, alike partitions counted once, from which on somebody would wait for the relaxations."""


def early_placement(problem: PlacementProblem, solver: str, seed: int) -> Solution | None:
    """With its first stage, which is what is unserved; None where there are few options or something runs, where that
    is not the first stage, or where what is rounded breaks a rule.

    It is no answer: a search begins with its counts, or better ones.
    """
    if len(problem.options) < MANY or problem.runs or stage_names(problem)[0] != "served":
        return None
    try:
        return _placement(with_sites(problem), solver, seed)
    except FabrictoolError:  # no numbers that can be trusted, of what nobody needs
        return None


def _placement(problem: PlacementProblem, solver: str, seed: int) -> Solution | None:
    every = range(len(problem.options))
    relaxed = Formulation(problem, every, whole=True, by_capacity=True, program=Program(whole=False))
    answer = relaxed.minimise("served", seconds=LEAST_LP_S, seed=seed)
    if answer is None:
        return None  # the search says why
    usage = relaxed.usage(answer)
    distance = {
        i: sum(float(answer.reduced[column]) for column, _ in relaxed.count(i)) / problem.options[i].levels[-1].rate
        for i in every
    }
    # Those that are as good as what is used, or nearly; and what has to be.
    among = {i for i in every if distance[i] <= TOLERANCE} | nearest(problem, distance, NEAREST) | named(problem)
    rough = rounded(problem, {i: usage[i] for i in sorted(among)}, distance)
    counts = {i: count for i, count in rough.items() if count}
    loads = Formulation.of_counts(problem, counts)
    judged = in_order(loads, user_stages(problem), seconds=LEAST_LP_S, seed=seed)
    if judged is None:
        return None
    values, loaded = judged
    served = StageResult("served", clean(values["served"]), clean(min(values["served"], answer.objective)))
    return Solution(counts, loads.loads(loaded), (served,), solver, optimal=False, repeatable=False, ended=True)
