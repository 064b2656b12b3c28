"""A stream whose replica is lost goes on at another one, for clients that want that."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from fabrictool.gateway.continuing import Utterance
from tests.gateway.conftest import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 9}
WISH = {"x-fabric-continue": "yes"}


def event(**choice):
    return b"data: " + json.dumps({"choices": [{"index": 0} | choice]}).encode() + b"\n\n"


def heard(body, *events, tokens=1):
    utterance = Utterance(json.dumps(body).encode())
    for text in events:
        utterance.take(text)
    rest = utterance.request(tokens)
    return None if rest is None else json.loads(rest)


def test_the_request_for_the_rest_ends_with_what_was_said():
    said = (
        event(delta={"role": "assistant", "content": ""}) + event(delta={"content": "Zür"}),
        event(delta={"content": "ich "}),
    )
    chat = heard(CHAT | {"temperature": 0}, *said, tokens=2)
    assert chat["messages"] == [*CHAT["messages"], {"role": "assistant", "content": "Zürich "}]
    assert chat["continue_final_message"] is True
    assert chat["add_generation_prompt"] is False
    assert (chat["max_tokens"], chat["temperature"]) == (7, 0)
    prompt = {"model": "m", "prompt": "once ", "stream": True}
    assert heard(prompt, event(text="upon a "), event(text="time"))["prompt"] == "once upon a time"
    assert heard(CHAT, b": comment\n\ndata: [DONE]\n\n", tokens=0) == CHAT, "nothing was said: the same again"


def test_an_event_may_hold_several_tokens_and_figures_say_how_many():
    utterance = Utterance(json.dumps(CHAT | {"min_tokens": 4}).encode())
    utterance.take(event(delta={"content": "ab"}).replace(b"}]}", b'}], "usage": {"completion_tokens": 2}}'))
    rest = json.loads(utterance.request(1))
    assert (rest["max_tokens"], rest["min_tokens"]) == (7, 2)
    assert utterance.turn(1) == 2
    utterance.take(event(delta={"content": "cde"}).replace(b"}]}", b'}], "usage": {"completion_tokens": 3}}'))
    rest = json.loads(utterance.request(3))
    assert (rest["max_tokens"], rest["min_tokens"]) == (4, 0)
    assert rest["messages"][-1]["content"] == "abcde"
    assert utterance.turn(3) == 5
    assert json.loads(utterance.request(6))["max_tokens"] == 3, "an engine without figures, and six events"


@pytest.mark.asyncio
async def test_who_may_be_gone_on_with_is_asked_for_figures_in_all_events(bed):
    for more, wish, options in (
        ({}, {}, {"include_usage": True}),
        ({}, WISH, {"include_usage": True, "continuous_usage_stats": True}),
        ({"stream_options": {"include_usage": True}}, {}, {"include_usage": True}),
        ({"stream_options": {"include_usage": True, "x": 1}}, WISH,
         {"include_usage": True, "x": 1, "continuous_usage_stats": True}),
    ):  # fmt: skip
        await ask(bed, headers=wish, **(CHAT | {"model": "only-a"} | more))
        assert bed.a.seen[-1][1]["stream_options"] == options


@pytest.mark.parametrize(
    ("body", "events", "tokens"),
    [
        (CHAT | {"n": 2}, [], 0),
        (CHAT | {"tools": [{"type": "function"}]}, [], 0),
        (CHAT | {"response_format": {"type": "json_object"}}, [], 0),
        ({"model": "m", "prompt": ["a", "b"], "stream": True}, [], 0),
        (CHAT, [event(delta={"content": "a"}, index=1)], 1),
        (CHAT, [event(delta={"tool_calls": [{"index": 0}]})], 1),
        (CHAT, [event(delta={"reasoning_content": "hm"})], 1),
        (CHAT, [event(delta={}, finish_reason="stop")], 1),
        (CHAT, [event(delta={"content": "a"})], 9),
        (CHAT, [b"data: {broken\n\n"], 1),
    ],
)
def test_what_is_more_than_text_cannot_be_gone_on_with(body, events, tokens):
    assert heard(body, *events, tokens=tokens) is None


async def ask(bed, path="/v1/chat/completions", headers=WISH, **body):
    headers = headers | {"authorization": f"Bearer {bed.KEY}"}
    async with aiohttp.ClientSession() as http, http.post(bed.url + path, json=body, headers=headers) as answer:
        return await answer.text()


def words(text):
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in events for choice in json.loads(line).get("choices", [])]
    return "".join(choice["delta"]["content"] for choice in choices)


def lines(text, beginning):
    return [line for line in text.splitlines() if line.startswith(beginning)]


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["dies-in-stream", "dies-in-event"])
async def test_the_rest_comes_from_another_replica(bed, mode):
    for target in bed.gateway.directory:
        target.engine = "vllm"
    records = []
    bed.gateway.sinks.append(records.append)
    bed.a.mode = mode
    bed.a.release.set()
    text = await ask(bed, **CHAT)
    assert words(text) == "from from b", "a's two words, and b's three"
    assert text.endswith("data: [DONE]\n\n")
    assert len(lines(text, ": continued by beta")) == 1
    assert "error" not in text
    (_, asked), (_, rest) = bed.a.seen[0], bed.b.seen[0]
    assert rest["messages"] == [*asked["messages"], {"role": "assistant", "content": "from "}]
    assert rest["max_tokens"] == 7
    (record,) = records
    assert (record.end, record.retries, record.replica) == ("answered", 1, f"127.0.0.1:{bed.b.port}")
    assert record.completion_tokens == 2 + 3
    assert record.prompt_tokens == 3 - 2, "what was said is not paid for twice"
    assert all(target.in_flight == 0 for target in bed.gateway.directory)


@pytest.mark.asyncio
async def test_a_stream_that_goes_on_neither_asks_the_budget_of_slow_retries_nor_spends_it(bed):
    for target in bed.gateway.directory:
        target.engine = "vllm"
    bed.a.mode = "dies-in-event"
    budget = bed.gateway._metrics.retry_budget
    while budget.allows(0.0):
        budget.spend(0.0)
    left, asking = budget.left, asyncio.create_task(ask(bed, **CHAT))
    await until(lambda: any(c.exchange and c.exchange._passing for c in bed.gateway.connections))
    bed.clock.advance(5.0)
    bed.a.release.set()
    assert words(await asking) == "from from b"
    budget.tick(bed.clock.monotonic())
    assert budget.left >= left >= 0.0


@pytest.mark.asyncio
async def test_a_stream_of_which_the_client_saw_nothing_is_tried_again_only_within_the_budget(bed, monkeypatch):
    for target in bed.gateway.directory:
        target.engine = "vllm"
    budget = bed.gateway._metrics.retry_budget
    while budget.allows(0.0):
        budget.spend(0.0)

    async def head_alone(request, _body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await bed.a.release.wait()
        request.transport.abort()
        return response

    monkeypatch.setattr(bed.a, "stream", head_alone)
    asking = asyncio.create_task(ask(bed, **CHAT))
    await until(lambda: any(c.exchange and c.exchange._event_stream for c in bed.gateway.connections))
    bed.clock.advance(5.0)
    bed.a.release.set()
    assert "FT8106" in await asking
    assert bed.b.seen == []


@pytest.mark.asyncio
async def test_nobody_goes_on_where_that_was_not_asked_for_or_no_engine_can(bed):
    bed.a.mode = "dies-in-stream"
    text = await ask(bed, headers={}, **CHAT)
    assert "error" in lines(text, "data:")[-1]
    for target in bed.gateway.directory:
        target.ejection.answered()
    text = await ask(bed, **CHAT)
    text = text if "error" in text else await ask(bed, **CHAT)
    assert "error" in lines(text, "data:")[-1], "its engine is unknown"
    assert "[DONE]" not in text


@pytest.mark.asyncio
async def test_when_the_second_is_lost_too_or_refuses_the_stream_ends_with_an_error_event(bed):
    for target in bed.gateway.directory:
        target.engine = "vllm"
    bed.a.mode = "dies-in-stream"
    for mode in ("dies-in-stream", "400", "503", "reset"):
        bed.b.mode = mode
        for target in bed.gateway.directory:
            target.ejection.answered()
        text = await ask(bed, **CHAT)
        if not lines(text, ": continued"):  # it began at b
            bed.b.mode, text = mode, await ask(bed, **CHAT)
        assert "[DONE]" not in text
        assert "error" in text.strip().splitlines()[-1]
    assert all(target.in_flight == 0 for target in bed.gateway.directory)
