"""Prompts of streams that were given up: an engine is asked, and whatever it does, the books are closed."""

import asyncio
import json

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.domain.terms import KeyLimits
from fabrictool.gateway import recounting
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import until
from tests.gateway.scripted import ScriptedEngine, chunk, dies, event, says

pytestmark = pytest.mark.asyncio
BEGUN = event(chunk({"content": "Hé"}))
ESTIMATE = 50
"""Of a request of some 150 octets, about."""


@pytest_asyncio.fixture
async def engines():
    started = [ScriptedEngine(), ScriptedEngine()]
    for engine in started:
        await engine.start()
    yield started
    for engine in started:
        await engine.stop()


@pytest_asyncio.fixture
async def bed(make_bed, engines):
    nodes = [StaticNode(engine.url, ["m"], "alpha", engine="vllm") for engine in engines]
    started = await make_bed().start(nodes=nodes)
    yield started
    await started.stop()


async def given_up(bed, engines, *, content="x" * 100):
    """A stream of which the client reads the beginning; its engine is the first or the second."""
    for engine in engines:
        engine.script.insert(0, engine.hang(BEGUN))
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": content}]}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(f"{bed.url}/v1/chat/completions", json=body) as answer,
    ):
        await answer.content.readuntil(b"\n\n")
    return next(engine for engine in engines if engine.paths[:1] == ["/v1/chat/completions"])


async def test_the_engine_that_read_it_is_asked_in_its_own_words(bed, engines):
    for engine in engines:
        engine.script = [says({"count": 77, "tokens": [1] * 77})]
    engine = await given_up(bed, engines)
    await until(lambda: bed.records)
    assert engine.paths == ["/v1/chat/completions", "/tokenize"]
    assert engine.bodies[0] == engine.bodies[1]
    (record,) = bed.records
    assert (record.end, record.prompt_tokens, record.counted) == ("cancelled", 77, False)
    assert bed.gateway._metrics.in_flight == 0


@pytest.mark.parametrize(
    "answer",
    [says({"error": {"message": "no"}}, 400), says({"count": "many"}), says([]), dies(b"{"), says({"count": -3})],
    ids=["refused", "words", "list", "dies", "below-nothing"],
)
async def test_whatever_it_answers_the_books_are_closed(bed, engines, answer):
    for engine in engines:
        engine.script = [answer]
    await given_up(bed, engines)
    await until(lambda: bed.records)
    assert bed.records[0].prompt_tokens in range(ESTIMATE - 15, ESTIMATE + 60)


async def test_one_that_does_not_answer_is_not_waited_for(bed, engines, monkeypatch):
    monkeypatch.setattr(recounting, "PATIENCE_S", 0.05)
    for engine in engines:
        engine.script = [engine.hang()]
    engine = await given_up(bed, engines)
    await until(lambda: bed.records)
    assert bed.records[0].prompt_tokens > 0
    await asyncio.wait_for(engine.cancelled.wait(), 5)


async def test_what_is_over_takes_no_place_while_its_books_are_open(bed, engines):
    """A key with one request at a time asks again at once, and the tokens of the first are counted once."""
    limits = KeyLimits(concurrency=1, tokens_per_minute=10_000)
    bed.gateway.accounts.limit_models({"m": limits})
    for engine in engines:
        engine.script = [engine.hang(), engine.hang()]
    engine = await given_up(bed, engines)
    await until(lambda: len(engine.paths) == 2)
    assert bed.gateway._metrics.in_flight == 0
    assert not bed.records
    for other in engines:
        other.script.insert(0, says({"usage": {"prompt_tokens": 5, "completion_tokens": 2}}))
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(f"{bed.url}/v1/chat/completions", json={"model": "m", "messages": []}) as answer,
    ):
        assert answer.status == 200
    allowance = bed.gateway.accounts._models["m"]
    assert (allowance.open, allowance.used) == (0, 7)
    await bed.gateway.drain(0)
    _, second = bed.records
    assert second.end == "cancelled"
    assert (allowance.open, allowance.used) == (0, 7 + second.prompt_tokens + second.completion_tokens)


async def test_a_gateway_that_ends_writes_down_what_it_knows(bed, engines):
    for engine in engines:
        engine.script = [engine.hang()]
    engine = await given_up(bed, engines)
    await until(lambda: len(engine.paths) == 2)
    assert not bed.records
    await bed.gateway.drain(0)
    assert bed.records[0].prompt_tokens > 0


async def test_of_what_broke_off_another_replica_is_asked(bed, engines):
    async def counts(_):
        return web.json_response({"count": 55})

    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    for engine in engines:
        engine.script = [dies(BEGUN), counts]
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(f"{bed.url}/v1/chat/completions", json=body) as answer,
    ):
        read = await answer.read()
    assert b"error" in read
    first, second = sorted(engines, key=lambda engine: engine.paths != ["/v1/chat/completions"])
    second.script = [counts]
    await until(lambda: bed.records)
    assert (first.paths, second.paths) == (["/v1/chat/completions"], ["/tokenize"])
    assert (bed.records[0].end, bed.records[0].prompt_tokens) == ("broken", 55)


async def test_pictures_are_not_asked_about(bed, engines):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    engine = await given_up(bed, engines, content=[picture])
    await until(lambda: bed.records)
    assert engine.paths == ["/v1/chat/completions"]


async def test_there_is_an_end_to_what_is_asked(bed, engines, monkeypatch):
    monkeypatch.setattr(recounting, "MOST", 0)
    engine = await given_up(bed, engines)
    await until(lambda: bed.records)
    assert engine.paths == ["/v1/chat/completions"]
    assert bed.records[0].prompt_tokens > 0


async def test_nobody_is_asked_what_was_said(bed, engines):
    usage = event(chunk({"content": "x"}) | {"usage": {"prompt_tokens": 9, "completion_tokens": 1}})
    for engine in engines:
        engine.script = [engine.hang(BEGUN + usage)]
    body = {"model": "m", "stream": True, "messages": [], "stream_options": {"continuous_usage_stats": True}}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(f"{bed.url}/v1/chat/completions", data=json.dumps(body)) as answer,
    ):
        await answer.content.readuntil(b"9")
    await until(lambda: bed.records)
    assert bed.records[0].prompt_tokens == 9
    assert sorted(path for engine in engines for path in engine.paths) == ["/v1/chat/completions"]
