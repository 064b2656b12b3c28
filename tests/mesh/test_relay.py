"""A gateway and an agent that have no tunnel to each other, and hubs that have one to both; real TLS on loopback."""

import asyncio
import random
import time

import pytest
import uvloop

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.framing import STREAM_CREDIT, StreamHead
from fabrictool.mesh.holders import HELD_MAX, HOLDS_SESSIONS, Holders, Holds
from fabrictool.mesh.revocation import read_revocation, revoke
from fabrictool.mesh.transport import relay
from fabrictool.mesh.transport.door import HUB_SHARE, STRANGERS_MAX
from fabrictool.mesh.transport.relay import RELAY
from fabrictool.mesh.transport.splice import Splice
from fabrictool.mesh.transport.views import fleet_status
from tests.mesh.conftest import Federation
from tests.mesh.test_transport import Collect, Echo, node_body, until

HEAD = StreamHead(b"s" * 16, "POST", "/v1/chat/completions", (), 0)
LONG_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Whoever answers may take long: on a crowded machine a process may stand still for seconds."""
    monkeypatch.setattr(relay, "OPEN_S", LONG_S)


class Federated:
    """A gateway of alpha, hubs of beta, and an agent of beta that is linked with the hubs alone."""

    def __init__(self, federation, hubs):
        self.federation = federation
        self.number = hubs

    async def __aenter__(self):
        self.gateway, self.heard = self.federation.node("gateway", role="gateway")
        self.agent, self.listener = self.federation.node("agent", provider="beta")
        self.hubs = []
        for number in range(self.number):
            hub, _ = self.federation.node(f"hub{number}", role="gateway", provider="beta")
            port = await hub.listen("127.0.0.1", 0)
            self.hubs.append(hub)
            self.gateway.dial([*self.addresses(self.gateway), ("127.0.0.1", port)])
            self.agent.dial([*self.addresses(self.agent), ("127.0.0.1", port)])
        self.listener.accept = lambda stream, head, peer: self.served(peer)
        self.peers = []
        self.agent.publish(node_body(self.agent))
        await until(lambda: len(self.gateway.relays_of(self.agent)) == self.number)
        return self

    @staticmethod
    def addresses(node):
        return [(host, int(port)) for host, _, port in (a.rpartition(":") for a in node.hub_links.routes)]

    def served(self, peer):
        self.peers.append(peer)
        return Echo()

    async def __aexit__(self, *_):
        for node in (self.gateway, self.agent, *self.hubs):
            await node.close()


@pytest.fixture
def relayed(federation, monkeypatch):
    from fabrictool.mesh.transport.node import MeshNode

    monkeypatch.setattr(
        MeshNode, "relays_of", lambda self, agent: self._member.holders.of(agent.session), raising=False
    )
    return lambda hubs=1: Federated(federation, hubs)


async def echoed(bed, data):
    """What comes back of `data` from the agent, asked by the gateway."""
    tunnel = await bed.gateway.relays.reach(bed.agent.session)
    sink = Collect()
    stream = tunnel.open_stream(HEAD, sink)
    stream.write(data)
    stream.write_eof()
    await until(lambda: len(sink.data) == len(data) or sink.lost.done())
    return bytes(sink.data)


@pytest.mark.asyncio
async def test_a_request_goes_by_a_hub_that_holds_the_agent(relayed):
    async with relayed() as bed:
        assert bed.gateway.tunnel(bed.agent.session) is None
        assert bed.gateway.reaches(bed.agent.session)
        data = bytes(range(256)) * 8192  # beyond every credit
        assert await echoed(bed, data) == data
        # The agent sees who asks, and not who carries.
        assert [peer.session for peer in bed.peers] == [bed.gateway.session]
        # And the mesh itself is not told of a link that hangs on the hub.
        assert bed.gateway.neighbours == [bed.hubs[0].session]
        assert bed.agent.neighbours == [bed.hubs[0].session]


@pytest.mark.asyncio
async def test_the_hub_sees_nothing_of_it(relayed, monkeypatch):
    carried = bytearray()
    passed_on = Splice.data_received

    def spied(self, data):
        carried.extend(data)
        passed_on(self, data)

    monkeypatch.setattr(Splice, "data_received", spied)
    prompt = b"a prompt that is nobody's business" * 100
    async with relayed() as bed:
        assert await echoed(bed, prompt) == prompt
    assert len(carried) > 2 * len(prompt)
    assert b"nobody's business" not in carried
    assert HEAD.path.encode() not in carried


@pytest.mark.asyncio
async def test_who_has_died_is_not_reached(relayed):
    async with relayed() as bed:
        assert await echoed(bed, b"x") == b"x"
        tunnel = bed.gateway.relays.tunnel(bed.agent.session)
        broken = Collect()
        tunnel.open_stream(HEAD, broken)
        await bed.agent.close()
        await broken.lost
        await until(lambda: not bed.gateway.reaches(bed.agent.session))
        with pytest.raises(FabrictoolError) as refused:
            await bed.gateway.relays.reach(bed.agent.session)
        assert refused.value.problems[0].code == "FT6210"


@pytest.mark.asyncio
async def test_the_other_hub_takes_over(relayed):
    async with relayed(2) as bed:
        assert await echoed(bed, b"x") == b"x"
        by = bed.gateway.relays.by(bed.agent.session)
        carrier = next(hub for hub in bed.hubs if hub.session == by)
        await carrier.close()
        # The tunnel is given up at the farewell, and the load at its end.
        await until(lambda: bed.gateway.relays.tunnel(bed.agent.session) is None)
        await until(lambda: bed.heard.loads[-1:] == [(bed.agent.session, ())])
        assert bed.gateway.reaches(bed.agent.session)
        assert await echoed(bed, b"y") == b"y"
        assert bed.gateway.relays.by(bed.agent.session) != by


@pytest.mark.asyncio
async def test_a_hub_that_swallows_comes_last_and_is_not_forgotten(relayed, federation, monkeypatch):
    monkeypatch.setattr(relay, "OPEN_S", 1.0)
    monkeypatch.setattr(relay.random, "shuffle", lambda hubs: hubs.sort(key=lambda hub: hub != bad))
    async with relayed(2) as bed:
        bad = bed.hubs[0].session

        def swallow(_head, _peer):
            monkeypatch.setattr(relay, "OPEN_S", LONG_S)  # for the good one, which is asked next
            return asyncio.Protocol()

        monkeypatch.setattr(bed.hubs[0].relays, "asked", swallow)
        assert await echoed(bed, b"x") == b"x"
        assert bed.gateway.relays.by(bed.agent.session) == bed.hubs[1].session
        assert bed.gateway.relays.hubs_to(bed.agent.session) == [bed.hubs[1].session]
        other, _ = federation.node("other", provider="beta")  # the silent one may have been the agent, and not the hub
        other.dial([bed.addresses(bed.agent)[0]])
        await until(lambda: bed.gateway.relays.hubs_to(other.session) == [bad])
        await other.close()


@pytest.mark.asyncio
async def test_nobody_else_answers_for_the_agent(relayed, federation, monkeypatch):
    """A hub that leads elsewhere, to an agent of its own, say."""
    async with relayed() as bed:
        impostor, _ = federation.node("impostor", provider="beta")
        impostor.dial([*bed.addresses(bed.agent)])
        await until(lambda: impostor.session in bed.hubs[0].neighbours)
        hub, asked = bed.hubs[0].relays, bed.hubs[0].relays.asked
        monkeypatch.setattr(
            hub, "asked", lambda head, peer: asked(StreamHead(impostor.session, RELAY, "", (), 0), peer)
        )
        with pytest.raises(FabrictoolError, match="answers where agent"):
            await bed.gateway.relays.reach(bed.agent.session)
        assert not bed.peers
        await impostor.close()


@pytest.mark.asyncio
async def test_why_a_hub_does_not_lead_there_is_said_in_its_words(relayed, monkeypatch):
    async with relayed() as bed:
        [hub] = bed.hubs
        monkeypatch.setattr(hub.relays, "asked", lambda head, peer: None)
        with pytest.raises(FabrictoolError, match=f"FT6210.*by hub {hub.session.hex()[:8]}: no such service"):
            await bed.gateway.relays.reach(bed.agent.session)


@pytest.mark.asyncio
async def test_only_hubs_ask_and_only_for_agents(relayed):
    async with relayed() as bed:
        [hub] = bed.hubs
        agent, gateway = (hub.tunnel(node.session).peer for node in (bed.agent, bed.gateway))
        for head_of, peer in ((bed.gateway, agent), (bed.agent, agent), (bed.gateway, gateway), (hub, gateway)):
            assert hub.relays.asked(StreamHead(head_of.session, RELAY, "", (), 0), peer) is None
        other = StreamHead(bed.gateway.session, RELAY, "", (), 0)
        assert bed.agent.relays.asked(other, gateway) is None
        mine = StreamHead(bed.agent.session, RELAY, "", (), 0)
        assert bed.agent.relays.asked(mine, agent) is None


@pytest.mark.asyncio
async def test_a_revoked_gateway_loses_its_relayed_tunnels(relayed, federation):
    async with relayed() as bed:
        assert await echoed(bed, b"x") == b"x"
        stream = Collect()
        bed.gateway.relays.tunnel(bed.agent.session).open_stream(HEAD, stream)
        await until(lambda: len(bed.peers) == 2)
        bed.gateway.publish(node_body(bed.gateway))
        await until(lambda: bed.agent.registry.session(bed.gateway.session) is not None)
        text = revoke(federation.root, bed.gateway.session, now=time.time(), until=time.time() + 3600)
        bed.agent.take(read_revocation(text)[0])
        await stream.lost


@pytest.mark.asyncio
async def test_what_nobody_uses_is_closed(relayed, monkeypatch):
    async with relayed() as bed:
        assert await echoed(bed, b"x") == b"x"
        await until(lambda: bed.gateway.relays.tunnel(bed.agent.session).open_streams == 0)
        tunnel = bed.gateway.relays.tunnel(bed.agent.session)
        for _ in range(3):  # nobody has used it for long, but not for longer than it is kept
            bed.gateway.relays.look()
        assert not tunnel.closed.done()
        monkeypatch.setattr(relay, "UNUSED_S", -1.0)
        bed.gateway.relays.look()
        await until(lambda: bed.gateway.relays.tunnel(bed.agent.session) is None)
        assert bed.gateway.reaches(bed.agent.session)
        assert await echoed(bed, b"y") == b"y"


@pytest.mark.asyncio
async def test_a_hub_that_brings_strangers_shuts_no_other_hub_out(relayed):
    """They say nothing, and are more than an agent's door holds."""
    async with relayed(2) as bed:
        liar, honest = bed.hubs
        streams = [Collect() for _ in range(STRANGERS_MAX + 1)]
        for stream in streams:
            liar.tunnel(bed.agent.session).open_stream(StreamHead(bed.agent.session, RELAY, "", (), 0), stream)
        await until(lambda: sum(stream.lost.done() for stream in streams) == len(streams) - HUB_SHARE)
        bed.gateway.relays._avoided_until[liar.session + bed.agent.session] = float("inf")
        assert await echoed(bed, b"x") == b"x"
        assert bed.gateway.relays.by(bed.agent.session) == honest.session
        assert not any(stream.lost.done() for stream in streams[:HUB_SHARE])


