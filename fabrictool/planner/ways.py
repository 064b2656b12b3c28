"""The best way through what each step of a horizon may have, and how it is made better afterwards."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.quotas import Quota
from fabrictool.planner.schedules import DUST, PAID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.planner.loading import Past
    from fabrictool.planner.problem import ModelNeed, OptionKey
    from fabrictool.planner.schedules import Judge, PlacedStep, Schedule, Value
    from fabrictool.planner.steps import Placed

    Choices = Sequence[Sequence[Placed]]
    """By step."""

MOST_CHOICES = 16
MOST_THINNED = 12
MISS_SHARE = 0.01
"""What a request that misses its SLO counts of one that is not served, where something has to go."""
MOST_PAIRS = 400
"""Other choices that are looked at two at a time, of those that serve more and of those that use less."""
NEAREST = 5
"""Of these pairs so many are tried."""


@dataclass(frozen=True, slots=True)
class QuotaPrice:
    """What the whole of a quota counts as in one place of a schedule's value, so that less of it is used."""

    place: int
    amount: float


class Ways:
    """Searches for schedules, as one judge has it."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    # -- choices ----------------------------------------------------------------------------------------------

    def overlaps(self, schedule: Schedule) -> list[Placed]:
        """For each step what is in it, and beside it, of models that are late in it, what stops as far as that fits."""
        placements = []
        former = self._judge.first.placed[-1]
        for at, part in enumerate(schedule.parts):
            counts = dict(part.placed)
            late = {start.key[0] for start in part.begun if start.late}
            for key, count in former:
                wanted = count - counts.get(key, 0)
                if key[0] in late and wanted > 0:
                    fits = self._judge.room(at, tuple(sorted(counts.items())), key, wanted)
                    counts[key] = counts.get(key, 0) + fits
            placements.append(tuple(sorted((key, n) for key, n in counts.items() if n)))
            former = part.placed
        return placements

    def chosen(self, choices: Choices, kept: Choices) -> list[list[Placed]]:
        """Of many choices for each step those that serve most, of these the cheapest, beside some others."""
        best = []
        for at, (candidates, others) in enumerate(zip(choices, kept, strict=True)):
            standing = ((self._judge.standing(at, placed), placed) for placed in candidates)
            values = sorted((value, placed) for value, placed in standing if value is not None)
            best.append(list(dict.fromkeys([*others, *(placed for _, placed in values[:MOST_CHOICES])])))
        return best

    def thinned(self, at: int, placed: Placed) -> list[Placed]:
        """The same with ever fewer replicas: always without the one by which least is lost for what it uses of quotas.

        Of many such placements some, evenly spaced. Minima are not looked at.
        """
        needs = {need.model: need for need in self._judge.steps[at].problem.needs}
        counts, parts = dict(placed), []
        uses = {key: math.fsum(self._share_of_quotas(at, key)) for key in counts}
        while any(uses[key] for key in counts):
            worth = {key: self._worth(at, needs[key[0]], counts, key) / uses[key] for key in counts if uses[key]}
            least = min(worth, key=lambda key: (worth[key], key))
            counts = {key: n - (key == least) for key, n in counts.items() if n > (key == least)}
            parts.append(tuple(sorted(counts.items())))
        return parts[:: max(1, math.ceil(len(parts) / MOST_THINNED))]

    def _worth(self, at: int, need: ModelNeed, counts: Mapping[OptionKey, int], key: OptionKey) -> float:
        """Requests/s, by priority, that one replica less would not serve, or serve outside of their SLO."""
        mine = {its: float(n) for its, n in counts.items() if its[0] == need.model}
        (unserved, misses), (more, worse) = (
            self._judge.loss(at, need, its) for its in (mine, mine | {key: mine[key] - 1.0})
        )
        return need.priority * (more - unserved) + MISS_SHARE * (worse - misses)

    def _share_of_quotas(self, at: int, key: OptionKey) -> list[float]:
        option = self._judge.options[at][key][1]
        return [quota.limit.used_by(option) / (quota.most or 1.0) for quota in self._judge.quotas]

    # -- ways through all steps -------------------------------------------------------------------------------

    def highest(self, place: int) -> float:
        """A price on the whole of a quota beyond which none changes anything, about."""
        needs = [need for step in self._judge.steps for need in step.problem.needs]
        asked = math.fsum(need.rate * max(1.0, need.priority) for need in needs) * self._judge.steps[0].seconds
        dearest = max((step.price(o) for step in self._judge.steps for o in step.problem.options), default=0.0)
        most = sum(pool.nodes * pool.devices_per_node for pool in self._judge.steps[0].problem.pools)
        paid = dearest * most * math.fsum(step.hours for step in self._judge.steps)
        return 100.0 * max(1.0, paid if place == PAID else asked)

    def best(self, choices: Choices, price: QuotaPrice | None = None) -> Schedule | None:
        """The best way through what each step may have; None where one may have none of it.

        Of the ways to a placement in a step the best one is kept. Where loads take longer than a step, another
        one might lead to a better end.
        """
        ways: dict[Placed, tuple[Value, tuple[Placed, ...], Past]] = {(): ((0.0, 0.0, 0.0, 0.0), (), self._judge.first)}
        for at in range(len(self._judge.steps)):
            reached: dict[Placed, tuple[Value, tuple[Placed, ...], Past]] = {}
            for placed in choices[at]:
                for value, way, past in ways.values():
                    its = self._judge.part(at, past, placed)
                    if its is None:
                        break
                    total = self._added(value, its[0], price)
                    if placed not in reached or total < reached[placed][0]:
                        reached[placed] = (total, (*way, placed), its[1])
            ways = reached
        if not ways:
            return None
        return self._judge.schedule(min((value, way) for value, way, _ in ways.values())[1])

    def _added(self, value: Value, part: PlacedStep, price: QuotaPrice | None) -> Value:
        seconds = self._judge.steps[0].seconds
        lacks, exposed, misses = (its * seconds for its in (part.lacks, part.exposed, part.misses))
        total = [value[0] + lacks, value[1] + exposed, value[2] + misses, value[3] + part.running + part.switching]
        if price is not None:
            total[price.place] += price.amount * math.fsum(
                used / (quota.most or 1.0) for quota, used in zip(self._judge.quotas, part.used, strict=True)
            )
        return round(total[0], DUST), round(total[1], DUST), round(total[2], DUST), total[3]

    def mixed(self, schedule: Schedule, choices: Choices, price: QuotaPrice | None = None) -> Schedule:
        """With each model in turn placed as in any choice of its step while the others stay, until that helps none."""
        models = sorted({key[0] for candidates in choices for placed in candidates for key, _ in placed})
        unchanged = 0
        for model in itertools.cycle(models):
            if unchanged == len(models) or self._judge.exhausted:
                break
            tried = []
            for part, candidates in zip(schedule.parts, choices, strict=True):
                others = tuple(pair for pair in part.placed if pair[0][0] != model)
                own = dict.fromkeys(tuple(pair for pair in placed if pair[0][0] == model) for placed in candidates)
                tried.append([tuple(sorted((*others, *its))) for its in own])
            other = self.best(tried, price)
            better = other is not None and other.rank < schedule.rank
            schedule = other if better and other is not None else schedule
            unchanged = 0 if better else unchanged + 1
        return schedule

    def improved(self, schedule: Schedule, choices: Choices) -> Schedule:
        """With another choice for one step, or for two of which one uses less, until neither helps."""
        better: Schedule | None = schedule
        while better is not None:
            schedule = self._step_by_step(better, choices)
            better = None if self._judge.exhausted else self._exchanged(schedule, choices)
        return schedule

    def _step_by_step(self, schedule: Schedule, choices: Choices) -> Schedule:
        unchanged = 0
        for at in itertools.cycle(range(len(choices))):
            if unchanged == len(choices) or self._judge.exhausted:
                break
            ways = (self._with_choice(schedule, {at: placed}) for placed in choices[at])
            best = min((way for way in ways if way is not None), key=lambda way: way.rank, default=schedule)
            better = best.rank < schedule.rank
            schedule = best if better else schedule
            unchanged = 0 if better else unchanged + 1
        return schedule

    def _with_choice(self, schedule: Schedule, chosen: Mapping[int, Placed]) -> Schedule | None:
        return self._judge.schedule([chosen.get(at, part.placed) for at, part in enumerate(schedule.parts)])

    def _exchanged(self, schedule: Schedule, choices: Choices) -> Schedule | None:
        """With other choices for two steps, by what each of them would change alone; None: that is never better."""
        singles = [
            (at, placed, way)
            for at, candidates in enumerate(choices)
            for placed in candidates
            if placed != schedule.parts[at].placed
            if (way := self._with_choice(schedule, {at: placed})) is not None
        ]
        more = sorted((its for its in singles if its[2].value < schedule.value), key=lambda its: its[2].value)
        less = sorted(
            (its for its in singles if any(map(operator.lt, its[2].used, schedule.used))), key=lambda its: its[2].value
        )
        pairs = []
        for (at, placed, up), (other, instead, down) in itertools.product(more[:MOST_PAIRS], less[:MOST_PAIRS]):
            value = _joint(up.value, down.value, schedule.value)
            if at != other and value < schedule.value:
                used = _joint(up.used, down.used, schedule.used)
                if not any(map(Quota.over, schedule.quotas, used)):
                    pairs.append((value, {at: placed, other: instead}))
        for _, chosen in heapq.nsmallest(NEAREST, pairs, key=lambda pair: pair[0]):
            way = self._with_choice(schedule, chosen)
            if way is not None and way.rank < schedule.rank:
                return way
        return None

    def kept(self, schedule: Schedule) -> Schedule:
        """With replicas that are gone for some steps left where they are, one by one, where that is better; and with
        those that stop left for a step in which others still load.
        """
        better = True
        while better and not self._judge.exhausted:
            better = False
            for placements in (*self._bridged(schedule), *self._overlapping(schedule)):
                other = self._judge.schedule(placements)
                if other is not None and other.rank < schedule.rank:
                    schedule, better = other, True
                    break
        return schedule

    def _overlapping(self, schedule: Schedule) -> Iterable[list[Placed]]:
        """Schedules in which one kind of replica stays for a step in which something is lost to loading."""
        placements = [part.placed for part in schedule.parts]
        before = [self._judge.first.placed[-1], *placements]
        for at, part in enumerate(schedule.parts):
            now = dict(part.placed)
            for key, count in before[at] if part.to_loading else ():
                if count > now.get(key, 0):
                    yield [*placements[:at], _with(now, key, count), *placements[at + 1 :]]

    def _bridged(self, schedule: Schedule) -> Iterable[list[Placed]]:
        """Schedules in which one kind of replica has no gap where it has one."""
        every = [dict(self._judge.first.placed[-1]), *(dict(part.placed) for part in schedule.parts)]
        for key in sorted({key for placed in every for key in placed}):
            line = [placed.get(key, 0) for placed in every]
            for begin in range(len(line) - 2):
                if line[begin + 1] >= line[begin]:
                    continue
                level = line[begin + 1] + 1
                end = next((at for at in range(begin + 1, len(line)) if line[at] >= level), None)
                if end is None:
                    continue
                yield [
                    _with(placed, key, line[at]) if not begin < at < end else _with(placed, key, max(line[at], level))
                    for at, placed in enumerate(every)
                ][1:]


def _joint(first: tuple[float, ...], second: tuple[float, ...], base: tuple[float, ...]) -> tuple[float, ...]:
    """What two changes come to together, about."""
    return tuple(a + b - c for a, b, c in zip(first, second, base, strict=True))


def _with(placed: Mapping[OptionKey, int], key: OptionKey, count: int) -> Placed:
    return tuple(sorted((its, number) for its, number in (dict(placed) | {key: count}).items() if number))
