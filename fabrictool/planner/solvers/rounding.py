"""Whole replicas near a relaxation's fractions: a first placement in no time, to start the integer solver from."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fabrictool.planner.limits import DUST, open_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabrictool.domain.specs import Phase
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, PoolKey, ResourceLimit

CLOSE = 1e-6
SIZES = (1, 2, 4, 8, 16)
"""Of the blocks of devices inside a node that replicas take."""
PREFILL: Phase = "prefill"
DECODE: Phase = "decode"


def rounded(problem: PlacementProblem, usage: Mapping[int, float], distance: Mapping[int, float]) -> dict[int, int]:
    """Counts by option: fractions rounded down, then what the demand and the minima lack, nearest options first.

    `distance` is what a request/s on an option costs more than the relaxation's optimum. Devices are never exceeded;
    spreading over nodes is not looked at: the caller finds out whether it holds.
    """
    state = _filled(problem, usage, distance, minima_first=False)
    if not state.keeps_minima():
        state = _filled(problem, usage, distance, minima_first=True)
    return state.counts


def _filled(
    problem: PlacementProblem, usage: Mapping[int, float], distance: Mapping[int, float], *, minima_first: bool
) -> _State:
    """`minima_first`: before anybody's demand, which may go unserved for them."""
    state = _State(problem, usage)
    fraction = {i: usage[i] - math.floor(usage[i] + CLOSE) for i in usage}
    for i in usage:
        if problem.options[i].key not in problem.fixed:
            for _ in range(math.floor(usage[i] + CLOSE)):
                state.add(i)
    needs = sorted(problem.needs, key=lambda need: (-need.priority, need.model))
    for need in needs:
        state.even_out(need)
    by_need = {
        need.model: [i for i in state.by_model[need.model] if problem.options[i].key not in problem.fixed]
        for need in needs
    }
    for mine in by_need.values():
        mine.sort(key=lambda i: (fraction[i] <= CLOSE, distance[i], i))
    for for_minima in (True, False) if minima_first else (False,):
        for need in needs:
            state.fill(need, by_need[need.model], for_minima=for_minima)
    if state.drop_lone(i for mine in by_need.values() for i in mine):
        for need in needs:
            state.fill(need, by_need[need.model])
        state.drop_lone(i for mine in by_need.values() for i in mine)
    return state


