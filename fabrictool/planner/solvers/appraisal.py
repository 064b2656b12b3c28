"""What given counts are worth: loads and objectives as the exact solver would have them, beside the same bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import PlacementProblem, Solution, StageResult
from fabrictool.planner.stages import TIE_BREAK, clean, stage_names, tolerance

if TYPE_CHECKING:
    from fabrictool.planner.program import ProgramSolution


def appraise(problem: PlacementProblem, counts: dict[int, int], solver: str, deadline_s: float, seed: int) -> Solution:
    """The solution that has just these counts, by option.

    Raises InfeasibleError FT2001 when they break a rule.
    """
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    loads = Formulation.of_counts(problem, counts)
    stages: list[StageResult] = []
    answer: ProgramSolution | None = None
    for name in stage_names(problem):
        if name == TIE_BREAK or not loads.terms(name):
            continue
        answer = loads.minimise(name, seconds=deadline_s, seed=seed)
        below = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None or below is None:
            raise explain_infeasible(problem)
        value = loads.value(name, answer)
        stages.append(StageResult(name, clean(value), clean(min(value, below.objective))))
        for formulation in (loads, relaxed):
            formulation.keep(name, value + tolerance(name, value))
    served = loads.loads(answer) if answer is not None else {}
    return Solution({i: k for i, k in counts.items() if k}, served, tuple(stages), solver, optimal=False)
