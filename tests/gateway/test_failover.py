"""What replicas do wrong, and what their clients see of it: nothing, as long as one is left."""

import asyncio
import json

import aiohttp
import openai
import pytest

from fabrictool.gateway.patience import UNKNOWN
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.gateway.upstream import ANSWER_HEAD_OCTETS, IDLE_S
from fabrictool.routing.ejection import OUT_S
from tests.gateway.conftest import FakeEngine, until
from tests.gateway.test_raw_http import CHAT, post

pytestmark = pytest.mark.asyncio
N = 5


def ask(bed, http, **fields):
    return http.post(bed.url + "/v1/chat/completions", json={"model": "m", "messages": []} | fields)


def session(bed):
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"})


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "random"])
@pytest.mark.parametrize("dead", range(1, N))
async def test_with_any_number_dead_but_one_nobody_sees_an_error(make_bed, dead, policy):
    engines = [FakeEngine(str(number)) for number in range(N)]
    for engine in engines:
        await engine.start()
    bed = await make_bed().start(policy, retries=0, nodes=[StaticNode(e.url, ["m"], "alpha") for e in engines])
    for engine in engines[:dead]:
        await engine.stop()
    async with session(bed) as http:
        for number in range(40):
            async with ask(bed, http, stream=number % 3 == 0) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
    totals = bed.gateway.status().totals
    assert totals.failures == totals.in_flight == 0
    assert totals.retries <= dead, "who refuses is asked once, until it is time to try again"
    for engine in engines[dead:]:
        await engine.stop()
    await bed.stop()


async def test_a_server_that_comes_back_is_used_again(bed):
    await bed.a.stop()
    async with session(bed) as http:
        for _ in range(4):
            assert (await ask(bed, http)).status == 200
        retries = bed.gateway.status().totals.retries
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", bed.a.port)
        bed.clock.advance(1.5)
        for _ in range(4):
            assert (await ask(bed, http)).status == 200
        assert bed.gateway.status().totals.retries == retries + 1, "one request tried it, and it was out again"
        server.close()
        await server.wait_closed()


async def test_an_engine_that_restarts_under_many_requests_is_out_as_long_as_after_one(bed):
    bed.a.mode = "hang"
    async with session(bed) as http:
        tasks = [asyncio.create_task(ask(bed, http).__aenter__()) for _ in range(16)]
        await until(lambda: len(bed.a.seen) == 8)
        for request, _ in bed.a.seen:
            request.transport.abort()
        bed.a.mode = "ok"
        assert {(await task).status for task in tasks} == {200}
        assert out_for(bed, "alpha") == OUT_S


def out_for(bed, provider):
    """Seconds that a provider's server is still left alone."""
    (target,) = [t for t in bed.gateway.directory if (t.model, t.provider) == ("m", provider)]
    return max(0.0, target.ejection.out_until - bed.clock.monotonic())


async def test_a_server_that_has_no_room_in_time_is_passed_over_and_not_put_out(bed):
    bed.a.mode = "full"
    async with session(bed) as http:
        answers = [await (await ask(bed, http)).json() for _ in range(12)]
        assert {answer["choices"][0]["message"]["content"] for answer in answers} == {"from b"}
        asked = len(bed.a.seen)
        assert asked > 2, "after two failures it would have been out"
        bed.b.mode = "full"
        refused = await ask(bed, http)
        assert refused.status == 503
        assert (await refused.json())["error"]["code"] == "no_room_in_time"
        bed.a.mode = "ok"
        assert (await ask(bed, http)).status == 200, "no time had to pass"


@pytest.mark.parametrize("mode", ["full", "left"])
async def test_who_was_out_and_then_is_full_or_leaves_is_tried_again(bed, mode):
    async with session(bed) as http:
        bed.a.mode = "reset"
        for _ in range(6):
            assert (await ask(bed, http)).status == 200
        assert out_for(bed, "alpha") == OUT_S
        bed.a.mode = mode
        bed.clock.advance(2 * OUT_S)
        for _ in range(4):
            assert (await ask(bed, http)).status == 200
        bed.a.mode, asked = "ok", len(bed.a.seen)
        bed.clock.advance(OUT_S)  # that it leaves says nothing of whether it is well
        for _ in range(4):
            assert (await ask(bed, http)).status == 200
        assert len(bed.a.seen) > asked


