"""The rows that say what each loss leaves unserved of a model (`planner.survival`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from fabrictool.planner.survival import losses, lost_with_a_node, reserves, stands_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.planner.problem import ModelNeed, PlacementProblem, Pool
    from fabrictool.planner.program import Program, Terms
    from fabrictool.planner.survival import Reserve


class NewColumn(Protocol):
    """Makes a column that is of a model."""

    def __call__(self, model: str, low: float, high: float, *, whole: bool = False) -> int: ...


@dataclass(frozen=True, slots=True)
class SurvivalRows:
    """Makes them, in one program."""

    program: Program
    problem: PlacementProblem
    column: NewColumn
    count: Callable[[int], Terms]
    """Columns of an option's replicas."""
    given: Mapping[int, float] | None
    """Counts by option, where these are known; of a mean over time not whole ones."""

    def of(self, need: ModelNeed, mine: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Adds a column for what each loss leaves unserved of each thing that has to be left; yields it and its weight.

        `mine`: the options of the model that take part.
        """
        if need.survive is None:
            return
        problem = self.problem
        # Also those that are not chosen: what cannot survive does not hang on what a search looks at.
        options = {i: problem.options[i] for i in problem.of(need.model)}
        pools = {pool.key: pool for pool in problem.pools}
        pools |= {pool.key: pool for option in options.values() for pool in option.pools}
        chosen = set(mine)
        for reserve in reserves(need, options):
            every = {i: self._weighed(i, weight) for i, weight in reserve.weights.items() if i in chosen}
            for loss in losses(need.survive, pools.values()):
                if not reserve.can_survive(options, loss):
                    continue
                column = self.column(need.model, 0, math.inf)
                yield column, need.priority
                lacking = [(column, 1.0 / reserve.unit)]
                if loss.node:
                    (key,) = loss.pools
                    rows = self._of_node if self.given is None else self._of_node_with_counts
                    rows(need, reserve, pools[key], every, lacking)
                else:
                    left = [term for i, terms in every.items() if not stands_in(options[i], loss) for term in terms]
                    self.program.row(reserve.target, math.inf, [*left, *lacking])

    def _of_node_with_counts(
        self, _need: ModelNeed, reserve: Reserve, pool: Pool, every: Mapping[int, Terms], lacking: Terms
    ) -> None:
        """Then it is known whether less is lost with what the node can hold or with all that its pool has."""
        options, target, given = self.problem.options, reserve.target, self.given or {}
        here = self._sizes(every, pool)
        placed = {i: options[i] for i in every if given.get(i)}
        held = math.fsum(reserve.weights[i] * given.get(i, 0) for i in here)
        most = lost_with_a_node(replace(reserve, weights={i: reserve.weights[i] for i in placed}), placed, pool)
        if held >= most:
            whole = [term for terms in every.values() for term in terms]
            self.program.row(target + most, math.inf, [*whole, *lacking])
        else:
            left = [term for i, terms in every.items() if i not in here for term in terms]
            self.program.row(target, math.inf, [*left, *lacking])

    def _of_node(
        self, need: ModelNeed, reserve: Reserve, pool: Pool, every: Mapping[int, Terms], lacking: Terms
    ) -> None:
        """All but what a node can hold is left, or what is elsewhere, whichever is more.

        What a node can hold is bounded by the densest option that has a replica there.
        """
        program, target = self.program, reserve.target
        here = self._sizes(every, pool)
        whole = [term for terms in every.values() for term in terms]
        left = [term for i, terms in every.items() if i not in here for term in terms]
        dense = {i: reserve.weights[i] * pool.devices_per_node / size for i, size in here.items()}
        most = max(dense.values(), default=0.0)
        side = self.column(need.model, 0, 1, whole=True)
        gone = self.column(need.model, 0, most)
        for i, held in dense.items():
            there = self.column(need.model, 0, 1, whole=True)
            program.row(0, math.inf, [(there, float(need.maximum)), *[(c, -w) for c, w in self.count(i)]])
            program.row(0, math.inf, [(gone, 1.0), (there, -held)])
        program.row(target, math.inf, [*left, *lacking, (side, target)])
        program.row(-most, math.inf, [*whole, *lacking, (gone, -1.0), (side, -(target + most))])

    def _sizes(self, every: Mapping[int, Terms], pool: Pool) -> dict[int, int]:
        """Devices of a block, of the options that have one in the pool."""
        options = self.problem.options
        return {i: size for i in every for (key, size), _ in options[i].blocks.items() if key == pool.key}

    def _weighed(self, i: int, weight: float) -> Terms:
        return [(column, weight * its) for column, its in self.count(i)]