class Flood(asyncio.Protocol):
    """Writes as long as it may."""

    written = 0

    def connection_made(self, transport):
        self.transport, self.may = transport, True
        asyncio.get_running_loop().call_soon(self.go_on)

    def go_on(self):
        if self.may and not self.transport.is_closing():
            self.transport.write(b"f" * 16384)
            self.written += 16384
            asyncio.get_running_loop().call_soon(self.go_on)

    def pause_writing(self):
        self.may = False

    def resume_writing(self):
        self.may = True
        self.go_on()

    def eof_received(self):
        return True

    def connection_lost(self, exc):
        self.may = False


@pytest.mark.asyncio
async def test_a_slow_client_fills_nobodys_memory(relayed):
    async with relayed() as bed:
        flood = Flood()
        bed.listener.accept = lambda stream, head, peer: flood
        tunnel = await bed.gateway.relays.reach(bed.agent.session)
        sink = Collect()
        stream = tunnel.open_stream(HEAD, sink)
        stream.pause_reading()
        await until(lambda: flood.written and not flood.may)
        before = flood.written
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert flood.written == before <= 2 * STREAM_CREDIT
        # Another stream of the same tunnel goes on.
        bed.listener.accept = lambda stream, head, peer: Echo()
        assert await echoed(bed, b"beside it") == b"beside it"
        stream.close()


