"""What a tunnel costs the requests that share it, over real sockets and TLS 1.3 on loopback; all ends in this process.

    python tests/bench/tunnel.py [--quick]

First: small requests, one after another, beside 32 streams that an agent fills without end, on a link of 2 MB/s (a
relay between two sockets that carries so many octets a second each way and holds 64 KiB itself). Then: an upload of
30 MiB through a tunnel, against the same octets over plain TCP and over TLS alone.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import time
from pathlib import Path

from fabrictool.base.clock import SystemClock
from fabrictool.gateway.loop import run_loop
from fabrictool.mesh.framing import StreamHead
from fabrictool.mesh.identity import create_root, issue_provider, issue_session
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.tls import IdentityFiles, client_context, server_context

BULK_STREAMS = 32
LINK_OCTETS_S = 2_000_000
UPLOAD = 30 * 2**20
QUEUE = 64 * 1024
"""Octets that the slow link itself holds, each way."""


class Quiet:
    """A node's owner that wants nothing but to serve streams."""

    accept = None

    def record_changed(self, record):
        """Not looked at."""

    def link_changed(self, session, *, up, reason):
        """Not looked at."""

    def load_reported(self, session, load):
        """Not looked at."""

    def load(self, peer):
        """None."""
        return ()

    def stream_opened(self, stream, head, peer):
        """Whatever `accept` returns."""
        return self.accept(head)


class Flood(asyncio.Protocol):
    """Writes without end, as fast as it is let."""

    def connection_made(self, transport):
        self.transport, self.open = transport, True
        self.resume_writing()

    def resume_writing(self):
        self.writing = True
        asyncio.get_running_loop().call_soon(self.more)

    def pause_writing(self):
        self.writing = False

    def more(self):
        if self.writing and self.open:
            self.transport.write(bytes(64 * 1024))
            asyncio.get_running_loop().call_soon(self.more)

    def connection_lost(self, exc):
        self.open = False


class Sink(asyncio.Protocol):
    """Counts; answers one octet when all has come."""

    def __init__(self, awaited):
        self.missing = awaited

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.missing -= len(data)
        if self.missing == 0:
            self.transport.write(b"1")


class Answer(asyncio.Protocol):
    """Waits for the first octet of an answer."""

    def __init__(self):
        self.came = asyncio.get_running_loop().create_future()
        self.octets = 0

    def data_received(self, data):
        self.octets += len(data)
        if not self.came.done():
            self.came.set_result(time.perf_counter())


class SlowLink:
    """A relay between two sockets: `LINK_OCTETS_S` each way."""

    async def start(self, port):
        self.port, self.tasks = port, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE // 2)
        self.listener.setblocking(False)
        self.tasks.append(asyncio.create_task(self.accept()))
        return self.listener.getsockname()[1]

    async def accept(self):
        loop = asyncio.get_running_loop()
        near, _ = await loop.sock_accept(self.listener)
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE // 2)
        far.setblocking(False)
        await loop.sock_connect(far, ("127.0.0.1", self.port))
        self.tasks += [asyncio.create_task(self.carry(a, b)) for a, b in ((near, far), (far, near))]

    async def carry(self, source, target):
        """A burst of five milliseconds at most, so that a late wake-up makes the link no slower."""
        loop = asyncio.get_running_loop()
        allowed, last = 0.0, time.perf_counter()
        while True:
            now = time.perf_counter()
            allowed, last = min(allowed + (now - last) * LINK_OCTETS_S, LINK_OCTETS_S * 0.005), now
            if allowed < 1500:
                await asyncio.sleep(0.001)
                continue
            data = await loop.sock_recv(source, int(allowed))
            if not data:
                return
            allowed -= len(data)
            await loop.sock_sendall(target, data)

    def stop(self):
        for task in self.tasks:
            task.cancel()
        self.listener.close()


async def linked(files, *, slow):
    """Hub, agent's owner, the hub's tunnel to the agent, and a function that stops all."""
    nodes = [MeshNode(f, Quiet(), SystemClock(), hub=i == 0) for i, f in enumerate(files)]
    hub, agent = nodes
    port = await hub.listen("127.0.0.1", 0)
    link = SlowLink()
    if slow:
        port = await link.start(port)
    agent.dial([("127.0.0.1", port)])
    while hub.tunnel(agent.session) is None:  # noqa: ASYNC110 - a benchmark may poll
        await asyncio.sleep(0.01)

    async def stop():
        for node in nodes:
            await node.close()
        if slow:
            link.stop()

    return agent._listener, hub.tunnel(agent.session), stop