class _State:
    """Counts, and what is left."""

    def __init__(self, problem: PlacementProblem, usage: Mapping[int, float]) -> None:
        self._problem = problem
        self._need = {need.model: need for need in problem.needs}
        self._limits = open_limits(problem)
        self._room = FreeDevices(problem.pools, problem.options, self._limits)
        self._halves, self._sites = _Halves(problem), _Sites(problem)
        self._for_minima = False
        self.counts = dict.fromkeys(usage, 0)
        self.by_model: dict[str, list[int]] = defaultdict(list)
        self._by_pool: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._is_stable = {i: problem.options[i].stable and problem.options[i].serves for i in usage}
        self._total: Counter[str] = Counter()
        self._stable: Counter[str] = Counter()
        self._away: Counter[tuple[str, int]] = Counter()
        """Of those stable ones, what an announced outage takes, by its place in `problem.outages`."""
        self._surplus = {need.model: -need.rate for need in problem.needs}
        for i in usage:
            self.by_model[problem.options[i].model].append(i)
            for pool in problem.options[i].pools:
                self._by_pool[pool.key].append(i)
            self._count(i, problem.fixed.get(problem.options[i].key, 0) if problem.fixed else 0)
        for here in self._by_pool.values():
            here.sort(key=lambda i: (-problem.options[i].stage_devices, i))

    def keeps_minima(self) -> bool:
        """Of all models, also while there is an outage."""
        return not any(
            self._is_short(need, i) for need in self._problem.needs if need.minimum for i in self.by_model[need.model]
        )

    def even_out(self, need: ModelNeed) -> None:
        """Without replicas of sites that have more than their even part, if sites matter: fractions went elsewhere."""
        mine = [i for i in self.by_model[need.model] if self._problem.options[i].key not in self._problem.fixed]
        while need.spread_sites:
            crowded = [i for i in mine if self.counts[i] and self._sites.is_over(need, self._problem.options[i])]
            if not crowded:
                return
            # What gives least for a device is missed least.
            self._remove(min(crowded, key=lambda i: (self._gives(i), i)))

    def _gives(self, i: int) -> float:
        return self._problem.options[i].levels[-1].rate / self._problem.options[i].devices

    def fill(self, need: ModelNeed, mine: Sequence[int], *, for_minima: bool = False) -> None:
        """With what a model lacks, of the first of its options that helps; or what its minimum lacks, whoever else is
        served less `for_minima`.
        """
        self._for_minima = for_minima
        while self._took(need, mine, self.add):
            pass  # halves help each other in turn, and sites
        lacking = [i for i in mine if self._lacks(need, i)]
        if self._problem.runs and lacking:
            lacking = self._by_moves(need, lacking)
        while self._took(need, lacking, self._displace):
            pass

    def _took(self, need: ModelNeed, mine: Iterable[int], take: Callable[[int], bool]) -> bool:
        """Whether any of these options helped, as often as it does."""
        took = False
        for i in mine:
            while self._lacks(need, i) and take(i):
                took = True
        return took

    def _by_moves(self, need: ModelNeed, mine: Sequence[int]) -> list[int]:
        """Those first with which the least has to start and to stop, about, so that a model has what it lacks."""
        options = self._problem.options
        largest: dict[PoolKey, int] = {}
        for key, here in self._by_pool.items():
            donors = (options[j] for j in here if self.counts[j] and options[j].model != need.model)
            largest[key] = next((other.stage_devices for other in donors if self._can_spare(other)), 0)
        lacks = -self._surplus[need.model]

        def moves(i: int) -> float:
            donor = largest[options[i].pool.key]
            starts = max(1, math.ceil(lacks / max(CLOSE, options[i].levels[-1].rate) - CLOSE))
            return starts * (1 + math.ceil(options[i].stage_devices / donor)) if donor else math.inf

        return sorted(mine, key=moves)

    def _lacks(self, need: ModelNeed, i: int) -> bool:
        """Whether one more replica of option i would help its model."""
        option = self._problem.options[i]
        if self._total[need.model] >= need.maximum or not self._sites.has_room(need, option):
            return False
        pins = {place: wanted for place, wanted in need.pins.items() if option.pool.within(*place)}
        if any(self._pinned(need, place) >= wanted for place, wanted in pins.items()):
            return False
        is_ahead = self._halves.is_ahead(option)
        if (pins and not is_ahead) or self._is_short(need, i):
            return True
        return self._surplus[need.model] < -CLOSE and not is_ahead and not self._for_minima

    def _pinned(self, need: ModelNeed, place: tuple[str, str]) -> int:
        """How many replicas of a model a pin counts."""
        options = self._problem.options
        return sum(self.counts[i] for i in self.by_model[need.model] if options[i].pool.within(*place))

    def _is_short(self, need: ModelNeed, i: int) -> bool:
        """Whether the minimum lacks one of option i, also while there is an outage."""
        if not self._is_stable[i] or not need.minimum:
            return False
        left = [
            self._stable[need.model] - self._away[need.model, at]
            for at, outage in enumerate(self._problem.outages)
            if all(pool.key not in outage for pool in self._problem.options[i].pools)
        ]
        return min([self._stable[need.model], *left]) < need.minimum

    def drop_lone(self, options: Iterable[int]) -> bool:
        """Without replicas of a phase that have none of the other to work with; whether there were any."""
        lone = [i for i in options if self.counts[i] and self._halves.is_lone(self._problem.options[i])]
        for i in lone:
            for _ in range(self.counts[i]):
                self._remove(i)
        return bool(lone)

    def add(self, i: int) -> bool:
        """One replica more, if there are devices for it."""
        if not self._room.take(self._problem.options[i]):
            return False
        self._count(i, 1)
        return True

    def _remove(self, i: int) -> None:
        self._count(i, -1)
        self._room.give(self._problem.options[i])

    def _displace(self, i: int) -> bool:
        """One replica more, in the place of some that their own models can do without, the largest first."""
        option = self._problem.options[i]
        given: list[int] = []
        for j in self._in_the_way(option):
            other = self._problem.options[j]
            while other.model != option.model and self.counts[j] and self._can_spare(other):
                self._remove(j)
                given.append(j)
                if self.add(i):
                    return True
        for j in given:
            self.add(j)
        return False

    def _in_the_way(self, option: Option) -> Iterator[int]:
        """Options that take what one needs: devices of its pool, or of what a limit leaves."""
        yield from self._by_pool[option.pool.key]
        within = {key for limit in self._limits if limit.used_by(option) for key in limit.pools}
        for key in sorted(within - {option.pool.key}):
            yield from self._by_pool[key]

    def _can_spare(self, option: Option) -> bool:
        """Whether its model can do without one of its replicas, also while there is an outage."""
        need = self._need[option.model]
        if any(option.pool.within(*place) for place in need.pins) or not self._sites.can_spare(need, option):
            return False
        least, stable = need.minimum, self._stable[option.model]
        left = [
            stable - self._away[option.model, at] - (not any(pool.key in outage for pool in option.pools))
            for at, outage in enumerate(self._problem.outages)
        ]
        spare = self._for_minima or self._surplus[option.model] >= option.levels[-1].rate
        return spare and min([stable - 1, *left]) >= least

    def _count(self, i: int, more: int) -> None:
        option = self._problem.options[i]
        self.counts[i] += more
        self._total[option.model] += more
        self._sites.add(option, more)
        if self._is_stable[i]:
            self._stable[option.model] += more
            for at, outage in enumerate(self._problem.outages):
                if any(pool.key in outage for pool in option.pools):
                    self._away[option.model, at] += more
        rate = more * option.levels[-1].rate
        self._surplus[option.model] += rate if option.phase == "unified" else self._halves.add(option, rate)


