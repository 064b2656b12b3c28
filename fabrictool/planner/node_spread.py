"""Models that are spread over nodes: as many nodes as `replicas.min` says hold a replica, or more.

So the loss of a node takes one of these replicas at most. Replicas beyond them may be anywhere. What counts is what
counts towards the minimum: replicas that serve, on owned capacity. Where nobody chooses the nodes of replicas by what
else is there, those that have room on one are thought to be on one, as they are for a loss (`planner.survival`).

For each option a column says how many of its replicas are on nodes of their own. The rows over these are nearly exact:
beside blocks of some size, a smaller one that is on a node of its own takes the room of a whole one. What they miss, of
several small models in full nodes, is seen when the blocks are put into nodes (`crowded`). In such pools some devices
are left free when it is searched again (`planner.apart_search`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from fabrictool.planner.packing import Block, as_far_apart, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, PoolKey
    from fabrictool.planner.program import Program, Terms
    from fabrictool.planner.survival_rows import NewColumn

Held = tuple[int, int, int]
"""(option, size of its blocks in a pool, how many of them a replica takes there)."""


def is_spread(need: ModelNeed) -> bool:
    """Whether it asks for anything: one replica is on a node of its own wherever it is."""
    return need.spread_nodes and need.minimum > 1


def counts_for_it(option: Option) -> bool:
    """Whether its replicas count towards the minimum."""
    return option.stable and option.serves


def is_alone(pool: Pool, size: int) -> bool:
    """Whether no two such blocks have room on one node of it."""
    return 2 * size > pool.devices_per_node and not pool.shares_nodes


class SpreadRows:
    """Makes the rows of one program; none where no model is spread over nodes."""

    def __init__(
        self, program: Program, problem: PlacementProblem, column: NewColumn, count: Callable[[int], Terms]
    ) -> None:
        self._program, self._problem, self._column, self._count = program, problem, column, count

    def add(self, by_model: Mapping[str, Sequence[int]], here: Mapping[PoolKey, Sequence[Held]]) -> None:
        """`by_model`: options that take part; `here`: their blocks by pool."""
        needs = [need for need in self._problem.needs if is_spread(need)]
        if not needs and not self._problem.apart:
            return
        apart: dict[int, int] = {}
        """Option → the column of its replicas on nodes of their own."""
        for need in needs:
            mine = [i for i in by_model.get(need.model, ()) if counts_for_it(self._problem.options[i])]
            for i in mine:
                apart[i] = self._column(need.model, 0, need.maximum, whole=True)
                self._program.row(0, math.inf, [*self._count(i), (apart[i], -1.0)])
            if mine:
                self._program.row(need.minimum, math.inf, [(apart[i], 1.0) for i in mine])
        for pool in self._problem.pools:
            self._nodes(pool, here.get(pool.key, ()), apart)
            self._room(pool, here.get(pool.key, ()), apart)
            self._free(pool, here.get(pool.key, ()))

    def _nodes(self, pool: Pool, here: Sequence[Held], apart: Mapping[int, int]) -> None:
        """No more of a model than there are nodes."""
        by_model: dict[str, Terms] = defaultdict(list)
        for i, size, number in here:
            if i in apart:
                # Nobody knows that what may be together is on more than one node, and not on that of another one.
                known = pool.keeps_apart or is_alone(pool, size)
                by_model[self._problem.options[i].model].append((apart[i], number if known else pool.nodes))
        for terms in by_model.values():
            self._program.row(-math.inf, pool.nodes, terms)

    def _room(self, pool: Pool, here: Sequence[Held], apart: Mapping[int, int]) -> None:
        """For each size of blocks: smaller ones that are on nodes of their own take the room of one from these."""
        problem, options, key = self._problem, self._problem.options, pool.key
        if not pool.keeps_apart:
            return
        taken = {size for place, size in (*problem.taken, *problem.apart) if place == key}
        for size in sorted({size for _, size, _ in here} | taken):
            room = pool.nodes * (pool.devices_per_node // size) - problem.taken.get((key, size), 0)
            large: Terms = [
                (column, pool.parts_lost(its, size) * number * weight)
                for i, its, number in here
                if its >= size
                for column, weight in self._count(i)
            ]
            by_model: dict[str, Terms] = defaultdict(list)
            for i, its, number in here:
                if its < size and i in apart:
                    by_model[options[i].model].append((apart[i], number))
            outside = problem.apart.get((key, size), 0)
            for terms in by_model.values():
                self._program.row(-math.inf, room, [*large, *terms])
            if outside and large:
                self._program.row(-math.inf, room - outside, large)

    def _free(self, pool: Pool, here: Sequence[Held]) -> None:
        """Devices that stay free where blocks had no room."""
        free = self._problem.crowded.get(pool.key, 0)
        if free and here:
            room = pool.nodes * pool.devices_per_node - self._problem.taken.get((pool.key, 1), 0) - free
            taken = [(at, size * number * weight) for i, size, number in here for at, weight in self._count(i)]
            self._program.row(-math.inf, room, taken)


def nodes_used(problem: PlacementProblem, placed: Iterable[tuple[Option, int]]) -> dict[PoolKey, int]:
    """Nodes by pool on which so many replicas of each option of one model can be, beside nobody else."""
    pools = {pool.key: pool for pool in problem.pools}
    apart: dict[PoolKey, int] = defaultdict(int)
    together: set[PoolKey] = set()
    for option, count in placed:
        if count and counts_for_it(option):
            pools |= {pool.key: pools.get(pool.key, pool) for pool in option.pools}
            for (key, size), number in option.blocks.items():
                if pools[key].keeps_apart or is_alone(pools[key], size):
                    apart[key] += number * count
                else:
                    together.add(key)
    return {key: max(1, min(pools[key].nodes, apart[key])) for key in (*apart, *(together - apart.keys()))}


def lacking_nodes(problem: PlacementProblem, need: ModelNeed, placed: Iterable[tuple[Option, int]]) -> int:
    """Nodes that so many replicas of each of a model's options are short of."""
    return max(0, need.minimum - sum(nodes_used(problem, placed).values())) if is_spread(need) else 0


