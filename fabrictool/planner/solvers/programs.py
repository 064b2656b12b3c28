"""The programs over all models that a search asks; on large fabrics it takes long to make one, so none is made before
it is wanted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import BY_CAPACITY, Formulation
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers.capacity_cuts import add_rows
from fabrictool.planner.tangents import BY_LOAD, NOTHING, slo_prices
from fabrictool.planner.told import ToldFormulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.solvers.core import Core
    from fabrictool.planner.solvers.shares import KeptStage
    from fabrictool.planner.tangents import LoadPrices

TINY = 40
"""Options up to which SCIP solves a stage to its proof in no time."""
FEW = 450
"""Options up to which all of them take part in the integer program."""


def is_tiny(problem: PlacementProblem) -> bool:
    return len(problem.options) <= TINY


def has_few(problem: PlacementProblem) -> bool:
    return len(problem.options) <= FEW


class SearchPrograms:
    """The relaxation, and two programs in whole numbers: with the loads of replicas, or by their capacity alone."""

    def __init__(self, problem: PlacementProblem, core: Core) -> None:
        self._problem, self.relaxed, self._rows = problem, core.relaxed, core.rows
        every = range(len(problem.options))
        self.tiny, self.all = is_tiny(problem), has_few(problem)
        # Of a fabric that runs little changes: fewer options are enough, and time is short.
        wide = core.options if problem.runs else core.wide
        self._among: dict[bool, Sequence[int]] = {
            False: every if self.all else core.options,
            True: every if self.all else wide,
        }
        """By capacity or not: the options that take part."""
        flows = any(need.parts for need in problem.needs) or any(o.phase != "unified" for o in problem.options)
        self.by_tangents = not self.tiny and not flows
        """Whether the loads of models are each one's own matter: then no program has columns for them."""
        self._prices = list(slo_prices(problem)) if self.by_tangents and "slo" in problem.objective else []
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
            program = self._made[by_capacity] = self._new(options, by_capacity=by_capacity)
            for limit in self._limits.values():
                if limit.name in BY_CAPACITY or not by_capacity:
                    limit.keep(program)
            if isinstance(program, ToldFormulation):
                for prices in self._prices:
                    program.tell(prices)
        return self._made[by_capacity]

    def _new(self, options: Sequence[int], *, by_capacity: bool) -> Formulation:
        program: Formulation
        if self.by_tangents and not by_capacity:
            program = ToldFormulation(self._problem, options)
        else:
            program = Formulation(self._problem, options, whole=True, by_capacity=by_capacity)
            if not self.tiny and not by_capacity:
                program.tighten()
        add_rows(program, self._rows)
        return program

    def keep(self, limit: KeptStage) -> None:
        """From now on, in all of them that know the stage."""
        self._limits[limit.name] = limit
        if self.by_tangents and limit.most <= NOTHING:
            self._made.pop(False, None)  # it says the more
        for program in self._with(limit.name):
            limit.keep(program)

    def learn(self, prices: LoadPrices) -> bool:
        """What loads cost at least, for programs without them; whether there is one to which that is news."""
        if not self.by_tangents:
            return False
        if prices not in self._prices:
            self._prices.append(prices)
        program = self._made.get(False)
        return isinstance(program, ToldFormulation) and program.tell(prices)

    def learn_why_not(self, counts: Mapping[int, int], seed: int) -> bool:
        """Of counts with which what is kept cannot be: what loads cost there."""
        loads = Formulation.of_counts(self._problem, counts, self.options(counts, by_capacity=False))
        news = False
        for limit in self._limits.values():
            answer = loads.minimise(limit.name, seconds=LEAST_LP_S, seed=seed) if limit.name in BY_LOAD else None
            news |= answer is not None and self.learn(loads.prices(limit.name, answer))
            limit.keep(loads)
        return news

    def begin_again(self) -> None:
        """With nothing kept, and by capacity with all options."""
        for name in self._limits:
            for program in self._with(name):
                program.keep(name, math.inf)
        self._limits = {}
        if self.by_tangents:
            self._made.pop(False, None)  # what it was told took these limits for granted
        every = range(len(self._problem.options))
        if len(self._among[True]) < len(every):
            self._among[True] = every
            self._made.pop(True, None)

    def _with(self, stage: str) -> Iterator[Formulation]:
        """Those that know a stage."""
        yield self.relaxed
        yield from (program for by, program in self._made.items() if stage in BY_CAPACITY or not by)
