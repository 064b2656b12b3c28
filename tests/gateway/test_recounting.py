"""Prompts of streams that were given up: an engine is asked, and whatever it does, the books are closed."""

import asyncio
import json
import random
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.domain.terms import KeyLimits
from fabrictool.gateway import recounting
from fabrictool.gateway.directory import RoutingTarget
from fabrictool.gateway.modelrequest import ModelRequest
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.gateway.upstream import Caller, Connector, Upstream
from fabrictool.routing.policies import routing_policy
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
    nodes = [StaticNode(engine.url, ["m"], "alpha", engine="vllm", context=100_000) for engine in engines]
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
    [
        says({"count": 10**9}),
        says({"error": {"message": "no"}}, 400),
        says({"count": "many"}),
        says([]),
        dies(b"{"),
        says({"count": -3}),
    ],
    ids=["more-than-a-context", "refused", "words", "list", "dies", "below-nothing"],
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


async def test_limits_go_by_an_estimate_until_it_is_known(bed, engines):
    """A key with one request at a time asks again at once, and no token is counted later than its request ends."""
    bed.gateway.accounts.limit_models({"m": KeyLimits(concurrency=1, tokens_per_minute=10_000)})
    release = asyncio.Event()

    async def counts(_):
        await release.wait()
        return web.json_response({"count": 33})

    for engine in engines:
        engine.script = [counts]
    await given_up(bed, engines)
    allowance = bed.gateway.accounts._models["m"]
    await until(lambda: not allowance.open)
    assert allowance.used in range(ESTIMATE - 15, ESTIMATE + 60)
    assert bed.gateway._metrics.in_flight == 0
    assert not bed.records
    release.set()
    await until(lambda: bed.records)
    assert bed.records[0].prompt_tokens == 33
    assert allowance.used == 33 + bed.records[0].completion_tokens


async def test_what_is_shared_is_a_part_of_what_is_known(bed, engines):
    bed.gateway.sinks.append(lambda _: None)
    for engine in engines:
        engine.script = [says({"count": 700}), says({"count": 700})]
    for number in (1, 2):
        await given_up(bed, engines, content="word " * 2000)
        await until(lambda number=number: len(bed.records) == number)
        for engine in engines:
            engine.script = [says({"count": 700})]
            engine.paths.clear()
    assert bed.records[1].prefix_of == bed.records[0].id
    assert 600 < bed.records[1].prefix_tokens <= bed.records[1].prompt_tokens == 700


async def test_a_gateway_that_ends_writes_down_what_it_knows(bed, engines):
    for engine in engines:
        engine.script = [engine.hang()]
    engine = await given_up(bed, engines)
    await until(lambda: len(engine.paths) == 2)
    assert not bed.records
    await bed.gateway.drain(0)
    assert bed.records[0].prompt_tokens > 0


async def broken_off(make_bed, engines, others, path="/v1/chat/completions"):
    """A stream whose engine, of vLLM, dies; `others`: (kind, provider) of further ones, each of which could count."""

    async def counts(_):
        return web.json_response({"count": 55})

    kinds = [("vllm", "alpha"), *others]
    nodes = [StaticNode(e.url, ["m"], whose, engine=kind) for e, (kind, whose) in zip(engines, kinds, strict=True)]
    bed = await make_bed().start("round-robin", nodes=nodes)
    engines[0].script = [dies(BEGUN)]
    for engine in engines[1:]:
        engine.script = [counts]
    for target in bed.gateway.directory:  # the first one is asked
        target.in_flight += target.replica != engines[0].url.removeprefix("http://")
    bed.gateway.reload(
        replace(bed.gateway._rules, routing_policy=routing_policy("least-loaded", random.Random(1))),
        bed.gateway._keyring,
        {},
    )
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(bed.url + path, json=body) as answer,
    ):
        assert b"error" in await answer.read()
    await until(lambda: bed.records)
    (record,) = bed.records
    assert record.end == "broken"
    await bed.stop()
    return record.prompt_tokens == 55


@pytest.mark.parametrize(
    ("others", "asked"),
    [
        ([("vllm", "alpha")], 1),
        ([("reference", "alpha")], 1),
        ([("sglang", "alpha"), ("vllm", "alpha")], 2),
        ([("vllm", "beta"), ("vllm", "alpha")], 2),
        ([("vllm", "beta")], None),
        ([("sglang", "alpha")], None),
    ],
)
async def test_of_what_broke_off_another_replica_of_its_provider_is_asked(make_bed, others, asked):
    engines = [ScriptedEngine() for _ in range(1 + len(others))]
    for engine in engines:
        await engine.start()
    assert await broken_off(make_bed, engines, others) == (asked is not None)
    assert [at for at, engine in enumerate(engines) if "/tokenize" in engine.paths] == (
        [] if asked is None else [asked]
    )
    for engine in engines:
        await engine.stop()


async def test_a_gateway_that_ends_sends_no_prompt_anywhere(bed, engines):
    """Its streams are broken off by itself."""
    for engine in engines:
        engine.script = [engine.hang(BEGUN)]
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(f"{bed.url}/v1/chat/completions", json=body) as answer,
    ):
        await answer.content.readuntil(b"\n\n")
        await bed.gateway.drain(0)
        await until(lambda: bed.records)
    assert bed.records[0].prompt_tokens > 0
    assert len(bed.gateway._metrics.recounts) == 0
    assert sorted(path for engine in engines for path in engine.paths) == ["/v1/chat/completions"]


async def test_agents_hear_the_group_and_no_tenant():
    """They count the requests of tenants, and this is none."""
    heard = []

    class Way(Connector):
        def start(self, *asked, anew=False):
            heard.append((asked[1], asked[4]))
            return Upstream(asked[5])

    asked = ModelRequest("m", "POST", "/v1/completions", (), b"{}", "g", None, caller=Caller("g", "tenant"))
    recounts, told = recounting.Recounts(), []
    assert recounts.ask(RoutingTarget(b"k", "m", "alpha", Way(), "m/0", engine="vllm"), asked, told.append)
    assert heard == [("/tokenize", Caller("g"))]
    recounts.close()
    assert told == [None]
    assert not recounts.ask(RoutingTarget(b"k", "m", "alpha", Way(), "m/0", engine="vllm"), asked, told.append)


@pytest.mark.parametrize("kind", ["image_url", "image_embeds", "input_audio", "file"])
async def test_pictures_are_not_asked_about(bed, engines, kind):
    engine = await given_up(bed, engines, content=[{"type": kind, kind: {"url": "data:image/png;base64,AA=="}}])
    await until(lambda: bed.records)
    assert engine.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("bound", ["MOST", "MOST_OF_A_TENANT", "MOST_OCTETS"])
async def test_there_is_an_end_to_what_is_asked(bed, engines, monkeypatch, bound):
    monkeypatch.setattr(recounting, bound, 0)
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
