"""The placement that a search begins with: what runs, the last plan or the relaxation rounded, filled up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.stages import TOLERANCE, demand, first_change, in_order, user_stages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.solvers.core import Core

NEAR = 0.1
"""What runs is begun with where it is within so much of the relaxation rounded, in the first stage that differs."""
SHORT = 0.01
"""The share of the demand that may be unserved there without another beginning being tried."""

Counts = dict[int, int]


# Wide: what may be begun with, and what judges that.
def first_placement(
    problem: PlacementProblem,
    core: Core,
    chosen: Sequence[int],
    warm: Mapping[int, int] | None,
    early: Mapping[int, int] | None,
    seed: int,
) -> Counts | None:
    """The best that is known, or the relaxation rounded, where that is far better; None where all break a rule.

    `warm`: counts by option, such as those of the last plan; `early`: others, where these are far better than all.
    """
    judge = _Judge(problem, chosen, seed)
    best = _best_known(problem, core, judge, warm)
    counts, values = best if best is not None else (None, None)
    still = [] if problem.max_moves is None else [dict(problem.running)]
    for other in (*still, {i: count for i, count in core.rounded.items() if count}, *([early] if early else [])):
        if values is not None and not judge.is_far_better(core.lowest, values):
            break
        worth = judge.worth(other)
        if worth is not None and (values is None or judge.is_far_better(worth, values)):
            counts, values = dict(other), worth
    return counts


def _best_known(
    problem: PlacementProblem, core: Core, judge: _Judge, warm: Mapping[int, int] | None
) -> tuple[Counts, Mapping[str, float]] | None:
    """What runs, filled up; or the last plan, or the least moved, where that is better."""
    running = problem.running
    # A part of a replica that would stop is none that stops.
    moved = {i: math.ceil(k - TOLERANCE) if k < running.get(i, 0) else k for i, k in core.moved.items()}
    best: tuple[Counts, Mapping[str, float]] | None = None
    for known in (running, warm, moved):
        if not known or not any(known.values()):
            continue
        usage = {i: float(known.get(i, 0)) for i in range(len(problem.options))}
        counts = {i: count for i, count in rounded(problem, usage, core.distance).items() if count}
        values = None if best is not None and counts == best[0] else judge.worth(counts)
        if values is not None and (best is None or judge.is_better(values, best[1])):
            best = counts, values
    return best


class _Judge:
    """What counts are worth to users, stage by stage."""

    def __init__(self, problem: PlacementProblem, chosen: Sequence[int], seed: int) -> None:
        self._problem, self.chosen, self._seed = problem, chosen, seed
        self._stages = user_stages(problem)

    def worth(self, counts: Mapping[int, int]) -> Mapping[str, float] | None:
        """Values of the stages that users feel; None where the counts break a rule."""
        loads = Formulation.of_counts(self._problem, counts, sorted({*self.chosen, *counts}))
        result = in_order(loads, self._stages, seconds=LEAST_LP_S, seed=self._seed)
        return None if result is None else result[0]

    def is_better(self, values: Mapping[str, float], best: Mapping[str, float]) -> bool:
        change = first_change(best, values, self._stages)
        return change is not None and change[1] < 0.0

    def is_far_better(self, values: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """So much that what runs is better forgotten: what is near can be improved, with fewer moves."""
        change = first_change(best, values, self._stages)
        if change is None:
            return False
        name, more = change
        return -more > max(NEAR * values.get(name, 0.0), SHORT * demand(self._problem, name))
