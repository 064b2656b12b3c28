"""Two real nodes over real TLS on loopback."""

import asyncio
import os
import time

import pytest

from fabrictool.base.clock import SystemClock
from fabrictool.domain.specs import EgressSpec, HostPort, SshHostSpec
from fabrictool.mesh.framing import HEADER, STREAM_CREDIT, TEXT_CHARACTERS, FrameType, FramingError, StreamHead
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody, WitnessBody
from fabrictool.mesh.transport import hublinks
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.reach import Route
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.mesh.transport.tunnel import WRITE_OCTETS, Tunnel
from tests.mesh.conftest import RecordingListener

pytestmark = pytest.mark.asyncio


async def until(condition, seconds=30.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "condition did not become true in time"
        await asyncio.sleep(0.005)


def node_body(node, version=1, lifecycle=Lifecycle.SERVING, **changes):
    claims = node.credential.claims
    fields = {
        "federation": node.federation,
        "session": node.session,
        "lifecycle": lifecycle,
        "version": version,
        "role": claims.role,
        "fabric": "test",
        "provider": claims.provider,
        "site": "here",
        "cluster": "c",
        "node": "n",
    }
    return NodeBody(**(fields | changes))


def service_body(node, version=1, lifecycle=Lifecycle.SERVING, **changes):
    fields = {
        "federation": node.federation,
        "session": node.session,
        "service": b"s" * 16,
        "lifecycle": lifecycle,
        "version": version,
        "replica": "m/0",
        "model": "m",
        "engine": "reference",
    }
    return ServiceBody(**(fields | changes))


def frame(kind, stream, payload):
    """As it lies on the wire."""
    return HEADER.pack(len(payload), kind, stream) + payload


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)

    def eof_received(self):
        self.transport.write_eof()


class Collect(asyncio.Protocol):
    def __init__(self):
        self.data = bytearray()
        self.ended = asyncio.get_running_loop().create_future()
        self.lost = asyncio.get_running_loop().create_future()
        self.paused = 0

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.data += data

    def eof_received(self):
        self.ended.set_result(None)

    def connection_lost(self, exc):
        self.lost.set_result(exc)

    def pause_writing(self):
        self.paused += 1

    def resume_writing(self):
        pass


async def listening(federation, clock=None):
    hub, listener = federation.node("hub", role="gateway", clock=clock)
    return hub, listener, await hub.listen("127.0.0.1", 0)


async def linked(federation, *agents):
    hub, hub_listener, port = await listening(federation)
    return hub, hub_listener, await joined(federation, hub, port, *agents)


async def joined(federation, hub, port, *agents):
    nodes = []
    for name in agents:
        node, listener = federation.node(name)
        node.dial([("127.0.0.1", port)])
        nodes.append((node, listener))
    # Both sides: the hub may know an agent before the agent knows that it is known.
    await until(lambda: len(hub.neighbours) == len(agents) and all(node.neighbours for node, _ in nodes))
    return nodes


async def test_records_reach_every_node_through_the_hub(federation):
    hub, _, port = await listening(federation)
    [(a, _), (b, _)] = await joined(federation, hub, port, "a", "b")
    a.publish(node_body(a))
    a.publish(service_body(a))
    await until(lambda: len(b.registry) == 2)
    assert b.registry.root() == a.registry.root() == hub.registry.root()
    late, _ = federation.node("late")
    late.dial([("127.0.0.1", port)])
    await until(lambda: late.registry.root() == a.registry.root())
    for node in (a, b, late, hub):
        await node.close()


async def test_a_stream_carries_more_than_its_credit_both_ways(federation):
    hub, _, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: Echo()
    sink = Collect()
    payload = os.urandom(STREAM_CREDIT * 3 + 17)
    stream = hub.tunnel(agent.session).open_stream(StreamHead(b"s" * 16, "POST", "/v1/x", (), len(payload)), sink)
    stream.write(payload)
    stream.write_eof()
    await asyncio.wait_for(sink.ended, 10)
    assert bytes(sink.data) == payload
    assert sink.paused, "writing beyond the peer's credit must tell the writer to pause"
    assert await asyncio.wait_for(sink.lost, 10) is None
    assert not hub.tunnel(agent.session).open_streams
    await until(lambda: not agent.tunnel(hub.session).open_streams)
    for node in (agent, hub):
        await node.close()