async def test_what_an_engine_does_not_have_is_no_reason_to_leave_it_alone(bed):
    bed.a.mode = bed.b.mode = "501"
    async with session(bed) as http:
        for _ in range(12):
            async with http.post(bed.url + "/v1/embeddings", json={"model": "m", "input": "x"}) as answer:
                assert answer.status == 501
    assert (out_for(bed, "alpha"), out_for(bed, "beta")) == (0.0, 0.0)


async def test_every_server_is_asked_however_long_full_ones_took_to_say_so(make_bed):
    engines = [FakeEngine(str(number)) for number in range(N)]
    for engine in engines:
        await engine.start()
        engine.mode = "full"
    engines[0].mode = "ok"
    bed = await make_bed().start("round-robin", retries=0, nodes=[StaticNode(e.url, ["m"], "alpha") for e in engines])
    for engine in engines[1:]:
        engine.before = lambda: bed.clock.advance(4.0)  # longer than what counts as a slow failure
    async with session(bed) as http:
        for _ in range(N):
            async with ask(bed, http) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == "from 0"
    for engine in engines:
        await engine.stop()
    await bed.stop()


async def raw_engine(answers):
    """A server whose connections give one of these answers a request, and close after `None`."""
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                answer = answers.pop(0) if answers else None
                if answer is None:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, StaticNode(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ["m"], "alpha"), connections


OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n{"id":1}'


async def test_a_connection_is_kept_for_the_next_request(make_bed):
    server, node, connections = await raw_engine([OK] * 5)
    bed = await make_bed().start(nodes=[node])
    async with session(bed) as http:
        for _ in range(5):
            assert (await ask(bed, http)).status == 200
    assert len(connections) == 1
    server.close()
    await bed.stop()


async def test_a_kept_connection_that_its_server_closed_costs_nothing(make_bed):
    server, node, connections = await raw_engine([OK, None, OK])
    bed = await make_bed().start(nodes=[node], retries=0)
    async with session(bed) as http:
        assert (await ask(bed, http)).status == 200
        assert (await ask(bed, http)).status == 200, "closed without an octet: asked again by a new one"
    assert len(connections) == 2
    assert bed.gateway.status().totals.retries == 0
    server.close()
    await bed.stop()


@pytest.mark.parametrize(
    "again",
    [
        OK.replace(b"content-type", b"connection: close\r\ncontent-type"),
        OK + OK,
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}",
    ],
    ids=["says-close", "says-more", "has-no-length"],
)
async def test_a_connection_whose_answer_says_so_is_not_kept(make_bed, again):
    server, node, connections = await raw_engine([again, None] if b"length" not in again else [again, OK])
    bed = await make_bed().start(nodes=[node])
    async with session(bed) as http:
        task = asyncio.create_task(http.post(bed.url + "/v1/chat/completions", json={"model": "m"}))
        if b"length" not in again:
            await until(lambda: connections)
            await asyncio.sleep(0.05)
            connections[0].close()
        assert json.loads(await (await task).read()) in ({"id": 1}, {})
        if b"length" in again:
            assert (await ask(bed, http)).status == 200
            assert len(connections) == 2
    assert IDLE_S < 5.0, "uvicorn's own limit"
    server.close()
    await bed.stop()


