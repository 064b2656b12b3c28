"""How long is waited for a first octet."""

import asyncio

import aiohttp
import pytest

from fabrictool.gateway.patience import (
    IDLE_UPSTREAM_S,
    LEARNED,
    LEAST_S,
    LEAST_WHOLE_S,
    STREAM,
    UNKNOWN_STREAM_S,
    Patience,
)
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import FakeEngine, until

CHAT_PATH = "/v1/chat/completions"


def test_patience_is_learned_by_model_and_form():
    patience = Patience()
    assert (patience.limit("m", STREAM), patience.limit("m", CHAT_PATH)) == (UNKNOWN_STREAM_S, IDLE_UPSTREAM_S)
    for _ in range(LEARNED):
        patience.learn("m", STREAM, 0.2)
        patience.learn("m", "/tokenize", 0.01)
        patience.learn("thinker", CHAT_PATH, 100.0)
    assert patience.limit("m", STREAM) == LEAST_S
    assert patience.limit("m", "/tokenize") == LEAST_WHOLE_S
    assert patience.limit("m", CHAT_PATH) == IDLE_UPSTREAM_S
    assert patience.limit("thinker", CHAT_PATH) == 400.0


def session(bed):
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"})


async def ask(bed, http, **fields):
    async with http.post(bed.url + CHAT_PATH, json={"model": "m", "messages": []} | fields) as answer:
        await answer.read()
        return answer.status


async def pass_time(bed, seconds, step=1.0):
    """Seconds in which the gateway looks after its connections, as it does each second."""
    for _ in range(int(seconds / step)):
        bed.clock.advance(step)
        for connection in list(bed.gateway.connections):
            connection.expire()
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_what_a_hung_engine_costs_is_not_learned(bed):
    patience = bed.gateway._metrics.patience
    async with session(bed) as http:
        for _ in range(2 * LEARNED):
            assert await ask(bed, http, stream=True) == 200
        assert patience.limit("m", STREAM) == LEAST_S
        for _ in range(3):
            bed.a.mode, seen = "hang", len(bed.a.seen)
            asking = []
            while len(bed.a.seen) == seen:
                asking.append(asyncio.create_task(ask(bed, http, stream=True)))
                await asyncio.sleep(0.02)
            await pass_time(bed, LEAST_S + 2)
            assert set(await asyncio.gather(*asking)) == {200}
            bed.a.mode = "ok"
            bed.clock.advance(60)
            assert patience.limit("m", STREAM) == LEAST_S


@pytest.mark.asyncio
async def test_waiting_for_a_slot_is_not_learned(make_bed):
    engine = FakeEngine("x")
    await engine.start()
    bed = await make_bed().start(nodes=[StaticNode(engine.url, ["m"], "alpha", slots=1)])
    async with session(bed) as http:
        for _ in range(LEARNED):
            assert await ask(bed, http, stream=True) == 200
        engine.mode = "stream-hang"
        asking = []
        while not bed.gateway._admission.queued:
            asking.append(asyncio.create_task(ask(bed, http, stream=True)))
            await asyncio.sleep(0.02)
        streams = [connection.exchange for connection in bed.gateway.connections if connection.exchange]
        await until(lambda: sum(stream._passing for stream in streams) == len(asking) - 1)
        bed.clock.advance(20.0)
        engine.mode = "ok"
        engine.release.set()
        assert set(await asyncio.gather(*asking)) == {200}
    assert bed.gateway._metrics.patience.limit("m", STREAM) == LEAST_S
    await engine.stop()
    await bed.stop()
