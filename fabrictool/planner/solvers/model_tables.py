"""What any number of devices does for one model of a small fabric: the most that they serve, and a bound on latency."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.planner.solvers.load_grid import (
    SAME,
    Ladder,
    beyond,
    either_way,
    replicas,
    shared,
    side_by_side,
    under,
    up_to,
    wider,
)
from fabrictool.planner.tangents import of_levels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.domain.specs import Phase
    from fabrictool.planner.problem import ModelNeed, PlacementProblem, PoolKey
    from fabrictool.planner.solvers.load_grid import Devices, Floats
    from fabrictool.planner.tangents import LoadPrices

    Ladders = dict[tuple[int, Phase], list[Ladder]]
    """By place of the pool in its area."""

FINER = 2
"""So many times as fine are the cells where there are few devices."""


@dataclass(frozen=True, slots=True)
class Area:
    """Pools that hand requests to each other."""

    pools: tuple[PoolKey, ...]
    devices: Devices
    """How many each pool has."""

    @property
    def pairs(self) -> int:
        """Ways to give two takers some of the devices each."""
        return math.prod((n + 1) * (n + 2) // 2 for n in self.devices)


class ModelTables:
    """One model's, by devices of all areas."""

    def __init__(self, problem: PlacementProblem, need: ModelNeed, areas: Sequence[Area]) -> None:
        self.need, self._areas = need, areas
        self._ladders: list[Ladders] = [defaultdict(list) for _ in areas]
        place = {key: (at, place) for at, area in enumerate(areas) for place, key in enumerate(area.pools)}
        for option in (problem.options[i] for i in problem.of(need.model)):
            at, pool = place[option.pool.key]
            ladder = Ladder.of(
                option.devices, [0.0, *(level.rate for level in option.levels)], of_levels(option, "latency")
            )
            self._ladders[at][pool, option.phase].append(ladder)
        kinds = [(len(area.pools), ladders) for area, ladders in zip(areas, self._ladders, strict=True)]
        self._alike = [kinds.index(kind) for kind in kinds]
        """Of each area the first that is like it: what replicas do there is the same."""
        ways = (way.seconds for (model, *_), way in problem.transfers.items() if model == need.model)
        self._handing = min(ways, default=0.0)
        """Seconds, at least."""
        every = [ladder for by_phase in self._ladders for alike in by_phase.values() for ladder in alike]
        self.steepest = max(ladder.steepest for ladder in every)
        """The most that one request/s more adds to any replica's latency."""
        most = reduce(np.add.outer, map(_capacity, self._ladders, (area.devices for area in areas)))
        most = np.minimum(most, need.maximum * max(ladder.capacity for ladder in every))
        self.served = np.where(most >= need.rate * (1 - SAME), need.rate, most)
        """Requests/s at most."""
        self.lacking = need.priority * (need.rate - self.served)
        """What is unserved at least, as the stage `served` counts it."""

    def lowest(self, cells: int, prices: LoadPrices | None, spare: float) -> Floats:
        """What latency cannot be below, where no more is unserved than has to be, and `spare`.

        It is true at any prices; None: the steepest.
        """
        step = self.need.rate / cells
        price = self.steepest if prices is None else min(prices.demand[self.need.model], self.steepest)
        served = np.maximum(0.0, self.served - spare / self.need.priority)
        wanted = np.floor(served / step * (1 + SAME)).astype(np.int64)
        tables = {group: self._table(group, step, cells + 1, price, prices) for group in set(self._alike)}
        areas = [
            tables[group][tuple(slice(0, n + 1) for n in area.devices)]
            for group, area in zip(self._alike, self._areas, strict=True)
        ]
        if len(areas) == 1:
            values: Floats = np.take_along_axis(areas[0], wanted[..., None], axis=-1)[..., 0]
        else:
            values = under(reduce(side_by_side, areas[:-1]), areas[-1], wanted)
        return values + price * served

    def _table(self, group: int, step: float, cells: int, price: float, prices: LoadPrices | None) -> Floats:
        """Of an area, and of those like it: with as many devices of each pool as any of them has."""
        members = [area for area, of in zip(self._areas, self._alike, strict=True) if of == group]
        devices = tuple(map(max, zip(*(area.devices for area in members), strict=True)))
        ladders, by_phase = self._ladders[group], self._of_phases(group, members, price, prices)

        def phase(name: Phase) -> Floats:
            pools = (replicas(ladders.get((pool, name), []), n, by_phase[name], step / FINER, cells * FINER)
                     for pool, n in enumerate(devices))  # fmt: skip
            return reduce(side_by_side, pools)

        unified = wider(phase("unified"), FINER)
        if all(name == "unified" for _, name in ladders):
            return unified
        return either_way(unified, wider(shared(phase("prefill"), phase("decode")), FINER))

    def _of_phases(
        self, group: int, members: Sequence[Area], price: float, prices: LoadPrices | None
    ) -> dict[Phase, float]:
        """Of a request/s that is handed over, which takes its time, each phase has a part of the price."""
        both, pools = max(0.0, price - self._handing), [pool for area in members for pool in area.pools]
        known = [] if prices is None else [prices.decode.get((self.need.model, pool), 0.0) for pool in pools]
        decode = min(both, max(known, default=0.0)) or both * _decode_share(self._ladders[group])
        return {"unified": price, "prefill": both - decode, "decode": decode}


def _decode_share(ladders: Ladders) -> float:
    """Of the devices that a request takes."""
    least: dict[Phase, float] = {}
    for (_, phase), alike in ladders.items():
        least[phase] = min([least.get(phase, math.inf), *(ladder.devices / ladder.capacity for ladder in alike)])
    decode, prefill = least.get("decode", 1.0), least.get("prefill", 1.0)
    return decode / (decode + prefill)


def _capacity(ladders: Ladders, devices: Devices) -> Floats:
    """Requests/s at most, by devices of an area."""

    def phase(name: Phase) -> Floats:
        pools = (_filled(ladders.get((pool, name), []), n) for pool, n in enumerate(devices))
        return reduce(np.add.outer, pools)

    return _most(_most(phase("prefill"), phase("decode"), np.minimum), phase("unified"), np.add)


def _filled(ladders: Sequence[Ladder], devices: int) -> Floats:
    most = np.zeros(devices + 1)
    for used in range(1, devices + 1):
        fits = [most[used - ladder.devices] + ladder.capacity for ladder in ladders if ladder.devices <= used]
        most[used] = max([most[used - 1], *fits])
    return most


def _most(first: Floats, second: Floats, both: np.ufunc) -> Floats:
    """What both come to at most with devices that they share."""
    most: Floats = np.zeros(first.shape)
    for used in np.ndindex(first.shape):
        here = most[beyond(used)]
        np.maximum(here, both(first[used], second[up_to(used, second)]), out=here)
    return most
