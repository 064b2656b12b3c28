"""Meshes of a thousand nodes and more on virtual time: `world.py` from a state in which all have joined long ago.

What is added to the small world: an agent dials some of the hubs, not all; every message costs its receiver and its
sender time, one after the other, as in a process of one core; a lost segment comes after TCP's retransmissions, each
twice as late as the one before. What is left out is the joining, which costs the square of the number of nodes: one map
is merged record by record by the real core, and the others begin as copies of it.
"""

from collections import deque
from dataclasses import dataclass

from fabrictool.mesh.member import BEAT_SECONDS, Member
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody, seal
from fabrictool.mesh.registry import Registry
from fabrictool.mesh.transport.hublinks import RETRY_MAX_S
from fabrictool.mesh.transport.reach import CONNECT_SECONDS
from tests.mesh.world import EPOCH, FEDERATION, Link, VirtualNode, World, _sign

YEARS = 10 * 365 * 86400.0
"""Certificates end in other tests."""
HANDSHAKE_ROUNDS = 3
"""Round trips until a tunnel is up: TCP, TLS 1.3, and the first frame of each side."""
RTO_S = 0.2
"""What Linux waits at least before it sends a segment again; twice as long each further time."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the one core that a process runs on."""

    receive: float = 0.0
    """Of any message: TLS, the frame, and to find out that there is nothing new in it."""
    merge: float = 0.0
    """Of a record that is new: its signature, and what follows."""
    send: float = 0.0


class Layer:
    """A mapping that begins as another one, which it never changes: ten thousand copies of a map have no room."""

    def __init__(self, base):
        self._base, self._own = base, {}

    def get(self, key, default=None):
        value = self._own.get(key, self)
        return self._base.get(key, default) if value is self else value

    def __getitem__(self, key):
        value = self._own.get(key, self)
        return self._base[key] if value is self else value

    def __setitem__(self, key, value):
        self._own[key] = value

    def __contains__(self, key):
        return key in self._own or key in self._base

    def pop(self, key):
        """A record is only taken out to be replaced here: who forgets needs a copy of its own."""
        return self[key]

    def __len__(self):
        return len(self._base)


class LargeNode(VirtualNode):
    """Dials as `transport/node.py` does: TCP repeats a lost SYN after 1 and 3 s, and 5 s are waited for an answer."""

    def __init__(self, world, name, provider, hub):
        super().__init__(world, name, provider, hub)
        self.slow = 0.0
        """Seconds that whatever comes or goes waits more."""
        self.busy = 0.0
        """Until when the core has work."""
        self.working = False
        self.inbox = deque()

    def joined_long_ago(self, template, *, layered):
        """Alive, with a replica of `template`'s map."""
        issued = self.world.identity.issued[self.number]
        self.member = Member(
            self.world.identity, session=issued.session, sign=lambda m: _sign(issued.secret, m),
            chain=self.world.identity.chain(self.number), hub=self.hub,
        )  # fmt: skip
        _begin_as(self.member.registry, template, layered=layered)
        own = (self.member.registry.get(key) for key in [self.session, self.session + self.service.to_bytes(16, "big")])
        self.member._own = {record.key: record.body for record in own if record is not None}
        self.alive = True

    def dial(self, member, hub_name, tried_for=0.0):
        if not self.alive or self.member is not member:
            return
        world, hub = self.world, self.world.nodes[hub_name]
        if self.now_stalled():
            world.at(self.stalled_until, self.dial, member, hub_name)
        elif self._leaves_out(hub):
            world.after(BEAT_SECONDS, self.dial, member, hub_name)
        elif world.reachable(self.name, hub_name) and not hub.now_stalled():
            if hub.alive:
                world.after(HANDSHAKE_ROUNDS * 2 * world.latency[1], self._connected, member, hub, hub.member)
            world.after(world.rng.uniform(0.5, 1.0) * BEAT_SECONDS, self.dial, member, hub_name)
        elif tried_for == 0.0:
            world.after(1.0, self.dial, member, hub_name, 1.0)
        elif tried_for == 1.0:
            world.after(2.0, self.dial, member, hub_name, 3.0)
        else:
            world.after(CONNECT_SECONDS - 3.0 + world.rng.uniform(0.5, 1.0) * RETRY_MAX_S, self.dial, member, hub_name)

    def _leaves_out(self, hub):
        if self.choice is not None and hub.name not in self.wanted_hubs():
            return True
        return hub.alive and (hub.session in self.links or (self.hub and hub.session < self.session))

    def _connected(self, member, hub, hubs_member):
        """After the handshakes, if both are still there and nobody was faster."""
        same = self.member is member and hub.member is hubs_member and self.alive and hub.alive
        if same and hub.session not in self.links and self.world.reachable(self.name, hub.name):
            self.world.connect(self, hub)


