"""Every request leaves one record, and its counts are those of the engine."""

import asyncio

import aiohttp
import pytest

from tests.gateway.conftest import until

pytestmark = pytest.mark.asyncio


@pytest.fixture
def records(bed):
    kept = []
    bed.gateway.sinks.append(kept.append)
    return kept


def session(bed, key=None):
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {key or bed.KEY}"})


async def ask(bed, http, **fields):
    async with http.post(bed.url + "/v1/chat/completions", json={"model": "only-a", "messages": []} | fields) as answer:
        return answer.status, await answer.text()


async def test_whole_and_streamed_answers_are_counted_by_what_the_engine_says(bed, records):
    async with session(bed) as http:
        await ask(bed, http)
        await ask(bed, http, stream=True)
    whole, streamed = records
    assert (whole.prompt_tokens, whole.completion_tokens, whole.counted, whole.stream) == (3, 2, True, False)
    assert (streamed.prompt_tokens, streamed.completion_tokens, streamed.counted, streamed.stream) == (3, 3, True, True)
    assert {r.end for r in records} == {"answered"}
    assert {(r.tenant, r.model, r.provider, r.status) for r in records} == {("t1", "only-a", "alpha", 200)}
    assert len({r.id for r in records}) == 2


@pytest.mark.parametrize(
    ("options", "asked", "shown"),
    [
        ({}, {"include_usage": True}, False),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}, True),
        ({"stream_options": {"include_usage": False}}, {"include_usage": True}, False),
    ],
    ids=["silent", "wants-them", "does-not-want-them"],
)
async def test_the_figures_of_a_stream_are_asked_for_and_shown_to_who_asked(bed, records, options, asked, shown):
    """The engine of the test sends them in any case."""
    async with session(bed) as http:
        _, text = await ask(bed, http, stream=True, **options)
    assert bed.a.seen[0][1]["stream_options"] == asked
    assert ("prompt_tokens" in text) == shown
    assert text.endswith("data: [DONE]\n\n")
    assert records[0].prompt_tokens == 3


async def test_what_goes_wrong_is_recorded_too(bed, records):
    async with session(bed) as http:
        assert (await ask(bed, http, model=3))[0] == 400
        assert (await ask(bed, http, model="nope"))[0] == 404
        bed.a.mode = "400"
        assert (await ask(bed, http))[0] == 400
        bed.a.mode = "dies-in-stream"
        await ask(bed, http, stream=True)
        bed.a.mode = "hang"
        task = asyncio.create_task(ask(bed, http))
        await until(lambda: bed.gateway.status().totals.in_flight == 1)
        task.cancel()
        await until(lambda: len(records) == 5)
    assert [(r.end, r.status) for r in records] == [
        ("refused", 400),
        ("refused", 404),
        ("answered", 400),
        ("broken", 200),
        ("cancelled", 499),
    ]
    assert [r.model for r in records] == ["", "", "only-a", "only-a", "only-a"], "no client fills the books with names"
    assert records[3].completion_tokens == 2
    assert not records[3].counted
