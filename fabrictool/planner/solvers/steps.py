"""One step of a search: a program that an engine looks at, counted as work, or dropped where the clock ended it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.highs import SearchLimits
from fabrictool.planner.program import LEAST_LP_S, PATIENCE
from fabrictool.planner.solvers import effort
from fabrictool.planner.stages import LOADS, residual

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.formulation import Formulation
    from fabrictool.planner.highs import Searched
    from fabrictool.planner.program import ProgramSolution
    from fabrictool.planner.work import StepwiseWork

STEPS_PER_UNIT = 8_000
"""Of the simplex algorithm, times the options of the program, in a unit of work: measured, within a factor of two."""
COLUMNS_PER_UNIT = 30
"""Of a program that SCIP solves to one node."""


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """What is done counts in `work`."""

    work: StepwiseWork
    seed: int

    # Wide: a program, what it is searched for, where that begins and where it ends.
    def by_highs(
        self,
        program: Formulation,
        name: str,
        gap: float,
        nodes: int,
        start: Mapping[int, int],
        nudge: Sequence[tuple[int, float]] = (),
    ) -> Searched | None:
        """One step; None where the clock ended it, or the engine died on it. `nudge` is part of the objective."""
        limits = SearchLimits(
            gap,
            nodes,
            self.seed,
            min(LEAST_LP_S, self.work.for_steps_s()),
            restarts=program.restarts and nodes != effort.QUICK,
        )
        terms = [*program.terms(name), *nudge]
        result = program.program.searched(
            terms, limits, self.work.for_steps_s, program.beginning(start) if start else None
        )
        if result is not None and not result.in_time:
            self.work.cut()
            return None
        self.work.done(1 if result is None else result.steps * len(program.chosen) // STEPS_PER_UNIT)
        return result

    def in_time(
        self, programs: Sequence[Formulation], name: str, *, nodes: int, gap: float = 0.0
    ) -> list[ProgramSolution | None] | None:
        """What SCIP finds within its limits, of each program, side by side; None where the clock ended it."""
        seconds = min(LEAST_LP_S, max(0.0, self.work.for_steps_s()) / PATIENCE)
        answers: dict[int, ProgramSolution] = {}
        waiting = iter(list(enumerate(programs)))

        def answer() -> None:
            for at, program in waiting:
                with suppress(FabrictoolError):  # nothing within the limits, or no numbers that can be trusted
                    result = program.minimise(name, seconds=seconds, seed=self.seed, gap=gap, nodes=nodes)
                    if result is not None:
                        answers[at] = result

        # Not a pool, whose end would wait for its threads: Ctrl-C is heard while one of these is waited for.
        threads = [threading.Thread(target=answer, daemon=True) for _ in programs[1 : os.cpu_count() or 1]]
        for thread in threads:
            thread.start()
        answer()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
        if self.work.for_steps_s() <= 0.0 or not all(its.in_time for its in answers.values()):
            self.work.cut()
            return None
        self.work.done(sum(program.program.columns for program in programs) // COLUMNS_PER_UNIT)
        return [answers.get(at) for at in range(len(programs))]


def nudge(program: Formulation, name: str) -> Sequence[tuple[int, float]]:
    """Of what serves as much, what moves least: all moves together weigh no more than dust."""
    problem = program.problem
    if name not in LOADS or not problem.current:
        return ()
    a_move = residual(problem, name, 0.0) / sum(problem.running.values())
    return [(column, weight * a_move) for column, weight in program.terms("moves")]
