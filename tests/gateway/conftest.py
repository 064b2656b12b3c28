"""A gateway on loopback in front of fake engines that can be told to misbehave (`FakeEngine`)."""

import asyncio
import contextlib
import json
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.engines.protocol import FULL_HEADER
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.keyfile import KeyRow
from fabrictool.gateway.keys import Keyring, hash_key
from fabrictool.gateway.rules import RoutingRules
from fabrictool.gateway.staticlist import StaticNode, StaticRegistry, static_targets
from fabrictool.mesh.framing import LEFT_HEADER
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.policies import routing_policy
from tests.gateway.postgres import Postgres, programs
from tests.manual_clock import ManualClock


async def until(condition, seconds=30.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


class FakeEngine:
    """An OpenAI-shaped server that answers by script; it is no model."""

    FLOOD = 16 * 1024 * 1024

    def __init__(self, name):
        self.name = name
        self.seen = []
        self.prompt_tokens = 3
        self.mode = "ok"
        self.answer_id = "c"
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.before = lambda: None
        """Called before it says that it is full."""

    async def start(self):
        app = web.Application()
        app.router.add_post("/v1/{tail:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self):
        await self.runner.cleanup()

    async def answer(self, request):
        body = await request.json()
        self.seen.append((request, body))
        if self.mode in ("500", "501", "503"):
            return web.json_response({"error": {"message": "not now"}}, status=int(self.mode))
        if self.mode == "left":
            return web.Response(status=503, headers={LEFT_HEADER.decode(): "yes"})
        if self.mode == "full":
            self.before()
            answer = {"error": {"message": "nobody could begin this request in time", "code": "no_room_in_time"}}
            return web.json_response(answer, status=503, headers={FULL_HEADER: "yes"})
        if self.mode == "400":
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        if self.mode == "reset":
            request.transport.abort()
            await asyncio.sleep(1)
        if self.mode == "hang":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if body.get("stream"):
            return await self.stream(request, body)
        text = f"from {self.name}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 2, "total_tokens": 5}
        answer = {
            "id": self.answer_id,
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
        }
        if self.mode == "half-body":
            response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
            await response.prepare(request)
            await response.write(b'{"id": ')
            request.transport.abort()
            return response
        return web.json_response(answer | {"usage": usage})

    async def stream(self, request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if self.mode == "head-then-dies":
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            request.transport.write(head)
            await asyncio.sleep(0.05)  # so that the head is read before the reset
            request.transport.abort()
            return response
        await response.prepare(request)
        for _ in range(self.FLOOD // 65536 if self.mode == "flood" else 0):
            await response.write(b"data: " + b"x" * 65528 + b"\n\n")
        base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        for index, word in enumerate(["from", " ", self.name]):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            await response.write(b"data: " + json.dumps(base | {"choices": [choice]}).encode() + b"\n\n")
            if self.mode in ("dies-in-stream", "dies-in-event") and index == 1:
                if self.mode == "dies-in-event":
                    await response.write(b'data: {"choices": [{"delta": {"con')
                    await self.release.wait()
                request.transport.abort()
                return response
            if self.mode == "stream-hang":
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        await response.write(b"data: " + json.dumps(base | {"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


class Bed:
    """Engines a and b (providers alpha and beta), and a gateway with three keys."""

    KEY = "key-of-everyone-0123456789"
    ALPHA_KEY = "key-of-alpha-only-0123456789"
    NOBODY_KEY = "key-of-an-unknown-group-0123"
    tls = None

    async def start(self, policy_name="round-robin", retries=2, nodes=None, clock=None, targets=None):
        """`nodes`: servers of the test's own in place of the engines; `clock`: another one than virtual time."""
        self.a, self.b = FakeEngine("a"), FakeEngine("b")
        for engine in (self.a, self.b):
            await engine.start()
        nodes = nodes or [
            StaticNode(self.a.url, ["m", "only-a"], "alpha", "a100-80g", "bf16", 4096),
            StaticNode(self.b.url, ["m"], "beta"),
        ]
        rows = [
            KeyRow("t1", hash_key(self.KEY), "everyone"),
            KeyRow("t2", hash_key(self.ALPHA_KEY), "alpha-only"),
            KeyRow("t3", hash_key(self.NOBODY_KEY), "missing"),
        ]
        groups = {"everyone": frozenset({"alpha", "beta"}), "alpha-only": frozenset({"alpha"})}
        self.clock = clock or ManualClock()
        self.gateway = GatewayServer(
            self.clock,
            fabric="test",
            rules=RoutingRules(
                routing_policy(policy_name, random.Random(7), targets), TrustPolicy(groups, {}), retries
            ),
            keyring=Keyring(rows),
            targets=static_targets(StaticRegistry(nodes)),
        )
        self.records = []
        """Of requests that ended."""
        self.gateway.sinks.append(self.records.append)
        await self.gateway.listen("127.0.0.1", 0, self.tls)
        self.url = f"http://{self.gateway.listen_address}"
        self.host, port = self.gateway.listen_address.split(":")
        self.port = int(port)
        return self

    async def stop(self):
        for engine in (self.a, self.b):
            engine.release.set()
        await self.gateway.drain(0.1)
        for engine in (self.a, self.b):
            await engine.stop()

    async def raw(self, data, *, until_close=True):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data)
        await writer.drain()
        try:
            return await asyncio.wait_for(reader.read() if until_close else reader.read(65536), 5)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest_asyncio.fixture
async def bed():
    started = await Bed().start()
    yield started
    await started.stop()


@pytest.fixture
def make_bed():
    return Bed


@pytest.fixture
def postgres():
    """A real server, for this test alone; skipped where Debian's package is missing."""
    if programs() is None:
        pytest.skip("PostgreSQL's server is not installed (.ci/test-packages)")
    folder = Path(tempfile.mkdtemp(prefix="ftpg"))  # not below pytest's folders: these are root's alone
    server = Postgres(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)
