"""A stream gives its place to a more urgent request and goes on elsewhere."""

import asyncio
import json

import aiohttp
import pytest
import pytest_asyncio

from fabrictool.domain.steps import MeasuredSteps
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.gateway.upstream import Connector
from fabrictool.routing.making_room import MOST_MOVES
from fabrictool.routing.protocol import StreamTarget
from tests.gateway.conftest import Bed, FakeEngine, until

pytestmark = pytest.mark.asyncio
FAST = MeasuredSteps((1_000,) * 6, (1_000,) * 4)
WISH = {"x-fabric-continue": "yes"}
URGENT = {"x-fabric-providers": "alpha"}


class Absent(Connector):
    """A way to a server that is not there."""

    ready = False

    def close(self):
        pass


class Full:
    """Replica a (alpha) with two streams in it, which is what its slot and a tenth more hold, and b (beta), idle."""

    def __init__(self, bed, engines, http):
        self.bed, self.http = bed, http
        self.a, self.b = engines
        self.tasks, self.records = [], []
        bed.gateway.sinks.append(self.records.append)

    async def ask(self, headers, **more):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 9} | more
        async with self.http.post(self.bed.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, answer.headers.get("x-fabric-provider"), await answer.text()

    def send(self, headers, **more):
        self.tasks.append(asyncio.create_task(self.ask(headers, **more)))
        return self.tasks[-1]

    async def fill(self, headers):
        """Whatever the policy thinks of it, at first nobody else is there."""
        self.a.mode = "stream-hang"
        other = next(target for target in self.bed.gateway.directory if target.provider == "beta")
        connector, other.connector = other.connector, Absent()
        for number in (1, 2):
            self.send(headers)
            await until(lambda number=number: self.saying() == number)
        self.a.mode, other.connector = "ok", connector

    def saying(self):
        """Streams of which something came."""
        return sum(exchange._tokens == 1 for exchange in self.exchanges())

    def exchanges(self):
        return [c.exchange for c in self.bed.gateway.connections if c.exchange is not None]

    def waiting(self):
        return sum(self.bed.gateway._admission.waiting().values())

    async def answers(self):
        self.a.release.set()
        self.b.release.set()
        return await asyncio.gather(*self.tasks)


@pytest_asyncio.fixture
async def start():
    """full = await start(policy, wish, ...)"""
    begun = []

    async def begin(policy="slo-packing", wish=WISH, steps=FAST, slots=1, targets=None):
        engines = [FakeEngine("a"), FakeEngine("b")]
        for engine in engines:
            await engine.start()
        nodes = [
            StaticNode(engines[0].url, ["m"], "alpha", "xeon-6462c", engine="vllm", slots=slots),
            StaticNode(engines[1].url, ["m"], "beta", engine="vllm", slots=slots),
        ]
        bed = await Bed().start(policy, nodes=nodes, targets=targets)
        for target in bed.gateway.directory:
            target.steps = steps
        http = aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"})
        begun.append((bed, engines, http))
        full = Full(bed, engines, http)
        await full.fill(wish)
        return full

    yield begin
    for bed, engines, http in begun:
        for engine in engines:
            engine.release.set()
        await http.close()
        await bed.stop()
        for engine in engines:
            await engine.stop()


def words(text):
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"]["content"] for event in events for choice in event["choices"])


async def test_one_stream_goes_on_elsewhere_and_the_request_has_its_place(start):
    full = await start()
    assert len(full.a.seen) == 2
    assert full.b.seen == []
    status, provider, text = await full.ask(URGENT)
    assert (status, provider, words(text)) == (200, "alpha", "from a")
    await asyncio.wait_for(full.a.cancelled.wait(), 20)
    answers = await full.answers()
    moved, stayed = sorted((words(text) for _, _, text in answers), key=len, reverse=True)
    assert (moved, stayed) == ("fromfrom b", "from a")
    (text,) = [text for _, _, text in answers if ": continued by beta" in text]
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    ((_, rest),) = full.b.seen
    assert rest["messages"][-1] == {"role": "assistant", "content": "from"}
    assert rest["max_tokens"] == 8
    assert all(target.in_flight == 0 for target in full.bed.gateway.directory)
    assert full.bed.gateway._streams._running == {}
    assert 'fabric_retries_total{reason="moved"} 1.0' in full.bed.gateway.exposition().decode()


@pytest.mark.parametrize("policy", ["slo-headroom", "slo-packing"])
async def test_a_request_that_would_be_late_where_there_are_slots_makes_room_too(start, policy):
    steps = MeasuredSteps((1_000,) * 6, (40_000, 80_000, 160_000, 320_000))  # two keep 0.1 s a token, three do not
    full = await start(policy, steps=steps, slots=0, targets={"m": StreamTarget(2.0, 0.1)})
    status, provider, text = await full.ask({})
    assert (status, provider, words(text)) == (200, "beta", "from b"), "it is in time there, and nobody moves"
    assert not full.a.cancelled.is_set()
    assert (await full.ask(URGENT))[:2] == (200, "alpha")
    await asyncio.wait_for(full.a.cancelled.wait(), 20)
    assert sorted(words(text) for _, _, text in await full.answers()) == ["from a", "fromfrom b"]


@pytest.mark.parametrize("mode", ["400", "503", "reset"])
async def test_a_stream_that_is_not_taken_there_goes_on_where_it_was(start, mode):
    full = await start()
    full.b.mode = mode
    assert (await full.ask(URGENT))[:2] == (200, "alpha")
    answers = await full.answers()
    assert sorted(words(text) for _, _, text in answers) == ["from a", "fromfrom a"]
    assert all(text.endswith("data: [DONE]\n\n") for _, _, text in answers)
    assert all(target.in_flight == 0 for target in full.bed.gateway.directory)


@pytest.mark.parametrize("why", ["no wish", "another policy", "nothing measured", "no room", "moved enough"])
async def test_otherwise_the_request_waits(start, why):
    policy = "random" if why == "another policy" else "slo-packing"
    full = await start(policy, {} if why == "no wish" else WISH, None if why == "nothing measured" else FAST)
    if why == "no room":
        full.b.mode = "stream-hang"
        for number in (1, 2):
            full.send({"x-fabric-providers": "beta"})
            await until(lambda number=number: len(full.b.seen) == number)
    for exchange in full.exchanges():
        exchange._moves = MOST_MOVES if why == "moved enough" else 0
    urgent = full.send(URGENT)
    await until(lambda: full.waiting() == 1)
    assert not urgent.done()
    assert {status for status, *_ in await full.answers()} == {200}
    assert not full.a.cancelled.is_set()
