"""A small mesh for weeks: faults come at stated rates, the time around them is played, calm time is skipped.

In calm time nobody is away, suspected or behind; `test_weather.py` shows that such time changes nothing in any member,
so playing it would find nothing. Who is alive, and was in reach of a hub for as long as the grace period, over other
hubs or not, must neither be voted against by that hub, nor be evicted there without a tunnel. Where it is evicted
although there is a tunnel, by votes of hubs that were cut off from both and are heard again, it is routed to as before,
until its own word ends that; how often that was, and how long it lasted, is counted.
"""

import heapq
import math
from dataclasses import dataclass

from fabrictool.mesh import detector
from fabrictool.mesh.hubchoice import HubChoice
from fabrictool.mesh.records import WitnessBody
from tests.mesh.large import LargeWorld
from tests.mesh.world import Op

HOUR = 3600.0
SETTLED_S = 3.0
"""Nothing but beats for so long: whatever was said has arrived."""
REST_WITHIN_S = 1800.0
"""After the last fault; longer is an error."""
STEP_S = 1.0


@dataclass(frozen=True)
class Rate:
    """How often a fault comes, and how long it stays; lengths are spread evenly on a logarithmic scale."""

    every_hours: float
    """Of each node, path, site or hub, on average."""
    shortest_s: float
    longest_s: float


RATES = {
    "paths": Rate(14 * 24.0, 0.5, 600.0),
    "one-way": Rate(14 * 24.0, 0.5, 600.0),
    "stall": Rate(7 * 24.0, 0.5, 120.0),
    "site": Rate(14 * 24.0, 1.0, 600.0),
    "hub-crash": Rate(14 * 24.0, 0.5, 600.0),
    "agent-crash": Rate(30 * 24.0, 0.5, 600.0),
    "slow-hub": Rate(7 * 24.0, 10.0, 300.0),
    "clock": Rate(30 * 24.0, 1.0, 1.0),
}
"""Of a node some or all paths, or one direction of these; of a node its process; of a site all that leads out; of hubs
and agents the process; of a hub its speed; of a node its clock.
"""
NEXT_SOON = 0.5
"""How often a fault is followed by another within two minutes: troubles come in company."""


