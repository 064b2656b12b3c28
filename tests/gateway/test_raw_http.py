"""Bytes that no well-meaning client sends."""

import asyncio
import json

import pytest

from fabrictool.gateway.http import HEAD_S, HIGH_WATER, IDLE_CLIENT_S, REQUEST_S
from fabrictool.gateway.patience import UNKNOWN
from tests.gateway.conftest import until

pytestmark = pytest.mark.asyncio


def post(bed, body, *, headers="", path="/v1/chat/completions"):
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bed.KEY}\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


CHAT = b'{"model": "only-a", "messages": []}'


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 400), (b"{}", 400), (b'{"model": 3}', 400), (b"\xff\xfe", 400), (b"", 400)],
)
async def test_bad_json_is_400_in_the_openai_envelope(bed, body, status):
    answer = await bed.raw(post(bed, body, headers="connection: close\r\n"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert (error["code"], error["type"]) == ("invalid_json", "invalid_request_error")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"POST /v1/completions HTTP/1.1\r\nKEYcontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nKEYcontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (b"GET /v1/models HTTP/1.1\r\nKEYbad header\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nKEYupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nKEY" + b"a: " + b"b" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /v1/models?" + b"q" * 9000 + b" HTTP/1.1\r\nKEY\r\n", 414),
    ],
    ids=["version", "tls", "cl-and-te", "two-lengths", "no-colon", "upgrade", "huge-head", "long-target"],
)
async def test_what_is_not_valid_http_is_refused_and_the_connection_closed(bed, request_bytes, status):
    answer = await bed.raw(request_bytes.replace(b"KEY", f"authorization: Bearer {bed.KEY}\r\n".encode()))
    assert answer.split(b" ")[1] == str(status).encode(), answer[:80]
    assert b"connection: close" in answer.lower()
    assert bed.a.seen == bed.b.seen == []


