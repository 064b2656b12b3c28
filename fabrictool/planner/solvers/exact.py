"""The exact solver: one objective after another, each as an integer program beside its linear relaxation.

Objectives in order, each kept while the next is minimised: unserved demand by priority, then those of the
blueprint with the wishes of `place` after its SLO, then moves against what runs, then the number of replicas, then a
fixed tie-break. ``latency`` is the mean number of requests in the system: the mean latency times the rate, by Little's
law. It is kept within half a percent of its bound: its figures are not that exact, and nothing is moved for less.

Partitions that are alike are one (`symmetry`); the rest is `placing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.highs import prepare
from fabrictool.planner.infeasible import require_options
from fabrictool.planner.solvers.early import MANY, early_placement
from fabrictool.planner.solvers.placing import PlacementSearch
from fabrictool.planner.solvers.symmetry import merged
from fabrictool.planner.work import StepwiseWork, never, units

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabrictool.planner.problem import PlacementProblem, Solution

SMALL = 1500
"""Options up to which whoever solves a problem again and again may use it."""
NAME = "exact (HiGHS in OR-Tools)"


class ExactSolver:
    """See the module's docstring."""

    name = "exact"

    def __init__(self, left_s: Callable[[], float] = never) -> None:
        """`left_s`: seconds until a clock ends the search; what it finds is repeatable all the same."""
        self._left_s = left_s

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields ever better solutions, the last one is the answer."""
        require_options(problem)
        smaller = merged(problem)
        work = StepwiseWork(units(deadline_s), self._left_s)
        start = None if warm is None else smaller.counts_of(warm.counts)
        early = early_placement(smaller.problem, NAME, seed) if warm is None else None
        if early is not None:
            yield smaller.dealt(early, seed)
        if len(smaller.problem.options) >= MANY:
            prepare()  # not sooner: tables need both cores
        search = PlacementSearch(smaller.problem, NAME, work, seed, start, None if early is None else early.counts)
        goes_on = True
        while goes_on:
            for name in search.stages:
                for solution in search.stage(name):
                    yield smaller.dealt(solution, seed)
            goes_on = search.goes_on()
