"""The gateway before real vLLM servers: the SDKs' calls, exact counts under cancels, and a server that dies."""

import asyncio
import signal

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import Bed, until
from tests.vllm.conftest import CONTEXT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(1200)]
USER = {"role": "user", "content": "hello"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed(vllms):
    nodes = [
        StaticNode(server.url, ["m"], provider, engine="vllm", context=CONTEXT)
        for server, provider in zip(vllms, ("alpha", "beta"), strict=True)
    ]
    started = await Bed().start(nodes=nodes)
    yield started
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(bed):
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=bed.KEY, max_retries=0, timeout=120) as client:
        yield client


async def test_openai_calls(bed, sdk):
    whole = await sdk.chat.completions.create(model="m", messages=[USER], max_tokens=8)
    assert whole.usage.completion_tokens <= 8
    stream = await sdk.chat.completions.create(model="m", messages=[USER], max_tokens=8, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks), "the event of figures is ours"
    completed = await sdk.completions.create(model="m", prompt="once", max_tokens=4, temperature=0)
    assert completed.choices[0].text
    response = await sdk.responses.create(model="m", input="hello", max_output_tokens=8)
    assert response.usage.output_tokens <= 8
    with pytest.raises(openai.BadRequestError, match=r"(?i)context|length|token"):
        await sdk.completions.create(model="m", prompt="x" * 4000, max_tokens=4)
    assert [r.counted for r in bed.records[:4]] == [True] * 4
    assert bed.records[1].prompt_tokens == whole.usage.prompt_tokens
    assert {r.end for r in bed.records} == {"answered"}


async def test_anthropic_calls(bed):
    async with anthropic.AsyncAnthropic(base_url=bed.url, api_key=bed.KEY, max_retries=0, timeout=120) as client:
        asked = {"model": "m", "max_tokens": 8, "messages": [USER]}
        answer = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="m", messages=[USER])
    assert answer.usage.input_tokens == final.usage.input_tokens == counted.input_tokens
    whole, streamed = bed.records[-3:-1]
    assert (whole.prompt_tokens, whole.completion_tokens) == (answer.usage.input_tokens, answer.usage.output_tokens)
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (final.usage.input_tokens, final.usage.output_tokens)