async def test_a_reader_that_pauses_stalls_its_sender_and_loses_nothing(federation):
    hub, _, [(agent, listener)] = await linked(federation, "a")
    payload = os.urandom(STREAM_CREDIT * 2)

    class Flood(asyncio.Protocol):
        def connection_made(self, transport):
            transport.write(payload)
            transport.write_eof()

        def pause_writing(self):
            pass

        def resume_writing(self):
            pass

    listener.accept = lambda stream, head, peer: Flood()
    sink = Collect()
    stream = hub.tunnel(agent.session).open_stream(StreamHead(b"s" * 16, "GET", "/v1/x", (), 0), sink)
    stream.pause_reading()
    await until(lambda: stream.held_octets == STREAM_CREDIT)
    assert not sink.data
    stream.resume_reading()
    await asyncio.wait_for(sink.ended, 10)
    assert bytes(sink.data) == payload
    for node in (agent, hub):
        await node.close()


async def test_a_lost_tunnel_breaks_its_streams_and_is_an_event(federation):
    hub, hub_listener, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: asyncio.Protocol()
    sink = Collect()
    hub.tunnel(agent.session).open_stream(StreamHead(b"s" * 16, "GET", "/v1/x", (), 0), sink)
    session = agent.session
    await agent.close()
    assert isinstance(await asyncio.wait_for(sink.lost, 10), Exception)
    assert (session, False) in [(s, up) for s, up, _ in hub_listener.links]
    assert hub.neighbours == []
    await hub.close()


class Opening(asyncio.Protocol):
    """Opens another stream when its own breaks: a place that became free is given to who waits for one."""

    def __init__(self, opens):
        self.opens = opens

    def connection_lost(self, exc):
        self.opens()


async def test_a_stream_that_is_opened_while_a_tunnel_breaks_is_ended_too(federation):
    hub, _, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: asyncio.Protocol()
    tunnel, late = hub.tunnel(agent.session), Collect()
    head = StreamHead(b"s" * 16, "GET", "/v1/x", (), 0)
    tunnel.open_stream(head, Opening(lambda: tunnel.open_stream(head, late)))
    await agent.close()
    assert isinstance(await asyncio.wait_for(late.lost, 10), Exception)
    assert tunnel.open_streams == 0
    await hub.close()


def leave_the_hub(agent):
    """As an agent does that has others; this one has none, and would come back at once."""
    agent.hub_links._told = set()
    ((hub, _),) = agent.hub_links._dialled.items()
    agent.hub_links._let_go(hub, agent.hub_links._open(hub))


async def test_who_leaves_a_hub_breaks_no_stream_that_was_on_its_way(federation):
    hub, hub_listener, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: Echo()
    sinks = []
    for turn in range(400):
        tunnel = hub.tunnel(agent.session)
        if tunnel is None:
            break
        sinks.append(Collect())
        stream = tunnel.open_stream(StreamHead(b"s" * 16, "GET", "/v1/x", (), 0), sinks[-1])
        stream.write(b"word")
        stream.write_eof()
        if turn == 50:
            leave_the_hub(agent)
        await asyncio.sleep(0)
    assert 50 < len(sinks) < 400, "the hub has heard of it"
    for sink in sinks:
        assert await asyncio.wait_for(sink.lost, 10) is None
        assert sink.data == b"word"
    await until(lambda: tunnel is None or tunnel.closed.done())
    await until(lambda: not agent.hub_links._former)
    await until(lambda: [up for session, up, _ in hub_listener.links if session == agent.session] == [True, False])
    for node in (agent, hub):
        await node.close()


async def test_a_stream_goes_on_in_a_tunnel_that_is_left(federation):
    hub, _, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: Echo()
    tunnel, sink = hub.tunnel(agent.session), Collect()
    stream = tunnel.open_stream(StreamHead(b"s" * 16, "GET", "/v1/x", (), 0), sink)
    leave_the_hub(agent)
    await until(lambda: hub.tunnel(agent.session) is None)
    stream.write(b"still")
    await until(lambda: sink.data == b"still")
    assert not tunnel.closed.done()
    stream.write_eof()
    assert await asyncio.wait_for(sink.lost, 10) is None
    await asyncio.wait_for(tunnel.closed, 10)
    for node in (agent, hub):
        await node.close()


