"""When the replicas of a schedule begin to load, and from when on they serve.

* A job waits in the queue of its partition, then its replica loads: for that time it holds its devices and serves
  nobody. Nothing is submitted before the schedule is known.
* Where its devices are free for the whole of the step before, and the limits leave room, it is started early enough to
  serve from the beginning of its step; of longer loads in each step that they touch. What is started earlier, or is of
  a model with a higher priority, or loads longer, chooses first; what can wait comes last.
* Otherwise it begins a minute after the beginning of the first step from which on they are: by then what stops there
  has drained. Until it has loaded its model has only the others. What does not serve yet is stopped first.
* A job that ends within a step is followed by another one (`planner.renewals`), which takes what these leave.

Devices are counted as in the program: as if what stays could always stand so that the free ones are together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabrictool.planner.limits import DUST
from fabrictool.planner.moving import DRAIN_S
from fabrictool.planner.queue_waits import queue_wait_s
from fabrictool.planner.renewals import Around, JobEnds, JobRenewals, beside_during

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from fabrictool.domain.inventory import Inventory
    from fabrictool.planner.problem import Level, Option, OptionKey, Pool, PoolKey, ResourceLimit
    from fabrictool.planner.renewals import Doubled, JobRenewal, PlannedJob
    from fabrictool.planner.steps import Placed, Step

EVER = -math.inf


@dataclass(frozen=True, slots=True)
class Lead:
    """How early a start may be, how early it has to be, and how long it lasts."""

    now: float = EVER
    """Seconds since 1970 before which nothing can be submitted; by default the beginning of the horizon."""
    waits: Mapping[PoolKey, float] = field(default_factory=dict)
    """Seconds that a job waits in the queue, by partition; absent: not at all."""
    ends: JobEnds = field(default_factory=JobEnds)

    def wait_s(self, option: Option) -> float:
        return max((self.waits.get(pool.key, 0.0) for pool in option.pools), default=0.0)

    def since(self, begin: float) -> float:
        """The time from which on things may be submitted, of a horizon that begins then."""
        return begin if self.now == EVER else self.now


def lead_of(inventory: Inventory, measured: Mapping[str, Sequence[float]], now: float) -> Lead:
    """With the waits that the inventory states, else that 95 of 100 of our last jobs did not exceed.

    `measured`: seconds that these waited, by ``CLUSTER/PARTITION``; `now`: seconds since 1970.
    """
    waits = {
        (cluster, name): queue_wait_s(its.stated_waits.get(name), measured.get(f"{cluster}/{name}", ()), 0.0)
        for cluster, its in inventory.clusters.items()
        for name in its.partitions
    }
    return Lead(now, {place: wait for place, wait in waits.items() if wait})


@dataclass(frozen=True, slots=True)
class TimedStart:
    """Alike replicas that start for a step; all times are seconds from the beginning of that step."""

    key: OptionKey
    count: int
    submit: float
    """By when their jobs are to be submitted."""
    begins: float
    """From then on they hold their devices."""
    serves: float

    @property
    def late(self) -> bool:
        return self.serves > 0.0

    @property
    def early_s(self) -> float:
        """For how long it holds devices before its step."""
        return max(0.0, -self.begins)


Missing = tuple[tuple["OptionKey", float, float, int], ...]
"""(option, seconds from the beginning of a step from which on and until when they do not serve, how many)."""


@dataclass(frozen=True, slots=True)
class Past:
    """What later steps have to know of those before."""

    placed: tuple[Placed, ...]
    """In the last steps, the last one last; the first of all is what ran before the horizon."""
    booked: tuple[Placed, ...]
    """What loads in them for later steps."""
    missing: Missing = ()
    """Of the last one, what still loads at its end, from there."""
    jobs: tuple[tuple[OptionKey, tuple[PlannedJob, ...]], ...] = ()
    """That may end; none where none can within the horizon."""
    doubled: tuple[Doubled, ...] = ()
    """What loads in them beside the job that it follows."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What begins in a step, and what ends."""

    starts: tuple[TimedStart, ...]
    stops: int
    renewals: tuple[JobRenewal, ...]
    missing: Missing
    """What does not serve all the time."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a replica takes, whatever it costs."""

    blocks: tuple[tuple[PoolKey, int, int], ...]
    """(pool, devices, how many such blocks)."""
    pools: frozenset[PoolKey]
    wait_s: float


