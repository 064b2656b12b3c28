"""Where the engines of a site find the one that computes prompts for them."""

import asyncio
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.agent import pairing
from fabrictool.agent.bodies import service_body
from fabrictool.agent.pairing import PairMember
from fabrictool.domain.specs import AgentSpec
from fabrictool.engines.adapter import adapter
from fabrictool.mesh.records import Lifecycle, RecordError, ServiceBody, decode, seal


def spec(phase, engine="sglang"):
    return AgentSpec(
        fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m",
        source="file:///m", engine=engine, phase=phase, device="h100-sxm",
    )  # fmt: skip


class Engine:
    """Where the scripted part of a prefill engine listens for its decode engines, at loopback."""

    def __init__(self):
        self.asked = []

    async def __aenter__(self):
        async def answer(request):
            self.asked.append((request.method, request.path_qs, await request.text()))
            return web.json_response({"rank_port": 7}, status=404 if "unknown" in request.path_qs else 200)

        self.runner = web.ServerRunner(web.Server(answer))
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


async def ask(place, method="GET", path="/route", **more):
    async with aiohttp.ClientSession() as http, http.request(method, f"http://{place}{path}", **more) as answer:
        return answer.status, await answer.text()


async def connect(place):
    host, _, port = place.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def is_closed(reader):
    try:
        return await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionResetError:
        return True


def member(monkeypatch, phase, engine="sglang", host="127.0.0.2"):
    async def own(_hubs):
        if not host:
            raise OSError("no way out")
        return host

    notes = []
    monkeypatch.setattr(pairing, "own_address", own)
    return PairMember(spec(phase), adapter(engine).capabilities, lambda *words: notes.append(words)), notes


@pytest_asyncio.fixture
async def met(monkeypatch):
    """A prefill replica, its engine, and where it is met."""
    replica, _ = member(monkeypatch, "prefill")
    async with Engine() as engine:
        await replica.open()
        replica.handover(engine.port)
        yield replica, engine, replica.meets_at
        await replica.close()


@pytest.mark.asyncio
async def test_what_listens_at_loopback_is_found_at_the_nodes_address_over_restarts(monkeypatch):
    replica, _ = member(monkeypatch, "prefill")
    await replica.open()
    place = replica.meets_at
    assert place.startswith("127.0.0.2:")
    try:
        for _ in range(2):
            async with Engine() as engine:
                told = replica.handover(engine.port)
                assert (told.prefill, told.host, told.port, told.device) == (
                    True, "127.0.0.2", engine.port, "h100-sxm",
                )  # fmt: skip
                assert await ask(place, path="/route?prefill_dp_rank=0") == (200, '{"rank_port": 7}')
                assert await ask(place, path="/route?unknown=1") == (404, '{"rank_port": 7}')
                assert await ask(place, "POST", "/query_dp_ranks", json={"bootstrap_rooms": [3]}) == (
                    200, '{"rank_port": 7}',
                )  # fmt: skip
                assert engine.asked == [
                    ("GET", "/route?prefill_dp_rank=0", ""),
                    ("GET", "/route?unknown=1", ""),
                    ("POST", "/query_dp_ranks", '{"bootstrap_rooms": [3]}'),
                ]
            status, text = await ask(place)
            assert (status, text) == (503, "the engine does not answer\n"), "nobody listens: it says so at once"
        assert replica.meets_at == place
    finally:
        await replica.close()
    with pytest.raises(aiohttp.ClientConnectorError):
        await ask(place)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/route"), ("POST", "/register_dp_rank"), ("POST", "/route"), ("GET", "/health/../flush"), ("GET", "/")],
)
async def test_nobody_registers_an_engine_from_outside(met, method, path):
    _, engine, place = met
    reader, writer = await connect(place)
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 403 ")
    writer.close()
    assert engine.asked == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("head", "status"),
    [(f"content-length: {pairing.MOST_OCTETS + 1}", b"413"), ("transfer-encoding: chunked", b"411")],
)
async def test_a_question_is_short_and_says_so(met, head, status):
    _, engine, place = met
    reader, writer = await connect(place)
    writer.write(f"POST /query_dp_ranks HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{head}\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 " + status)
    writer.close()
    assert engine.asked == []


@pytest.mark.asyncio
async def test_a_second_request_on_a_connection_is_looked_at_as_the_first(met):
    _, engine, place = met
    async with aiohttp.ClientSession() as http:
        statuses = []
        for method in ("GET", "PUT", "GET"):
            async with http.request(method, f"http://{place}/route") as answer:
                statuses.append(answer.status)
    assert statuses == [200, 403, 200]
    assert [method for method, *_ in engine.asked] == ["GET", "GET"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("limit", "lasting"), [("MOST_CONNECTIONS", 2), ("MOST_OF_A_PEER", 2)])
async def test_so_many_connections_and_no_more(met, monkeypatch, limit, lasting):
    monkeypatch.setattr(pairing, limit, lasting)
    _, _, place = met
    held = [await connect(place) for _ in range(lasting)]
    reader, writer = await connect(place)
    assert await is_closed(reader)
    for one in [*(writer for _, writer in held), writer]:
        one.close()
    deadline = asyncio.get_running_loop().time() + 20
    while asyncio.get_running_loop().time() < deadline:
        try:
            assert (await ask(place))[0] == 200
            break
        except aiohttp.ClientError:
            await asyncio.sleep(0.02)
    else:
        pytest.fail("those that are gone count still")


@pytest.mark.asyncio
@pytest.mark.parametrize("begun", [b"", b"GET /route HT"], ids=["nothing", "half a line"])
async def test_who_asks_nothing_is_not_kept(met, monkeypatch, begun):
    monkeypatch.setattr(pairing, "SILENCE_S", 0.05)
    _, _, place = met
    reader, writer = await connect(place)
    writer.write(begun)
    assert await is_closed(reader)
    writer.close()


@pytest.mark.asyncio
async def test_an_engine_that_does_not_answer_is_not_waited_for(met, monkeypatch):
    monkeypatch.setattr(pairing, "ANSWER_S", 0.05)
    replica, _, place = met

    async def take_and_say_nothing(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(take_and_say_nothing, "127.0.0.1", 0)
    replica.handover(server.sockets[0].getsockname()[1])
    assert (await ask(place))[0] == 503
    server.close()
    await server.wait_closed()


@pytest.mark.asyncio
@pytest.mark.parametrize(("phase", "engine"), [("unified", "sglang"), ("decode", "sglang"), ("prefill", "vllm")])
async def test_nobody_else_needs_such_a_place(monkeypatch, phase, engine):
    one, notes = member(monkeypatch, phase, engine)
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