async def test_a_hub_that_does_not_know_how_is_left_all_the_same(federation, monkeypatch):
    monkeypatch.setattr("fabrictool.mesh.transport.tunnel.PARTING_S", 0.05)
    hub, _, [(agent, _)] = await linked(federation, "a")
    hub.tunnel(agent.session)._frame = lambda frame: None
    leave_the_hub(agent)
    await until(lambda: hub.neighbours == [])
    for node in (agent, hub):
        await node.close()


async def test_leaving_is_acknowledged(federation):
    hub, _, [(agent, _)] = await linked(federation, "a")
    agent.publish(node_body(agent))
    agent.publish(node_body(agent, version=2, lifecycle=Lifecycle.LEFT))
    assert await agent.leave()
    assert hub.registry.get(agent.session).body.lifecycle is Lifecycle.LEFT
    await hub.close()


async def test_another_federation_is_refused(federation, tmp_path):
    stranger = type(federation)(tmp_path / "other")
    hub, _, port = await listening(federation)
    node, _ = stranger.node("intruder")
    node.dial([("127.0.0.1", port)])
    await until(lambda: node.hub_links.errors)
    assert hub.neighbours == []
    for each in (node, hub):
        await each.close()


async def test_a_head_that_cannot_be_decoded_costs_its_stream_and_not_the_tunnel(federation):
    hub, _, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: Echo()
    innocent, poisoned = Collect(), Collect()
    tunnel = hub.tunnel(agent.session)
    stream = tunnel.open_stream(StreamHead(b"s" * 16, "GET", "/v1/x", (), 0), innocent)
    with pytest.raises(FramingError) as refused:
        tunnel.open_stream(StreamHead(b"s" * 16, "GET", "/" + "x" * TEXT_CHARACTERS, (), 0), poisoned)
    assert refused.value.problems[0].code == "FT6205"
    bad = stream.id + 2  # what a peer of another release, or a hostile one, might send all the same
    agent.tunnel(hub.session).data_received(frame(FrameType.OPEN, bad, b"junk"))
    stream.write(b"still here")
    await until(lambda: innocent.data == b"still here")
    assert hub.tunnel(agent.session) is tunnel
    for node in (agent, hub):
        await node.close()


async def test_a_tunnel_ends_with_its_peers_certificate(federation):
    class Calendar(SystemClock):
        days = 0

        def wall(self):
            return super().wall() + self.days * 86400

    clock = Calendar()
    hub, hub_listener, port = await listening(federation, clock)
    [(agent, listener)] = await joined(federation, hub, port, "a")
    clock.days = 7
    await until(lambda: hub.neighbours == [])
    assert hub_listener.links[-1] == (agent.session, False, "the peer's certificate has expired")
    await until(lambda: not listener.links[-1][1])
    assert "expired" not in listener.links[-1][2], "it does not know why the other one left"
    for node in (agent, hub):
        await node.close()


class Writer(asyncio.Protocol):
    def __init__(self):
        self.calls = []

    def pause_writing(self):
        self.calls.append("pause")

    def resume_writing(self):
        self.calls.append("resume")


async def test_a_full_socket_pauses_the_streams_that_write_and_credit_alone_resumes_none(federation):
    hub, _, [(agent, listener)] = await linked(federation, "a")
    listener.accept = lambda stream, head, peer: asyncio.Protocol()
    tunnel, old, new, idle = hub.tunnel(agent.session), Writer(), Writer(), Writer()
    head = StreamHead(b"s" * 16, "POST", "/v1/x", (), 0)
    stream = tunnel.open_stream(head, old)
    tunnel.pause_writing()
    other = tunnel.open_stream(head, new)
    tunnel.open_stream(head, idle)
    stream.write(b"x" * (STREAM_CREDIT + 1))
    other.write(b"x")
    assert (old.calls, new.calls, idle.calls) == (["pause"], ["pause"], [])
    tunnel.data_received(frame(FrameType.CREDIT, stream.id, bytes(4)))
    assert old.calls == ["pause"], "the socket is still full"
    tunnel.resume_writing()
    await until(lambda: new.calls == ["pause", "resume"])
    await until(lambda: old.calls == ["pause", "resume"])  # the agent's grant lets the last octet through
    assert idle.calls == []
    for node in (agent, hub):
        await node.close()


