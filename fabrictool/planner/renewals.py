"""Jobs that end within a horizon, and those that follow them.

* A job of a partition with a walltime ends so long after it began to hold its devices, with the ends of several spread
  as those of real ones are. Of what runs before the horizon the scheduler says when it ends.
* The job that follows is asked for ahead, as `planner.succession` has it: by the wait in the queue, the load, draining
  and slack, at most two thirds of a walltime, and not before the schedule is known.
* It holds devices of its own as soon as some are free until it serves, beside all that the schedule has and loads.
  Where none are, it has those of the job before it, once that has ended: until it has loaded its model lacks a replica.
* What stops first is what does not serve yet, then what ends first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fabrictool.clusters.allocation import STAGGER, usual_lengths
from fabrictool.domain.following import LONGEST_LEAD
from fabrictool.planner.moving import DRAIN_S
from fabrictool.planner.succession import SIGNAL_SLACK_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.planner.problem import Option, OptionKey, PoolKey
    from fabrictool.planner.steps import Placed, Step

    Room = Callable[[int, Placed, Mapping[OptionKey, int], OptionKey, int], int]
    """How many more of a kind fit into a step (-1: before the horizon) beside what is and what loads there."""

AHEAD_S = DRAIN_S + SIGNAL_SLACK_S
"""What a successor is asked for earlier than it has to wait and load."""


@dataclass(frozen=True, slots=True)
class JobEnds:
    """How long jobs last, and until when those that run do."""

    lengths: Mapping[PoolKey, float] = field(default_factory=dict)
    """Walltime in seconds, by partition; absent: none ends by itself."""
    known: Mapping[OptionKey, tuple[float, ...]] = field(default_factory=dict)
    """Of replicas that run before the horizon, in seconds since 1970; absent: they do not end in it."""
    unasked: frozenset[PoolKey] = frozenset()
    """Partitions without a scheduler: there a successor is started after the end."""

    def walltime_s(self, option: Option) -> float:
        return min((self.lengths.get(pool.key, math.inf) for pool in option.pools), default=math.inf)


class PlannedJob(NamedTuple):
    """One replica's; times are seconds since 1970."""

    key: OptionKey
    ends: float
    serves: float


Jobs = dict["OptionKey", tuple[PlannedJob, ...]]
"""By option, those that end first first."""


class Doubled(NamedTuple):
    """For how long a job holds devices beside the one that it follows; seconds since 1970."""

    key: OptionKey
    begins: float
    until: float

    def touches(self, begin: float, end: float) -> bool:
        return self.begins < end and self.until > begin


@dataclass(frozen=True, slots=True)
class JobRenewal:
    """A job that ends in a step, and the one that follows; all times are seconds from the beginning of that step."""

    key: OptionKey
    ends: float
    submit: float
    begins: float
    """From then on the next job holds devices."""
    serves: float
    until: float
    """Until then both hold devices; `begins`: they never do."""
    lacks_from: float
    """From then on until it serves its model lacks a replica, where it is late."""

    @property
    def late(self) -> bool:
        return self.serves > self.ends

    @property
    def doubled_s(self) -> float:
        return self.until - self.begins


@dataclass(frozen=True, slots=True)
class _Kind:
    wait_s: float
    load_s: float
    walltime_s: float
    asked: bool
    """Whether its successor is asked for before it ends."""

    @property
    def lead_s(self) -> float:
        """Seconds before an end at which the next one is asked for."""
        wanted = self.wait_s + self.load_s + AHEAD_S
        return min(wanted, self.walltime_s * LONGEST_LEAD) if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class Around:
    """What holds devices in a step and in those before it, that one last."""

    placed: Sequence[Placed]
    starting: Sequence[Counter[OptionKey]]
    """What loads in them for later steps."""
    doubled: list[Doubled]


