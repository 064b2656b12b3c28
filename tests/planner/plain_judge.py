"""What a schedule comes to, replica by replica and minute by minute: shares no code with the planner.

All times are whole minutes from the beginning of the horizon.
"""

from collections import Counter
from dataclasses import dataclass

HOUR = 3600.0
DRAIN = 60.0


@dataclass
class Kind:
    """One option of the fabric."""

    model: str
    pool: str
    devices: int
    rate: float
    load: float
    price: float


@dataclass
class Fabric:
    """Kinds by key, (nodes, devices of each) by pool, and what a start has to reckon with."""

    kinds: dict
    pools: dict
    seconds: float
    away: list
    """By step: pools that are not there."""
    now: float = 0.0
    wait: dict = None
    priority: dict = None
    most: float = float("inf")
    """Devices, in each step."""

    @classmethod
    def of(cls, instance, seconds, number, *, away=(), now=0.0, wait=None, most=float("inf")):
        kinds = {
            o.key: Kind(o.model, o.pool.cluster, o.tp, o.levels[-1].rate, o.start_s, o.cost) for o in instance.options
        }
        pools = {p.cluster: (p.nodes, p.devices_per_node) for p in instance.pools}
        gone = [{cluster for cluster, _ in its} for its in away] or [set() for _ in range(number)]
        priority = {need.model: need.priority for need in instance.needs}
        return cls(kinds, pools, seconds, gone, now, wait or {}, priority, most)

    def fits(self, counts, step):
        """Whether all of them stand in a step: largest first into nodes, exact for powers of two."""
        if self.devices(counts) > self.most:
            return False
        for pool, (nodes, size) in self.pools.items():
            blocks = sorted(
                (
                    self.kinds[key].devices
                    for key, n in counts.items()
                    for _ in range(n)
                    if self.kinds[key].pool == pool
                ),
                reverse=True,
            )
            if blocks and step >= 0 and pool in self.away[step]:
                return False
            free = [size] * nodes
            for block in blocks:
                node = next((i for i, room in enumerate(free) if room >= block), None)
                if node is None:
                    return False
                free[node] -= block
        return True

    def drained(self, at):
        """From when on what stops at the beginning of a step holds nothing."""
        return DRAIN + (max(0.0, self.now) if at == 0 else at * self.seconds)

    def devices(self, counts):
        return sum(self.kinds[key].devices * n for key, n in counts.items())

    def starts(self, placements, running):
        """By step: (key, when its devices are held, when it serves) of each replica that starts for it."""
        number = len(placements)
        held = {-1: Counter(running)} | {at: Counter(its) for at, its in enumerate(placements)}
        loading = {at: Counter() for at in range(-1, number)}
        return [self.started(at, held, loading) for at in range(number)]

    def takes(self, key, counts, step, since):
        """Whether one more of a kind stands beside these in a step, from then on."""
        return self.fits(counts + Counter([key]), step)

    def turn(self, key):
        """Who chooses first."""
        return -self.priority[self.kinds[key].model], -self.kinds[key].load, key

    def started(self, at, held, loading):
        """Of one step; what holds devices before it is added to `loading`. Both by step, from -1 on."""
        rising = held[at] - held[at - 1]
        begun = []
        for key in sorted(rising, key=self.turn):
            kind = self.kinds[key]
            for _ in range(rising[key]):
                begins = None
                wanted = max(at * self.seconds - kind.load, self.now + self.wait.get(kind.pool, 0.0))
                for step in range(at - 1, -2, -1):
                    if not self.takes(key, held[step] + loading[step], step, wanted):
                        begins = self.drained(step + 1)
                        break
                    if step >= 0 and self.drained(step) <= wanted:
                        break
                begins = wanted if begins is None else max(begins, wanted)
                for step in range(-1, at):
                    if step >= 0 and kind.pool in self.away[step]:
                        continue
                    loading[step][key] += begins < self.drained(step + 1)
                begun.append((key, begins, begins + kind.load))
        return begun

    def judged(self, placements, rates, running):
        """(unserved by priority, what it comes to) of the whole horizon, and unserved requests/s by step.

        `rates`: by step and model.
        """
        starts, seconds = self.starts(placements, running), self.seconds
        before, cost, lacks, unserved = Counter(running), 0.0, 0.0, []
        not_ready = []
        for at, placed in enumerate(map(Counter, placements)):
            for key, n in (before - placed).items():
                # What would serve last is stopped first.
                mine = sorted((its for its in not_ready if its[0] == key), key=lambda its: -its[1])
                for its in mine[:n]:
                    not_ready.remove(its)
                cost += n * self.kinds[key].price * DRAIN / HOUR
            for key, begins, serves in starts[at]:
                cost += self.kinds[key].price * max(0.0, at * seconds - begins) / HOUR
                not_ready.append((key, serves))
            cost += sum(self.kinds[key].price * n for key, n in placed.items()) * seconds / HOUR
            lost = 0.0
            begin, end = at * seconds, (at + 1) * seconds
            while begin < end:
                middle = begin + 30.0
                ready = placed - Counter(key for key, serves in not_ready if serves > middle >= self.now)
                for model, rate in rates[at].items():
                    room = sum(n * self.kinds[key].rate for key, n in ready.items() if self.kinds[key].model == model)
                    lost += max(0.0, rate - room) * 60.0
                    lacks += self.priority[model] * max(0.0, rate - room) * 60.0
                begin += 60.0
            unserved.append(lost / seconds)
            not_ready = [its for its in not_ready if its[1] > end]
            before = placed
        return lacks, cost, unserved

    def broken(self, placements, running):
        """What of minute by minute, with what loads and what drains, does not fit; "": all does."""
        starts, seconds = self.starts(placements, running), self.seconds
        held = {-1: Counter(running)} | {at: Counter(its) for at, its in enumerate(placements)}
        minute = min(0.0, self.now)
        while minute < len(placements) * seconds:
            at = int(minute // seconds) if minute >= 0.0 else -1
            there = Counter(held[at])
            for begun in range(at, len(placements)):
                for key, begins, _ in starts[begun]:
                    if begun > at and begins <= minute:
                        there[key] += 1
                    if begun == at and begins > minute:
                        there[key] -= 1  # its devices are still those of what drains
            if at >= 0 and minute < self.drained(at):
                gone = held[at - 1] - held[at]
                there += Counter({key: n for key, n in gone.items() if self.kinds[key].pool not in self.away[at]})
            if not self.fits(there, at):
                return f"minute {minute / 60:.0f}: {there}"
            minute += 60.0
        return ""
