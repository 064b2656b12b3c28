"""Where the engines of a site find the one that computes prompts for them."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from fabrictool.agent import pairing
from fabrictool.agent.bodies import service_body
from fabrictool.agent.pairing import PairMember
from fabrictool.domain.specs import AgentSpec
from fabrictool.mesh.records import Lifecycle, RecordError, ServiceBody, decode, seal


def spec(phase, engine="sglang"):
    return AgentSpec(
        fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m",
        source="file:///m", engine=engine, phase=phase, device="h100-sxm",
    )  # fmt: skip


async def served(port=0):
    async def answer(reader, writer):
        writer.write(b"heard " + await reader.readline())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", port)


async def ask(place):
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET /route\n")
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def member(monkeypatch, phase, way="together", host="127.0.0.2"):
    async def own(_hubs):
        if not host:
            raise OSError("no way out")
        return host

    notes = []
    monkeypatch.setattr(pairing, "own_address", own)
    return PairMember(spec(phase), way, lambda *words: notes.append(words)), notes


@pytest.mark.asyncio
async def test_what_listens_at_loopback_is_found_at_the_nodes_address_over_restarts(monkeypatch):
    one, _ = member(monkeypatch, "prefill")
    await one.open()
    place = one.meets_at
    assert place.startswith("127.0.0.2:")
    try:
        for _ in range(2):
            server = await served()
            port = server.sockets[0].getsockname()[1]
            told = one.handover(port)
            assert (told.prefill, told.host, told.port, told.device) == (True, "127.0.0.2", port, "h100-sxm")
            assert await ask(place) == b"heard GET /route\n"
            server.close()
            await server.wait_closed()
            assert await ask(place) == b"", "nobody listens: it says so at once"
        assert one.meets_at == place
    finally:
        await one.close()
    with pytest.raises(ConnectionRefusedError):
        await ask(place)


@pytest.mark.asyncio
async def test_so_many_connections_and_no_more(monkeypatch):
    monkeypatch.setattr(pairing, "MOST_CONNECTIONS", 2)
    one, _ = member(monkeypatch, "prefill")
    server = await served()
    await one.open()
    try:
        one.handover(server.sockets[0].getsockname()[1])
        host, _, port = one.meets_at.rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert await ask(one.meets_at) == b""
        for reader, writer in held:
            writer.write(b"x\n")
            assert await asyncio.wait_for(reader.read(), 20) == b"heard x\n"
            writer.close()
        assert await ask(one.meets_at) == b"heard GET /route\n"
    finally:
        await one.close()
        server.close()
        await server.wait_closed()


@pytest.mark.asyncio
@pytest.mark.parametrize(("phase", "way"), [("unified", "together"), ("decode", "together"), ("prefill", "relayed")])
async def test_nobody_else_needs_such_a_place(monkeypatch, phase, way):
    one, notes = member(monkeypatch, phase, way)
    await one.open()
    told = one.handover(20003)
    assert (one.meets_at, notes) == (None, [])
    assert told is None if phase == "unified" else (told.host, told.port) == ("127.0.0.2", 20003)
    await one.close()


@pytest.mark.asyncio
async def test_without_a_way_out_it_is_found_inside_its_node_and_says_so(monkeypatch):
    one, notes = member(monkeypatch, "prefill", host="")
    await one.open()
    assert one.meets_at.startswith("127.0.0.1:")
    assert [note[0] for note in notes] == ["no-address"]
    await one.close()


def test_its_record_says_how_it_shares_and_where_it_is_found():
    body = service_body(spec("prefill"), "f", bytes(16), bytes(16), Lifecycle.SERVING, "m")
    body = msgspec.structs.replace(body, meets_at="10.0.0.7:41000")
    read = decode(seal(body, lambda _: bytes(64)).envelope).body
    assert (read.phase, read.pairing, read.meets_at) == ("prefill", "together", "10.0.0.7:41000")
    assert service_body(spec("unified"), "f", bytes(16), bytes(16), Lifecycle.JOIN, "m").pairing == "relayed"
    assert service_body(spec("decode", "vllm"), "f", bytes(16), bytes(16), Lifecycle.JOIN, "m").pairing == "relayed"


def test_a_record_of_an_earlier_release_shares_in_turn():
    """What they wrote has neither field, and what does not differ from that is written as they did."""
    body = service_body(spec("decode", "vllm"), "f", bytes(16), bytes(16), Lifecycle.SERVING, "m")
    fields = msgspec.msgpack.decode(seal(body, lambda _: bytes(64)).envelope.body)
    assert not {"pairing", "meets_at"} & fields.keys()


@pytest.mark.parametrize(
    "place",
    ["evil.example:80", "10.0.0.7", "10.0.0.7:80/x", "http://10.0.0.7:80", "10.0.0.7:80\n", "[::1]:80", "x" * 3000],
)
def test_a_record_with_anything_but_an_address_is_refused(place):
    body = ServiceBody("f", bytes(16), bytes(16), Lifecycle.SERVING, 1, "m/0", "m", "sglang", meets_at=place)
    envelope = SimpleNamespace(body=msgspec.msgpack.encode(body), signature=bytes(64), chain=())
    with pytest.raises(RecordError):
        decode(envelope)