async def test_an_agent_that_listens_is_no_gateway(federation):
    fake, _ = federation.node("fake", role="agent")
    port = await fake.listen("127.0.0.1", 0)
    agent, _ = federation.node("agent")
    agent.dial([("127.0.0.1", port)])
    await until(lambda: agent.hub_links.errors)
    assert "answers where a gateway should" in agent.hub_links.errors[f"127.0.0.1:{port}"]
    assert agent.neighbours == []
    for node in (agent, fake):
        await node.close()


async def test_a_hub_that_is_learned_of_is_dialled_and_one_that_left_no_longer(federation):
    first, _, port = await listening(federation)
    agent, _ = federation.node("agent")
    agent.dial([("127.0.0.1", port)])
    second, _ = federation.node("second", role="gateway", provider="beta")
    other_port = await second.listen("127.0.0.1", 0)
    second.dial([("127.0.0.1", port)])
    second.publish(node_body(second, addresses=(f"127.0.0.1:{other_port}",)))
    await until(lambda: second.session in agent.neighbours)
    await until(lambda: first.session in second.neighbours)
    second.publish(node_body(second, lifecycle=Lifecycle.LEFT, addresses=(f"127.0.0.1:{other_port}",)))
    await second.leave()
    await until(lambda: second.session not in agent.neighbours)
    await until(lambda: list(agent.hub_links.routes) == [f"127.0.0.1:{port}"])
    for node in (agent, first):
        await node.close()


async def test_a_learned_hub_that_others_voted_out_keeps_its_tunnel(federation):
    first, _, port = await listening(federation)
    agent, _ = federation.node("agent")
    agent.dial([("127.0.0.1", port)])
    second, _ = federation.node("second", role="gateway", provider="beta")
    other_port = await second.listen("127.0.0.1", 0)
    second.dial([("127.0.0.1", port)])
    for hub in (first, second):
        addresses = (f"127.0.0.1:{other_port}",) if hub is second else ()
        hub.publish(node_body(hub, addresses=addresses))
    await until(lambda: second.session in agent.neighbours)
    tunnel = agent.tunnel(second.session)
    body = second.registry.node(second.session)
    second.gossip_received = lambda *_: None  # it does not hear of it, and so does not refute it
    first.publish(
        WitnessBody(
            federation=first.federation, session=first.session, suspect=second.session, lifecycle=Lifecycle.JOIN,
            version=1, seen=body.version, until=SystemClock().wall() + 1000, suspects=True, votes=True,
        )
    )  # fmt: skip
    await until(lambda: agent.registry.evicted(second.session))
    await asyncio.sleep(2.5)  # two ticks
    assert agent.registry.evicted(second.session)
    second.publish(body)  # and now it does: it is back, and was never dialled anew
    await until(lambda: not agent.registry.evicted(second.session))
    await asyncio.sleep(1.0)
    assert agent.tunnel(second.session) is tunnel
    for node in (agent, second, first):
        await node.close()


async def test_two_hubs_that_dial_each_other_end_up_with_one_tunnel(federation):
    hubs = [federation.node(name, role="gateway")[0] for name in ("one", "two")]
    ports = [await hub.listen("127.0.0.1", 0) for hub in hubs]
    for hub, port in zip(hubs, reversed(ports), strict=True):
        hub.dial([("127.0.0.1", port)])
    await until(lambda: all(hub.neighbours for hub in hubs))

    def tunnels():
        return [hub.tunnel(other.session) for hub, other in zip(hubs, reversed(hubs), strict=True)]

    for _ in range(5):  # on a busy machine the second one of the two that are dialled may come late
        before = tunnels()
        await asyncio.sleep(2.5)
        if before == tunnels():
            break
    else:
        pytest.fail("they replace each other for ever")
    for hub in hubs:
        await hub.close()


async def test_a_second_run_with_the_same_identity_speaks_over_the_first(federation):
    hub, _, port = await listening(federation)
    [(agent, _)] = await joined(federation, hub, port, "agent")
    for lifecycle in (Lifecycle.JOIN, Lifecycle.SERVING):
        agent.publish(node_body(agent, lifecycle=lifecycle))
    agent.publish(service_body(agent))
    await until(lambda: len(hub.registry.serving(wall=SystemClock().wall())) == 1)
    await agent.close()  # as by kill -9: without a word
    again = MeshNode(IdentityFiles(federation.folder / "agent"), RecordingListener(), SystemClock(), hub=False)
    again.publish(node_body(again))
    again.publish(service_body(again, service=b"t" * 16))
    again.dial([("127.0.0.1", port)])
    await until(
        lambda: [entry.service.service for entry in hub.registry.serving(wall=SystemClock().wall())] == [b"t" * 16]
    )
    assert again.registry.root() == hub.registry.root()
    for node in (again, hub):
        await node.close()


