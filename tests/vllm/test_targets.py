"""Two real vLLM servers under load: how many of them are used while they keep the targets."""

import asyncio
import statistics
from collections import Counter

import aiohttp
import pytest
import pytest_asyncio

from fabrictool.base.clock import SystemClock
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.routing.protocol import StreamTarget
from tests.gateway.conftest import Bed
from tests.vllm.conftest import CONTEXT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest_asyncio.fixture(loop_scope="module")
async def start(vllms):
    """bed = await start(targets): a gateway before both servers, one of which says that it has a processor."""
    beds = []

    async def begin(targets=None):
        devices = ("h100-sxm-80g", "xeon-6462c")
        nodes = [
            StaticNode(server.url, ["m"], provider, device, engine="vllm", context=CONTEXT)
            for server, provider, device in zip(vllms, ("alpha", "beta"), devices, strict=True)
        ]
        bed = await Bed().start("slo-packing", nodes=nodes, clock=SystemClock(), targets=targets)
        bed.records = []
        bed.gateway.sinks.append(bed.records.append)
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
