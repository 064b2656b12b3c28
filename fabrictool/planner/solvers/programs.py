"""The programs over all models that a search asks; on large fabrics it takes long to make one, so none is made before
it is wanted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import BY_CAPACITY, Formulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.solvers.core import Core
    from fabrictool.planner.solvers.shares import KeptStage

TINY = 40
"""Options up to which SCIP solves a stage to its proof in no time."""
FEW = 450
"""Options up to which all of them take part in the integer program."""


class SearchPrograms:
    """The relaxation, and two programs in whole numbers: with the loads of replicas, or by their capacity alone."""

    def __init__(self, problem: PlacementProblem, core: Core) -> None:
        self._problem, self.relaxed = problem, core.relaxed
        every = range(len(problem.options))
        self.tiny, self.all = len(every) <= TINY, len(every) <= FEW
        # Of a fabric that runs little changes: fewer options are enough, and time is short.
        wide = core.options if problem.runs else core.wide
        self._among: dict[bool, Sequence[int]] = {
            False: every if self.all else core.options,
            True: every if self.all else wide,
        }
        """By capacity or not: the options that take part."""
        self._made: dict[bool, Formulation] = {}
        self._limits: dict[str, KeptStage] = {}

    def options(self, counts: Mapping[int, int], *, by_capacity: bool) -> Sequence[int]:
        """Those that take part; what has replicas always does."""
        if not counts.keys() <= set(self._among[by_capacity]):
            self._among[by_capacity] = sorted({*self._among[by_capacity], *counts})
            self._made.pop(by_capacity, None)
        return self._among[by_capacity]

    def program(self, counts: Mapping[int, int], *, by_capacity: bool) -> Formulation:
        """In whole numbers, over the options that take part, with what is kept."""
        options = self.options(counts, by_capacity=by_capacity)
        if by_capacity not in self._made:
            program = self._made[by_capacity] = Formulation(self._problem, options, whole=True, by_capacity=by_capacity)
            if not self.tiny and not by_capacity:
                program.tighten()
            for limit in self._limits.values():
                if limit.name in BY_CAPACITY or not by_capacity:
                    limit.keep(program)
        return self._made[by_capacity]

    def keep(self, limit: KeptStage) -> None:
        """From now on, in all of them that know the stage."""
        self._limits[limit.name] = limit
        for program in self._with(limit.name):
            limit.keep(program)

    def begin_again(self) -> None:
        """With nothing kept, and by capacity with all options."""
        for name in self._limits:
            for program in self._with(name):
                program.keep(name, math.inf)
        self._limits = {}
        every = range(len(self._problem.options))
        if len(self._among[True]) < len(every):
            self._among[True] = every
            self._made.pop(True, None)

    def _with(self, stage: str) -> Iterator[Formulation]:
        """Those that know a stage."""
        yield self.relaxed
        yield from (program for by, program in self._made.items() if stage in BY_CAPACITY or not by)