class Unread(asyncio.Transport):
    """A socket that takes nothing after `room` octets."""

    def __init__(self, tunnel, room):
        super().__init__()
        self.tunnel, self.room, self.written = tunnel, room, b""

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = high

    def is_closing(self):
        return False

    def write(self, data):
        full = len(self.written) >= self.room
        self.written += data
        if not full and len(self.written) >= self.room:
            self.tunnel.pause_writing()


async def test_what_a_full_socket_does_not_take_stays_where_its_order_can_change(federation):
    node, _ = federation.node("a")
    tunnel = Tunnel(node, SystemClock().monotonic, dialler=True, expected="gateway")
    transport = Unread(tunnel, 64 * 1024)
    tunnel.connection_made(transport)
    assert transport.high == 1, "the transport must say at once that it cannot send"
    stream = tunnel.open_stream(StreamHead(b"s" * 16, "GET", "/v1/x", (), 0), asyncio.Protocol())
    stream.write(bytes(STREAM_CREDIT))
    assert len(transport.written) <= 64 * 1024 + WRITE_OCTETS
    tunnel.gossip(b"news")
    handed = len(transport.written)
    transport.room = 10**9
    tunnel.resume_writing()
    following = transport.written[handed:]
    assert following.startswith(frame(FrameType.GOSSIP, 0, b"news"))
    assert len(following) > STREAM_CREDIT - handed


async def test_how_a_log_ended_is_told_to_hubs_of_the_own_provider_alone(federation):
    hubs = [federation.node(provider, role="gateway", provider=provider) for provider in ("alpha", "beta")]
    ports = [await hub.listen("127.0.0.1", 0) for hub, _ in hubs]
    agent, _ = federation.node("agent", provider="beta")
    agent.dial([("127.0.0.1", port) for port in ports])
    await until(lambda: len(agent.neighbours) == 2)
    agent.confide(b"s" * 16, ["a line", "x" * 9000 + " the end"])
    (alpha, its_alpha), (beta, its_beta) = hubs
    await until(lambda: its_beta.tails)
    ((session, service, text),) = its_beta.tails
    assert (session, service) == (agent.session, b"s" * 16)
    assert text.endswith(" the end")
    agent.publish(node_body(agent))
    await until(lambda: len(alpha.registry) == 1)
    assert its_alpha.tails == []
    for member in (agent, alpha, beta):
        await member.close()


async def test_who_has_a_tunnel_leaves_other_peoples_hosts_alone_and_who_has_none_does_not_wait(
    federation, monkeypatch
):
    monkeypatch.setattr(hublinks, "RETRY_MAX_S", 0.05)
    hub, _, port = await listening(federation)
    agent, _ = federation.node("agent")
    assert await agent.hub_links._wait(0.04, by_ssh=True) == 0.05, "no tunnel is up"
    login = SshHostSpec(host="127.0.0.1", user="u", host_keys=("ssh-ed25519 AAAA",))
    agent.dial([("127.0.0.1", port)], EgressSpec(login=login))
    assert agent.hub_links.routes[f"127.0.0.1:{port}"].by_ssh
    await until(lambda: agent.neighbours)
    assert await agent.hub_links._wait(0.04, by_ssh=False) == 0.05
    assert await agent.hub_links._wait(0.04, by_ssh=True) == 0.08
    waiting = asyncio.create_task(agent.hub_links._wait(50.0, by_ssh=True))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await hub.close()
    assert await asyncio.wait_for(waiting, 5) == 0.05
    await agent.close()
    assert not Route(HostPort("h", 1), EgressSpec(), {}).by_ssh


@pytest.mark.asyncio
async def test_an_agent_reads_the_hubs_of_its_map_once_a_beat(federation, monkeypatch):
    hub, _, ((agent, _),) = await linked(federation, "agent")
    hub.publish(node_body(hub))
    await until(lambda: agent.registry.node(hub.session) is not None)
    readings = []
    monkeypatch.setattr(agent.hub_links, "_hubs", lambda: readings.append(1) or agent.registry.hubs(wall=time.time()))
    agent.hub_links.beat()
    assert len(readings) == 1
    for node in (agent, hub):
        await node.close()