class Weather(LargeWorld):
    """A mesh of hubs of three sites, one provider each, and agents that dial all; with `choose` they keep two."""

    def __init__(self, seed, *, hubs=3, agents=5, rates=RATES, choose=False):
        super().__init__(
            seed, hubs=hubs, agents=agents, dials=None, providers=("alpha", "beta", "gamma"), services=True
        )
        self.choose = choose
        for node in self.nodes.values():
            node.choice = HubChoice(self.rng) if choose and not node.hub else None
        self.rates = rates
        self.script = []
        """What was done, for whoever looks into a finding."""
        self.faults = 0
        self.ends = 0.0
        """When the last fault ends that has begun."""
        self.cuts = {}
        """Pair → how many faults cut it."""
        self.silenced = {}
        """(sender, receiver) → how many faults keep the one from being heard by the other."""
        self.skipped = 0.0
        self.apart_at = {}
        """(hub, session) → when the one could not be reached from the other, or was not alive, the last time."""
        self.evictions = {}
        """(hub, session) → when it was seen evicted there."""
        self.false_votes, self.false_evictions = [], []
        """(when, hub, node, how long it had been in reach): votes of that hub; evictions there, and no tunnel."""
        self.contradicted_s = {}
        """(hub, session, when) → for how long it was evicted there although it was in reach, and had a tunnel."""

    # -- faults ---------------------------------------------------------------------------------------------------

    def pairs(self):
        nodes = list(self.nodes.values())
        return [(one.name, hub.name) for one in nodes for hub in self.hubs if not one.hub or one.name < hub.name]

    def draw(self):
        """Seconds until the next fault, and which it is: (kind, of what)."""
        names = list(self.nodes)
        hubs = [hub.name for hub in self.hubs]
        targets = {
            "paths": names, "one-way": names, "stall": names,
            "site": sorted({node.provider for node in self.nodes.values()}),
            "hub-crash": hubs, "agent-crash": [name for name in names if name not in hubs], "slow-hub": hubs,
            "clock": names,
        }  # fmt: skip
        weights = {kind: len(targets[kind]) / rate.every_hours for kind, rate in self.rates.items()}
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        wait = HOUR * self.rng.expovariate(sum(weights.values()))
        if self.rng.random() < NEXT_SOON:
            wait = self.rng.uniform(0.0, 120.0)
        return wait, kind, self.rng.choice(targets[kind])

    def strike(self, kind, target):
        rate = self.rates[kind]
        lasts = math.exp(self.rng.uniform(math.log(rate.shortest_s), math.log(rate.longest_s)))
        self.faults += 1
        self.script.append((round(self.now, 3), kind, target, round(lasts, 3)))
        self.ends = max(self.ends, self.now + lasts)
        match kind:
            case "paths":
                pairs = [pair for pair in self.pairs() if target in pair]
                self._cut_for(self.rng.sample(pairs, self.rng.randint(1, len(pairs))), lasts)
            case "one-way":
                pairs = [pair for pair in self.pairs() if target in pair]
                chosen = self.rng.sample(pairs, self.rng.randint(1, len(pairs)))
                others = [one if other == target else other for one, other in chosen]
                says = self.rng.random() < 0.5
                self._mute_for([(target, other) if says else (other, target) for other in others], lasts)
            case "site":
                inside = [node.name for node in self.nodes.values() if node.provider == target]
                pairs = [pair for pair in self.pairs() if (pair[0] in inside) != (pair[1] in inside)]
                self._cut_for(pairs, lasts)
            case "stall":
                self.do(Op(self.now, "stall", target, lasts))
            case "slow-hub":
                self.nodes[target].slow += (slower := self.rng.uniform(0.1, 2.5))
                self.after(lasts, self._slow, target, -slower)
            case "clock":
                node = self.nodes[target]
                node.skew = max(-250.0, min(250.0, node.skew + self.rng.choice([-200.0, 200.0])))
            case _:
                self.do(Op(self.now, self.rng.choice(["kill", "power"]), target))
                self.after(lasts, self._comes_back, target, self.rng.choice(["restart", "start"]))

    def _cut_for(self, pairs, lasts):
        for pair in pairs:
            self.cuts[pair] = self.cuts.get(pair, 0) + 1
            self.cut.add(frozenset(pair))
        self.after(lasts, self._heal, pairs)

    def _heal(self, pairs):
        for pair in pairs:
            self.cuts[pair] -= 1
            if not self.cuts[pair]:
                self.heal({frozenset(pair)})

    def _mute_for(self, ways, lasts):
        for way in ways:
            self.silenced[way] = self.silenced.get(way, 0) + 1
            self.muted.add(way)
        self.after(lasts, self._unmute, ways)

    def _unmute(self, ways):
        for way in ways:
            self.silenced[way] -= 1
            if not self.silenced[way]:
                self.hear_again({way})

    def _slow(self, name, seconds):
        self.nodes[name].slow += seconds
        if abs(self.nodes[name].slow) < 1e-9:
            self.nodes[name].slow = 0.0

    def _comes_back(self, name, how):
        node = self.nodes[name]
        if not node.alive:
            self.do(Op(self.now, "start" if node.ended else how, name))

    # -- who can be reached, and who is evicted -------------------------------------------------------------------

    def look(self):
        """Who is apart from whom now, and who is evicted somewhere since the last look."""
        up = [node for node in self.nodes.values() if node.alive and not node.now_stalled()]
        edges = {node.name: [] for node in up}
        for one, other in self.pairs():
            if one in edges and other in edges and self.reachable(one, other):
                edges[one].append(other)
                edges[other].append(one)
        for hub in self.hubs:
            reached = self._reached(hub, edges) if hub.name in edges else set()
            for node in self.nodes.values():
                if node.name not in reached:
                    self.apart_at[hub.name, node.name] = self.now
            if hub.name in edges:
                self._look_at(hub)

    def _reached(self, hub, edges):
        """Over other hubs too, never over an agent: agents carry nothing."""
        reached, todo = {hub.name}, [hub.name]
        while todo:
            for name in edges[todo.pop()]:
                if name not in reached:
                    reached.add(name)
                    if self.nodes[name].hub:
                        todo.append(name)
        return reached

    def _look_at(self, hub):
        registry = hub.member.registry
        for node in self.nodes.values():
            if not node.alive or node is hub:
                continue
            where = hub.name, node.session
            if not registry.evicted(node.session):
                self.evictions.pop(where, None)
                continue
            since = self.evictions.setdefault(where, self.now)
            if self._together(hub, node) <= detector.GRACE_S:
                continue
            if node.session in hub.links:
                self.contradicted_s[*where, since] = self.now - since + STEP_S
            elif since == self.now:
                self.false_evictions.append((round(self.now, 3), hub.name, node.name, self._together(hub, node)))

    def _together(self, hub, node):
        """For how long it has been in reach, and alive."""
        return self.now - self.apart_at.get((hub.name, node.name), -math.inf)

    def check_change(self, node, record):
        """Whether a hub votes against somebody that it could reach."""
        super().check_change(node, record)
        body = record.body
        if isinstance(body, WitnessBody) and body.votes and body.session == node.session:
            for suspect in self.nodes.values():
                if suspect.alive and suspect.session == body.suspect:
                    together = self._together(node, suspect)
                    if together > detector.GRACE_S:
                        self.false_votes.append((round(self.now, 3), node.name, suspect.name, together))

    # -- time -----------------------------------------------------------------------------------------------------

    def live(self, hours):
        """So long, with all that comes to pass in it."""
        end = self.now + HOUR * hours
        wait, kind, target = self.draw()
        strikes = self.now + wait
        while self.now < end:
            rest_by = max(self.ends, self.now) + REST_WITHIN_S
            while self.now < strikes and not self.calm():
                assert self.now < rest_by, f"no rest after {self.script[-10:]}"
                self._play(min(strikes, self.now + STEP_S))
            self.skip(max(0.0, min(strikes, end + 1.0) - self.now))
            if self.now >= end:
                return
            self.strike(kind, target)
            self.look()
            wait, kind, target = self.draw()
            strikes = self.now + wait
            self._play(min(strikes, self.now + STEP_S))

    def _play(self, until):
        self.run_until(until)
        self.look()

    def calm(self):
        """Nobody is away, suspected or behind, and nothing but beats was said for a while."""
        if self.octets != getattr(self, "_octets_then", -1):
            self._octets_then, self._quiet_since = self.octets, self.now
        if self.now - self._quiet_since < SETTLED_S or self.now < self.ends or self.cut or self.muted:
            return False
        for node in self.nodes.values():
            if not node.alive or node.now_stalled() or node.slow:
                return False
            missing = [hub for hub in self.hubs_of(node) if hub.session not in node.links]
            if missing and (node.choice is None or {hub.name for hub in missing} & node.wanted_hubs()):
                return False
            lost, held = node.member.detector._lost, node.member.holders.held
            if any(not entry.voted for session, entry in lost.items() if session not in held):
                return False
        return len(set(self.roots().values())) == 1

    def skip(self, seconds):
        """Calm time: what is planned comes later by it, and all have heard from each other meanwhile."""
        self.now += seconds
        self.skipped += seconds
        self.events = [(when + seconds, *rest) for when, *rest in self.events]
        heapq.heapify(self.events)
        for node in self.nodes.values():
            for link in node.links.values():
                link.heard[node.name] += seconds
            if node.member.detector._ticked_at is not None:
                node.member.detector._ticked_at += seconds

    def node_hours(self):
        return self.now / HOUR * len(self.nodes)
