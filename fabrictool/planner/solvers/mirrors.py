"""Areas of pools that differ in nothing that a program looks at: what holds for devices of some holds for as many of
the others.

Pools that hand requests to each other cannot be merged, as single ones are (`symmetry`). But each swap of two areas
that are alike leads from one split of the devices to another that is worth as much.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations, islice
from typing import TYPE_CHECKING

from fabrictool.planner.solvers.symmetry import key_in, shape

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem, PoolKey
    from fabrictool.planner.solvers.load_grid import Devices
    from fabrictool.planner.solvers.model_tables import Area

MOST_MIRRORS = 24
"""Of many areas that are alike not all pairs are swapped: each one would do."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Two areas that are alike, swapped."""

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
    """Of each pair of areas that are alike; none where something runs, or has its place by name."""
    placed = problem.current or problem.fixed or problem.taken or problem.crowded or problem.apart
    if placed or any(need.pins or need.survive is not None or need.spread_nodes for need in problem.needs):
        return []
    here: dict[PoolKey, list[int]] = defaultdict(list)
    for i, option in enumerate(problem.options):
        here[option.pool.key].append(i)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for at, area in enumerate(areas):
        groups[_kind(problem, area, here)].append(at)
    pairs = (pair for alike in groups.values() for pair in combinations(alike, 2))
    return [_mirror(problem, areas, *pair) for pair in islice(pairs, MOST_MIRRORS)]


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


def _mirror(problem: PlacementProblem, areas: Sequence[Area], first: int, second: int) -> Mirror:
    flat = [key for area in areas for key in area.pools]
    there = {key: key for key in flat}
    for key, other in zip(areas[first].pools, areas[second].pools, strict=True):
        there[key], there[other] = other, key
    at = {option.key: i for i, option in enumerate(problem.options)}
    options = {i: at[key_in(option, there[option.pool.key])] for i, option in enumerate(problem.options)}
    return Mirror(tuple(flat.index(there[key]) for key in flat), options)