def test_it_runs_on_uvloop(tmp_path, monkeypatch):
    """As gateways do, where it is installed."""
    from fabrictool.mesh.transport.node import MeshNode

    monkeypatch.setattr(
        MeshNode, "relays_of", lambda self, agent: self._member.holders.of(agent.session), raising=False
    )

    async def run():
        async with Federated(Federation(tmp_path), 2) as bed:
            data = b"0123456789abcdef" * 65536
            assert await echoed(bed, data) == data

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


# -- who holds whom, sans I/O ---------------------------------------------------------------------------------------


def carried(source, name, others):
    """Deliver what one hub has to tell."""
    for hub, message in source.news():
        others[hub].heard(name, message)


def test_what_a_hub_claims_is_bounded():
    hub, claimed = Holders(b"2" * 16), [number.to_bytes(16, "big") for number in range(HELD_MAX + HOLDS_SESSIONS)]
    hub.link_up(b"1" * 16, hub=True)
    for at in range(0, len(claimed), HOLDS_SESSIONS):
        hub.heard(b"1" * 16, Holds(False, claimed[at : at + HOLDS_SESSIONS], []))
    assert len(hub.held) == HELD_MAX


def test_hubs_tell_each_other_whom_they_hold():
    first, second = Holders(b"1" * 16), Holders(b"2" * 16)
    agents = [number.to_bytes(16, "big") for number in range(HOLDS_SESSIONS * 2 + 5)]
    for agent in agents:
        first.link_up(agent, hub=False)
    first.news()
    first.link_up(b"2" * 16, hub=True)
    second.link_up(b"1" * 16, hub=True)
    carried(first, b"1" * 16, {b"2" * 16: second})
    assert all(second.of(agent) == [b"1" * 16] for agent in agents)
    first.link_down(agents[7])
    carried(first, b"1" * 16, {b"2" * 16: second})
    assert second.of(agents[7]) == []
    assert second.of(agents[8]) == [b"1" * 16]
    second.link_down(b"1" * 16)
    assert second.of(agents[8]) == []
    second.heard(b"1" * 16, Holds(False, [agents[8]], []))  # on its way when the link went
    assert second.of(agents[8]) == []


