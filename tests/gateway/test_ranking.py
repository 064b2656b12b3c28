"""The place that a gateway gives a request in its engine's queue, and what becomes of a client's own."""

import itertools
import json

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.gateway.ranking import rank_of
from fabrictool.gateway.staticlist import StaticNode, StaticRegistry, static_targets
from fabrictool.routing.admission import BATCH, INTERACTIVE, PATIENCE_S, PRIORITIES, STANDARD

TIMES = st.floats(0, 4e9)


@given(first=TIMES, second=TIMES, classes=st.permutations(range(len(PRIORITIES))))
def test_the_more_important_class_comes_first_whatever_its_deadline_and_nobody_before_who_was_not_ranked(
    first, second, classes
):
    more, less = sorted(classes[:2])
    assert rank_of(more, first) < rank_of(less, second) < 0
    earlier, later = sorted((first, second))
    assert rank_of(more, earlier) <= rank_of(more, later)
    assert rank_of(more, first) >= -(2**63)


@pytest_asyncio.fixture
async def ranked(bed):
    """asked = await ranked(body, …): what the engine was sent, by the gateway, for a replica that goes by priority."""

    async def ask(body, path="/v1/chat/completions", *, by_priority=True, **headers):
        for target in bed.gateway.directory:
            target.by_priority = by_priority
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers |= {"authorization": f"Bearer {bed.KEY}", "content-type": "application/json"}
        before = len(bed.a.seen)
        async with aiohttp.ClientSession() as http, http.post(bed.url + path, data=text, headers=headers) as answer:
            told = answer.status, await answer.text()
        assert len(bed.a.seen) == before + (told[0] == 200)
        if told[0] != 200:
            return told
        request, asked = bed.a.seen[-1]
        return request.headers, asked, (await request.text())

    yield ask


BODY = {"model": "only-a", "messages": [], "temperature": 0.5}


@pytest.mark.asyncio
async def test_a_request_goes_with_its_class_and_deadline_and_all_else_as_it_was_written(ranked, bed):
    headers, asked, text = await ranked('{ "model":"only-a", "messages":[],  "temperature":5e-1}')
    rank = rank_of(STANDARD, bed.clock.wall() + PATIENCE_S[STANDARD])
    assert asked["priority"] == rank
    assert headers["x-vllm-priority"] == str(rank)
    assert text.endswith('"model":"only-a", "messages":[],  "temperature":5e-1}')
    bed.clock.advance(10)
    ranks = [
        (await ranked(BODY, x_fabric_priority="batch"))[1]["priority"],
        (await ranked(BODY, x_fabric_priority="interactive"))[1]["priority"],
        (await ranked(BODY, x_fabric_max_wait="5"))[1]["priority"],
    ]
    assert ranks == [
        rank_of(BATCH, bed.clock.wall() + PATIENCE_S[BATCH]),
        rank_of(STANDARD, bed.clock.wall() + PATIENCE_S[STANDARD]),  # no more important than the tenant's
        rank_of(STANDARD, bed.clock.wall() + 5),
    ]
    assert sorted(ranks, reverse=True) == [ranks[0], ranks[1], ranks[2]]
    assert rank_of(INTERACTIVE, bed.clock.wall() + 1e9) < min(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "own", ['"priority": -9e15', '"prior\\u0069ty": -9', '"priority": 1, "priority": -5', '"priority": null']
)
async def test_a_clients_own_priority_never_reaches_such_an_engine(ranked, bed, own):
    headers, asked, text = await ranked(
        f'{{"model": "only-a", {own}, "messages": [], "x": 1.50}}', x_vllm_priority="-7"
    )
    rank = rank_of(STANDARD, bed.clock.wall() + PATIENCE_S[STANDARD])
    pairs = json.loads(text, object_pairs_hook=list)
    assert [value for name, value in pairs if name == "priority"] == [rank]
    assert headers.getall("x-vllm-priority") == [str(rank)]
    assert '"x":1.50' in text
    assert {name for name, _ in pairs} == {"priority", "model", "messages", "x"}
    assert asked["messages"] == []


@pytest.mark.asyncio
async def test_an_engine_that_serves_as_they_come_gets_what_the_client_wrote(ranked):
    text = '{"model": "only-a", "priority": 0, "messages": []}'
    headers, _, sent = await ranked(text, by_priority=False, x_vllm_priority="-7")
    assert (sent, "x-vllm-priority" in headers) == (text, False)


@pytest.mark.asyncio
async def test_paths_without_such_a_field_have_the_header_alone(ranked):
    for path, named in itertools.product(("/v1/messages", "/v1/embeddings", "/v1/responses"), (True, False)):
        headers, asked, _ = await ranked(BODY | ({"priority": 3} if named else {}), path)
        assert int(headers["x-vllm-priority"]) < 0
        if path == "/v1/responses":
            assert asked["priority"] == int(headers["x-vllm-priority"])
        else:
            assert asked.get("priority", 3) == 3


@pytest.mark.asyncio
async def test_a_body_from_which_it_cannot_be_taken_is_no_request(ranked):
    status, text = await ranked('{"model": "only-a", "priority": 1, "\\ud800": 1, "messages": []}')
    assert (status, "FT8101" in text) == (400, True)


@pytest.mark.asyncio
async def test_a_static_list_says_which_servers_go_by_priority():
    nodes = [StaticNode("http://h:1", ["m"], by_priority=True), StaticNode("http://h:2", ["m"])]
    assert [target.by_priority for target in static_targets(StaticRegistry(nodes))] == [True, False]