async def test_an_endless_head_of_an_answer_is_cut_off(make_bed):
    endless = b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * (2 * ANSWER_HEAD_OCTETS // 8)
    server, node, _ = await raw_engine([endless])
    bed = await make_bed().start(nodes=[node])
    async with session(bed) as http, ask(bed, http) as answer:
        assert answer.status == 502
        assert "64 KiB" in await answer.text()
    server.close()
    await bed.stop()


async def test_a_stopped_engine_is_given_up_when_its_model_never_took_so_long(bed):
    bed.a.mode = "hang"
    async with session(bed) as http:
        task = asyncio.create_task(
            http.post(bed.url + "/v1/chat/completions", json={"model": "only-a", "stream": True})
        )
        await until(lambda: bed.a.seen)
        (connection,) = bed.gateway.connections
        bed.clock.advance(UNKNOWN.unknown_s - 1)
        connection.expire()
        assert not task.done()
        bed.clock.advance(2)
        connection.expire()
        answer = await task
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "upstream_timeout"


# -- what a request may look like ------------------------------------------------------------------------------------


async def test_a_body_that_is_nested_deeply_is_400(bed):
    body = b'{"model": "only-a", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = await bed.raw(post(bed, body, headers="connection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"nested too deeply" in answer


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nKEYconnection: close\r\n\r\n", b"400"),
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\nKEYconnection: close\r\n\r\n", b"400"),
        (b"GET http://x/v1/models HTTP/1.1\r\nhost: x\r\nKEYconnection: close\r\n\r\n", b"200"),
        (b"GET /v1/models/org%2Fname HTTP/1.1\r\nhost: x\r\nKEYconnection: close\r\n\r\n", b"200"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nKEYtransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n", b"401"),
    ],
    ids=["no-host", "two-hosts", "absolute-form", "slash-in-a-name", "gzip-chunked", "expect-without-a-key"],
)
async def test_small_print_of_http(make_bed, request_text, status):
    bed = make_bed()
    engine = FakeEngine("x")
    await engine.start()
    await bed.start(nodes=[StaticNode(engine.url, ["org/name"], "alpha")])
    answer = await bed.raw(request_text.replace(b"KEY", f"authorization: Bearer {bed.KEY}\r\n".encode()))
    assert answer.split(b" ")[1] == status, answer[:300]
    await engine.stop()
    await bed.stop()


async def test_the_sdk_finds_a_model_with_a_slash(make_bed):
    bed = make_bed()
    engine = FakeEngine("x")
    await engine.start()
    await bed.start(nodes=[StaticNode(engine.url, ["org/name"], "alpha")])
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=bed.KEY, max_retries=0) as client:
        assert (await client.models.retrieve("org/name")).id == "org/name"
    await engine.stop()
    await bed.stop()


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/responses", "/v1/rerank"]
)
async def test_other_apis_are_passed_on_as_they_are(bed, path):
    body = b'{ "model" : "only-a",  "input":"x" , "thinking":{"type":"enabled"}}'
    request = post(bed, body, path=path, headers="connection: close\r\nanthropic-version: 2023-06-01\r\n")
    answer = await bed.raw(request.replace(b"authorization: Bearer", b"x-api-key:"))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    ((seen, _),) = bed.a.seen
    assert (seen.path, await seen.read()) == (path, body)
    assert seen.headers["anthropic-version"] == "2023-06-01"
    assert "x-api-key" not in seen.headers


async def test_errors_are_in_the_words_of_the_api(bed):
    answer = await bed.raw(post(bed, b'{"model": "nope"}', path="/v1/messages", headers="connection: close\r\n"))
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")


async def test_a_request_that_is_open_when_the_gateway_ends_is_told_so(make_bed):
    bed = await make_bed().start()
    bed.a.mode = "stream-hang"
    tasks = []
    for stream in (b"true", b"false"):
        bed.a.mode = "stream-hang" if stream == b"true" else "hang"
        body = CHAT[:-1] + b', "stream": ' + stream + b"}"
        tasks.append(asyncio.create_task(bed.raw(post(bed, body))))
        await until(lambda: len(bed.a.seen) == len(tasks))
    await until(lambda: any(c.exchange is not None and c.exchange._passing for c in bed.gateway.connections))
    await bed.gateway.drain(0.05)
    streamed, whole = await asyncio.gather(*tasks)
    assert b"being stopped" in streamed
    assert streamed.endswith(b"\r\n0\r\n\r\n")
    assert b"[DONE]" not in streamed
    assert whole.startswith(b"HTTP/1.1 503 ")
    await bed.stop()