def apart_of_others(
    problem: PlacementProblem, counts: Mapping[int, int], members: AbstractSet[str]
) -> dict[tuple[PoolKey, int], int]:
    """For a part of a problem, the models `members`: blocks of each size that replicas of the others on nodes of their
    own take away, beside what they are. As few as there can be: of a model those that cannot be elsewhere.
    """
    taken: dict[tuple[PoolKey, int], int] = {}
    pools = {pool.key: pool for pool in problem.pools}
    for need in problem.needs:
        if not is_spread(need) or need.model in members:
            continue
        used = nodes_used(problem, _placed(problem, need, counts))
        largest: dict[PoolKey, int] = defaultdict(int)
        for i in problem.of(need.model):
            for key, size in problem.options[i].blocks if counts.get(i) else ():
                largest[key] = max(largest[key], size)
        for key, nodes in used.items() if pools.keys() >= used.keys() else ():
            least = need.minimum - (sum(used.values()) - nodes)
            for size in range(largest[key] + 1, pools[key].devices_per_node + 1) if least > 0 else ():
                taken[key, size] = max(taken.get((key, size), 0), least)
    return taken


def crowded(problem: PlacementProblem, counts: Mapping[int, int]) -> frozenset[PoolKey]:
    """Pools in whose nodes these replicas, by option, have no room so that all models are spread as they are to be; or
    none that was seen.
    """
    needs = [need for need in problem.needs if is_spread(need)]
    if not needs:
        return frozenset()
    used = {need.model: nodes_used(problem, _placed(problem, need, counts)) for need in needs}
    spare = {need.model: sum(used[need.model].values()) - need.minimum for need in needs}
    full: set[PoolKey] = set()
    for pool in problem.pools:
        if not pool.keeps_apart:
            continue
        wanted = {model: its.get(pool.key, 0) for model, its in used.items() if its.get(pool.key)}
        if as_far_apart(wanted, spare, partial(_fits, problem, pool, counts)) is None:
            full.add(pool.key)
    return frozenset(full)


def _placed(problem: PlacementProblem, need: ModelNeed, counts: Mapping[int, int]) -> list[tuple[Option, int]]:
    return [(problem.options[i], counts.get(i, 0)) for i in counts if problem.options[i].model == need.model]


def _fits(problem: PlacementProblem, pool: Pool, counts: Mapping[int, int], wanted: Mapping[str, int]) -> bool:
    return packed(_blocks(problem, pool, counts, wanted), pool.nodes, pool.devices_per_node) is not None


def _blocks(problem: PlacementProblem, pool: Pool, counts: Mapping[int, int], wanted: Mapping[str, int]) -> list[Block]:
    """What is in a pool; so many of a model on nodes of their own, the largest, which have least to choose from."""
    blocks: list[Block] = []
    left = dict(wanted)
    here = [
        (size, number * counts[i], problem.options[i])
        for i in sorted(counts)
        for (key, size), number in problem.options[i].blocks.items()
        if key == pool.key
    ]
    for size, number, option in sorted(here, key=lambda its: (-its[0], its[2].key)):
        apart = min(number, left.get(option.model, 0)) if counts_for_it(option) else 0
        left[option.model] = left.get(option.model, 0) - apart
        blocks += [Block(option.model, size, apart=True)] * apart + [Block(option.model, size)] * (number - apart)
    return blocks
