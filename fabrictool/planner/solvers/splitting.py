"""Which devices of a small fabric each model is best given: bounds and placements by dynamic programming.

With so many devices of each pool a model comes to a value by itself, whatever the others do. No less than tables over
devices and loads say (`model_tables`), in which replicas and devices are whole; the best split is found in a table over
these. What it takes of them is then replaced by what an integer program of one model and these devices says, until that
is a placement: no other is better. On 32 devices with phases this takes a second, and one program of all models
minutes. With more devices there are too many splits.

What only some problems have (links and limits that models share, minima over all of them) is left out of the split: so
a bound is one all the same, and a placement is to be judged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers.load_grid import best_split
from fabrictool.planner.solvers.mirrors import mirrors
from fabrictool.planner.solvers.model_tables import Area, ModelTables
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.stages import rounding
from fabrictool.planner.work import PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem, Pool
    from fabrictool.planner.solvers.load_grid import Devices
    from fabrictool.planner.solvers.steps import EngineSteps
    from fabrictool.planner.tangents import LoadPrices

MOST_SPLITS, MOST_OF_A_POOL = 36_000, 24
"""Ways to give a model devices of all pools, of all models together; and devices of one pool."""
MOST_NUMBERS = 3_000
"""Ways to fill a pool with replicas of one model in one phase: each is looked at."""
MOST_PAIRS = 60_000
"""Ways to share the devices of pools that hand requests to each other between two phases."""
FIRST_CELLS, CELLS = 32, 64
"""Of the grid of a model's loads: for what is to be there soon, and for what is to be close."""
FIRST_TRIES = 3
"""Splits that are looked at by the first one, once it has the prices of loads."""
PAIRS_PER_UNIT = 3_000_000
"""Of devices and of loads, in a unit of work: measured, within a factor of two."""
DEARER, DEAREST = 4.0, 20
"""Times its price is dearer what is unserved, where a split that leaves more of it than has to be looks cheap; and how
often at most."""
PART_NODES, PART_GAP = 5_000, 1e-3
"""Limits of a program of one model."""


