"""What a plan moves, what that takes, and what would be lost if all stayed as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.canonical import tidy
from fabrictool.base.errors import InfeasibleError
from fabrictool.domain.plan import Moves
from fabrictool.planner.explaining.wording import first_difference, more
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.highs import SearchLimits
from fabrictool.planner.moving import changed, moves_in
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.stages import in_order, user_stages, values_of
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.planner.problem import PlacementProblem, Solution

NODES = 2000
"""Of the search for the least moves; less than a clock has, and the same on every machine."""
WHOLE = 1e-6


def moves_of(problem: PlacementProblem, solution: Solution, currency: str, seed: int) -> Moves | None:
    """None where nothing runs, or all stays."""
    changes = list(changed(problem, solution.counts))
    if not changes:
        return None
    starting = [(option, change) for option, change in changes if change > 0]
    return Moves(
        starts=sum(change for _, change in starting),
        stops=sum(-change for _, change in changes if change < 0),
        loading_s=tidy(sum(change * option.start_s for option, change in starting)),
        devices=sum(change * option.devices for option, change in starting),
        otherwise=_otherwise(problem, solution, currency, seed),
    )


def _otherwise(problem: PlacementProblem, solution: Solution, currency: str, seed: int) -> str:
    """What would be worse without them; moves themselves are not counted on either side."""
    names = user_stages(problem)
    left = in_order(Formulation.of_counts(problem, problem.running), names, seconds=LEAST_LP_S, seed=seed)
    if left is None:
        return "what runs cannot stay: it breaks a rule, or its nodes are gone"
    now = {name: value - moves_in(problem, solution.counts, name) for name, value in values_of(solution).items()}
    change = first_difference(problem, now, left[0], names)
    return "" if change is None else f"if nothing moved: {more(*change, currency)}"


def refuse_too_few(problem: PlacementProblem, seed: int, left_s: Callable[[], float] = never) -> None:
    """Raises InfeasibleError FT2017 when the rules are proved to need more moves than there may be. `left_s`: seconds
    until a clock ends the proof.
    """
    if problem.max_moves is None or not problem.current:
        return
    least = Formulation(replace(problem, max_moves=None), range(len(problem.options)), whole=True)
    limits = SearchLimits(0.0, NODES, seed, min(LEAST_LP_S, max(0.0, left_s())))
    result = least.program.searched(least.terms("moves"), limits, left_s)
    if result is None or not result.in_time or not math.isfinite(result.bound):
        return
    # What was found may not be the least; that no fewer will do is what the bound says.
    needed, proved = math.ceil(result.bound - WHOLE), result.ending == "OPTIMAL"
    if needed > problem.max_moves:
        moves = f"{'' if proved else 'at least '}{needed} move{'s'[: needed != 1]}"
        raise InfeasibleError.of(
            "FT2017",
            f"the rules need {moves}, and `--max-moves` allows {problem.max_moves}",
            hint=f"--max-moves {needed}, or more to serve better",
        )
