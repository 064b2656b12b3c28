"""Lightweight rescheduling: who reads prompts, who makes answers, and who serves how much; nothing else changes.

For a shift of the workload, or when nodes are lost: devices, cuts and weights stay, only phases are flipped, one group
at a time as long as that helps, and loads are dealt out anew (ThunderServe, paper 002, section 3.4).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import InfeasibleError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.planner.solvers.neighbours import flips
from fabrictool.planner.solvers.search import TabuSearch
from fabrictool.planner.solvers.tabu import EVALUATIONS_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fabrictool.planner.problem import PlacementProblem, Solution


class RescheduleSolver:
    """See the module's docstring. Starts from `warm`, or from what runs now."""

    name = "reschedule"

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields the one answer. Raises InfeasibleError: FT2008 nothing runs, FT2014 fewer than the minimum."""
        if warm is None:
            counts = {i: problem.current.get(option.key, 0) for i, option in enumerate(problem.options)}
        else:
            counts = warm.counts
        search = TabuSearch(problem, random.Random(f"reschedule {seed}"))
        start = search.of_counts(counts)
        if not start.groups:
            raise InfeasibleError.of(
                "FT2008",
                "nothing runs that could be rescheduled",
                hint="`fabrictool plan` without --solver reschedule places replicas",
            )
        self._require_minima(problem, counts)
        best, used = search.run(start, flips, evaluations=int(EVALUATIONS_PER_SECOND * deadline_s))
        yield replace(search.solution(best, self.name, deadline_s, seed), work=used / EVALUATIONS_PER_SECOND)

    @staticmethod
    def _require_minima(problem: PlacementProblem, counts: Mapping[int, int]) -> None:
        """Raises InfeasibleError FT2014 where fewer replicas run than are wanted: it starts none."""
        short = []
        for need in problem.needs:
            there = sum(counts.get(i, 0) for i in problem.of(need.model))
            if there < need.minimum:
                message = f"{need.model}: {there} run, replicas.min is {need.minimum}; reschedule starts no replica"
                place = Place(thing=f"models.{need.model}")
                short.append(Complaint("FT2014", message, place, "`fabrictool plan` without --solver reschedule"))
        if short:
            raise InfeasibleError(short)
