"""The mesh's own core on virtual time and a virtual network: one seed is one run, to the octet.

Links are what TCP gives: in order, sometimes late, sometimes ended by the other side, sometimes silent. Faults come
from a list of operations (`Op`), so that a run that fails can be told as a script, shortened, and run again.

Signatures are keyed hashes here (`FakeIdentity`): what is tested is the protocol, a thousand times, not Ed25519. The
same core with real certificates and sockets is in `test_transport.py` and `test_registry.py`.
"""

import hashlib
import heapq
import random
from dataclasses import dataclass, field, replace

from fabrictool.mesh.gossip import Changed, Refused, Send, Vain
from fabrictool.mesh.hubchoice import HubChoice, LinkedHub
from fabrictool.mesh.identity import Claims, IdentityError, fingerprint
from fabrictool.mesh.member import BEAT_SECONDS, Member, SessionEnded
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody, WitnessBody, signed_bytes
from fabrictool.mesh.sites import SITE_LINKS

EPOCH = 1_800_000_000.0
FEDERATION = "f" * 32
MISSED_BEATS = 3
DAY = 26 * 3600.0


@dataclass(frozen=True)
class FakeSession:
    claims: Claims
    not_after: float
    secret: bytes
    issuer: bytes = b""
    models: tuple[str, ...] = ()
    certificate: bytes = b""

    @property
    def session(self):
        return bytes.fromhex(self.claims.session)

    def verify(self, signature, message):
        return signature == _sign(self.secret, message)


def _sign(secret, message):
    return hashlib.blake2b(message, key=secret).digest()


class FakeIdentity:
    """Issues sessions and verifies their chains: a chain is an index into what was issued."""

    federation = FEDERATION

    def __init__(self):
        self.issued = []
        self.of = {}
        """Session id → what was issued."""

    def issue(self, provider, role, not_after):
        number = len(self.issued)
        session = hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16).hexdigest()
        secret = bytes([7]) * 8 + session.encode()
        return self._keep(FakeSession(Claims(FEDERATION, provider, role, session), not_after, secret))

    def renew(self, number, not_after):
        """Another certificate for the same key."""
        return self._keep(replace(self.issued[number], not_after=not_after))

    def _keep(self, issued):
        number = len(self.issued)
        issued = replace(issued, certificate=fingerprint(self.chain(number)[0]))
        self.issued.append(issued)
        self.of[issued.session] = issued
        return number

    def chain(self, number):
        return (number.to_bytes(4, "big"),)

    def verify(self, chain, *, now):
        number = int.from_bytes(chain[0], "big") if len(chain) == 1 else -1
        if not 0 <= number < len(self.issued):
            raise IdentityError.of("FT6004", "no chain of this world")
        if now > self.issued[number].not_after + 300:
            raise IdentityError.of("FT6005", "expired")
        return self.issued[number]


@dataclass(frozen=True)
class Op:
    """A fault, or its end."""

    at: float
    kind: str
    node: str = ""
    value: float = 0.0
    others: tuple = ()

    def __str__(self):
        extra = f", others={self.others!r}" if self.others else ""
        return f"Op({self.at!r}, {self.kind!r}, {self.node!r}, {self.value!r}{extra})"


@dataclass(eq=False)
class Link:
    """One connection of two runs; each end has heard from the other at some time."""

    ends: tuple
    latency: float
    heard: dict
    sessions: dict
    since: float
    open: bool = True
    arrives: dict = field(default_factory=dict)
    """End → when what was sent to it last arrives: nothing overtakes."""
    waiting: list = field(default_factory=list)
    """Who sent what while the network was cut."""

    def other(self, node):
        return self.ends[0] if self.ends[1] is node else self.ends[1]

    def peer(self, node):
        """The session at the other end."""
        return self.sessions[self.other(node).name]


