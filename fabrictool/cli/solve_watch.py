"""A solver with a clock beside it: how long it took, and what it had found when. The planner itself knows no time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.planner.problem import PlacementProblem, Solution, Solver, StageResult


@dataclass(frozen=True, slots=True)
class Moment:
    """What was known of the stage that was being solved."""

    seconds: float
    stage: StageResult


@dataclass
class SolverWatch:
    """Wraps one solver for one plan, which may ask it several times."""

    solver: Solver
    name: str = ""
    seconds: float = 0.0
    """What the search took, or has taken so far."""
    moments: list[Moment] = field(default_factory=list)
    """One for each solution that was found on the way."""

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """As the solver does."""
        began = time.monotonic() - self.seconds
        try:
            for solution in self.solver.solve(problem, deadline_s=deadline_s, seed=seed, warm=warm):
                self.moments.append(Moment(time.monotonic() - began, solution.stages[-1]))
                yield solution
        finally:
            self.seconds = time.monotonic() - began