class Starts:
    """When things start in a horizon."""

    def __init__(self, steps: Sequence[Step], same: Sequence[int], lead: Lead, waiting: Collection[str] = ()) -> None:
        """`same`: the first step that is like one; `waiting`: models whose requests may wait."""
        self._steps, self._same, self._waiting = steps, same, frozenset(waiting)
        self._seconds = steps[0].seconds
        self._now = lead.since(steps[0].begin)
        self._pools = [{pool.key: pool for pool in step.problem.pools} for step in steps]
        self._priority = {need.model: need.priority for need in steps[0].problem.needs}
        self._options: dict[int, dict[OptionKey, Option]] = {}
        self._shapes: dict[OptionKey, _Shape] = {}
        for at in sorted(set(same)):
            self._options[at] = {o.key: o for o in (*steps[at].problem.options, *steps[at].gone.values())}
            for key, option in self._options[at].items():
                if key not in self._shapes:
                    blocks = tuple((pool, size, number) for (pool, size), number in option.blocks.items())
                    pools = frozenset(pool for pool, _, _ in blocks)
                    self._shapes[key] = _Shape(blocks, pools, lead.wait_s(option))
        self._blocks: dict[Placed, dict[PoolKey, Counter[int]]] = {}
        self._uses: dict[tuple[int, int, OptionKey], float] = {}
        every = {key: option for its in self._options.values() for key, option in its.items()}
        waits = {key: (option, lead.wait_s(option)) for key, option in every.items()}
        self._renewals = JobRenewals(steps, self._now, waits, lead.ends, self.room, self._turn)
        longest = max([self._renewals.longest_s, *(option.start_s for option in every.values())])
        self._depth = min(len(steps), max(1, math.ceil((longest + DRAIN_S) / self._seconds)))
        slowest = max((shape.wait_s for shape in self._shapes.values()), default=0.0)
        self._usual = self._now + slowest + longest + self._depth * self._seconds

    def kind(self, at: int) -> tuple[float | None, tuple[int, ...]]:
        """What the starts of a step depend on but for the past: steps of one kind have the same ones."""
        begin = self._steps[at].begin
        before = tuple(self._same[i] if i >= 0 else -1 for i in range(at - self._depth, at + 1))
        usual = begin >= self._usual and not self._renewals.any
        return (None if usual else begin - self._now), before

    def first(self, running: Mapping[OptionKey, int]) -> Past:
        """Before the horizon, with nothing that loads."""
        placed = tuple(sorted((key, k) for key, k in running.items() if k))
        return Past((placed,), ((),), jobs=tuple(sorted(self._renewals.first(dict(placed)).items())))

    def share_of_late(self, at: int, key: OptionKey) -> float:
        """The part of a step in which a replica serves whose devices are free only from its beginning on."""
        loading, begin = self._options[self._same[at]][key].start_s, self._steps[at].begin
        serves = max(DRAIN_S, self._now + self._shapes[key].wait_s - begin) + loading
        return max(0.0, 1.0 - serves / self._seconds)

    def after(self, at: int, past: Past, placed: Placed) -> tuple[Begun, Past]:
        """What begins and ends in a step, and what is then past."""
        before, now = dict(past.placed[-1]), dict(placed)
        changes = {key: now.get(key, 0) - before.get(key, 0) for key in {*before, *now}}
        booked = [Counter(dict(its)) for its in past.booked]
        starts: list[TimedStart] = []
        for key in sorted((key for key, n in changes.items() if n > 0), key=lambda key: self._turn(at, key)):
            starts += self._starts(at, past, booked, key, changes[key])
        jobs = dict(past.jobs)
        self._renewals.stop(at, jobs, changes)
        self._renewals.start(at, jobs, ((its.key, its.count, its.begins, its.serves) for its in starts))
        placements = (*past.placed, placed)
        around = Around(placements, [*booked, Counter()], list(past.doubled))
        renewals = self._renewals.renew(at, jobs, around)
        late = [(its.key, 0.0, its.serves, its.count) for its in starts if its.late]
        late += [(its.key, its.lacks_from, its.serves, 1) for its in renewals if its.late]
        missing = tuple(sorted([*_stopped(past.missing, changes), *late]))
        seconds = self._seconds
        later = tuple(
            (key, max(0.0, since - seconds), until - seconds, n) for key, since, until, n in missing if until > seconds
        )
        # What ran before the horizon drains after now, which may be later than the horizon's beginning.
        kept = self._depth + (at + 1 == self._depth)
        records = (*(tuple(sorted(its.items())) for its in booked), ())
        since = self._steps[at].begin - self._depth * seconds
        then = Past(
            placements[-kept:],
            records[-kept:],
            later,
            tuple(sorted(jobs.items())),
            tuple(sorted(its for its in around.doubled if its.until > since)),
        )
        stops = -sum(n for n in changes.values() if n < 0)
        return Begun(tuple(starts), stops, tuple(renewals), missing), then

    def _turn(self, at: int, key: OptionKey) -> tuple[bool, float, float, OptionKey]:
        loading = self._options[self._same[at]][key].start_s
        return key[0] in self._waiting, -self._priority.get(key[0], 1.0), -loading, key

    # Wide: one kind of replica, and all that is known by then.
    def _starts(
        self, at: int, past: Past, booked: list[Counter[OptionKey]], key: OptionKey, number: int
    ) -> Iterable[TimedStart]:
        """Those of one kind; what they hold before their step is added to `booked`."""
        loading, shape, seconds = self._options[self._same[at]][key].start_s, self._shapes[key], self._seconds
        now = self._now - self._steps[at].begin
        wanted = max(-loading, now + shape.wait_s)
        begin = self._steps[at].begin
        # By boundary between steps, this one's beginning first: when what stops there has drained.
        drained = [DRAIN_S - back * seconds for back in range(len(past.placed) + 1)]
        if len(drained) > at:
            drained[at] = max(drained[at], now + DRAIN_S)
        ends: list[tuple[int, float]] = []
        left = number
        for back in range(len(past.placed)):
            # What fits into the step that ends at this boundary may begin before it.
            since = max(wanted, -(back + 1) * seconds) if back < at else wanted
            free = left
            for beside in beside_during(past.doubled, begin + since, begin + drained[back]):
                loads = booked[-1 - back] + beside if beside else booked[-1 - back]
                free = self.room(at - back - 1, past.placed[-1 - back], loads, key, free)
            if free < left:
                ends.append((left - free, drained[back]))
            left = free
            if not left or back == at or drained[back + 1] <= wanted:
                break
        if left:
            ends.append((left, EVER))
        for count, devices in ends:
            begins = max(devices, wanted)
            for back, until in enumerate(drained[:-1]):
                if begins < until:
                    booked[-1 - back][key] += count
            yield TimedStart(key, count, begins - shape.wait_s, begins, begins + loading)

    # -- room -------------------------------------------------------------------------------------------------

    # Wide: a step, what is in it and what is to be added.
    def room(self, at: int, placed: Placed, booked: Mapping[OptionKey, int], key: OptionKey, wanted: int) -> int:
        """How many more of a kind fit into a step (-1: before the horizon) beside what is and what loads there."""
        pools, shape, most = self._pools[max(0, at)], self._shapes[key], wanted
        if any(pool not in pools for pool in shape.pools):
            return 0
        held = self._held_by(placed)
        for pool in shape.pools:
            blocks = Counter(held.get(pool, {}))
            for its, count in booked.items():
                for where, size, number in self._shapes[its].blocks:
                    if where == pool:
                        blocks[size] += number * count
            mine = {size: number for where, size, number in shape.blocks if where == pool}
            most = min(most, _fitting(pools[pool], blocks, mine, most))
        for number, limit in enumerate(self._steps[max(0, at)].problem.limits):
            more = self._use(at, number, limit, key)
            if most and more:
                there = [*placed, *booked.items()]
                used = limit.taken + math.fsum(self._use(at, number, limit, its) * n for its, n in there)
                most = min(most, math.floor((limit.most * (1 + DUST) - used) / more + DUST))
        return max(0, most)

    def _held_by(self, placed: Placed) -> dict[PoolKey, Counter[int]]:
        """How many blocks of each size replicas take, by pool."""
        if placed not in self._blocks:
            blocks: dict[PoolKey, Counter[int]] = defaultdict(Counter)
            for key, count in placed:
                for pool, size, number in self._shapes[key].blocks if key in self._shapes else ():
                    blocks[pool][size] += number * count
            self._blocks[placed] = blocks
        return self._blocks[placed]

    def _use(self, at: int, number: int, limit: ResourceLimit, key: OptionKey) -> float:
        where = (self._same[max(0, at)], number, key)
        if where not in self._uses:
            option = self._options[where[0]].get(key)
            self._uses[where] = 0.0 if option is None else limit.used_by(option)
        return self._uses[where]


