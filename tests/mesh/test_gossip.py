"""Dissemination on a virtual network that loses, repeats and reorders; no sockets, no clock."""

import random

import msgspec
import pytest

from fabrictool.mesh.gossip import Changed, Gossip, Refused, Send, Vain, decode_message
from fabrictool.mesh.identity import issue_session
from fabrictool.mesh.records import Lifecycle
from fabrictool.mesh.registry import Registry
from tests.mesh.signed_records import NOW, PROVIDERS, VERIFIER, node, sealed, service


class Network:
    """Hubs fully linked, agents on one or two hubs; `deliver` moves messages until none is left."""

    def __init__(self, hubs, agents, seed, *, loss=0.0, duplication=0.0, uplinks=2):
        self.rng = random.Random(seed)
        self.loss, self.duplication = loss, duplication
        self.nodes = {f"h{i}".encode(): Gossip(Registry(VERIFIER), me=f"h{i}".encode(), hub=True) for i in range(hubs)}
        self.links = {(a, b) for a in self.nodes for b in self.nodes if a < b}
        for i in range(agents):
            name = f"a{i}".encode()
            self.nodes[name] = Gossip(Registry(VERIFIER), me=name, hub=False)
            chosen = self.rng.sample([n for n in self.nodes if n.startswith(b"h")], min(uplinks, hubs))
            self.links |= {tuple(sorted((name, hub))) for hub in chosen}
        self.queue = []
        self.bytes = 0
        self.refused, self.vain = [], []
        for link in sorted(self.links):
            self.up(*link)

    def up(self, a, b):
        self.perform(a, self.nodes[a].link_up(b))
        self.perform(b, self.nodes[b].link_up(a))

    def perform(self, source, effects):
        for effect in [*effects, *self.nodes[source].flush()]:
            match effect:
                case Send(peer, message):
                    self.bytes += len(message)
                    if self.rng.random() >= self.loss:
                        self.queue.append((source, peer, message))
                    if self.rng.random() < self.duplication:
                        self.queue.append((source, peer, message))
                case Refused():
                    self.refused.append(effect)
                case Vain():
                    self.vain.append(source)
                case Changed():
                    pass

    def deliver(self):
        steps = 0
        while self.queue:
            steps += 1
            assert steps < 200_000, "messages multiply without end"
            source, peer, message = self.queue.pop(self.rng.randrange(len(self.queue)))
            self.perform(peer, self.nodes[peer].received(source, decode_message(message), wall=NOW))

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
    network.nodes[b"late"] = Gossip(Registry(VERIFIER), me=b"late", hub=False)
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


def test_two_hubs_that_are_not_linked_learn_of_each_other_through_an_agent():
    network = Network(hubs=2, agents=1, seed=7)
    network.links.discard((b"h0", b"h1"))
    for hub, other in ((b"h0", b"h1"), (b"h1", b"h0")):
        network.nodes[hub].link_down(other)
    network.queue.clear()
    (owner,) = owners(1)
    publish(network, b"h0", owner, node(owner))
    network.deliver()
    beats = 0
    while not network.agreed():
        network.beat()
        beats += 1
        assert beats < 8
    assert len(network.nodes[b"h1"].registry) == 1


def test_a_chain_crosses_a_link_once_a_session():
    network = Network(hubs=1, agents=2, seed=8)
    network.deliver()
    (owner,) = owners(1)
    sizes = []
    for version in range(1, 4):
        before = network.bytes
        publish(network, b"a0", owner, node(owner, version))
        network.deliver()
        sizes.append(network.bytes - before)
    chain = sum(map(len, owner.chain))
    assert sizes[1] == sizes[2] < sizes[0] - 2 * chain, "one copy to the hub, one to the other agent"
    record = network.nodes[b"a1"].registry.get(bytes.fromhex(owner.claims.session))
    assert record.envelope.chain == owner.chain, "kept for who comes later"


def test_what_one_turn_brings_goes_out_in_one_message():
    network = Network(hubs=1, agents=1, seed=9)
    network.deliver()
    hub = network.nodes[b"h0"]
    everyone = owners(5)
    for owner in everyone:
        assert [type(effect) for effect in hub.publish(sealed(owner, node(owner)), wall=NOW)] == [Changed]
        hub.publish(sealed(owner, node(owner, 2)), wall=NOW)
    (send,) = hub.flush()
    assert [e.body for e in decode_message(send.message).envelopes] == [
        hub.registry.get(key).envelope.body for key in sorted(bytes.fromhex(o.claims.session) for o in everyone)
    ], "the newest of each, once"
    assert hub.flush() == []


def test_hubs_are_told_first_and_last_those_who_hear_it_elsewhere():
    hub = Gossip(Registry(VERIFIER), me=b"h0", hub=True)
    for name in (b"a0", b"a1", b"a2", b"a3", b"h1"):
        hub.link_up(name, hub=name.startswith(b"h"))
    (owner,) = owners(1)
    hub.publish(sealed(owner, node(owner)), wall=NOW)
    sends = hub.flush({b"a0", b"a2"})
    assert sends[0].peer == b"h1"
    assert {send.peer for send in sends[1:3]} == {b"a1", b"a3"}
    assert {send.peer for send in sends[3:]} == {b"a0", b"a2"}


def test_repairs_in_vain_become_seldom_and_are_said():
    """One side refuses what the other holds: its clock is a day ahead, say."""
    network = Network(hubs=1, agents=1, seed=10)
    network.deliver()
    (owner,) = owners(1)
    agent, hub = network.nodes[b"a0"], network.nodes[b"h0"]
    agent.publish(sealed(owner, node(owner)), wall=NOW)
    agent.flush()
    received = hub.received
    hub.received = lambda peer, message, wall: received(peer, message, wall=wall + 10**6)
    repairs = []
    for beat in range(400):
        before = network.bytes
        network.beat()
        if network.bytes > before:
            repairs.append(beat)
    assert len(network.refused) == 1, "checked once, and remembered"
    assert len(repairs) < 20
    assert repairs[-1] - repairs[-2] >= 30
    assert set(network.vain) == {b"a0", b"h0"} or len(set(network.vain)) == 1
    hub.received = received
    publish(network, b"a0", owner, node(owner, 2))
    network.deliver()
    network.beat()
    assert network.agreed(), "a change of either side is tried at once"


def test_garbage_is_no_message():
    for garbage in (b"\xc1garbage", b"", b"\x92\xa1p", b"\x92\xa1?\x90"):
        with pytest.raises((msgspec.DecodeError, ValueError)):
            decode_message(garbage)
