"""A solver with a clock beside it: how long it took, what it had found when, and when it has to end.

The planner itself knows no time.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.cli.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.planner.problem import PlacementProblem, Solution, Solver, StageResult

AFTER_S, AFTER_A_MODEL_S = 0.25, 0.045
"""What comes after a search takes so long, and so much more for each model: replay, names, reasons. Measured."""
MOST_AFTER = 0.4
"""Of the budget, at most."""
EXPLAINING, LEAST_EXPLAINING_S, MOST_EXPLAINING = 1 / 5, 2.0, 2 / 5
"""Of the budget, where something is to be explained: so much, and at least so many seconds where that is not more."""


class SearchClock:
    """Ends a search when a budget is used up, or at Ctrl-C where that is to keep what there is."""

    def __init__(self, *, keeps: bool, budget_s: float = math.inf, models: int = 0, explains: bool = False) -> None:
        """`budget_s` is for all that this process does, for so many `models`; whether it `explains` the plan, too."""
        after = min(AFTER_S + AFTER_A_MODEL_S * models, MOST_AFTER * budget_s)
        end = time.monotonic() + budget_s - (_age_s() if budget_s < math.inf else 0.0)
        explaining = min(max(EXPLAINING * budget_s, LEAST_EXPLAINING_S), MOST_EXPLAINING * budget_s)
        self._until = end - after - (explaining if explains and budget_s < math.inf else 0.0)
        self._end = end - min(AFTER_S, MOST_AFTER * budget_s)
        self._interrupts = Interrupts(at_once=False) if keeps else None

    def left_s(self) -> float:
        if self.interrupted:
            return 0.0
        return self._until - time.monotonic()

    def explaining_left_s(self) -> float:
        """Seconds for explaining; a search that was interrupted is explained all the same."""
        return self._end - time.monotonic()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return self._interrupts is not None and self._interrupts.pressed

    def hearing(self) -> Interrupts | nullcontext[None]:
        """A context in which Ctrl-C ends the search, and the second time the command."""
        return nullcontext() if self._interrupts is None else self._interrupts


def _age_s() -> float:
    """Seconds since this process was started: a command begins before any of ours runs."""
    try:
        # After the name, which may have blanks in it, the 20th field is the start, in ticks since the machine's.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return 0.0  # not on this system


@dataclass(frozen=True, slots=True)
class Moment:
    """What was known of the stage that was being solved."""

    seconds: float
    stage: StageResult


@dataclass
class SolverWatch:
    """Wraps one solver for one plan, which may ask it several times."""

    solver: Solver
    clock: SearchClock | None = None
    """Where the solver asks it when to end."""
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
            with nullcontext() if self.clock is None else self.clock.hearing():
                for solution in self.solver.solve(problem, deadline_s=deadline_s, seed=seed, warm=warm):
                    self.moments.append(Moment(time.monotonic() - began, solution.stages[-1]))
                    yield solution
        finally:
            self.seconds = time.monotonic() - began
