"""Two real vLLM servers under load: who waits for whom, who is told to come again, and how many servers are used."""

import asyncio
import json
import statistics
import time
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
SLOTS = 2


@pytest_asyncio.fixture(loop_scope="module")
async def start(vllms):
    """bed = await start(policy, slots): a gateway before both servers, one of which says that it has a processor."""
    beds = []

    async def begin(policy="least-loaded", slots=0, targets=None):
        devices = ("h100-sxm-80g", "xeon-6462c")
        nodes = [
            StaticNode(server.url, ["m"], provider, device, engine="vllm", context=CONTEXT, slots=slots)
            for server, provider, device in zip(vllms, ("alpha", "beta"), devices, strict=True)
        ]
        bed = await Bed().start(policy, nodes=nodes, clock=SystemClock(), targets=targets)
        bed.records = []
        bed.gateway.sinks.append(bed.records.append)
        beds.append(bed)
        return bed

    yield begin
    for bed in beds:
        await bed.stop()


async def ask(http, bed, number, tokens, **headers):
    """(status, when its first octet came, body)."""
    body = {"model": "m", "prompt": f"{number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with http.post(bed.url + "/v1/completions", json=body, headers=headers) as answer:
        first = await answer.content.readany()
        came = time.monotonic()
        return answer.status, came, first + await answer.read()


def client(bed):
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"})


async def test_who_is_in_no_hurry_waits_and_who_is_too_late_is_told(start):
    bed = await start(slots=SLOTS)
    async with client(bed) as http:
        batch = [
            asyncio.create_task(ask(http, bed, number, 150, **{"x-fabric-priority": "batch"})) for number in range(8)
        ]
        await asyncio.sleep(1.0)
        hurried = await asyncio.gather(*(ask(http, bed, number, 20) for number in range(2)))
        full = [asyncio.create_task(ask(http, bed, number, 1500)) for number in range(2 * (SLOTS + 1))]
        await asyncio.sleep(0.5)
        status, _, body = await ask(http, bed, 99, 20, **{"x-fabric-max-wait": "0"})
        assert status == 429, body
        assert json.loads(body)["error"]["code"] == "busy"
        batch, full = await asyncio.gather(*batch), await asyncio.gather(*full)
    assert {status for status, *_ in (*batch, *hurried, *full)} == {200}
    came = sorted(first for _, first, _ in batch)
    assert max(first for _, first, _ in hurried) < came[2], "two of the batch were begun before, six waited for these"


async def test_one_server_is_used_while_it_keeps_the_targets_and_both_when_it_does_not(start):
    bed = await start("slo-packing")
    async with client(bed) as http:
        for number in range(40):
            await ask(http, bed, number, 30)
    used = Counter(record.provider for record in bed.records)
    assert used == {"beta": 40}, "the processor, alone"

    alone = statistics.median(record.tpot_s for record in bed.records)
    bed = await start("slo-packing", targets={"m": StreamTarget(ttft_s=30.0, tpot_s=1.3 * alone)})
    async with client(bed) as http:

        async def again(number):
            return [await ask(http, bed, 8 * number + turn, 60) for turn in range(8)]

        answers = await asyncio.gather(*(again(number) for number in range(24)))
    assert {status for turns in answers for status, *_ in turns} == {200}
    used = Counter(record.provider for record in bed.records)
    assert min(used["alpha"], used["beta"]) > 10, "with two dozen at once tokens of either alone would come too slowly"
