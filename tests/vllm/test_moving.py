"""Two real vLLM servers: a stream gives its place to an urgent request and goes on at the other one, saying what it
would have said.
"""

import asyncio
import json
import string

import aiohttp
import pytest
import pytest_asyncio
from tokenizers import pre_tokenizers

from fabrictool.base.clock import SystemClock
from fabrictool.domain.steps import MeasuredSteps
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.routing.protocol import StreamTarget
from tests.gateway.conftest import Bed, until
from tests.vllm.conftest import CONTEXT, Vllm, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(1200)]

TOKENS = 300
AHEAD = 40
"""Tokens by which a stream has more headroom than a request that just came."""
ROUNDS = 2
FAST = MeasuredSteps((20_000, 25_000, 30_000, 40_000, 60_000, 100_000), (10_000, 11_000, 13_000, 17_000))
LETTERS = [sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in string.ascii_letters]
"""Each token is a letter, so that what was said is cut into the same tokens when it is read again."""


SLOW = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 128}
"""The usual model is done before anybody can look."""
LAX = StreamTarget(ttft_s=20.0, tpot_s=1.0)
"""So that a busy machine keeps it, too."""


@pytest.fixture(scope="module")
def exact(tmp_path_factory, random_model):
    """In fp32: where a batch is larger, or a prompt is read at once, sums differ in their last digits."""
    model = random_model.with_name("slow")
    write_model(model, **SLOW)
    servers = [
        Vllm(tmp_path_factory.mktemp("exact"), model, more=("--enforce-eager", "--dtype", "float32")) for _ in range(2)
    ]
    try:
        for server in servers:
            server.start()
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


def body_of(prompt, tokens=TOKENS):
    return {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "allowed_token_ids": LETTERS,
    }  # fmt: skip


class Talk:
    """One stream, as its client sees it."""

    def __init__(self, http, url, prompt, headers=None, tokens=TOKENS):
        self.text, self.comments, self.ahead = "", [], asyncio.Event()
        self.task = asyncio.create_task(self._listen(http, url, body_of(prompt, tokens), headers or {}))

    async def _listen(self, http, url, body, headers):
        async with http.post(url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b":"):
                    self.comments.append(line.decode().strip())
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    self.text += "".join(choice["text"] for choice in event["choices"])
                    if len(self.text) >= AHEAD:
                        self.ahead.set()


@pytest_asyncio.fixture(loop_scope="module")
async def bed(exact):
    devices = ("xeon-6462c", "h100-sxm-80g")
    nodes = [
        StaticNode(server.url, ["m"], provider, device, engine="vllm", context=CONTEXT, slots=2)
        for server, provider, device in zip(exact, ("alpha", "beta"), devices, strict=True)
    ]
    started = await Bed().start("slo-packing", nodes=nodes, clock=SystemClock(), targets={"m": LAX})
    for target in started.gateway.directory:
        target.steps = FAST
    yield started
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def http(bed):
    headers = {"authorization": f"Bearer {bed.KEY}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=300)) as session:
        yield session


async def moved_in_a_round(bed, http, server, number):
    """The streams of a round; None where one was over before the urgent request came."""
    wish, (alpha, beta) = {"x-fabric-continue": "yes"}, bed.gateway.directory
    other = Talk(http, bed.url, f"other {number}", {"x-fabric-providers": "beta"})
    streams = [Talk(http, bed.url, f"stream {number} {which}", wish) for which in range(3)]
    await asyncio.gather(*(stream.ahead.wait() for stream in streams))
    with server.standing_still():
        full, before = alpha.in_flight == 3, beta.requests
        urgent = Talk(http, bed.url, f"urgent {number}", {"x-fabric-providers": "alpha"}, tokens=5)
        await until(lambda: beta.requests > before or not full)
    await asyncio.gather(*(talk.task for talk in (other, urgent, *streams)))
    assert len(urgent.text) == 5
    return [other, *streams] if full else None


async def test_a_moved_stream_says_what_it_would_have_said(bed, http, exact):
    records = []
    bed.gateway.sinks.append(records.append)
    rounds, number = 0, 0
    while rounds < ROUNDS:
        number += 1
        assert number <= 4 * ROUNDS, "on a busy machine streams may be over before"
        talks = await moved_in_a_round(bed, http, exact[0], number)
        if talks is None:
            continue
        rounds += 1
        moved = [talk for talk in talks if talk.comments]
        assert [talk.comments for talk in moved] == [[f": continued by beta 127.0.0.1:{exact[1].port}"]]
        prompts = [f"other {number}", *(f"stream {number} {which}" for which in range(3))]
        for server in exact:
            alone = [Talk(http, server.url, prompt) for prompt in prompts]
            await asyncio.gather(*(talk.task for talk in alone))
            assert [talk.text for talk in alone] == [talk.text for talk in talks]
        assert {len(talk.text) for talk in talks} == {TOKENS}
    assert {record.end for record in records} == {"answered"}
    whole = [record for record in records if record.completion_tokens != 5]
    assert {record.completion_tokens for record in whole} == {TOKENS}
    assert sum(record.retries for record in records) == 0
    print(f"{rounds} of {number} rounds moved a stream")