def test_of_the_hubs_that_hold_an_agent_just_one_tells_it_first():
    names = [number * 16 for number in (b"1", b"5", b"9")]
    hubs = {name: Holders(name) for name in names}
    agents = [random.randbytes(16) for _ in range(300)]
    for name, hub in hubs.items():
        for other in names:
            if other != name:
                hub.link_up(other, hub=True)
        for agent in agents[:200] if name == names[2] else agents:  # a third of them has two hubs alone
            hub.link_up(agent, hub=False)
    for name, hub in hubs.items():
        carried(hub, name, hubs)
    first = [
        [name for name, hub in hubs.items() if agent in hub.own and agent not in hub.others_first] for agent in agents
    ]
    assert {len(tellers) for tellers in first} == {1}
    assert {name for (name,) in first} == set(names)  # all have a share
    hubs[names[0]].link_down(names[1])
    hubs[names[0]].link_down(names[2])
    assert hubs[names[0]].others_first == set()


# -- with many hubs, an agent keeps two -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_agent_keeps_two_hubs_of_two_providers_and_all_reach_it(federation):
    hubs, ports = [], []
    for number, provider in enumerate(("alpha", "alpha", "beta", "beta")):
        hub, _ = federation.node(f"hub{number}", role="gateway", provider=provider)
        ports.append(await hub.listen("127.0.0.1", 0))
        hub.dial([("127.0.0.1", port) for port in ports[:-1]])
        hub.publish(node_body(hub, addresses=(f"127.0.0.1:{ports[-1]}",)))
        hubs.append(hub)
    agent, listener = federation.node("agent")
    listener.accept = lambda stream, head, peer: Echo()
    agent.publish(node_body(agent))
    agent.dial([("127.0.0.1", ports[0])])  # of the others it hears from the registry

    def providers():
        return sorted(tunnel.peer.claims.provider for tunnel in agent.hub_tunnels)

    def state_at(hub):
        [row] = [row for row in fleet_status(hub).members if row.session == agent.session.hex()]
        return row.state, row.lost_at

    async def settled(hubs):
        await until(lambda: providers() == ["alpha", "beta"], 20)
        for hub in hubs:
            answers = [await answered(hub) for _ in range(5)]  # what is lost with a hub is asked for again
            assert answers[-1], answers
            await until(lambda hub=hub: state_at(hub) == ("serving", None))  # and lost nowhere

    async def answered(hub):
        await until(lambda: hub.reaches(agent.session))
        try:
            tunnel = hub.tunnel(agent.session) or await hub.relays.reach(agent.session)
        except FabrictoolError:
            return False
        sink = Collect()
        stream = tunnel.open_stream(HEAD, sink)
        stream.write(b"to you")
        await until(lambda: sink.data == b"to you" or sink.lost.done())
        stream.close()
        return sink.data == b"to you"

    await until(lambda: all(len(hub.neighbours) >= 3 for hub in hubs))
    await settled(hubs)
    lost = next(hub for hub in hubs if hub.session in agent.neighbours)
    await lost.close()
    await settled([hub for hub in hubs if hub is not lost])
    for node in (agent, *hubs):
        await node.close()