class _Sites:
    """How many replicas each site has, of models that are spread over sites (the rows of `formulation`)."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._here: dict[str, Counter[str]] = {need.model: Counter() for need in problem.needs}
        self._stuck: dict[str, Counter[str]] = {need.model: Counter() for need in problem.needs}
        """Where nothing is seen, and cannot be moved."""
        self._over = {need.model: need.sites for need in problem.needs if need.spread_sites and need.sites > 1}
        for option in problem.options if problem.fixed else ():
            self._stuck[option.model][option.pool.site] += problem.fixed.get(option.key, 0)

    def add(self, option: Option, more: int) -> None:
        self._here[option.model][option.pool.site] += more

    def is_over(self, need: ModelNeed, option: Option) -> bool:
        """Whether the option's site has more than its even part."""
        return self._beyond(need, option.pool.site, 0) > 0

    def has_room(self, need: ModelNeed, option: Option) -> bool:
        """Whether it would not have more with one more."""
        site = option.pool.site
        return self._beyond(need, site, 1) + self._over.get(need.model, 0) <= 0

    def can_spare(self, need: ModelNeed, option: Option) -> bool:
        """Whether no other site would have more with one less at the option's."""
        return all(self._beyond(need, site, -1) <= 0 for site in self._here[need.model] if site != option.pool.site)

    def _beyond(self, need: ModelNeed, site: str, more: int) -> int:
        """By how much a site breaks its row, with so many more of the model in all."""
        over = self._over.get(need.model)
        if over is None:
            return 0
        here, total = self._here[need.model], self._here[need.model].total() + more
        excess = max(0, self._stuck[need.model][site] - math.ceil(need.minimum / over))
        return over * here[site] - total - over * excess - (over - 1)


class _Halves:
    """What replicas that prefill and those that decode can do together, about: as much as the fewer of them, in each
    group of pools that are joined by ways, whichever these are. Not each of a group may reach each other one: who is
    loaded with what is the linear program's to find.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self._group: dict[tuple[str, PoolKey], PoolKey] = {}
        for model, *pair in problem.transfers:
            first, second = (self._first(model, pool) for pool in pair)
            self._group[model, first] = second
        self._ways = problem.transfers
        self._rates: dict[tuple[str, PoolKey, Phase], float] = defaultdict(float)
        """By group."""
        self._here: dict[tuple[str, PoolKey, Phase], float] = defaultdict(float)
        """By pool."""

    def _first(self, model: str, pool: PoolKey) -> PoolKey:
        while (other := self._group.get((model, pool), pool)) != pool:
            pool = other
        return pool

    def _sides(self, option: Option) -> tuple[tuple[str, PoolKey, Phase], tuple[str, PoolKey, Phase]]:
        """Its own, and the other."""
        group = self._first(option.model, option.pool.key)
        other = DECODE if option.phase == PREFILL else PREFILL
        return (option.model, group, option.phase), (option.model, group, other)

    def add(self, option: Option, rate: float) -> float:
        """By how much both can do more with so many requests/s more of an option."""
        mine, other = self._sides(option)
        before = min(self._rates[mine], self._rates[other])
        self._rates[mine] += rate
        self._here[option.model, option.pool.key, option.phase] += rate
        return min(self._rates[mine], self._rates[other]) - before

    def is_ahead(self, option: Option) -> bool:
        """Whether the other side is what lacks."""
        if option.phase == "unified":
            return False
        mine, other = self._sides(option)
        return self._rates[mine] > self._rates[other] + CLOSE

    def is_lone(self, option: Option) -> bool:
        """Whether nothing of the other side is where it hands over to, or gets from."""
        if option.phase == "unified":
            return False
        here, model = option.pool.key, option.model
        if option.phase == PREFILL:
            partners = [(model, to, DECODE) for of, at, to in self._ways if (of, at) == (model, here)]
        else:
            partners = [(model, at, PREFILL) for of, at, to in self._ways if (of, to) == (model, here)]
        return all(self._here[partner] <= CLOSE for partner in partners)


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
