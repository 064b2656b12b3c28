"""Areas of pools that differ in nothing that a program looks at: what holds for devices of some holds for as many of
the others.

Pools that hand requests to each other cannot be merged, as single ones are (`symmetry`). But each swap of two areas
that are alike leads from one split of the devices to another that is worth as much.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import TYPE_CHECKING

from fabrictool.planner.solvers.symmetry import key_in, shape

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem, PoolKey
    from fabrictool.planner.solvers.load_grid import Devices
    from fabrictool.planner.solvers.model_tables import Area

MOST_MIRRORS = 24
"""Of many areas that are alike not all orders are looked at: each one would do."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """One order of areas, in which every area stands where one like it stood."""

    pools: tuple[int, ...]
    """By pool: the one that it stands for."""
    options: Mapping[int, int]
    """By option: the same one in that pool."""

    def devices(self, of: Devices) -> Devices:
        """The same numbers of devices, of the pools that stand for these."""
        there = list(of)
        for at, place in enumerate(self.pools):
            there[place] = of[at]
        return tuple(there)

    def counts(self, of: Mapping[int, int]) -> dict[int, int]:
        """The same counts, of the options that stand for these."""
        return {self.options[i]: count for i, count in of.items()}


def mirrors(problem: PlacementProblem, areas: Sequence[Area]) -> list[Mirror]:
    """All but the order that is there; none where something runs, or has its place by name."""
    placed = problem.current or problem.fixed or problem.taken or problem.crowded or problem.apart
    if placed or any(need.pins or need.survive is not None or need.spread_nodes for need in problem.needs):
        return []
    here: dict[PoolKey, list[int]] = defaultdict(list)
    for i, option in enumerate(problem.options):
        here[option.pool.key].append(i)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for at, area in enumerate(areas):
        groups[_kind(problem, area, here)].append(at)
    orders = islice(product(*(permutations(alike) for alike in groups.values())), 1, MOST_MIRRORS)
    before = [at for alike in groups.values() for at in alike]
    return [_mirror(problem, areas, dict(zip(before, (at for part in order for at in part), strict=True)))
            for order in orders]  # fmt: skip


def _kind(problem: PlacementProblem, area: Area, here: Mapping[PoolKey, Sequence[int]]) -> Hashable:
    """All of an area that a program looks at."""
    pools = {pool.key: pool for pool in problem.pools}
    place = {key: at for at, key in enumerate(area.pools)}
    ways = (
        (model, place[sender], place[receiver], way)
        for (model, sender, receiver), way in problem.transfers.items()
        if sender in place
    )
    return (
        tuple((pools[key].nodes, shape(problem, pools[key], here.get(key, ()))) for key in area.pools),
        frozenset(ways),
    )


def _mirror(problem: PlacementProblem, areas: Sequence[Area], stands_for: Mapping[int, int]) -> Mirror:
    flat = {key: at for at, key in enumerate(_pools(areas))}
    there = {
        key: other
        for at, area in enumerate(areas)
        for key, other in zip(area.pools, areas[stands_for[at]].pools, strict=True)
    }
    at = {option.key: i for i, option in enumerate(problem.options)}
    options = {i: at[key_in(option, there[option.pool.key])] for i, option in enumerate(problem.options)}
    return Mirror(tuple(flat[there[key]] for key in flat), options)


def _pools(areas: Sequence[Area]) -> Iterator[PoolKey]:
    for area in areas:
        yield from area.pools
