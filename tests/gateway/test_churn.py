"""One server after the other is killed, stopped, muted, resets or says 503, while one at least is left.

A client that had no octet yet must see no error, whatever happens; a stream that was begun ends with its `[DONE]`, or
with an error event and without. Whose server hangs is given up by the gateway itself, after the second that the model's
`patience` says.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fabrictool.base.clock import SystemClock
from fabrictool.domain.specs import PatienceRule
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.rules import RoutingRules
from fabrictool.gateway.staticlist import StaticNode, StaticRegistry, static_targets
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.policies import routing_policy
from tests.gateway.conftest import until
from tests.ports import free_port

MOCK = Path(__file__).with_name("mock_process.py")
NODES = 4
CLIENTS = 32
FAULTS = ("killed", "stopped", "503", "reset", "mute")
WHOLE = json.dumps({"model": "m", "messages": []}).encode()
STREAMED = json.dumps({"model": "m", "messages": [], "stream": True}).encode()


class Node:
    """A mock server in a process of its own, always at the same port."""

    def __init__(self):
        self.port = free_port()
        self.name, self.fault = f"127.0.0.1:{self.port}", ""
        self.process = None

    async def start(self):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(MOCK), str(self.port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert await self.process.stdout.readline() == b"ready\n"

    def tell(self, word):
        self.process.stdin.write(word.encode() + b"\n")

    async def harm(self, fault):
        self.fault = fault
        if fault == "killed":
            await self.end()
        elif fault == "stopped":
            self.process.send_signal(signal.SIGSTOP)
        else:
            self.tell(fault)

    async def mend(self):
        if self.fault == "killed":
            await self.start()
        elif self.fault == "stopped":
            self.process.send_signal(signal.SIGCONT)
        else:
            self.tell("ok")
        self.fault = ""

    async def end(self):
        self.process.kill()
        self.process.stdin.close()
        await self.process.wait()


class Watched:
    """A routing policy that notes who was asked for each request."""

    name, learns = "watched", True

    def __init__(self):
        self.policy = routing_policy("least-loaded", random.Random(1))
        self.asked, self.twice = {}, 0

    def pick(self, candidates, request, now):
        return self.policy.pick(candidates, request, now)

    def on_request_start(self, candidate, request, now):
        tried = self.asked.setdefault(request.id, [])
        self.twice += candidate in tried
        tried.append(candidate)

    def on_request_end(self, candidate, request, outcome):
        """See `Churn.ended`, which forgets the request."""


class Churn:
    """A gateway before the nodes, clients that ask for ever, and somebody who does harm."""

    def __init__(self, wanted, seed):
        self.wanted, self.rng = wanted, random.Random(seed)
        self.nodes = [Node() for _ in range(NODES)]
        self.seen, self.harms, self.wrong, self.records = Counter(), Counter(), [], Counter()
        self.watched = Watched()

    async def run(self, pause_s):
        await asyncio.gather(*(node.start() for node in self.nodes))
        registry = StaticRegistry([StaticNode(f"http://{node.name}", ["m"], "alpha") for node in self.nodes])
        patience = {"m": PatienceRule(first_byte_s=1.0, whole_s=1.0, idle_s=1.0)}
        rules = RoutingRules(self.watched, TrustPolicy({}, {}), 10, patience=patience)
        targets = static_targets(registry)
        self.gateway = GatewayServer(SystemClock(), fabric="churn", rules=rules, keyring=None, targets=targets)
        self.gateway.sinks.append(self.ended)
        await self.gateway.listen("127.0.0.1", 0)
        self.host, _, self.port = self.gateway.listen_address.partition(":")
        clients = [asyncio.create_task(self.ask_for_ever(number)) for number in range(CLIENTS)]
        try:
            while not all(client.done() for client in clients):
                await self.harm_or_mend()
                await asyncio.sleep(pause_s)
            await asyncio.gather(*clients)
            await until(lambda: self.gateway._metrics.in_flight == 0)
        finally:
            for client in clients:
                client.cancel()
            await self.gateway.drain(0.1)
            for node in self.nodes:
                if node.fault != "killed":
                    await node.end()

    def ended(self, record):
        self.records[record.end] += 1
        self.watched.asked.pop(record.id, None)

    async def harm_or_mend(self):
        """One event: a node that works is harmed as long as another one is left, else a harmed one is mended."""
        well = [node for node in self.nodes if not node.fault]
        ill = [node for node in self.nodes if node.fault]
        if ill and (len(well) == 1 or self.rng.random() < 0.5):
            await self.rng.choice(ill).mend()
            return
        node = self.rng.choice(well)
        others = {other.name for other in well if other is not node}
        if all(self.has_one_left(exchange, others) for exchange in self.open()):
            fault = FAULTS[self.harms.total() % len(FAULTS)]
            self.harms[fault] += 1
            await node.harm(fault)

    def open(self):
        return [connection.exchange for connection in self.gateway.connections if connection.exchange is not None]

    def has_one_left(self, exchange, well):
        """Whether a node that works is left for a request, which is not asked twice."""
        now = exchange._target.replica if exchange._target is not None else ""
        return now in well or bool(well - {target.replica for target in exchange._tried})

    async def ask_for_ever(self, number):
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        turn = number
        while self.seen.total() < self.wanted or self.harms.total() < 2 * len(FAULTS):
            turn += 1
            body = STREAMED if turn % 3 == 0 else WHOLE
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, text = await self.answer(reader)
            self.seen[self.kind(status, text, streamed=body is STREAMED)] += 1
        writer.close()

    async def answer(self, reader):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head[9:12])
        if b"transfer-encoding: chunked" not in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            return status, await reader.readexactly(length)
        parts = []
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        return status, b"".join(parts)

    def kind(self, status, text, *, streamed):
        """Of what a client saw; what it must not see is kept."""
        events = text.split(b"\n\n")
        if status != 200:
            kind = "error"
        elif not streamed:
            kind = "whole" if json.loads(text)["choices"] else "error"
        elif events[-1] or any(not part.startswith(b"data: ") for part in events[:-1]):
            kind = "malformed"
        elif events[-2] == b"data: [DONE]":
            kind = "streamed" if len(events) == 7 else "malformed"
        else:
            told = json.loads(events[-2].removeprefix(b"data: "))
            lost = told.get("error", {}).get("fabric_code") in ("FT8106", "FT8109") and b"[DONE]" not in text
            kind = "lost in mid-stream, and told so" if lost and len(events) > 2 else "malformed"
        if kind in ("error", "malformed"):
            self.wrong.append((status, text[-300:]))
        return kind


async def churned(wanted, pause_s, seed=1):
    churn = Churn(wanted, seed)
    await churn.run(pause_s)
    assert churn.wrong == []
    assert churn.watched.twice == 0, "no node is asked twice for a request"
    assert churn.watched.asked == {}, "each request has its record"
    totals = churn.gateway.status().totals
    assert totals.in_flight == sum(target.in_flight for target in churn.gateway.directory) == 0
    assert b"fabric_inflight 0.0" in churn.gateway.exposition()
    assert churn.records["refused"] == 0
    assert churn.records["broken"] == churn.seen["lost in mid-stream, and told so"]
    assert churn.records.total() == churn.seen.total() >= wanted
    return churn, totals


@pytest.mark.asyncio
async def test_thousands_of_requests_while_servers_die_hang_and_reset_and_nobody_sees_an_error():
    churn, totals = await churned(3000, pause_s=0.1)
    assert totals.retries > 0
    assert set(churn.harms) == set(FAULTS)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.asyncio
async def test_a_million_requests_and_a_fault_each_second():
    churn, totals = await churned(1_000_000, pause_s=1.0)
    print(f"\n{dict(churn.seen)}\nfaults {dict(churn.harms)}\nretries {totals.retries}")
