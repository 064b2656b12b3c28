"""What a schedule comes to where jobs end: replica by replica and moment by moment; shares no code with the planner.

All times are seconds from the beginning of the horizon.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from tests.planner.plain_judge import DRAIN, HOUR, Fabric

SLACK = 240.0
"""Of draining, and of a scheduler's warning that may come early."""
NEVER = float("inf")


@dataclass
class Replica:
    """One that a schedule has, with the jobs that it was, one after the other."""

    key: tuple
    ends: float
    serves: float = -NEVER
    gaps: list = field(default_factory=list)
    """(from, until) of times in which it does not serve."""
    since: int = -1
    """The first step in which it counts."""
    until: float = NEVER
    """When it is stopped."""

    def ready(self, moment, now):
        """Nobody can change what was before now."""
        return moment < now or not any(begin <= moment < end for begin, end in self.gaps)


@dataclass
class Course(Fabric):
    """A fabric whose jobs end: walltimes by pool, and when those end that run (by key)."""

    walltimes: dict = None
    known: dict = None
    unasked: tuple = ()

    def lengths(self, pool, number):
        """Of jobs that begin together; of one the mean, of more evenly spread over the last 15 of 100."""
        walltime = self.walltimes.get(pool, NEVER)
        if not 1800.0 <= walltime < NEVER:
            return [walltime] * number
        return [walltime * (0.85 + 0.15 * (at + 0.5) / number) for at in range(number)]

    def run(self, placements, running):
        """Follows all replicas; fills `replicas`, `doubled` (key, begin, end), `renewals` and `begun`, by step."""
        number = len(placements)
        held = {-1: Counter(running)} | {at: Counter(its) for at, its in enumerate(placements)}
        loading = {at: Counter() for at in range(-1, number)}
        self.held, self.starting, self.doubled, self.renewals, self.begun = held, loading, [], [], []
        self.replicas = []
        for key, count in running.items():
            ends = [*self.known.get(key, ()), *[NEVER] * count][:count]
            self.replicas += [Replica(key, end) for end in ends]
        for at in range(number):
            self.stop(at)
            begun = self.started(at, held, loading)
            self.begun.append(begun)
            for start in sorted(set(begun)):
                key, begins, serves = start
                for length in self.lengths(self.kinds[key].pool, begun.count(start)):
                    gaps = [(at * self.seconds, serves)] if serves > at * self.seconds else []
                    self.replicas.append(Replica(key, begins + length, serves, gaps, since=at))
            self.renew(at)

    def takes(self, key, counts, step, since):
        first = max(since, step * self.seconds) if step >= 0 else since
        return self.throughout(key, counts, step, first, self.drained(step + 1))

    def throughout(self, key, counts, step, since, until):
        """Whether one more stands beside these and what is doubled, at every moment of that time."""
        moments = {since, *(its for _, *both in self.doubled for its in both if since < its < until)}
        return all(self.stands(key, counts + self.active(moment) + Counter([key]), step) for moment in moments)

    def active(self, moment):
        return Counter(its for its, since, end in self.doubled if since <= moment < end)

    def stands(self, key, counts, step):
        """In its own pool; a limit counts all."""
        mine = Counter({its: n for its, n in counts.items() if self.kinds[its].pool == self.kinds[key].pool})
        return self.fits(mine, step) and self.devices(counts) <= self.most

    def stop(self, at):
        begin = at * self.seconds
        for key, count in (self.held[at - 1] - self.held[at]).items():
            mine = [its for its in self.replicas if its.key == key and its.until == NEVER]
            loading = sorted((its for its in mine if its.serves > begin), key=lambda its: (-its.serves, its.ends))
            serving = sorted((its for its in mine if its.serves <= begin), key=lambda its: its.ends)
            for its in [*loading, *serving][:count]:
                its.until = begin

    def renew(self, at):
        begin, end = at * self.seconds, (at + 1) * self.seconds
        renewed = []
        while True:
            ending = [its for its in self.replicas if its.until == NEVER and its.ends < end]
            if not ending:
                break
            replica = min(ending, key=lambda its: (its.ends, self.turn(its.key), its.serves))
            kind, ends = self.kinds[replica.key], replica.ends
            wait = self.wait.get(kind.pool, 0.0)
            lead = min(wait + kind.load + SLACK, self.walltimes.get(kind.pool, NEVER) * 2 / 3)
            lead = 0.0 if kind.pool in self.unasked else lead
            ready = max(self.now, ends - lead) + wait
            moments = {ready, *(self.drained(step) for step in range(at + 1)), *(until for _, _, until in self.doubled)}
            able = [its for its in sorted(moments) if ready <= its < ends and self.free(replica.key, its, ends)]
            begins = able[0] if able else max(ready, ends)
            serves = begins + kind.load
            until = min(ends, serves + DRAIN)
            if begins < until:
                self.doubled.append((replica.key, begins, until))
            if serves > ends:
                replica.gaps.append((max(ends, replica.serves), serves))
            renewed.append((replica.key, ends - begin, begins - begin, serves - begin))
            replica.serves, replica.ends = serves, begins + self.lengths(kind.pool, 1)[0]
        self.renewals.append(renewed)

    def free(self, key, begins, ends):
        """Whether there are devices for one more until it serves and the one before has drained."""
        until = min(ends, begins + self.kinds[key].load + DRAIN)
        for step in self.held:
            first = max(begins, step * self.seconds) if step >= 0 else begins
            last = min(until, self.drained(step + 1))
            counts = self.held[step] + self.starting[step]
            if first < last and not self.throughout(key, counts, step, first, last):
                return False
        return True

    def judged(self, placements, rates, running):
        """As that of `Fabric`, with what ends; `run` was called before."""
        moments = {its for replica in self.replicas for gap in replica.gaps for its in gap} | {self.now}
        before, cost, lacks, unserved = Counter(running), 0.0, 0.0, []
        for key, begins, until in self.doubled:
            cost += self.kinds[key].price * (until - begins) / HOUR
        for at, placed in enumerate(map(Counter, placements)):
            begin, end = at * self.seconds, (at + 1) * self.seconds
            cost += sum(n * self.kinds[key].price * DRAIN / HOUR for key, n in (before - placed).items())
            cost += sum(self.kinds[key].price * max(0.0, begin - begins) / HOUR for key, begins, _ in self.begun[at])
            cost += sum(self.kinds[key].price * n for key, n in placed.items()) * self.seconds / HOUR
            parts = sorted({begin, end, *(its for its in moments if begin < its < end)})
            lost = 0.0
            for first, last in itertools.pairwise(parts):
                middle = (first + last) / 2
                there = [its for its in self.replicas if its.until > middle and its.since <= at]
                ready = Counter(its.key for its in there if its.ready(middle, self.now))
                for model, rate in rates[at].items():
                    room = sum(n * self.kinds[key].rate for key, n in ready.items() if self.kinds[key].model == model)
                    lost += max(0.0, rate - room) * (last - first)
                    lacks += self.priority[model] * max(0.0, rate - room) * (last - first)
            unserved.append(lost / self.seconds)
            before = placed
        return lacks, cost, unserved