class VirtualNode:
    def __init__(self, world, name, provider, hub):
        self.world, self.name, self.provider, self.hub = world, name, provider, hub
        self.skew = 0.0
        self.stalled_until = 0.0
        self.alive = False
        self.number = None
        self.member = None
        self.links = {}
        self.ended = []
        self.ranks = {}
        self.service = 0
        self.choice = None

    @property
    def session(self):
        return self.member.session

    def wall(self):
        return EPOCH + self.world.now + self.skew

    def start(self, number=None):
        """A new run; with `number` in the folder of a former one, whose session it has again."""
        role = "gateway" if self.hub else "agent"
        if number is None:
            number = self.world.identity.issue(self.provider, role, self.world.session_ends())
        self.number = number
        issued = self.world.identity.issued[number]
        self.member = Member(
            self.world.identity, session=issued.session, sign=lambda m: _sign(issued.secret, m),
            chain=self.world.identity.chain(number), hub=self.hub,
        )  # fmt: skip
        self.alive, self.links, self.ranks, self.ended = True, {}, {}, []
        self.choice = HubChoice(self.world.rng) if self.world.choose and not self.hub else None
        self.publish_node(Lifecycle.JOIN)
        self.serve()
        self.world.after(BEAT_SECONDS, self.tick, self.member)
        for hub in self.world.hubs_of(self):
            self.world.after(self.world.rng.uniform(0, 0.1), self.dial, self.member, hub.name)

    def publish_node(self, lifecycle):
        self.perform(self.member.publish(NodeBody(
            federation=FEDERATION, session=self.session, lifecycle=lifecycle, version=1, role="gateway" if self.hub else
            "agent", fabric="f", provider=self.provider, site="s", cluster="c", node=self.name,
            addresses=("h:1",) if self.world.site_links and not self.hub else (),
        ), wall=self.wall()))  # fmt: skip

    def publish_service(self, lifecycle, **changes):
        self.perform(self.member.publish(ServiceBody(
            federation=FEDERATION, session=self.session, service=self.service.to_bytes(16, "big"), lifecycle=lifecycle,
            version=1, replica=f"m/{self.name}", model="m", engine="reference", **changes,
        ), wall=self.wall()))  # fmt: skip

    def serve(self):
        self.service = self.world.next_service()
        if not self.hub:
            self.publish_service(Lifecycle.SERVING)
        self.publish_node(Lifecycle.SERVING)

    def dial(self, member, hub_name):
        """For ever, as long as this run lasts; two hubs need one link, and the smaller id dials."""
        if not self.alive or self.member is not member:
            return
        world, hub = self.world, self.world.nodes[hub_name]
        if self.now_stalled():
            world.at(self.stalled_until, self.dial, member, hub_name)
            return
        wants = hub.alive and hub.session not in self.links and not (self.hub and hub.session < self.session)
        wants = wants and (self.choice is None or hub_name in self.wanted_hubs())
        if wants and world.reachable(self.name, hub_name) and not hub.now_stalled():
            world.connect(self, hub)
        world.after(world.rng.uniform(0.5, 1.0) * 1.0, self.dial, member, hub_name)

    def now_stalled(self):
        return self.world.now < self.stalled_until

    def wanted_hubs(self, *, beat=False):
        """Those that an agent dials or stays linked with, as `transport/hublinks.py` asks."""
        links = sorted(self.links.values(), key=lambda link: link.since)
        linked = {other.name: LinkedHub(other.provider) for link in links if (other := link.other(self)).hub}
        providers = {hub.provider for hub in linked.values()}
        providers |= {body.provider for body in self.member.registry.hubs(wall=self.wall())}
        return self.choice.wanted(
            [hub.name for hub in self.world.hubs_of(self)], linked, providers=len(providers), beat=beat
        )

    def choose_hubs(self):
        if self.choice is None:
            return
        wanted = self.wanted_hubs(beat=True)
        for link in list(self.links.values()):
            if link.other(self).hub and link.other(self).name not in wanted:
                self.world.disconnect(link, self.name, "closed")

    def tick(self, member):
        if not self.alive or self.member is not member:
            return
        if self.now_stalled():
            self.world.at(self.stalled_until, self.tick, member)
            return
        now = self.world.now
        for link in list(self.links.values()):
            if now - link.heard[self.name] > BEAT_SECONDS * MISSED_BEATS:
                self.world.disconnect(link, self.name, "silent")
            else:
                root, alone = self.member.registry.root(), self.member.gossip.alone
                self.world.carry(
                    link, self.name, lambda peer, link=link, root=root, alone=alone: peer.beat(link, root, alone=alone)
                )
        self.dial_site()
        self.choose_hubs()
        self.perform(self.member.tick(now=now, wall=self.wall()))
        self.world.after(BEAT_SECONDS, self.tick, member)

    def dial_site(self):
        """The next two of those that can be reached, as `transport/sitelinks.py` does."""
        if not self.world.site_links or self.hub:
            return
        near = []
        for session in self.member.sites.behind(self.session):
            other = self.world.running(session)
            linked = session in self.links
            if linked or (
                other is not None and self.world.reachable(self.name, other.name) and not other.now_stalled()
            ):
                near.append((session, other))
        for session, other in near[:SITE_LINKS]:
            if session not in self.links:
                self.world.connect(self, other)

    def beat(self, link, root, *, alone):
        self.perform(self.member.beat(link.peer(self), root, alone=alone))

    def received(self, link, payload):
        self.perform(self.member.received(link.peer(self), payload, now=self.world.now, wall=self.wall()))

    def perform(self, effects):
        for effect in effects:
            match effect:
                case Changed(record):
                    self.world.check_change(self, record)
                case Refused(_, reason):
                    self.world.refusals.append((self.name, reason))
                case Vain():
                    self.world.vain.append(self.name)
                case SessionEnded(reason):
                    self.ended.append(reason)
                case Send():
                    self.send(effect)
        for send in self.member.flush():
            self.send(send)

    def send(self, send):
        link = self.links.get(send.peer)
        if link is not None:
            self.world.octets += len(send.message)
            self.world.carry(link, self.name, lambda other: other.received(link, send.message))


