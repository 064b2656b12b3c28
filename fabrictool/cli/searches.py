"""What commands share that place a fabric several times: a budget that all searches get a part of, and how a placement
is written.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec

from fabrictool.cli.forecast_answers import PlacedRow, StageRow
from fabrictool.cli.output import say
from fabrictool.cli.solve_watch import SearchClock
from fabrictool.planner.apart_search import searched_apart
from fabrictool.planner.solvers.exact import ExactSolver

if TYPE_CHECKING:
    from fabrictool.cli.planning import SearchLimit
    from fabrictool.planner.problem import Option, PlacementProblem, Solution

PATIENCE_S = 2.0
"""Who takes longer tells how far it is."""


class Searches:
    """Each has an even part of what is left of budget and work."""

    # Wide: what there is, and by whom and how it is shared.
    def __init__(
        self, limit: SearchLimit, seed: int, number: int, *, keeps: bool, share: float = 1.0, least_s: float = 0.0
    ) -> None:
        """`share` of the budget is for `number` searches at most, and `least_s` for each in any case; `keeps`: Ctrl-C
        ends them, and what was found stays.
        """
        self.clock = SearchClock(keeps=keeps, budget_s=limit.budget_s)
        self.complete = 0
        self._then = "; Ctrl-C takes those so far" if keeps else ""
        self._limit, self._seed, self._number, self._share, self._least_s = limit, seed, number, share, least_s
        self._began = time.monotonic()

    def more(self) -> bool:
        """Whether there is time for another one."""
        return self.clock.left_s() > 0.0

    def solve(self, problem: PlacementProblem) -> Solution:
        part_s = self._share * self.clock.left_s() / max(1, self._number - self.complete)
        until = time.monotonic() + max(self._least_s, part_s)
        solver = ExactSolver(lambda: 0.0 if self.clock.interrupted else until - time.monotonic())
        work_s = self._limit.work_s / self._number

        def search(asked: PlacementProblem, work: float) -> tuple[Solution, bool]:
            *_, last = solver.solve(asked, deadline_s=max(0.01, work_s - work), seed=self._seed)
            return last, False  # Ctrl-C is the clock's here: what it ends has a placement

        _, solution, _ = searched_apart(problem, search)
        self.complete += 1
        passed = time.monotonic() - self._began
        if sys.stderr.isatty() and passed > PATIENCE_S and self.complete < self._number:
            say(f"{passed:4.0f} s  {self.complete} of {self._number} placements at most{self._then}")
        return solution


def placement_row(option: Option, count: int) -> PlacedRow:
    """So many replicas of one kind, for a JSON document."""
    stages = [
        StageRow(cluster=pool.cluster, partition=pool.partition, device=pool.device, tp=tp)
        for pool, tp in option.stages
    ]
    return PlacedRow(
        model=option.model,
        cluster=option.pool.cluster,
        partition=option.pool.partition,
        tp=option.tp,
        pp=option.pp,
        dp=option.dp,
        phase=option.phase,
        replicas=count,
        variant=option.variant or msgspec.UNSET,
        stages=stages if option.others else msgspec.UNSET,
    )