@pytest.mark.asyncio
async def test_a_hub_that_leaves_lets_open_streams_end(relayed):
    async with relayed(2) as bed:
        tunnel = await bed.gateway.relays.reach(bed.agent.session)
        sink = Collect()
        stream = tunnel.open_stream(HEAD, sink)
        stream.write(b"begun")
        await until(lambda: sink.data == b"begun")
        by = bed.gateway.relays.by(bed.agent.session)
        leaving = next(hub for hub in bed.hubs if hub.session == by)
        leaving.retire()
        await until(
            lambda: (
                bed.gateway.relays.hubs_to(bed.agent.session) != [by] and bed.gateway.relays.by(bed.agent.session) != by
            )
        )
        waits = asyncio.create_task(leaving.relays.carried_out(20))
        assert await echoed(bed, b"new") == b"new"
        assert bed.gateway.relays.by(bed.agent.session) != by
        bed.gateway.relays.look()
        stream.write(b" and ended")
        await until(lambda: sink.data == b"begun and ended")
        assert not waits.done()
        stream.close()
        await until(lambda: not tunnel.open_streams)
        bed.gateway.relays.look()
        await asyncio.wait_for(waits, 10)
        await until(tunnel.closed.done)


@pytest.mark.asyncio
async def test_a_hub_with_two_names_keeps_its_tunnel_when_another_one_ends(federation):
    """Its second name is no second hub: to dial it would end the tunnel that carries the requests."""
    hubs = [federation.node(f"hub{number}", role="gateway", provider="beta")[0] for number in range(2)]
    ports = [await hub.listen("127.0.0.1", 0) for hub in hubs]
    agent, listener = federation.node("agent")
    listener.accept = lambda stream, head, peer: Echo()
    agent.dial([("127.0.0.1", ports[0]), ("localhost", ports[0])])
    await until(lambda: len(agent.neighbours) == 1)
    await asyncio.sleep(0.5)
    agent.dial([("127.0.0.1", ports[0]), ("localhost", ports[0]), ("127.0.0.1", ports[1])])
    await until(lambda: len(agent.neighbours) == 2)
    sink = Collect()
    stream = hubs[0].tunnel(agent.session).open_stream(HEAD, sink)
    stream.write(b"begun")
    await until(lambda: sink.data == b"begun")
    await hubs[1].close()
    for _ in range(30):
        await asyncio.sleep(0.1)
        assert not sink.lost.done()
    stream.close()
    for node in (agent, hubs[0]):
        await node.close()