def _fitting(pool: Pool, blocks: Mapping[int, int], mine: Mapping[int, int], wanted: int) -> int:
    """How many more replicas with such blocks (size → number) a pool has room for, by the rows of the program."""
    most = wanted
    for part in {1, *blocks, *mine}:
        more = sum(number * pool.parts_lost(size, part) for size, number in mine.items() if size >= part)
        if more:
            used = sum(number * pool.parts_lost(size, part) for size, number in blocks.items() if size >= part)
            most = min(most, (pool.nodes * (pool.devices_per_node // part) - used) // more)
    return max(0, most)


def _stopped(missing: Missing, changes: Mapping[OptionKey, int]) -> Missing:
    """What still loads, without what is stopped; what would serve last stops first."""
    left = Counter({key: -n for key, n in changes.items() if n < 0})
    kept: list[tuple[OptionKey, float, float, int]] = []
    for key, since, until, count in sorted(missing, key=lambda its: -its[2]):
        gone = min(count, left[key])
        left[key] -= gone
        if count > gone:
            kept.append((key, since, until, count - gone))
    return tuple(sorted(kept))


def loads_before(
    begun: Sequence[Sequence[TimedStart]], renewed: Sequence[Sequence[JobRenewal]], seconds: float
) -> list[Placed]:
    """What holds devices in each step of so many seconds to load for a later one, or beside the job that it follows.

    `begun`: what starts for each; `renewed`: what is renewed in each.
    """
    held = [Counter["OptionKey"]() for _ in begun]
    for at, starts in enumerate(begun):
        for start in starts:
            for back in range(at):
                if start.begins < -back * seconds:
                    held[at - back - 1][start.key] += start.count
    for at, renewals in enumerate(renewed):
        for its in renewals:
            for step in range(len(held)):
                begin = (step - at) * seconds
                held[step][its.key] += its.begins < begin + seconds and its.until > begin
    return [tuple(sorted((+its).items())) for its in held]


def stretches(missing: Missing, seconds: float, first: float) -> list[tuple[float, dict[OptionKey, int]]]:
    """(share of the step, what does not serve in it) where anything does not, from `first` seconds in it on."""
    begin = max(0.0, first)
    moments = {min(its, seconds) for _, since, until, _ in missing for its in (since, until)}
    parts: list[tuple[float, dict[OptionKey, int]]] = []
    for end in sorted({begin, *moments}):
        if end > begin:
            lacking: Counter[OptionKey] = Counter()
            for key, since, until, count in missing:
                lacking[key] += count if until >= end and since <= begin else 0
            if lacks := {key: n for key, n in lacking.items() if n}:
                parts.append(((end - begin) / seconds, lacks))
            begin = end
    return parts


def lost(rate: float, replicas: Iterable[tuple[Sequence[Level], float]]) -> tuple[float, float]:
    """(requests/s not served, requests/s that miss their SLO) of so many replicas with these levels each.

    As much as can be is served; then as little as can be misses: each replica first takes what it can while it attains
    the SLO, and what is beyond goes to where the fewest others miss for it.
    """
    left, pieces = rate, []
    for levels, count in replicas:
        attained = max((level.rate for level in levels if level.attains), default=0.0)
        most = levels[-1].rate
        taken = min(left, attained * count)
        left -= taken
        if most > attained:
            pieces.append((most / (most - attained), (most - attained) * count))
    misses = 0.0
    for per_request, width in sorted(pieces):
        taken = min(left, width)
        left -= taken
        misses += taken * per_request
    return max(0.0, left), misses
