"""Bytes that no well-meaning client sends."""

import asyncio
import json

import pytest

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
    "request_bytes",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
    ],
    ids=["version", "tls", "cl-and-te", "two-lengths", "no-colon", "upgrade", "huge-head"],
)
async def test_what_is_not_valid_http_is_refused_and_the_connection_closed(bed, request_bytes):
    answer = await bed.raw(request_bytes)
    assert answer.split(b" ")[1] in (b"400", b"401", b"431"), answer[:80]
    assert b"connection: close" in answer.lower()
    assert bed.a.seen == bed.b.seen == []


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


async def test_http_1_0_gets_an_unchunked_stream(bed):
    body = b'{"model": "only-a", "stream": true}'
    request = post(bed, body).replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await bed.raw(request)
    head, text = answer.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head
    assert text.endswith(b"data: [DONE]\n\n")


async def test_a_header_cannot_smuggle_another(bed):
    answer = await bed.raw(post(bed, CHAT, headers="x-request-id: a\tb\r\nconnection: close\r\n"))
    assert b"x-request-id: req-" in answer