class World:
    """See the module's docstring."""

    # Wide: the shape of the mesh.
    def __init__(
        self,
        seed,
        *,
        hubs=2,
        agents=4,
        providers=("alpha", "beta", "gamma"),
        loss=0.001,
        site_links=False,
        sites=3,
        choose=False,
    ):
        """`sites`: of how many providers agents there are; `choose`: agents keep to two hubs, and do not dial all."""
        self.choose = choose
        self.site_links = site_links
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.identity = FakeIdentity()
        self.events = []
        self.sequence = 0
        self.services = 0
        self.octets = 0
        self.messages = 0
        self.refusals, self.vain, self.changes = [], [], []
        self.cut = set()
        self.muted = set()
        """(sender, receiver): what the one says the other does not hear, while it hears what that says."""
        self.left = set()
        """Sessions that left of their own accord."""
        self.died = {}
        """Session of a run that ended without a word → when."""
        self.trace = hashlib.blake2b()
        self.nodes = {}
        self.hubs = [self.add(f"h{i}", providers[i % len(providers)], hub=True) for i in range(hubs)]
        for i in range(agents):
            self.add(f"a{i}", providers[i % min(sites, len(providers))], hub=False)
        for node in self.nodes.values():
            node.start()

    def add(self, name, provider, *, hub):
        self.nodes[name] = VirtualNode(self, name, provider, hub)
        return self.nodes[name]

    def running(self, session):
        """The node whose run this is."""
        return next((node for node in self.nodes.values() if node.alive and node.session == session), None)

    def hubs_of(self, node):
        """Those that it dials."""
        return [hub for hub in self.hubs if hub is not node]

    def session_ends(self):
        return EPOCH + self.now + DAY

    def next_service(self):
        self.services += 1
        return self.services

    # -- time and network -----------------------------------------------------------------------------------------

    def at(self, when, action, *arguments):
        self.sequence += 1
        heapq.heappush(self.events, (when, self.sequence, action, arguments))

    def after(self, delay, action, *arguments):
        self.at(self.now + delay, action, *arguments)

    def run_until(self, end):
        while self.events and self.events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
        self.now = end

    def reachable(self, one, other):
        """For a connection to come about; one that stands may carry what goes one way."""
        return self.hears(one, other) and self.hears(other, one)

    def hears(self, receiver, sender):
        return frozenset((sender, receiver)) not in self.cut and (sender, receiver) not in self.muted

    def connect(self, dialler, hub):
        latency = self._latency()
        ends = (dialler, hub)
        link = Link(ends, latency, {n.name: self.now for n in ends}, {n.name: n.session for n in ends}, self.now)
        for node in ends:
            former = node.links.get(link.peer(node))
            if former is not None:
                self.disconnect(former, node.name, "closed")
            node.links[link.peer(node)] = link
        for node in ends:
            node.perform(node.member.link_up(link.peer(node), wall=node.wall(), hub=link.other(node).hub))

    def _latency(self):
        return self.rng.uniform(0.0001, 0.015)

    def disconnect(self, link, by, how):
        """One end closes: the other hears of it where the network allows."""
        if not link.open:
            return
        link.open = False
        closing = self.nodes[by]
        other = link.other(closing)
        self._lose(closing, link, how)
        if self.hears(other.name, by):
            self.after(link.latency, self._lose, other, link, "closed")
        else:
            wait = MISSED_BEATS * BEAT_SECONDS + BEAT_SECONDS - (self.now - link.heard[other.name])
            self.after(max(link.latency, wait), self._lose, other, link, "silent")

    def _lose(self, node, link, how):
        if node.alive and node.session == link.sessions[node.name] and node.links.get(link.peer(node)) is link:
            if node.now_stalled():
                self.at(node.stalled_until, self._lose, node, link, how)
                return
            del node.links[link.peer(node)]
            node.member.link_down(link.peer(node), how, now=self.now)
            node.perform(())

    def carry(self, link, sender, deliver):
        """In order, late now and then; what the network does not carry waits, as long as both ends hold on to it."""
        receiver = link.other(self.nodes[sender])
        if not link.open:
            return
        if not self.hears(receiver.name, sender):
            link.waiting.append((sender, deliver))
            return
        delay = link.latency + (0.2 if self.rng.random() < self.loss else 0.0)
        when = max(self.now + delay, link.arrives.get(receiver.name, 0.0))
        link.arrives[receiver.name] = when
        self.messages += 1
        self.at(when, self._arrive, link, receiver, receiver.member, deliver)

    def _arrive(self, link, receiver, member, deliver):
        if not receiver.alive or receiver.member is not member or receiver.links.get(link.peer(receiver)) is not link:
            return
        if receiver.now_stalled():
            self.at(receiver.stalled_until, self._arrive, link, receiver, member, deliver)
            return
        link.heard[receiver.name] = self.now
        deliver(receiver)

    # -- faults ---------------------------------------------------------------------------------------------------

    def do(self, op):
        getattr(self, f"op_{op.kind}")(op)

    def op_kill(self, op):
        """kill -9: its connections are closed by its kernel."""
        self._stop(op.node, closes=True)

    def op_power(self, op):
        """Power loss: nobody says a word."""
        self._stop(op.node, closes=False)

    def op_start(self, op):
        """Anew, with a session of its own."""
        if not self.nodes[op.node].alive:
            self.nodes[op.node].start()

    def op_restart(self, op):
        """In the folder of its former run: the same session again."""
        node = self.nodes[op.node]
        if not node.alive and not node.ended and node.number is not None and node.number not in self.left:
            self.died.pop(node.session, None)
            node.start(node.number)

    def op_leave(self, op):
        node = self.nodes[op.node]
        if node.alive and not node.now_stalled():
            if not node.hub:
                node.publish_service(Lifecycle.DOWN)
            node.publish_node(Lifecycle.LEFT)
            self.left.add(node.number)
            self.after(0.5, self._stop, op.node)

    def op_cut(self, op):
        for other in op.others:
            self.cut.add(frozenset((op.node, other)))

    def op_heal(self, op):
        self.heal({frozenset((op.node, other)) for other in op.others})

    def heal(self, pairs):
        self.cut -= pairs
        self._carry_on()

    def hear_again(self, pairs):
        self.muted -= pairs
        self._carry_on()

    def _carry_on(self):
        """What waited comes in the order in which it was sent; what still cannot come goes on waiting."""
        for node in self.nodes.values():
            for link in node.links.values():
                waiting, link.waiting = link.waiting, []
                for sender, deliver in waiting:
                    self.carry(link, sender, deliver)

    def op_mute(self, op):
        """What it says to these is lost."""
        self.muted |= {(op.node, other) for other in op.others}

    def op_deafen(self, op):
        """What these say to it is lost."""
        self.muted |= {(other, op.node) for other in op.others}

    def op_clear(self, op):
        self.hear_again({pair for other in op.others for pair in ((op.node, other), (other, op.node))})

    def op_stall(self, op):
        self.nodes[op.node].stalled_until = max(self.nodes[op.node].stalled_until, self.now + op.value)

    def op_clock(self, op):
        self.nodes[op.node].skew += op.value

    def op_renew(self, op):
        node = self.nodes[op.node]
        if node.alive and not node.now_stalled():
            left = node.number in self.left
            node.number = self.identity.renew(node.number, EPOCH + self.now + DAY)
            self.left |= {node.number} if left else set()
            node.perform(node.member.renew(self.identity.chain(node.number), wall=node.wall()))

    def op_engine(self, op):
        """The engine dies and comes back as another service."""
        node = self.nodes[op.node]
        if node.alive and not node.hub and not node.now_stalled():
            node.publish_service(Lifecycle.DOWN)
            node.serve()

    def op_drain(self, op):
        node = self.nodes[op.node]
        if node.alive and not node.hub and not node.now_stalled():
            node.publish_service(Lifecycle.SERVING, accepting=False)

    def _stop(self, name, *, closes=True):
        node = self.nodes[name]
        if not node.alive:
            return
        if node.number not in self.left:
            self.died[node.session] = self.now
        node.alive = False
        for link in list(node.links.values()):
            if closes:
                self.disconnect(link, name, "closed")

    # -- what must hold at every step -----------------------------------------------------------------------------

    def check_change(self, node, record):
        """Invariants 2, 3 and 10 of mesh.md §8.1, at each change of each replica."""
        body = record.body
        owner = self.identity.of[body.session]
        assert owner.verify(record.envelope.signature, signed_bytes(record.envelope.body)), "unsigned, and visible"
        assert record.rank > node.ranks.get(record.key, (-1, -1, b"")), "a rank went down"
        node.ranks[record.key] = record.rank
        if isinstance(body, WitnessBody):
            assert owner.claims.role == "gateway"
        self.changes.append((round(self.now, 6), node.name, record.hash))
        self.trace.update(f"{self.now:.6f}{node.name}".encode() + record.hash)

    def check(self):
        """Invariants 4 and 5, of the whole."""
        living = {node.session: node for node in self.nodes.values() if node.alive}
        for node in living.values():
            registry = node.member.registry
            routable = {entry.node.session for entry in registry.serving(wall=node.wall())}
            for session in routable:
                assert not registry.evicted(session)
                assert registry.node(session).lifecycle is Lifecycle.SERVING
        return living

    def roots(self):
        return {node.name: node.member.registry.root() for node in self.nodes.values() if node.alive}
