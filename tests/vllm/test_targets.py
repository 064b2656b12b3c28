"""Two real vLLM servers under load: who waits for whom, who is told to come again, and how many servers are used."""

import asyncio
import contextlib
import json
import statistics
from collections import Counter

import aiohttp
import pytest
import pytest_asyncio

from fabrictool.base.clock import SystemClock
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.routing.protocol import StreamTarget
from tests.gateway.conftest import Bed, until
from tests.vllm.conftest import CONTEXT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest_asyncio.fixture(loop_scope="module")
async def start(vllms):
    """bed = await start(policy, …): a gateway before both servers, one of which says that it has a processor."""
    beds = []
    for server in vllms:
        await asyncio.to_thread(server.again)

    async def begin(policy="slo-packing", slots=0, targets=None):
        devices = ("h100-sxm-80g", "xeon-6462c")
        nodes = [
            StaticNode(server.url, ["m"], provider, device, engine="vllm", context=CONTEXT, slots=slots)
            for server, provider, device in zip(vllms, ("alpha", "beta"), devices, strict=True)
        ]
        bed = await Bed().start(policy, nodes=nodes, clock=SystemClock(), targets=targets)
        beds.append(bed)
        return bed

    yield begin
    for bed in beds:
        await bed.stop()


async def ask(http, bed, number, tokens):
    """The status of a streamed answer of so many tokens."""
    body = {"model": "m", "prompt": f"{number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with http.post(bed.url + "/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


def client(bed):
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"})


class Crowd:
    """Requests of a name each, and the order in which their first tokens came."""

    def __init__(self, bed, http):
        self.bed, self.http = bed, http
        self.first, self.answers = [], {}
        self.tasks = []

    async def send(self, name, tokens=200, **headers):
        before = self.sent
        self.tasks.append(asyncio.create_task(self._ask(name, tokens, headers)))
        await until(lambda: self.sent > before)

    @property
    def sent(self):
        return sum(self.inside) + self.waiting + len(self.answers)

    @property
    def inside(self):
        return [target.in_flight for target in self.bed.gateway.directory]

    @property
    def waiting(self):
        return sum(self.bed.gateway._admission.waiting().values())

    async def _ask(self, name, tokens, headers):
        headers = {key.replace("_", "-"): value for key, value in headers.items()}
        body = {"model": "m", "prompt": name, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with self.http.post(self.bed.url + "/v1/completions", json=body, headers=headers) as answer:
            text = await answer.content.readany()
            if answer.status == 200:
                self.first.append(name)
            self.answers[name] = answer.status, text + await answer.read()


async def test_who_is_in_no_hurry_waits_and_who_is_too_late_is_told(start, vllms):
    bed = await start("least-loaded", slots=2)
    async with client(bed) as http:
        crowd = Crowd(bed, http)
        with contextlib.ExitStack() as still:
            for server in vllms:
                still.enter_context(server.standing_still())
            for number in range(6):
                await crowd.send(f"batch {number}", x_fabric_priority="batch")
            assert (crowd.inside, crowd.waiting) == ([1, 1], 4), "batch leaves a slot of two to others"
            for number in range(6):
                await crowd.send(f"usual {number}")
            assert (crowd.inside, crowd.waiting) == ([3, 3], 6), "a tenth more than slots, so one, and the rest waits"
            await crowd.send("at once", x_fabric_max_wait="0")
            await until(lambda: "at once" in crowd.answers)
            assert (crowd.inside, crowd.waiting) == ([3, 3], 6)
        await asyncio.gather(*crowd.tasks)
    status, text = crowd.answers.pop("at once")
    assert (status, json.loads(text)["error"]["code"]) == (429, "busy")
    assert {status for status, _ in crowd.answers.values()} == {200}
    waited = [name for name in crowd.first if name not in ("batch 0", "batch 1", *(f"usual {n}" for n in range(4)))]
    assert sorted(waited[:2]) == ["usual 4", "usual 5"], "they were sent last, and the batch waited for them"
    assert sorted(waited[2:]) == [f"batch {number}" for number in range(2, 6)]


async def test_one_server_is_used_while_it_keeps_the_targets_and_both_when_it_does_not(start):
    bed = await start()
    async with client(bed) as http:
        for number in range(40):
            await ask(http, bed, number, 30)
    used = Counter(record.provider for record in bed.records)
    assert used == {"beta": 40}, "the processor, alone"

    alone = statistics.median(record.tpot_s for record in bed.records)
    bed = await start(targets={"m": StreamTarget(ttft_s=30.0, tpot_s=1.3 * alone)})
    async with client(bed) as http:

        async def again(number):
            return [await ask(http, bed, 8 * number + turn, 60) for turn in range(8)]

        answers = await asyncio.gather(*(again(number) for number in range(24)))
    assert {status for turns in answers for status in turns} == {200}
    used = Counter(record.provider for record in bed.records)
    assert min(used["alpha"], used["beta"]) > 10, "with two dozen at once tokens of either alone would come too slowly"
