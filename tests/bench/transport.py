"""Two ways to carry many token streams over one connection that the agent dialled: our frames, or HTTP/2 with
reversed roles (the dialling agent is the HTTP/2 server). The decision that follows is docs/adr/0002-transport.md.

    python tests/bench/transport.py [--quick]

First sans I/O, then over TLS 1.3 with both certificates checked, on loopback; both ends run in this process, so CPU is
that of sender and receiver together. Every token is 180 octets, about one SSE chunk. Flow control is on in both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.settings

from fabrictool.gateway.loop import run_loop
from fabrictool.mesh import framing, mux, turns
from fabrictool.mesh.framing import STREAM_CREDIT, FrameType, StreamHead
from fabrictool.mesh.identity import create_root, issue_provider, issue_session
from fabrictool.mesh.mux import Mux
from fabrictool.mesh.transport.tls import IdentityFiles, client_context, server_context

TOKEN = 180
STREAMS = (1, 64, 256)
STAMP = struct.Struct(">d")


# -- the two candidates, behind the same six calls ----------------------------------------------------------------


class OurEnd:
    """One end of a connection with our frames."""

    name = "our frames"

    def __init__(self, *, agent):
        self.mux = Mux(dialler=agent)

    def open(self):
        return self.mux.open(StreamHead(bytes(16), "POST", "/v1/chat/completions", (("content-type", "x"),), 0))

    def send(self, stream, data):
        self.mux.write(stream, data)

    def may_send(self, stream):
        return not self.mux.blocked(stream)

    def take(self):
        return self.mux.take()

    def receive(self, data, *, consume=True):
        """Pairs of stream and payload."""
        found = []
        for frame in self.mux.receive(data):
            if frame.type is FrameType.DATA:
                found.append((frame.stream, frame.payload))
                if consume:
                    self.mux.consumed(frame.stream, len(frame.payload))
        return found

    def answer(self, stream):
        """Begin the response."""


class H2End:
    """One end of an HTTP/2 connection; header checks that an authenticated peer does not need are off."""

    name = "h2 library"

    def __init__(self, *, agent):
        config = h2.config.H2Configuration(
            client_side=not agent,
            validate_outbound_headers=False,
            validate_inbound_headers=False,
            normalize_outbound_headers=False,
            normalize_inbound_headers=False,
        )
        self.conn = h2.connection.H2Connection(config)
        codes = h2.settings.SettingCodes
        self.conn.local_settings = h2.settings.Settings(
            client=not agent,
            initial_values={
                codes.INITIAL_WINDOW_SIZE: STREAM_CREDIT,
                codes.MAX_CONCURRENT_STREAMS: framing.MAX_STREAMS,
                codes.ENABLE_PUSH: 0,
            },
        )
        self.conn.initiate_connection()
        # Our frames limit each stream only; the same here, or one slow reader would hold up its neighbours.
        self.conn.increment_flow_control_window(2**31 - 1 - 65535)

    def open(self):
        stream = self.conn.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "https"), (":path", "/v1/chat/completions"), (":authority", "s")]
        self.conn.send_headers(stream, [*head, ("content-type", "x")], end_stream=True)
        return stream

    def answer(self, stream):
        self.conn.send_headers(stream, [(":status", "200"), ("content-type", "text/event-stream")])

    def send(self, stream, data):
        if self.conn.local_flow_control_window(stream) < len(data):
            raise RuntimeError("the benchmark's streams never fill their window")
        self.conn.send_data(stream, data)

    def may_send(self, stream):
        return self.conn.local_flow_control_window(stream) >= TOKEN

    def take(self):
        return self.conn.data_to_send()

    def receive(self, data, *, consume=True):
        found = []
        for event in self.conn.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                found.append((event.stream_id, event.data))
                if consume:
                    self.conn.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        return found


def connect(kind, streams):
    """Gateway and agent with that many streams open and answered."""
    gateway, agent = kind(agent=False), kind(agent=True)
    settle(gateway, agent)
    ids = [gateway.open() for _ in range(streams)]
    settle(gateway, agent)
    for stream in ids:
        agent.answer(stream)
    settle(gateway, agent)
    return gateway, agent, ids


def settle(one, other):
    """Carry octets both ways until there are none."""
    while True:
        out, back = one.take(), other.take()
        if not out and not back:
            return
        if out:
            other.receive(out)
        if back:
            one.receive(back)


# -- sans I/O -------------------------------------------------------------------------------------------------------


def without_sockets(kind, streams, tokens, *, together):
    """CPU µs per token for encode, decode and credit, and octets on the wire per token.

    `together`: tokens of one round leave in one write, as when an engine's step is read at once; else one write each.
    """
    gateway, agent, ids = connect(kind, streams)
    payload = b"d" * TOKEN
    rounds = max(1, tokens // streams)
    octets = 0
    gc.collect()
    began = time.process_time()
    for _ in range(rounds):
        if together:
            for stream in ids:
                agent.send(stream, payload)
            batches = [agent.take()]
        else:
            batches = []
            for stream in ids:
                agent.send(stream, payload)
                batches.append(agent.take())
        for batch in batches:
            octets += len(batch)
            gateway.receive(batch)
            credit = gateway.take()
            if credit:
                octets += len(credit)
                agent.receive(credit)
    used = time.process_time() - began
    return used / (rounds * streams) * 1e6, octets / (rounds * streams)


def memory(kind, streams=256):
    """Octets per open stream, both ends together, after one token on each."""
    connect(kind, 1)
    gc.collect()
    tracemalloc.start()
    gateway, agent, ids = connect(kind, 1)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    ids += [gateway.open() for _ in range(streams)]
    settle(gateway, agent)
    for stream in ids[1:]:
        agent.answer(stream)
        agent.send(stream, b"d" * TOKEN)
    settle(gateway, agent)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / streams


def unread(kind):
    """Octets that a sender can put into a stream whose reader consumes nothing."""
    gateway, agent, (stream,) = connect(kind, 1)
    sent = 0
    while agent.may_send(stream):
        agent.send(stream, b"d" * TOKEN)
        out = agent.take()
        sent += sum(len(data) for _, data in gateway.receive(out, consume=False))
    return sent


# -- over TLS -------------------------------------------------------------------------------------------------------


class Wire(asyncio.Protocol):
    """The same thin shell for both candidates; a write per token, as `TunnelStream.write` does."""

    def __init__(self, end, received, connected=None):
        self.end, self.received, self.connected = end, received, connected

    def connection_made(self, transport):
        self.transport = transport
        self.flush()
        if self.connected:
            self.connected(self)

    def data_received(self, data):
        for stream, payload in self.end.receive(data):
            self.received(stream, payload)
        self.flush()

    def flush(self):
        data = self.end.take()
        if data:
            self.transport.write(data)


class Bench:
    """One connected pair with its streams."""

    def __init__(self):
        self.delays = []
        self.missing = 0
        self.done = asyncio.Event()

    def received(self, _stream, payload):
        self.delays.append(time.perf_counter() - STAMP.unpack_from(payload)[0])
        self.missing -= 1
        if self.missing == 0:
            self.done.set()

    async def start(self, kind, streams, files):
        loop = asyncio.get_running_loop()
        connected = loop.create_future()
        self.server = await loop.create_server(
            lambda: Wire(kind(agent=False), self.received, connected.set_result),
            "127.0.0.1",
            0,
            ssl=server_context(files[0]),
        )
        port = self.server.sockets[0].getsockname()[1]
        _, self.agent = await loop.create_connection(
            lambda: Wire(kind(agent=True), self.received), "127.0.0.1", port, ssl=client_context(files[1])
        )
        self.gateway = await connected
        self.ids = [self.gateway.end.open() for _ in range(streams)]
        self.gateway.flush()
        await asyncio.sleep(0.2)
        for stream in self.ids:
            self.agent.end.answer(stream)
        self.agent.flush()
        await asyncio.sleep(0.2)

    async def round(self):
        """One token on every stream; returns when all have arrived."""
        self.done.clear()
        self.missing = len(self.ids)
        filler = bytes(TOKEN - STAMP.size)
        for stream in self.ids:
            self.agent.end.send(stream, STAMP.pack(time.perf_counter()) + filler)
            self.agent.flush()
        await self.done.wait()

    def stop(self):
        self.agent.transport.abort()
        self.gateway.transport.abort()
        self.server.close()


async def over_tls(kind, streams, tokens, seconds, files):
    """CPU µs per token when rounds follow each other at once; then p50 and p99 ms at 20 tokens/s per stream."""
    bench = Bench()
    await bench.start(kind, streams, files)
    await bench.round()
    rounds = max(1, tokens // streams)
    gc.collect()
    began = time.process_time()
    for _ in range(rounds):
        await bench.round()
    cpu = (time.process_time() - began) / (rounds * streams) * 1e6
    bench.delays.clear()
    began = time.perf_counter()
    for tick in range(int(seconds * 20)):
        await asyncio.sleep(max(0.0, began + tick / 20 - time.perf_counter()))
        await bench.round()
    delays = sorted(bench.delays)
    bench.stop()
    await asyncio.sleep(0.1)
    return cpu, delays[len(delays) // 2] * 1e3, delays[int(len(delays) * 0.99)] * 1e3


def identities(folder):
    """Credential files of a gateway and an agent of one federation."""
    root = create_root("bench", now=time.time())
    provider = issue_provider(root, "alpha", now=time.time())
    made = []
    for role in ("gateway", "agent"):
        files = IdentityFiles(folder / role)
        files.folder.mkdir(parents=True)
        files.write(issue_session(provider, role, now=time.time()), root)
        made.append(files)
    return made


CANDIDATES = (OurEnd, H2End)


# -- the table --------------------------------------------------------------------------------------------------------


def median(measure, repeat):
    """Of each figure."""
    return [statistics.median(column) for column in zip(*(measure() for _ in range(repeat)), strict=True)]


def report(label, streams, values, unit):
    """One row: ours, the library's, and what the library costs in terms of ours."""
    ours, theirs = values
    print(f"| {label} | {streams} | {ours:,.1f} | {theirs:,.1f} | {theirs / ours:.2f} | {unit} |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, once")
    quick = parser.parse_args(argv).quick
    tokens, seconds, repeat = (5_000, 1, 1) if quick else (50_000, 5, 5)
    print("| figure | streams | ours | h2 | h2 ÷ ours | unit |")
    print("|---|--:|--:|--:|--:|---|")
    for together in (False, True):
        for streams in STREAMS if together else STREAMS[1:2]:
            pair = [
                median(lambda k=kind, n=streams, t=together: without_sockets(k, n, tokens, together=t), repeat)
                for kind in CANDIDATES
            ]
            how = "one write a round" if together else "one write a token"
            report(f"CPU a token, no sockets, {how}", streams, [p[0] for p in pair], "µs")
            report(f"on the wire a token, {how}", streams, [p[1] for p in pair], "octets")
    with tempfile.TemporaryDirectory() as folder:
        files = identities(Path(folder))
        for streams in STREAMS:
            pair = [
                median(
                    lambda k=kind, n=streams: run_loop(over_tls(k, n, tokens // 2, seconds, files)),
                    max(1, repeat // 2 + 1),
                )
                for kind in CANDIDATES
            ]
            report("CPU a token, TLS 1.3 on loopback", streams, [p[0] for p in pair], "µs")
            report("latency p50 at 20 tokens/s a stream", streams, [p[1] * 1000 for p in pair], "µs")
            report("latency p99 at 20 tokens/s a stream", streams, [p[2] * 1000 for p in pair], "µs")
    report("memory an open stream, both ends", 256, [memory(kind) for kind in CANDIDATES], "octets")
    report("octets that an unread stream holds", 1, [unread(kind) for kind in CANDIDATES], "octets")
    ours = (framing, mux, turns)
    lines = sum(bool(line.strip()) for module in ours for line in Path(module.__file__).read_text().splitlines())
    print(f"\nOur frames are {lines} lines that are not blank.")


if __name__ == "__main__":
    main()
