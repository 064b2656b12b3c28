"""Whole replicas near a relaxation's fractions: a first placement in no time, to start the integer solver from."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fabrictool.planner.limits import DUST, open_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, PoolKey, ResourceLimit

CLOSE = 1e-6
SIZES = (1, 2, 4, 8, 16)
"""Of the blocks of devices inside a node that replicas take."""


def rounded(problem: PlacementProblem, usage: Mapping[int, float], distance: Mapping[int, float]) -> dict[int, int]:
    """Counts by option: fractions rounded down, then what the demand and the minima lack, nearest options first.

    `distance` is what a request/s on an option costs more than the relaxation's optimum. Devices are never exceeded;
    pins and spreading are not looked at: the caller finds out whether they hold.
    """
    state = _State(problem, usage)
    fraction = {i: usage[i] - math.floor(usage[i] + CLOSE) for i in usage}
    for i in usage:
        if problem.options[i].key not in problem.fixed:
            for _ in range(math.floor(usage[i] + CLOSE)):
                state.add(i)
    for need in sorted(problem.needs, key=lambda need: (-need.priority, need.model)):
        mine = [i for i in state.by_model[need.model] if problem.options[i].key not in problem.fixed]
        mine.sort(key=lambda i: (fraction[i] <= CLOSE, distance[i], i))
        for make_room in (False, True):
            for i in mine:
                while state.lacks(need, i) and (state.add(i) or (make_room and state.displace(i))):
                    pass
    return state.counts


class _State:
    """Counts, and what is left."""

    def __init__(self, problem: PlacementProblem, usage: Mapping[int, float]) -> None:
        self._problem = problem
        self._need = {need.model: need for need in problem.needs}
        self._room = FreeDevices(problem.pools, problem.options, open_limits(problem))
        self.counts = dict.fromkeys(usage, 0)
        self.by_model: dict[str, list[int]] = defaultdict(list)
        self._by_pool: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._is_stable = {i: problem.options[i].stable for i in usage}
        self._total: Counter[str] = Counter()
        self._stable: Counter[str] = Counter()
        self._surplus = {need.model: -need.rate for need in problem.needs}
        for i in usage:
            self.by_model[problem.options[i].model].append(i)
            for pool in problem.options[i].pools:
                self._by_pool[pool.key].append(i)
            self._count(i, problem.fixed.get(problem.options[i].key, 0) if problem.fixed else 0)

    def lacks(self, need: ModelNeed, i: int) -> bool:
        """Whether one more replica of option i would help its model."""
        if self._total[need.model] >= need.maximum:
            return False
        lacks = self._surplus[need.model] < -CLOSE
        return lacks or (self._is_stable[i] and self._stable[need.model] < need.minimum)

    def add(self, i: int) -> bool:
        """One replica more, if there are devices for it."""
        if not self._room.take(self._problem.options[i]):
            return False
        self._count(i, 1)
        return True

    def displace(self, i: int) -> bool:
        """One replica more, in the place of one that its own model can do without."""
        option = self._problem.options[i]
        for j in self._by_pool[option.pool.key]:
            if not self.counts[j]:
                continue
            other = self._problem.options[j]
            need = self._need[other.model]
            rate = other.levels[-1].rate
            spare = self._surplus[other.model] >= rate and self._stable[other.model] > need.minimum
            if spare and other.model != option.model and other.stage_devices >= option.stage_devices:
                self._count(j, -1)
                self._room.give(other)
                if self.add(i):
                    return True
                self.add(j)
        return False

    def _count(self, i: int, more: int) -> None:
        option = self._problem.options[i]
        self.counts[i] += more
        self._total[option.model] += more
        self._stable[option.model] += more if self._is_stable[i] else 0
        self._surplus[option.model] += more * option.levels[-1].rate


class FreeDevices:
    """What is left of each pool: devices, and for each size whole blocks of nodes (the rows of `formulation`); and of
    the limits.
    """

    def __init__(self, pools: Iterable[Pool], options: Iterable[Option], limits: Sequence[ResourceLimit] = ()) -> None:
        """Blocks of sizes that none of these `options` has count as somewhat larger ones."""
        self._limits, self._spare = limits, [limit.most * (1 + DUST) for limit in limits]
        self._sizes = sorted({*SIZES, *(size for option in options for _, size in option.blocks)})
        self._pools = {pool.key: pool for pool in pools}
        self._left = {
            key: {size: pool.nodes * (pool.devices_per_node // size) for size in self._sizes}
            for key, pool in self._pools.items()
        }

    def copy(self) -> FreeDevices:
        other = FreeDevices((), ())
        other._sizes, other._pools = self._sizes, self._pools
        other._limits, other._spare = self._limits, list(self._spare)
        other._left = {key: dict(left) for key, left in self._left.items()}
        return other

    def take(self, option: Option) -> bool:
        """The devices of one replica; False when they are not there."""
        need = self._need(option)
        if any(self._left.get(key, {}).get(size, 0) < blocks for (key, size), blocks in need.items()):
            return False
        uses = [limit.used_by(option) for limit in self._limits]
        if any(use > spare for use, spare in zip(uses, self._spare, strict=True)):
            return False
        self._spare = [spare - use for spare, use in zip(self._spare, uses, strict=True)]
        self._move(need, -1)
        return True

    def give(self, option: Option) -> None:
        self._spare = [spare + limit.used_by(option) for spare, limit in zip(self._spare, self._limits, strict=True)]
        self._move(self._need(option), 1)

    def _need(self, option: Option) -> Counter[tuple[PoolKey, int]]:
        blocks: Counter[tuple[PoolKey, int]] = Counter()
        for (key, held), number in option.blocks.items():
            pool = self._pools.get(key)
            blocks[key, 1] += number * held
            if pool is None:
                continue
            counted = min(next((size for size in self._sizes if size >= held), held), pool.devices_per_node)
            for size in self._sizes[1:]:
                if size <= counted:
                    blocks[key, size] += number * pool.parts_lost(counted, size)
        return blocks

    def _move(self, need: Counter[tuple[PoolKey, int]], sign: int) -> None:
        for (key, size), blocks in need.items():
            self._left[key][size] += sign * blocks