class DeviceSplits:
    """One problem's; see the module's docstring."""

    def __init__(self, problem: PlacementProblem, areas: Sequence[Area]) -> None:
        self._problem = problem
        self._pools = [key for area in areas for key in area.pools]
        self._devices = tuple(n for area in areas for n in area.devices)
        self._models = [ModelTables(problem, need, areas) for need in problem.needs]
        self._mirrors = mirrors(problem, areas)
        self._pairs = sum(area.pairs for area in areas) * len(self._models)
        self.unserved, _ = best_split([model.lacking for model in self._models], self._devices)
        """The least that the stage `served` can come to."""
        self._spare = 2 * rounding(self.unserved)
        """By so much it may be more: of what a search keeps it within, and of digits."""
        self._dear = max(model.steepest for model in self._models)
        """The price of a weighted request/s that is unserved."""
        too_much = self.unserved + self._spare
        self._lowest = [np.where(model.lacking > too_much, math.inf, 0.0) for model in self._models]
        """By model and devices: what latency cannot be below."""
        self._known: dict[tuple[int, Devices], Mapping[int, int] | None] = {}
        """By model and devices: the best counts that a program found; None: it found none."""

    @classmethod
    def of(cls, problem: PlacementProblem) -> DeviceSplits | None:
        """None where there are too many splits, or devices alone do not say what fits, as of clusters that are away."""
        if problem.fixed or any(option.others or not option.devices for option in problem.options):
            return None
        if not problem.needs or not all(need.rate and problem.of(need.model) for need in problem.needs):
            return None
        areas = list(_areas(problem))
        devices = [n for area in areas for n in area.devices]
        splits = math.prod(n + 1 for n in devices) * len(problem.needs)
        fits = splits <= MOST_SPLITS and max(devices) <= MOST_OF_A_POOL and max(a.pairs for a in areas) <= MOST_PAIRS
        return cls(problem, areas) if fits and _most_numbers(problem) <= MOST_NUMBERS else None

    def placement(self, steps: EngineSteps) -> dict[int, int] | None:
        """Counts by option that leave as little unserved as can be, at not much latency; None: there was no time."""
        if not self._ask_tables(steps, FIRST_CELLS, None):
            return None
        _, shares = self._best()
        return self._counts(shares) if shares and self._place(steps, shares) else None

    def tries(
        self, steps: EngineSteps, prices: LoadPrices, unserved: float
    ) -> Iterator[tuple[float, dict[int, int] | None]]:
        """What latency cannot be below, and counts by option, where these are known: closer and closer.

        Nothing is known where more may be `unserved` than has to be.
        """
        if unserved > self.unserved + self._spare:
            return
        for cells, most in ((FIRST_CELLS, FIRST_TRIES), (CELLS, math.inf)):
            if not self._ask_tables(steps, cells, prices):
                return
            bound, shares = self._best()
            yield bound, None
            tried, known = 0, False
            while shares and tried < most and not known:
                known = all(part in self._known for part in enumerate(shares))
                if not self._place(steps, shares):
                    return
                counts = self._counts(shares)
                bound, shares = self._best()  # what was placed says more, and that belongs to its step
                yield bound, counts
                tried += 1
            if known or not shares:
                return

    def _best(self) -> tuple[float, list[Devices]]:
        """What latency cannot be below, and the split of devices that comes closest to it; none where none is left."""
        most = self.unserved + self._spare
        for _ in range(DEAREST):
            parts = zip(self._models, self._lowest, strict=True)
            least, shares = best_split([lowest + self._dear * model.lacking for model, lowest in parts], self._devices)
            lacking = math.fsum(model.lacking[devices] for model, devices in zip(self._models, shares, strict=True))
            if least == math.inf:
                break
            if lacking <= most:
                return least - self._dear * most, shares
            self._dear *= DEARER
        return 0.0, []

    def _ask_tables(self, steps: EngineSteps, cells: int, prices: LoadPrices | None) -> bool:
        """Raises what latency cannot be below to what the tables say; False where there was no time."""
        work = 1 + self._pairs * cells * cells // PAIRS_PER_UNIT
        if not steps.work.more():
            return False
        if steps.work.for_steps_s() < work / PER_SECOND:
            steps.work.cut()
            return False
        for model, lowest in zip(self._models, self._lowest, strict=True):
            np.maximum(lowest, model.lowest(cells, prices, self._spare), out=lowest)
        steps.work.done(work)
        return True

    def _place(self, steps: EngineSteps, shares: Sequence[Devices]) -> bool:
        """Places each model on just these devices, where that was not done before; False where there was no time."""
        parts = [part for part in enumerate(shares) if part not in self._known]
        if not parts:
            return True
        if not steps.work.more():
            return False
        problems = [self._part(*part) for part in parts]
        programs = [self._program(*part, of) for part, (of, _) in zip(parts, problems, strict=True)]
        answers = steps.in_time(programs, "latency", nodes=PART_NODES, gap=PART_GAP)
        if answers is None:
            return False
        for (at, devices), (of, indices), program, answer in zip(parts, problems, programs, answers, strict=True):
            if answer is None:
                # Nothing may have been found, and still be: what the relaxation denies is not there.
                self._learn(at, devices, None, 0.0 if self._may_be(at, devices, of) else math.inf)
            else:
                counts = {indices[k]: n for k, n in program.counts(answer).items()}
                self._learn(at, devices, counts, answer.bound)
        return True

    def _program(self, at: int, devices: Devices, part: PlacementProblem) -> Formulation:
        program = Formulation(part, range(len(part.options)), whole=True)
        program.tighten()
        program.keep("served", self._most_unserved(at, devices))
        return program

    def _most_unserved(self, at: int, devices: Devices) -> float:
        return float(self._models[at].lacking[devices]) + self._spare

    def _learn(self, at: int, devices: Devices, counts: Mapping[int, int] | None, bound: float) -> None:
        self._known[at, devices] = counts
        self._raise_lowest(at, devices, bound)
        for mirror in self._mirrors:
            there = mirror.devices(devices)
            self._known.setdefault((at, there), None if counts is None else mirror.counts(counts))
            self._raise_lowest(at, there, bound)

    def _raise_lowest(self, at: int, devices: Devices, bound: float) -> None:
        """With fewer devices, and as much served, nothing is better."""
        lowest, lacking = self._lowest[at], self._models[at].lacking
        fewer = tuple(slice(0, n + 1) for n in devices)
        np.maximum(lowest[fewer], bound, out=lowest[fewer], where=lacking[fewer] <= lacking[devices])

    def _part(self, at: int, devices: Devices) -> tuple[PlacementProblem, list[int]]:
        """One model and its devices; of what models share, all is its own. And its options, as the whole knows them."""
        model = self._models[at]
        part, indices = part_of(self._problem, {}, self._fitting(model, devices), [model.need.model])
        taken = dict(self._problem.taken)
        for key, most, n in zip(self._pools, self._devices, devices, strict=True):
            taken[key, 1] = taken.get((key, 1), 0) + most - n
        problem = self._problem
        return replace(part, taken=taken, links=problem.links, max_moves=problem.max_moves, crowded={}), indices

    def _may_be(self, at: int, devices: Devices, part: PlacementProblem) -> bool:
        relaxed = Formulation(part, range(len(part.options)), whole=False)
        relaxed.keep("served", self._most_unserved(at, devices))
        try:
            return relaxed.minimise("latency", seconds=LEAST_LP_S, seed=0) is not None
        except FabrictoolError:  # no numbers that can be trusted
            return True

    def _fitting(self, model: ModelTables, devices: Devices) -> list[int]:
        """Options that have room on these devices, or that a rule of moves speaks of."""
        room, running = dict(zip(self._pools, devices, strict=True)), self._problem.current
        options = ((i, self._problem.options[i]) for i in self._problem.of(model.need.model))
        return [i for i, option in options if option.devices <= room[option.pool.key] or option.key in running]

    def _counts(self, shares: Sequence[Devices]) -> dict[int, int] | None:
        """Of all models; None where one has none."""
        counts: dict[int, int] = {}
        for part in enumerate(shares):
            mine = self._known[part]
            if mine is None:
                return None
            counts |= mine
        return counts


def _most_numbers(problem: PlacementProblem) -> int:
    """Of all models, phases and pools: the most ways to fill a pool with replicas, or a part of it."""
    sizes: dict[tuple[str, str, Pool], list[int]] = defaultdict(list)
    for option in problem.options:
        sizes[option.model, option.phase, option.pool].append(option.devices)
    most = 0
    for (_, _, pool), devices in sizes.items():
        ways = [1] * (pool.nodes * pool.devices_per_node + 1)
        for size in devices:
            for room in range(size, len(ways)):
                ways[room] += ways[room - size]
        most = max(most, ways[-1])
    return most


def _areas(problem: PlacementProblem) -> Iterator[Area]:
    """Pools that requests are handed between, together; every other one by itself."""
    area = {pool.key: {pool.key} for pool in problem.pools}
    for _, sender, receiver in problem.transfers:
        together = area[sender] | area[receiver]
        for key in together:
            area[key] = together
    for keys in {id(keys): keys for keys in area.values()}.values():
        pools = [pool for pool in problem.pools if pool.key in keys]
        devices = [pool.nodes * pool.devices_per_node - problem.taken.get((pool.key, 1), 0) for pool in pools]
        yield Area(tuple(pool.key for pool in pools), tuple(max(0, n) for n in devices))
