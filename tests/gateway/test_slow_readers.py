"""Five hundred clients that take nothing of their answers do not hinder the others, nor fill the memory."""

import asyncio
import contextlib
import socket

import pytest

from fabrictool.gateway.http import HIGH_WATER, IDLE_CLIENT_S, LEAST_TAKEN, ClientConnection, ClientRequest, Handler
from fabrictool.gateway.outbox import Outbox
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import until
from tests.manual_clock import ManualClock

READERS = 500
PIECE = b"data: " + b"x" * 8184 + b"\n\n"
PIECES = 50
"""Of 8 KiB: more than the kernel and the gateway keep for a client that does not read."""
CHAT = b'{"model": "m", "messages": [], "stream": true}'


async def flood(reader, writer):
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(PIECES):
                writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
                await writer.drain()
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
    writer.close()


async def ask(bed, plug):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bed.KEY}\r\n"
    request = f"{head}connection: close\r\ncontent-length: {len(CHAT)}\r\n\r\n".encode() + CHAT
    loop = asyncio.get_running_loop()
    plug.setblocking(False)
    await loop.sock_connect(plug, (bed.host, bed.port))
    await loop.sock_sendall(plug, request)
    return plug


async def read_all(plug):
    parts = []
    while part := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(plug, 65536), 60):
        parts.append(part)
    plug.close()
    return b"".join(parts)


def narrow():
    """A socket that takes little until somebody reads from it."""
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return plug


class Pipe(asyncio.Transport):
    """To a client that takes what the test says."""

    def __init__(self):
        super().__init__()
        self.waiting = 0
        self.aborted = False

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_write_buffer_size(self):
        return self.waiting

    def write(self, data):
        self.waiting += len(data)

    def take(self, octets):
        self.waiting = max(0, self.waiting - octets)

    def is_closing(self):
        return self.aborted

    def close(self):
        """No request comes: it would be closed for that."""

    def abort(self):
        self.aborted = True


class Nobody(Handler):
    """Hears of connections that no request comes by."""

    def __init__(self):
        self.clients = []

    def opened(self, connection):
        self.clients.append(connection)


@pytest.mark.parametrize(("octets", "each_s", "stays"), [(1, 60, False), (100, 1, False), (LEAST_TAKEN, 60, True)])
@pytest.mark.parametrize("written", [0, 50], ids=["paused", "while-more-is-written"])
def test_who_drips_is_cut_and_who_is_only_slow_is_not(octets, each_s, stays, written):
    clock, pipe = ManualClock(), Pipe()
    client = ClientConnection(Nobody(), clock, Outbox(lambda flush: None))
    client.connection_made(pipe)
    client.begin(200, "text/event-stream", "")
    client.chunk(b"x" * (HIGH_WATER + 1_000_000))
    for second in range(1, 900):
        if second % each_s == 0:
            pipe.take(octets)
        client.chunk(b"y" * written)
        clock.advance(1.0)
        client.expire()
        if pipe.aborted:
            break
    assert pipe.aborted is not stays
    assert stays or IDLE_CLIENT_S < clock.monotonic() < 3 * IDLE_CLIENT_S


async def cut_after(rate, seconds):
    """When a client is cut that takes `rate` octets a second, by a connection with the system's own buffers; None: not
    within `seconds`.
    """
    clock, handler = ManualClock(), Nobody()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(handler, clock, Outbox()), "127.0.0.1", 0)
    plug = socket.socket()
    plug.setblocking(False)
    await loop.sock_connect(plug, server.sockets[0].getsockname())
    await until(lambda: handler.clients)
    (client,) = handler.clients
    client._current = ClientRequest()
    client.begin(200, "text/event-stream", "")
    cut = None
    for second in range(seconds):
        while not client.writing_paused and not client._transport.is_closing():
            client.chunk(b"x" * 4096)
        left = rate
        while left and (part := plug.recv(left) if second else b""):
            left -= len(part)
        await asyncio.sleep(0.005)
        clock.advance(1.0)
        client.expire()
        if client._transport.is_closing():
            cut = second
            break
    plug.close()
    client._transport.abort()
    server.close()
    return cut


@pytest.mark.asyncio
async def test_who_takes_eight_kilobytes_a_second_is_not_cut_whatever_the_systems_buffers_hold():
    assert await cut_after(8000, 400) is None


@pytest.mark.asyncio
async def test_who_takes_nothing_is_cut_whatever_the_systems_buffers_hold():
    assert IDLE_CLIENT_S - 2 <= await cut_after(0, 400) < 3 * IDLE_CLIENT_S, "the last of it is acknowledged late"


def test_who_takes_all_of_it_is_never_cut_however_little_there_is():
    clock, pipe = ManualClock(), Pipe()
    client = ClientConnection(Nobody(), clock, Outbox(lambda flush: None))
    client.connection_made(pipe)
    for second in range(900):
        client.chunk(b"x")
        if second % 60 == 0:
            pipe.take(10**6)
        clock.advance(1.0)
        client.expire()
    assert not pipe.aborted


@pytest.mark.asyncio
async def test_five_hundred_slow_readers_do_not_hinder_the_others(make_bed):
    tasks = []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        await flood(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    node = StaticNode(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ["m"], "alpha")
    bed = await make_bed().start(nodes=[node])
    for listener in (*server.sockets, *bed.gateway.listening.sockets):  # or the kernel keeps megabytes for each
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    slow = [await ask(bed, narrow()) for _ in range(READERS)]
    await until(lambda: sum(connection.writing_paused for connection in bed.gateway.connections) == READERS, 60)
    unread = [connection.unread for connection in bed.gateway.connections]
    assert max(unread) <= HIGH_WATER + 256 * 1024, "what one read of an engine brought, and no more"
    for _ in range(20):
        text = await read_all(await ask(bed, socket.socket()))
        assert text.count(b"data: xx") == PIECES
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    paused = [connection for connection in bed.gateway.connections if connection.writing_paused]
    assert len(paused) == READERS, "nothing was fetched for them meanwhile"
    assert [connection.unread for connection in paused] == unread
    for plug in slow[:5]:
        assert (await read_all(plug)).count(b"data: xx") == PIECES, "they get all of it, once they read"
    for plug in slow:
        plug.close()
    await until(lambda: bed.gateway._metrics.in_flight == 0, 60)
    server.close()
    await bed.stop()
    await asyncio.gather(*tasks)