class LargeWorld(World):
    """`hubs` of `providers` in turn, all linked to each other; each agent dials `dials` hubs of different providers."""

    # Wide: what a mesh is made of, and what its network is like.
    def __init__(
        self, seed, *, hubs=16, agents=1000, dials=2, providers=("alpha", "beta", "gamma", "delta"), loss=0.001,
        latency=(0.004, 0.015), costs=Costs(), layered=False, services=False,
    ):  # fmt: skip
        super().__init__(seed, hubs=0, agents=0, loss=loss)
        self.latency, self.costs = latency, costs
        for i in range(hubs):
            self.hubs.append(self.add(f"h{i}", providers[i % len(providers)], hub=True))
        for i in range(agents):
            self.add(f"a{i}", providers[i % len(providers)], hub=False)
        self.dialled = {node.name: self._choice(node, dials) for node in self.nodes.values()}
        template, places = self._joined(services)
        for node in self.nodes.values():
            node.joined_long_ago(template, layered=layered and not node.hub)
        for node in self.nodes.values():
            for hub in self.dialled[node.name]:
                if not node.hub or node.session < hub.session:
                    self._linked_long_ago(node, hub)
        for node in self.nodes.values():
            gossip = node.member.gossip
            gossip._places = places if layered else dict(places)
            for state in gossip._peers.values():
                state.has_chain = (1 << len(places)) - 1
            self.after(self.rng.uniform(0.0, BEAT_SECONDS), node.tick, node.member)
            for hub in self.dialled[node.name]:
                self.after(self.rng.uniform(0.0, BEAT_SECONDS), node.dial, node.member, hub.name)

    def session_ends(self):
        return EPOCH + self.now + YEARS

    def add(self, name, provider, *, hub):
        self.nodes[name] = LargeNode(self, name, provider, hub)
        return self.nodes[name]

    def hubs_of(self, node):
        return self.dialled[node.name]

    def _choice(self, node, dials):
        """Which hubs a node dials: a hub all others, an agent one of its own provider and then of others'."""
        others = [hub for hub in self.hubs if hub is not node]
        if node.hub or dials is None:
            return others
        chosen = [self.rng.choice([hub for hub in others if hub.provider == node.provider] or others)]
        while len(chosen) < min(dials, len(others)):
            providers = {hub.provider for hub in chosen}
            left = [hub for hub in others if hub not in chosen]
            chosen.append(self.rng.choice([hub for hub in left if hub.provider not in providers] or left))
        return chosen

    def _joined(self, services):
        """One map with everybody's records, and a number for each session."""
        template = Registry(self.identity)
        wall = EPOCH + self.now
        for node in self.nodes.values():
            role = "gateway" if node.hub else "agent"
            node.number = self.identity.issue(node.provider, role, self.session_ends())
            issued, chain = self.identity.issued[node.number], self.identity.chain(node.number)
            node.service = self.next_service()
            bodies = [NodeBody(
                federation=FEDERATION, session=issued.session, lifecycle=Lifecycle.SERVING, version=1,
                role=issued.claims.role, fabric="f", provider=node.provider, site="s", cluster="c", node=node.name,
                certificate=issued.certificate,
            )]  # fmt: skip
            if services and not node.hub:
                bodies.append(ServiceBody(
                    federation=FEDERATION, session=issued.session, service=node.service.to_bytes(16, "big"),
                    lifecycle=Lifecycle.SERVING, version=1, replica=f"m/{node.name}", model="m", engine="reference",
                ))  # fmt: skip
            for body in bodies:
                template.merge(seal(body, lambda m, s=issued.secret: _sign(s, m), chain).envelope, wall=wall)
        certificates = [self.identity.of[session].certificate for session in template.sessions]
        return template, dict(zip(template.sessions, enumerate(certificates), strict=True))

    def _linked_long_ago(self, node, hub):
        ends = (node, hub)
        link = Link(ends, self._latency(), {n.name: 0.0 for n in ends}, {n.name: n.session for n in ends}, self.now)
        for end in ends:
            end.links[link.peer(end)] = link
            end.member.link_up(
                link.peer(end), wall=end.wall(), hub=link.other(end).hub
            )  # both have the same: nothing to compare

    # -- network --------------------------------------------------------------------------------------------------

    def _latency(self):
        return self.rng.uniform(*self.latency)

    def carry(self, link, sender, deliver):
        node = self.nodes[sender]
        if not link.open:
            return
        if (self.cut or self.muted) and not self.hears(link.other(node).name, sender):
            link.waiting.append((sender, deliver))
            return
        node.busy = max(node.busy, self.now) + self.costs.send
        receiver = link.other(node)
        delay, rto = link.latency + node.slow + receiver.slow, RTO_S + 2 * link.latency
        while self.rng.random() < self.loss:
            delay, rto = delay + rto, 2 * rto
        when = max(node.busy + delay, link.arrives.get(receiver.name, 0.0))
        link.arrives[receiver.name] = when
        self.messages += 1
        self.at(when, self._arrive, link, receiver, receiver.member, deliver)

    def _arrive(self, link, receiver, member, deliver):
        if receiver.now_stalled():
            self.at(receiver.stalled_until, self._arrive, link, receiver, member, deliver)
            return
        receiver.inbox.append((link, member, deliver))
        if not receiver.working:
            receiver.working = True
            self.at(max(self.now, receiver.busy) + self.costs.receive, self._work, receiver)

    def _work(self, receiver):
        """One message after the other: what a turn sends goes out before the next is looked at."""
        link, member, deliver = receiver.inbox.popleft()
        super()._arrive(link, receiver, member, deliver)
        if receiver.inbox:
            self.at(max(self.now, receiver.busy) + self.costs.receive, self._work, receiver)
        else:
            receiver.working = False

    def check_change(self, node, record):
        node.busy = max(node.busy, self.now) + self.costs.merge
        super().check_change(node, record)
        self.changes[-1] = (round(node.busy, 6), *self.changes[-1][1:])


def _begin_as(registry, template, *, layered):
    """`layered`: for runs in which nobody joins, leaves, votes or is forgotten; all else is shared then."""
    wrap = Layer if layered else dict
    for name in ("_records", "_sessions"):
        setattr(registry, name, wrap(getattr(template, name)))
    for name in ("_sum", "_keys"):
        setattr(registry._digests, name, getattr(template._digests, name))
    registry._digests._sums = list(template._digests._sums)
    for name in ("_keys_of", "_sessions_of", "_hub_sessions", "_ends"):
        setattr(registry, name, getattr(template, name))
    if not layered:
        registry._digests._keys = {bucket: set(keys) for bucket, keys in template._digests._keys.items()}
        registry._keys_of = {session: set(keys) for session, keys in template._keys_of.items()}
        registry._sessions_of = {provider: set(held) for provider, held in template._sessions_of.items()}
        registry._hub_sessions, registry._ends = set(template._hub_sessions), list(template._ends)
