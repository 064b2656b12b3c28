"""What request smugglers send: ours beside another parser (aiohttp's in Python), whole, in pieces and octet by octet.

Two parsers that see different requests in the same octets are what smuggling needs. So whatever the other one refuses,
we refuse; and where both accept, they see the same requests with the same bodies.
"""

import asyncio
import json
import random
import secrets

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParserPy

from tests.gateway.conftest import until

CHAT = json.dumps({"model": "only-a", "messages": []}).encode()
SIZE = f"content-length: {len(CHAT)}\r\n".encode()
CHUNKED = b"transfer-encoding: chunked\r\n"


def chunks(*sizes, end=b"0\r\n\r\n"):
    """The chat's body in chunks of these sizes and the rest."""
    pieces, rest = b"", CHAT
    for size in (*sizes, len(CHAT)):
        piece, rest = rest[:size], rest[size:]
        if piece:
            pieces += b"%x\r\n%b\r\n" % (len(piece), piece)
    return pieces + end


def post(headers, body, line=b"POST /v1/chat/completions HTTP/1.1\r\n"):
    return line + b"host: x\r\nAUTH" + headers + b"\r\n" + body


GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nAUTH\r\n"
GOOD = {
    "sized": post(SIZE, CHAT),
    "chunked": post(CHUNKED, chunks(1, 2, 3)),
    "chunk-extension": post(CHUNKED, b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "trailers": post(CHUNKED, chunks(end=b"0\r\nx-trailer: 1\r\n\r\n")),
    "upper-hex": post(CHUNKED, b"%X\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "zeros-before-a-size": post(CHUNKED, b"000%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "coding-in-capitals": post(b"Transfer-Encoding: CHUNKED\r\n", chunks()),
    "two-in-a-row": post(SIZE, CHAT) + post(CHUNKED, chunks(5)),
    "three-kinds": GET + post(SIZE, CHAT) + GET,
    "empty-value": post(b"x-empty:\r\n" + SIZE, CHAT),
    "spaces-around-a-value": post(b"x-wide: \t a \t\r\n" + SIZE, CHAT),
    "high-octets": post("x-name: grün\r\n".encode() + SIZE, CHAT),
    "a-colon-in-a-value": post(b"x-time: 1:2:3\r\n" + SIZE, CHAT),
    "query": post(SIZE, CHAT, b"POST /v1/chat/completions?a=b HTTP/1.1\r\n"),
}
BAD = {
    "length-and-chunks": post(SIZE + CHUNKED, chunks()),
    "chunks-and-length": post(CHUNKED + SIZE, chunks()),
    "two-lengths": post(SIZE + b"content-length: 1\r\n", CHAT),
    "the-same-length-twice": post(SIZE + SIZE, CHAT),
    "a-list-of-lengths": post(SIZE[:-2] + f", {len(CHAT)}\r\n".encode(), CHAT),
    "a-signed-length": post(SIZE.replace(b": ", b": +"), CHAT),
    "a-negative-length": post(b"content-length: -1\r\n", CHAT),
    "a-hex-length": post(b"content-length: 0x10\r\n", CHAT),
    "an-empty-length": post(b"content-length:\r\n", CHAT),
    "a-huge-length": post(b"content-length: 99999999999999999999999\r\n", CHAT),
    "a-length-of-two-words": post(b"content-length: 1 2\r\n", CHAT),
    "space-before-the-colon": post(SIZE.replace(b":", b" :"), CHAT),
    "tab-before-the-colon": post(SIZE.replace(b":", b"\t:"), CHAT),
    "folded-line": post(b"x-folded: a\r\n b\r\n" + SIZE, CHAT),
    "bare-lf-in-the-head": post(SIZE, CHAT).replace(b"host: x\r\n", b"host: x\n"),
    "bare-cr-in-a-value": post(b"x-cr: a\rb\r\n" + SIZE, CHAT),
    "nul-in-a-value": post(b"x-nul: a\x00b\r\n" + SIZE, CHAT),
    "nul-in-a-name": post(b"x-\x00nul: a\r\n" + SIZE, CHAT),
    "no-name": post(b": a\r\n" + SIZE, CHAT),
    "a-name-with-brackets": post(b"x(y): a\r\n" + SIZE, CHAT),
    "chunked-twice": post(b"transfer-encoding: chunked, chunked\r\n", chunks()),
    "chunked-and-identity": post(b"transfer-encoding: chunked, identity\r\n", chunks()),
    "two-codings": post(CHUNKED + b"transfer-encoding: identity\r\n", chunks()),
    "unknown-coding": post(b"transfer-encoding: xchunked\r\n", chunks()),
    "vertical-tab-before-the-coding": post(b"transfer-encoding:\x0bchunked\r\n", chunks()),
    "a-size-with-0x": post(CHUNKED, b"0x%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "a-size-with-a-sign": post(CHUNKED, b"+%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "a-size-with-an-underscore": post(CHUNKED, b"1_0\r\n" + CHAT[:16] + b"\r\n0\r\n\r\n"),
    "a-size-that-is-none": post(CHUNKED, b"g\r\n" + CHAT + b"\r\n0\r\n\r\n"),
    "a-huge-size": post(CHUNKED, b"fffffffffffffffff\r\n" + CHAT),
    "a-chunk-that-is-longer": post(CHUNKED, b"4\r\n" + CHAT + b"\r\n0\r\n\r\n"),
    "bare-lf-after-a-size": post(CHUNKED, b"%x\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "bare-lf-after-a-chunk": post(CHUNKED, b"%x\r\n%b\n0\r\n\r\n" % (len(CHAT), CHAT)),
    "two-hosts": post(b"host: y\r\n" + SIZE, CHAT),
    "no-host": post(SIZE, CHAT).replace(b"host: x\r\n", b""),
    "a-method-in-lower-case": post(SIZE, CHAT, b"post /v1/chat/completions HTTP/1.1\r\n"),
    "a-space-in-the-target": post(SIZE, CHAT, b"POST /v1/chat completions HTTP/1.1\r\n"),
    "a-version-that-is-none": post(SIZE, CHAT, b"POST /v1/chat/completions HTTP/1.10\r\n"),
    "http-0.9": post(SIZE, CHAT, b"POST /v1/chat/completions\r\n"),
    "a-blank-before-the-method": b" " + post(SIZE, CHAT),
    "a-head-inside-a-body": post(b"content-length: 0\r\n" + CHUNKED, chunks()),
    "http-1.0-with-chunks": post(CHUNKED + SIZE, chunks(), b"POST /v1/chat/completions HTTP/1.0\r\n"),
}
STRICTER_THAN_AIOHTTP = {"a-huge-length", "a-huge-size", "a-method-in-lower-case", "chunked-twice"}
"""That parser waits for a body that is longer than all the world's disks, and leaves the other two to its caller."""


def seen_by_aiohttp(data, loop):
    """Bodies of the requests that it sees, or None where it refuses."""
    parser = HttpRequestParserPy(BaseProtocol(loop), loop, 2**16, max_field_size=2**16)
    try:
        messages, _, tail = parser.feed_data(data)
        if tail or any(payload.exception() for _, payload in messages):
            return None
        bodies = [b"".join(payload._buffer) if hasattr(payload, "_buffer") else b"" for _, payload in messages]
        return [body for (message, _), body in zip(messages, bodies, strict=True) if message.method == "POST"]
    except (HttpProcessingError, ValueError):
        return None


def pieces(data, rng):
    cuts = sorted(rng.sample(range(1, len(data)), min(5, len(data) - 1)))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def answers(bed, parts, wanted):
    """Status lines that come back, in order; `wanted`: how many answers to wait for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bed.port)
    text = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            while (data := await reader.read(65536)) or not reader.at_eof():
                text += data
                if text.count(b"HTTP/1.1 ") >= wanted and text.endswith((b"}", b"0\r\n\r\n")):
                    break
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return [int(line[:3]) for line in text.split(b"HTTP/1.1 ")[1:]]


def ways(data):
    rng = random.Random(secrets.randbits(32))
    return {
        "whole": [data],
        "pieces": pieces(data, rng),
        "octets": [data[at : at + 1] for at in range(len(data))],
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("name", GOOD)
async def test_what_is_right_is_heard_alike_by_both(bed, name):
    data = GOOD[name].replace(b"AUTH", f"authorization: Bearer {bed.KEY}\r\n".encode())
    theirs = [json.loads(body) for body in seen_by_aiohttp(data, asyncio.get_running_loop())]
    assert theirs, "the other parser accepts it"
    for how, parts in ways(data).items():
        bed.a.seen.clear()
        count = data.count(b" HTTP/1.1\r\n")
        assert await answers(bed, parts, count) == [200] * count, how
        assert [body for _, body in bed.a.seen] == theirs, how


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD)
async def test_what_is_wrong_is_refused_and_reaches_no_engine(bed, name):
    data = BAD[name].replace(b"AUTH", f"authorization: Bearer {bed.KEY}\r\n".encode())
    for how, parts in ways(data).items():
        statuses = await answers(bed, parts, 1)
        assert statuses in ([400], []), how
        assert bed.a.seen == [], how
    await until(lambda: not bed.gateway.connections)


@pytest.mark.asyncio
async def test_the_other_parser_refuses_nothing_that_we_let_pass():
    loop = asyncio.get_running_loop()
    theirs = {name for name, data in BAD.items() if seen_by_aiohttp(data.replace(b"AUTH", b""), loop) is None}
    assert BAD.keys() - theirs == STRICTER_THAN_AIOHTTP