def head(length=0):
    return StreamHead(bytes(16), "POST", "/v1/chat/completions", (), length)


async def beside_bulk(files, streams, seconds):
    """Delays of small requests in ms, and octets a second of the bulk streams together."""
    owner, tunnel, stop = await linked(files, slow=True)
    owner.accept = lambda h: Sink(h.length) if h.length else Flood()
    bulk = [Answer() for _ in range(streams)]
    for answer in bulk:
        tunnel.open_stream(head(), answer)
    for answer in bulk:
        await answer.came
    await asyncio.sleep(1)
    delays, before, began = [], sum(a.octets for a in bulk), time.perf_counter()
    while time.perf_counter() - began < seconds or len(delays) < 3:
        answer, sent = Answer(), time.perf_counter()
        stream = tunnel.open_stream(head(2000), answer)
        stream.write(bytes(2000))
        stream.write_eof()
        delays.append((await answer.came - sent) * 1e3)
        stream.close()
        await asyncio.sleep(0.05)
    rate = (sum(a.octets for a in bulk) - before) / (time.perf_counter() - began)
    await stop()
    await asyncio.sleep(0.1)
    return delays, rate


async def upload_tunnel(files, body):
    """Seconds from the first octet written until the answer."""
    owner, tunnel, stop = await linked(files, slow=False)
    owner.accept = lambda h: Sink(h.length)
    answer, began = Answer(), time.perf_counter()
    stream = tunnel.open_stream(head(len(body)), answer)
    stream.write(body)
    stream.write_eof()
    took = await answer.came - began
    await stop()
    await asyncio.sleep(0.1)
    return took


async def upload_direct(body, server=None, client=None):
    """The same over one connection, plain or with these TLS contexts."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Sink(len(body)), "127.0.0.1", 0, ssl=server)
    port, options = listener.sockets[0].getsockname()[1], {"ssl": client, "server_hostname": ""} if client else {}
    transport, answer = await loop.create_connection(Answer, "127.0.0.1", port, **options)
    began = time.perf_counter()
    transport.write(body)
    took = await answer.came - began
    transport.abort()
    listener.close()
    await asyncio.sleep(0.1)
    return took


def identities(folder):
    """Credential files of a gateway and an agent of one federation."""
    root = create_root("bench", now=time.time())
    provider = issue_provider(root, "alpha", now=time.time())
    both = []
    for role in ("gateway", "agent"):
        files = IdentityFiles(folder / role)
        files.folder.mkdir(parents=True)
        files.write(issue_session(provider, role, now=time.time()), root)
        both.append(files)
    return both


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three seconds a row, one upload")
    quick = parser.parse_args(argv).quick
    seconds, repeat = (3, 1) if quick else (15, 7)
    with tempfile.TemporaryDirectory() as folder:
        files = identities(Path(folder))
        print("| beside bulk streams, link of 2 MB/s | small requests | p50 ms | max ms | bulk MB/s |")
        print("|---|--:|--:|--:|--:|")
        for name, runner in (("uvloop where installed", run_loop), ("asyncio", asyncio.run)):
            for streams in (0, BULK_STREAMS):
                delays, rate = runner(beside_bulk(files, streams, seconds))
                p50, worst = statistics.median(delays), max(delays)
                print(f"| {streams} streams, {name} | {len(delays)} | {p50:.0f} | {worst:.0f} | {rate / 1e6:.2f} |")
        body = bytes(UPLOAD)
        ways = {
            "plain TCP": lambda: upload_direct(body),
            "TLS": lambda: upload_direct(body, server_context(files[0]), client_context(files[1])),
            "tunnel": lambda: upload_tunnel(files, body),
        }
        print("\n| upload of 30 MiB, asyncio | ms | ÷ plain TCP | ÷ TLS |\n|---|--:|--:|--:|")
        took = {name: statistics.median(asyncio.run(way()) for _ in range(repeat)) for name, way in ways.items()}
        for name, value in took.items():
            ratios = f"{value / took['plain TCP']:.1f} | {value / took['TLS']:.2f}"
            print(f"| {name} | {value * 1e3:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