async def test_a_header_that_no_tunnel_carries_is_431_and_duplicates_are_not_passed_on(bed):
    answer = await bed.raw(post(bed, CHAT, headers="user-agent: " + "a" * 9000 + "\r\nconnection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 431 ")
    answer = await bed.raw(post(bed, CHAT, headers="accept: a/b\r\n" * 65 + "connection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert bed.a.seen[0][0].headers.getall("accept") == ["a/b"]


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("", 200),
        ("alpha", 200),
        ("beta", 403),
        (" ", 403),
        ("alpha\nbeta", 403),
        ("beta\nalpha", 403),
        ("alpha,beta\nalpha", 200),
    ],
)
async def test_every_allowlist_line_narrows_and_an_empty_one_allows_nobody(bed, lines, status):
    headers = "".join(f"x-fabric-providers: {line}\r\n" for line in lines.split("\n") if line)
    answer = await bed.raw(post(bed, CHAT, headers=headers + "connection: close\r\n"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert len(bed.a.seen) == (status == 200)


async def test_a_client_that_does_not_read_is_not_read_from_either(bed):
    reader, writer = await asyncio.open_connection(bed.host, bed.port, limit=1024)
    writer.transport.pause_reading()
    blob = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
    while True:  # the sockets' own buffers take some; then the gateway must stop reading, or this never ends
        writer.write(blob)
        try:
            await asyncio.wait_for(writer.drain(), 1)
        except TimeoutError:
            break
    (connection,) = bed.gateway.connections
    assert connection.unread < 2 * HIGH_WATER
    writer.transport.abort()
    del reader


async def test_a_body_without_a_key_is_not_kept(bed):
    reader, writer = await asyncio.open_connection(bed.host, bed.port)
    size = 4 * 1024 * 1024
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * (size - 1))
    await until(lambda: any(c.receiving.body_octets == size - 1 for c in bed.gateway.connections))
    (connection,) = bed.gateway.connections
    assert not connection.receiving.body
    writer.write(b"x")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_the_idle_clock_starts_at_the_answer_and_cuts_nothing(bed):
    bed.a.mode = "hang"
    reader, writer = await asyncio.open_connection(bed.host, bed.port)
    writer.write(post(bed, CHAT))
    await until(lambda: bed.a.seen)
    (connection,) = bed.gateway.connections
    bed.clock.advance(IDLE_CLIENT_S + 1)  # the request came that long ago
    bed.a.release.set()
    await reader.readuntil(b"\r\n\r\n")
    connection.expire()
    bed.a.mode = "ok"
    writer.write(post(bed, CHAT, headers="connection: close\r\n"))
    assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 5), "the connection is still good"
    writer.close()


async def test_a_slow_reader_is_no_sick_replica_and_gets_all_while_it_reads(bed):
    bed.a.mode = "flood"
    reader, writer = await asyncio.open_connection(bed.host, bed.port, limit=1024)
    writer.transport.pause_reading()
    writer.write(post(bed, b'{"model": "only-a", "stream": true}', headers="connection: close\r\n"))
    await until(lambda: any(c.writing_paused for c in bed.gateway.connections))
    (connection,) = bed.gateway.connections
    connection.exchange.last_activity -= UNKNOWN.idle_s + 1
    connection.expire()
    assert bed.gateway.status().totals.failures == 0
    writer.transport.resume_reading()
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(answer) > bed.a.FLOOD
    writer.close()


async def test_a_client_that_takes_nothing_of_its_answer_is_given_up(bed):
    bed.a.mode = "flood"
    _, writer = await asyncio.open_connection(bed.host, bed.port, limit=1024)
    writer.transport.pause_reading()
    writer.write(post(bed, b'{"model": "only-a", "stream": true}'))
    await until(lambda: any(c.writing_paused for c in bed.gateway.connections))
    (connection,) = bed.gateway.connections
    connection.expire()
    bed.clock.advance(IDLE_CLIENT_S + 1)
    connection.expire()
    await until(lambda: not bed.gateway.connections)
    assert bed.gateway.status().totals.failures == 0
    assert bed.gateway.status().totals.in_flight == 0
    writer.close()


@pytest.mark.parametrize(("part", "limit"), [(b"GET /v1/models HT", HEAD_S), (b"", REQUEST_S)])
async def test_a_request_that_drips_in_has_a_deadline(bed, part, limit):
    reader, writer = await asyncio.open_connection(bed.host, bed.port)
    writer.write(part or post(bed, CHAT)[:-1])
    await until(lambda: any(c.receiving.target for c in bed.gateway.connections))
    (connection,) = bed.gateway.connections
    bed.clock.advance(limit - 1)
    connection.expire()
    await asyncio.sleep(0.01)  # a closed one would leave meanwhile
    assert bed.gateway.connections == {connection}
    bed.clock.advance(2)
    connection.expire()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_draining_answers_what_is_open_refuses_what_is_new_and_ends(make_bed):
    bed = await make_bed().start()
    bed.a.mode = "hang"
    reader, writer = await asyncio.open_connection(bed.host, bed.port)
    idle, idle_writer = await asyncio.open_connection(bed.host, bed.port)
    writer.write(post(bed, CHAT) + post(bed, CHAT))
    await until(lambda: bed.a.seen and len(bed.gateway.connections) == 2)
    draining = asyncio.create_task(bed.gateway.drain(3600))
    assert await asyncio.wait_for(idle.read(), 5) == b""
    bed.a.release.set()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer
    await asyncio.wait_for(draining, 5)
    assert len(bed.a.seen) == 1
    for each in (writer, idle_writer):
        each.close()
    await bed.stop()


async def test_pipelined_requests_are_answered_in_order(bed):
    first = post(bed, CHAT)
    second = post(bed, b"{", headers="connection: close\r\n")
    answer = await bed.raw(first + second)
    assert answer.index(b"HTTP/1.1 200 OK") < answer.index(b"HTTP/1.1 400 Bad Request")


async def test_one_byte_at_a_time(bed):
    reader, writer = await asyncio.open_connection(bed.host, bed.port)
    for byte in post(bed, CHAT, headers="connection: close\r\n"):
        writer.write(bytes([byte]))
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("headers", ["", "connection: keep-alive\r\n"])
async def test_http_1_0_gets_an_unchunked_stream_that_ends_with_the_connection(bed, headers):
    body = b'{"model": "only-a", "stream": true}'
    request = post(bed, body, headers=headers).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await bed.raw(request)
    head, text = answer.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head
    assert text.endswith(b"data: [DONE]\n\n")


async def test_a_header_cannot_smuggle_another(bed):
    answer = await bed.raw(post(bed, CHAT, headers="x-request-id: a\tb\r\nconnection: close\r\n"))
    assert b"x-request-id: 0-" in answer
