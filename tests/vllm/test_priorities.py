"""A real vLLM with one place, and requests of several classes before it: who is served next."""

import asyncio
import json

import aiohttp
import pytest
import pytest_asyncio

from fabrictool.base.clock import SystemClock
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import Bed, until
from tests.vllm.conftest import CONTEXT, Vllm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, random_model):
    words = ("--enforce-eager", "--max-num-seqs", "1", "--scheduling-policy", "priority")
    server = Vllm(tmp_path_factory.mktemp("priorities"), random_model, more=words)
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def line(vllm):
    node = StaticNode(vllm.url, ["m"], "alpha", engine="vllm", context=CONTEXT, by_priority=True)
    bed = await Bed().start(nodes=[node], clock=SystemClock())
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        yield Line(bed, http, vllm)
    await bed.stop()


class Line:
    """Requests that are sent one after the other, to an engine that stands still meanwhile."""

    def __init__(self, bed, http, vllm):
        self.bed, self.http, self.vllm = bed, http, vllm
        self.first, self.tasks = [], []

    async def send(self, name, tokens=8, path="/v1/completions", headers=None, **body):
        target = next(iter(self.bed.gateway.directory))
        before = target.in_flight
        text = {"messages": [{"role": "user", "content": name}]} if "messages" in path else {"prompt": name}
        body = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "stream": True} | text | body
        self.tasks.append(asyncio.create_task(self._ask(name, path, body, headers)))
        await until(lambda: target.in_flight > before)
        await asyncio.sleep(0.1)  # the server hands it to its engine

    async def _ask(self, name, path, body, headers):
        async with self.http.post(self.bed.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {") and _has_text(json.loads(line[6:])) and name not in self.first:
                    self.first.append(name)


def _has_text(event):
    return "choices" in event or event.get("type") == "content_block_delta"


async def test_the_urgent_come_before_the_lax_that_were_there_earlier(line):
    batch = {"x-fabric-priority": "batch"}
    await line.send("long", 1900)
    await until(lambda: "long" in line.first)
    with line.vllm.standing_still():
        await line.send("lax 1", headers=batch)
        await line.send("lax 2", headers=batch)
        await line.send("sly", headers=batch | {"x-vllm-priority": "-9000000000000000000"}, priority=-(2**62))
        await line.send("lax 3", headers=batch)
        await line.send("usual")
        await line.send("messages", path="/v1/messages")
        await line.send("soon", headers={"x-fabric-max-wait": "60"})
    await asyncio.gather(*line.tasks)
    assert line.first == ["long", "soon", "usual", "messages", "lax 1", "lax 2", "sly", "lax 3"]