async def test_sums_are_the_engines_own(bed, vllms):
    """Whole answers and streams, with and without the wish for figures, many at once."""
    begin, first = [server.counters() for server in vllms], len(bed.records)

    async def ask(http, number):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": f"number {number}"}],
            "max_tokens": 5 + number % 20,
        }
        body |= {"stream": True} if number % 2 else {}
        body |= {"stream_options": {"include_usage": True}} if number % 4 == 1 else {}
        async with http.post(bed.url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        await asyncio.gather(*(ask(http, number) for number in range(60)))
    mine = bed.records[first:]
    assert len(mine) == 60
    now = [server.counters() for server in vllms]
    theirs = [sum(after[i] - before[i] for before, after in zip(begin, now, strict=True)) for i in range(2)]
    assert [sum(r.prompt_tokens for r in mine), sum(r.completion_tokens for r in mine)] == theirs


async def test_prompts_of_streams_that_are_given_up_are_the_engines_own(bed, vllms):
    """Clients leave after the first tokens, with messages, tools, or a plain prompt; vLLM is asked what it read."""
    begin, first = [server.counters() for server in vllms], len(bed.records)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def ask(http, number):
        text = f"number {number}: " + "Was ist größer? " * (number % 7)
        body = {"model": "m", "stream": True, "max_tokens": 1500, "ignore_eos": True}
        path = "/v1/completions" if number % 3 == 2 else "/v1/chat/completions"
        body |= {"prompt": text} if number % 3 == 2 else {"messages": [{"role": "user", "content": text}]}
        body |= {"tools": [tool], "tool_choice": "none"} if number % 6 == 0 else {}
        async with http.post(bed.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            for _ in range(number % 5 + 1):
                await answer.content.readuntil(b"\n\n")
            answer.close()

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        for turn in range(0, 40, 10):  # no more at a time than a tenant's questions
            await asyncio.gather(*(ask(http, number) for number in range(turn, turn + 10)))
            await until(lambda turn=turn: len(bed.records) == first + turn + 10, 120)
    mine = bed.records[first:]
    assert sum((record.end, record.counted) == ("cancelled", False) for record in mine) > 20, "few are as fast as that"
    theirs = sum(server.counters()[0] for server in vllms) - sum(before for before, _ in begin)
    assert sum(record.prompt_tokens for record in mine) == theirs


async def test_what_prompts_share_is_what_the_engine_finds_in_its_cache(bed, sdk):
    """Conversations with one system prompt, turn by turn on one server; blocks of its cache have up to 128 tokens, and
    what is around a message in JSON is not as long as in a template.
    """
    first, one = len(bed.records), {"x-fabric-providers": "alpha"}
    system = {"role": "system", "content": "".join(f"Rule {n}: be careful. " for n in range(50))}
    for talk in range(3):
        messages = [system, {"role": "user", "content": f"I am user {talk}. " + f"{talk}" * 150}]
        for _ in range(4):
            answer = await sdk.chat.completions.create(model="m", messages=messages, max_tokens=4, extra_headers=one)
            messages += [{"role": "assistant", "content": "y" * 20}, {"role": "user", "content": "z" * 60}]
    records = bed.records[first:]
    assert records[-1].prompt_tokens == answer.usage.prompt_tokens
    assert (records[0].prefix_tokens, records[0].prefix_of) == (0, "")
    for record in records[1:]:
        assert record.prefix_of in {its.id for its in records}
        assert 0.95 * record.cached_tokens - 16 <= record.prefix_tokens <= 1.05 * record.cached_tokens + 128, record
    print([(its.prompt_tokens, its.prefix_tokens, its.cached_tokens) for its in records])


async def test_a_client_that_goes_away_frees_the_engine(bed, vllms):
    async def running():
        async with aiohttp.ClientSession() as http:
            text = "".join([await (await http.get(server.url + "/metrics")).text() for server in vllms])
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
        )

    body = {"model": "m", "prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    for _ in range(5):
        before = len(bed.records)
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
            answer = await http.post(bed.url + "/v1/completions", json=body)
            await answer.content.readany()
            answer.close()  # at once: two thousand tokens of a tiny model are there in seconds
            for _ in range(200):
                if await running() == 0:
                    break
                await asyncio.sleep(0.05)
            assert await running() == 0
        await until(lambda before=before: len(bed.records) > before)
        # On a busy machine vLLM's engine may be done before its server has sent a word: nothing was left to cancel.
        if bed.records[-1].end != "answered":
            break
    assert bed.records[-1].end == "cancelled", bed.records[-1]


async def test_a_server_that_is_killed_costs_no_request_without_an_octet(bed, vllms):
    """Those whose stream had begun get an error event; all others the other server's answer."""

    async def ask(http, number):
        body = {"model": "m", "prompt": f"{number}", "max_tokens": 60, "ignore_eos": True, "stream": number % 2 == 0}
        wish = {"x-fabric-continue": "yes"} if number % 4 == 0 else {}
        async with http.post(bed.url + "/v1/completions", json=body, headers=wish) as answer:
            return answer.status, await answer.text()

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        tasks = [asyncio.create_task(ask(http, number)) for number in range(24)]
        await asyncio.sleep(0.3)
        vllms[0].signal(signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        more = [await ask(http, number) for number in range(6)]
    assert {status for status, _ in [*answers, *more]} == {200}
    for number, (_, text) in enumerate(answers):
        if number % 4 == 0:
            assert "data: [DONE]" in text, "the other server said the rest"
        elif number % 2 == 0 and "data: [DONE]" not in text:
            assert '"error"' in text.strip().splitlines()[-1]
    assert all('"error"' not in text for _, text in more)
    assert bed.gateway.status().totals.in_flight == 0