class JobRenewals:
    """Which jobs end in each step, and from when on those serve that follow."""

    # Wide: what there is, and how others count it.
    def __init__(
        self,
        steps: Sequence[Step],
        now: float,
        waits: Mapping[OptionKey, tuple[Option, float]],
        ends: JobEnds,
        room: Room,
        turn: Callable[[int, OptionKey], tuple[object, ...]],
    ) -> None:
        """`now`: seconds since 1970 before which nothing is asked for; `waits`: options, with the seconds that a job of
        theirs waits; `turn`: who chooses first of those that end together.
        """
        self._room, self._turn, self._known = room, turn, ends.known
        self._seconds, self._begin = steps[0].seconds, steps[0].begin
        self._now = now
        self._kinds = {
            key: _Kind(
                wait_s,
                option.start_s,
                ends.walltime_s(option),
                not any(pool.key in ends.unasked for pool in option.pools),
            )
            for key, (option, wait_s) in waits.items()
        }
        over = self._begin + len(steps) * self._seconds
        first = [end for its in ends.known.values() for end in its]
        first += [
            max(self._now + kind.wait_s, self._begin - kind.load_s) + kind.walltime_s * (1.0 - STAGGER)
            for kind in self._kinds.values()
        ]
        self.any = any(end < over for end in first)
        """Whether a job can end within the horizon at all."""
        self.longest_s = max((kind.load_s + AHEAD_S for kind in self._kinds.values()), default=0.0) if self.any else 0.0
        """How long before its end a job is followed at most, in seconds."""

    def first(self, running: Mapping[OptionKey, int]) -> Jobs:
        """Of what runs before the horizon."""
        jobs: Jobs = {}
        for key, count in running.items() if self.any else ():
            if self._counts(key):
                ends = sorted(self._known.get(key, ()))[:count]
                ends += [math.inf] * (count - len(ends))
                jobs[key] = tuple(PlannedJob(key, end, -math.inf) for end in ends)
        return jobs

    def start(self, at: int, jobs: Jobs, starts: Iterable[tuple[OptionKey, int, float, float]]) -> None:
        """Adds what starts for a step: (option, how many, seconds from its beginning until they hold devices, and until
        they serve).
        """
        begin = self._begin_of(at)
        together: dict[tuple[OptionKey, float, float], int] = {}
        for key, count, begins, serves in starts if self.any else ():
            if self._counts(key):
                start = (key, begins, serves)
                together[start] = together.get(start, 0) + count
        for (key, begins, serves), count in together.items():
            lengths = usual_lengths(self._kinds[key].walltime_s, count)
            new = [PlannedJob(key, begin + begins + length, begin + serves) for length in lengths]
            jobs[key] = tuple(sorted([*jobs[key], *new]) if key in jobs else new)

    def stop(self, at: int, jobs: Jobs, changes: Mapping[OptionKey, int]) -> None:
        """Takes out what stops at the beginning of a step; `changes`: replicas that are more, or fewer."""
        begin = self._begin_of(at)
        for key, change in changes.items():
            if change < 0 and key in jobs:
                mine = sorted(jobs[key], key=lambda job: (job.serves <= begin, -max(begin, job.serves), job.ends))
                jobs[key] = tuple(sorted(mine[-change:]))
                if not jobs[key]:
                    del jobs[key]

    def renew(self, at: int, jobs: Jobs, around: Around) -> list[JobRenewal]:
        """Of a step, by their ends; `jobs` and what is doubled `around` have what follows afterwards."""
        begin = self._begin_of(at)
        end = begin + self._seconds
        ending = [
            (job.ends, self._turn(at, job.key), job)
            for its in jobs.values()
            for job in itertools.takewhile(lambda job: job.ends < end, its)
        ]
        later = {job.key: [job for job in jobs[job.key] if job.ends >= end] for _, _, job in ending}
        heapq.heapify(ending)
        renewals = []
        while ending:
            _, turn, job = heapq.heappop(ending)
            its = self._follower(at, job, around)
            after = PlannedJob(job.key, its.begins + usual_lengths(self._kinds[job.key].walltime_s, 1)[0], its.serves)
            if after.ends < end:
                heapq.heappush(ending, (after.ends, turn, after))
            else:
                later[job.key].append(after)
            times = (its.ends, its.submit, its.begins, its.serves, its.until, its.lacks_from)
            renewals.append(JobRenewal(job.key, *(time - begin for time in times)))
            if its.doubled_s > 0.0:
                around.doubled.append(Doubled(job.key, its.begins, its.until))
        jobs.update({key: tuple(sorted(its)) for key, its in later.items()})
        return renewals

    # -- internals --------------------------------------------------------------------------------------------

    def _counts(self, key: OptionKey) -> bool:
        return key in self._kinds and (key in self._known or self._kinds[key].walltime_s < math.inf)

    def _begin_of(self, at: int) -> float:
        return self._begin + at * self._seconds

    def _drained(self, at: int) -> float:
        """From when on what stops at the beginning of a step holds nothing; before the schedule is known none stops."""
        begin = self._begin_of(at)
        return (max(begin, self._now) if at == 0 else begin) + DRAIN_S

    def _follower(self, at: int, job: PlannedJob, around: Around) -> JobRenewal:
        """With times in seconds since 1970."""
        kind = self._kinds[job.key]
        submit = max(self._now, job.ends - kind.lead_s)
        ready = submit + kind.wait_s

        def until(begins: float) -> float:
            return max(begins, min(job.ends, begins + kind.load_s + DRAIN_S))

        moments = [self._drained(at - back) for back in range(len(around.placed))]
        moments += [its.until for its in around.doubled]
        later = sorted({ready, *(its for its in moments if ready < its < job.ends)}) if ready < job.ends else []
        free = (its for its in later if self._fits(at, Doubled(job.key, its, until(its)), around))
        begins = next(free, max(ready, job.ends))
        lacks_from = max(job.ends, job.serves)
        return JobRenewal(job.key, job.ends, submit, begins, begins + kind.load_s, until(begins), lacks_from)

    def _fits(self, at: int, wanted: Doubled, around: Around) -> bool:
        """Whether devices are free all the time; what stops at the end of a step has them until it has drained."""
        for back in range(len(around.placed)):
            step = at - back
            begin = self._begin_of(step) if step >= 0 else -math.inf
            end = self._drained(step + 1) if back else math.inf
            if wanted.begins >= end:
                break
            if not wanted.touches(begin, end):
                continue
            starting = around.starting[-1 - back]
            since, until = max(begin, wanted.begins), min(end, wanted.until)
            for beside in beside_during(around.doubled, since, until):
                if not self._room(step, around.placed[-1 - back], starting + beside, wanted.key, 1):
                    return False
        return True


def beside_during(doubled: Iterable[Doubled], since: float, until: float) -> Iterable[Counter[OptionKey]]:
    """What is doubled at each moment at which that becomes more."""
    every = [its for its in doubled if its.begins < until and its.until > since]
    if not every:
        return (Counter(),)
    moments = {since, *(its.begins for its in every if its.begins > since)}
    return [Counter(its.key for its in every if its.begins <= moment < its.until) for moment in moments]
