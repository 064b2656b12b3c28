"""How long is waited for a first octet."""

import asyncio
from collections import Counter

import aiohttp
import pytest

from fabrictool.gateway.exchange import DEADLINE_S, SHARE
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
from fabrictool.routing.retry_budget import ALWAYS, RETRIED
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
    timeout = aiohttp.ClientTimeout(total=20)
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}, timeout=timeout)


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


async def hung(bed, http):
    """A request for a whole answer that an engine sits on, of a model of which nothing is known yet."""
    bed.a.mode = "hang"
    while True:
        asking = asyncio.create_task(ask(bed, http))
        await asyncio.wait([asking], timeout=0.1)
        if bed.a.seen:
            return asking


@pytest.mark.asyncio
async def test_an_engine_that_hangs_at_first_does_not_use_up_a_requests_time_while_another_is_free(bed):
    async with session(bed) as http:
        asking = await hung(bed, http)
        await pass_time(bed, SHARE * DEADLINE_S - 2)
        assert not asking.done()
        await pass_time(bed, 4)
        assert await asking == 200
        assert (len(bed.a.seen), bed.gateway.status().totals.retries) == (1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["it-is-out", "no-retries"])
async def test_where_nobody_else_could_answer_it_is_waited_for_as_long_as_ever(make_bed, why):
    bed = await make_bed().start(retries=0 if why == "no-retries" else 2)
    async with session(bed) as http:
        asking = await hung(bed, http)
        (beta,) = [target for target in bed.gateway.directory if target.provider == "beta"]
        if why == "it-is-out":
            beta.ejection.out_until = DEADLINE_S
        await pass_time(bed, SHARE * DEADLINE_S + 5)
        assert not asking.done()
        bed.a.release.set()
        assert await asking == 200
    await bed.stop()


@pytest.mark.asyncio
async def test_where_many_requests_fail_slowly_some_are_tried_again_and_the_others_hear_so_at_once(bed):
    bed.a.mode = "hang"
    async with session(bed) as http:
        asking = [asyncio.create_task(ask(bed, http, stream=True)) for _ in range(80)]
        await until(lambda: len(bed.a.seen) == 40)
        await pass_time(bed, UNKNOWN_STREAM_S + 2)
        statuses = Counter(await asyncio.gather(*asking))
        allowed = ALWAYS + RETRIED * 80
        assert 40 + ALWAYS <= statuses[200] <= 40 + allowed
        assert statuses[200] + statuses[504] == 80
        (left,) = [
            line for line in bed.gateway.exposition().decode().splitlines() if line[:19] == "fabric_retries_left"
        ]
        assert 0.0 <= float(left.split()[1]) < 1.0


@pytest.mark.asyncio
async def test_what_fails_at_once_is_no_matter_of_the_budget(bed):
    bed.a.mode = "reset"
    budget = bed.gateway._metrics.retry_budget
    for _ in range(2 * int(ALWAYS)):
        budget.spend(bed.clock.monotonic())
    async with session(bed) as http:
        for _ in range(30):
            assert await ask(bed, http) == 200
            bed.clock.advance(40)
            budget.spend(bed.clock.monotonic())
    assert bed.gateway.status().totals.retries > 10
