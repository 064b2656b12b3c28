"""Dissemination on a virtual network that loses, repeats and reorders; no sockets, no clock."""

import random

import pytest

from fabrictool.mesh.gossip import Changed, Gossip, Refused, Send
from fabrictool.mesh.identity import issue_session
from fabrictool.mesh.records import Lifecycle
from fabrictool.mesh.registry import Registry
from tests.mesh.signed_records import NOW, PROVIDERS, VERIFIER, node, sealed, service


class Network:
    """Hubs fully linked, agents on one or two hubs; `deliver` moves messages until none is left."""

    def __init__(self, hubs, agents, seed, *, loss=0.0, duplication=0.0, uplinks=2):
        self.rng = random.Random(seed)
        self.loss, self.duplication = loss, duplication
        self.nodes = {f"h{i}".encode(): Gossip(Registry(VERIFIER), hub=True) for i in range(hubs)}
        self.links = {(a, b) for a in self.nodes for b in self.nodes if a < b}
        for i in range(agents):
            name = f"a{i}".encode()
            self.nodes[name] = Gossip(Registry(VERIFIER), hub=False)
            chosen = self.rng.sample([n for n in self.nodes if n.startswith(b"h")], min(uplinks, hubs))
            self.links |= {tuple(sorted((name, hub))) for hub in chosen}
        self.queue = []
        self.bytes = 0
        self.refused = []
        for link in sorted(self.links):
            self.up(*link)

    def up(self, a, b):
        self.perform(a, self.nodes[a].link_up(b))
        self.perform(b, self.nodes[b].link_up(a))

    def perform(self, source, effects):
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.bytes += len(message)
                    if self.rng.random() >= self.loss:
                        self.queue.append((source, peer, message))
                    if self.rng.random() < self.duplication:
                        self.queue.append((source, peer, message))
                case Refused():
                    self.refused.append(effect)
                case Changed():
                    pass

    def deliver(self):
        steps = 0
        while self.queue:
            steps += 1
            assert steps < 200_000, "messages multiply without end"
            source, peer, message = self.queue.pop(self.rng.randrange(len(self.queue)))
            self.perform(peer, self.nodes[peer].received(source, message, wall=NOW))

    def beat(self):
        for a, b in sorted(self.links):
            self.perform(a, self.nodes[a].beat(b, self.nodes[b].registry.root()))
            self.perform(b, self.nodes[b].beat(a, self.nodes[a].registry.root()))
        self.deliver()

    def agreed(self):
        return len({gossip.registry.root() for gossip in self.nodes.values()}) == 1


def owners(count):
    return [issue_session(PROVIDERS["alpha"], "agent", now=NOW) for _ in range(count)]


def publish(network, name, owner, body):
    network.perform(name, network.nodes[name].publish(sealed(owner, body), wall=NOW))


def test_an_update_reaches_everybody_without_any_beat():
    network = Network(hubs=2, agents=6, seed=1)
    network.deliver()
    (owner,) = owners(1)
    publish(network, b"a0", owner, node(owner))
    publish(network, b"a0", owner, service(owner))
    network.deliver()
    for gossip in network.nodes.values():
        assert len(gossip.registry) in (1, 2)
    network.beat()
    network.beat()
    assert network.agreed()
    assert network.refused == []


@pytest.mark.parametrize("seed", range(12))
def test_loss_duplication_and_reordering_only_delay(seed):
    network = Network(hubs=2, agents=5, seed=seed, loss=0.3, duplication=0.1)
    everyone = owners(5)
    for round_ in range(1, 4):
        for index, owner in enumerate(everyone):
            publish(network, f"a{index}".encode(), owner, node(owner, round_))
            publish(network, f"a{index}".encode(), owner, service(owner, index, round_))
        network.deliver()
    publish(network, b"a0", everyone[0], node(everyone[0], 9, Lifecycle.LEFT))
    network.loss = 0.0
    beats = 0
    while not network.agreed():
        network.beat()
        beats += 1
        assert beats < 12
    assert len(network.nodes[b"h0"].registry) == 10
    assert network.nodes[b"a3"].registry.get(bytes.fromhex(everyone[0].claims.session)).body.lifecycle is Lifecycle.LEFT


def test_a_late_node_gets_everything_from_its_first_link():
    network = Network(hubs=1, agents=3, seed=3, uplinks=1)
    for index, owner in enumerate(owners(3)):
        publish(network, f"a{index}".encode(), owner, node(owner))
    network.deliver()
    network.nodes[b"late"] = Gossip(Registry(VERIFIER), hub=False)
    network.links.add((b"h0", b"late"))
    network.up(b"h0", b"late")
    network.deliver()
    assert network.nodes[b"late"].registry.root() == network.nodes[b"h0"].registry.root()


def test_an_idle_mesh_says_nothing_but_beats():
    network = Network(hubs=2, agents=4, seed=5)
    network.deliver()
    before = network.bytes
    for _ in range(5):
        network.beat()
    assert network.bytes == before


def test_agents_never_forward():
    network = Network(hubs=1, agents=4, seed=6, uplinks=1)
    network.deliver()
    (owner,) = owners(1)
    before = network.bytes
    publish(network, b"a0", owner, node(owner))
    first = network.bytes - before
    network.deliver()
    assert network.bytes - before == first * 4, "one copy to the hub, one from it to each other agent"


def test_garbage_is_refused():
    network = Network(hubs=1, agents=1, seed=7)
    network.perform(b"h0", network.nodes[b"h0"].received(b"a0", b"\xc1garbage", wall=NOW))
    assert network.refused
