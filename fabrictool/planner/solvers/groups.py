"""Groups of devices and the best way to run a replica on each: the lower level of ThunderServe's search.

A group is a set of blocks, each of so many devices of one node. Tensor parallelism stays inside a block; blocks follow
each other in a pipeline whose path avoids slow links; layers are dealt out by memory and speed (paper 002, section 3.3
and algorithm 2). Prefill wants the shortest prompt, everything else the most requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.solvers.rounding import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.domain.specs import Phase
    from fabrictool.planner.problem import Option, PlacementProblem, Pool

MOST_BLOCKS = 3
"""In one group; ThunderServe's own plans join two. More would pay where a node has one GPU (`examples/helix`)."""
MOST_STAGES = 8

Blocks = tuple[tuple[int, int], ...]
"""(pool's index, devices of one node), sorted."""


@dataclass(frozen=True, slots=True, order=True)
class DeviceGroup:
    """Devices for one replica."""

    model: str
    blocks: Blocks
    phase: Phase

    @property
    def devices(self) -> int:
        return sum(size for _, size in self.blocks)


class Deduction:
    """Remembers each group's best column; new ones are numbered after the problem's own."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem, self._pools = problem, problem.pools
        self._at = {pool.key: number for number, pool in enumerate(problem.pools)}
        self._known: dict[DeviceGroup, int | None] = {}
        self._index = {option.key: i for i, option in enumerate(problem.options)}
        self.options: list[Option] = list(problem.options)

    @property
    def added(self) -> tuple[Option, ...]:
        return tuple(self.options[len(self._problem.options) :])

    def column(self, group: DeviceGroup) -> int | None:
        """The index of the best column; None where no cut of the model fits the group."""
        if group not in self._known:
            self._known[group] = self._deduce(group)
        return self._known[group]

    def group_of(self, i: int) -> DeviceGroup | None:
        """The group behind a column; None for one that stands on what is no pool now."""
        option = self.options[i]
        if any(pool.key not in self._at for pool in option.pools):
            return None
        blocks = tuple(sorted((self._at[pool.key], tp * option.dp) for pool, tp in option.stages))
        group = DeviceGroup(option.model, blocks, option.phase)
        self._known.setdefault(group, i)
        return group

    def _deduce(self, group: DeviceGroup) -> int | None:
        best: tuple[tuple[float, ...], Option] | None = None
        for option in self._ways(group):
            rank = _rank(option)
            if best is None or rank > best[0]:
                best = (rank, option)
        if best is None:
            return None
        option = best[1]
        if option.key not in self._index:
            self._index[option.key] = len(self.options)
            self.options.append(option)
        return self._index[option.key]

    def _ways(self, group: DeviceGroup) -> Iterator[Option]:
        yield from (option for option in self._problem.options if self._merges(option, group))
        columns = self._problem.columns.get(group.model)
        path = self._path(group.blocks)
        if path is None:
            return
        smallest = min(size for _, size in path)
        cuts = {tuple(min(size, limit) for _, size in path) for limit in SIZES if limit <= smallest}
        cuts.add(tuple(size for _, size in path))
        for cut in sorted(cuts):
            stages = [
                (self._pools[pool], tp) for (pool, size), tp in zip(path, cut, strict=True) for _ in range(size // tp)
            ]
            if len(stages) > MOST_STAGES:
                continue
            option = columns.mixed(stages, group.phase) if columns is not None else self._own(group, stages)
            if option is not None:
                yield option

    def _merges(self, option: Option, group: DeviceGroup) -> bool:
        """Whether it is one of base engines that merge on just these devices; the search makes no new ones."""
        if option.dp == 1 or (option.model, option.phase) != (group.model, group.phase):
            return False
        return group.blocks == ((self._at.get(option.pool.key, -1), option.stage_devices),)

    def _own(self, group: DeviceGroup, stages: Sequence[tuple[Pool, int]]) -> Option | None:
        """The problem's own column with these stages, where it makes no new ones."""
        for option in self._problem.options:
            alike = option.model == group.model and option.phase == group.phase and option.dp == 1
            if alike and list(option.stages) == list(stages):
                return option
        return None

    def _path(self, blocks: Blocks) -> Blocks | None:
        """The order of blocks whose slowest link is the fastest; None where no link joins some of them.

        Dynamic programming over subsets: (blocks passed, last one) → the fastest slowest link, and the order so far.
        """
        count = len(blocks)
        best: dict[tuple[int, int], tuple[float, Blocks]] = {
            (1 << i, i): (math.inf, (blocks[i],)) for i in range(count)
        }
        for passed in range(1, 1 << count):
            for last in range(count):
                so_far = best.get((passed, last))
                if so_far is None:
                    continue
                for following in range(count):
                    if passed >> following & 1:
                        continue
                    slowest = min(so_far[0], self._bandwidth(blocks[last][0], blocks[following][0]))
                    key, longer = (passed | 1 << following, following), (slowest, (*so_far[1], blocks[following]))
                    if slowest > 0 and longer > best.get(key, (0.0, ())):
                        best[key] = longer
        ends = [end for (passed, _), end in best.items() if passed == (1 << count) - 1]
        return max(ends)[1] if ends else None

    def _bandwidth(self, sender: int, receiver: int) -> float:
        """Octets/s between two pools; 0 without a link."""
        return self._problem.ways.get((self._pools[sender].key, self._pools[receiver].key), (0.0, 0.0))[1]


def _rank(option: Option) -> tuple[float, ...]:
    """Of two cuts of a group the one with the higher rank is chosen: within the SLO, then by what the phase wants."""
    within = any(level.attains for level in option.levels)
    if option.phase == "prefill":
        return (within, -option.figures.prefill_s, option.capacity)
    return (within, max((level.rate for level in option.levels if level.attains), default=0.0), option.capacity)
