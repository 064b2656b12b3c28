"""The gateway before a real `llama-server`: the SDKs' calls, exact counts, and clients that go away."""

import asyncio

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from fabrictool.engines.adapter import EngineLaunch, adapter
from fabrictool.engines.artifacts import resolve
from fabrictool.gateway.staticlist import StaticNode
from tests.engines.conftest import SMOLLM2
from tests.engines.llama_server import built
from tests.gateway.conftest import Bed, until
from tests.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.extended, pytest.mark.timeout(1800)]
CONTEXT, SLOTS = 1024, 4
USER = {"role": "user", "content": "What is the capital of France?"}


class LlamaServer:
    """As an agent starts it, with SmolLM2."""

    def __init__(self, folder):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "llama.log"
        self.process = None

    async def start(self):
        launch = EngineLaunch(
            engine="llama.cpp",
            model=resolve(SMOLLM2),
            served_name="m",
            host="127.0.0.1",
            port=self.port,
            context=CONTEXT,
            max_num_seqs=SLOTS,
            options={"threads": "1"},
        )
        program = await asyncio.to_thread(built)
        command = adapter("llama.cpp").command(launch)
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(program, *command.argv[1:], stdout=log, stderr=log)
        for _ in range(600):
            if await self._is_ready():
                return
            assert self.process.returncode is None, self.log.read_text()[-3000:]
            await asyncio.sleep(0.1)
        pytest.fail(self.log.read_text()[-3000:])

    async def _is_ready(self):
        try:
            async with aiohttp.ClientSession() as http, http.get(self.url + "/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def figures(self):
        """What it says of itself, by name."""
        async with aiohttp.ClientSession() as http, http.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[:1] != "#")}

    async def stop(self):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory):
    started = LlamaServer(tmp_path_factory.mktemp("llama"))
    await started.start()
    yield started
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed(server):
    node = StaticNode(server.url, ["m"], "alpha", engine="llama.cpp", context=CONTEXT)
    started = await Bed().start(nodes=[node])
    yield started
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(bed):
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=bed.KEY, max_retries=0, timeout=120) as client:
        yield client


async def test_openai_calls(bed, sdk):
    first = len(bed.records)
    whole = await sdk.chat.completions.create(model="m", messages=[USER], max_tokens=8, temperature=0)
    stream = await sdk.chat.completions.create(model="m", messages=[USER], max_tokens=8, temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks), "the event of figures is ours"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    text = await sdk.completions.create(model="m", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in text.choices[0].text
    with pytest.raises(openai.BadRequestError, match=r"(?i)context"):
        await sdk.completions.create(model="m", prompt="a b " * 600, max_tokens=1)
    await until(lambda: len(bed.records) == first + 4)
    said, streamed, completed, refused = bed.records[first:]
    assert [record.counted for record in (said, streamed, completed)] == [True] * 3
    assert (said.prompt_tokens, said.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (said.prompt_tokens, said.completion_tokens)
    assert completed.completion_tokens == text.usage.completion_tokens
    assert (refused.status, refused.retries) == (400, 0)


async def test_anthropic_calls(bed):
    first = len(bed.records)
    async with anthropic.AsyncAnthropic(base_url=bed.url, api_key=bed.KEY, max_retries=0, timeout=120) as client:
        asked = {"model": "m", "max_tokens": 8, "messages": [USER]}
        answer = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="m", messages=[USER])
    await until(lambda: len(bed.records) == first + 3)
    whole, streamed, _ = bed.records[first:]
    assert answer.content[0].text
    assert final.content[0].text
    assert whole.completion_tokens == answer.usage.output_tokens
    assert streamed.completion_tokens == final.usage.output_tokens
    assert counted.input_tokens == whole.prompt_tokens == streamed.prompt_tokens


async def test_tokens_given_out_are_the_engines_own(bed, server):
    """Whole answers and streams, with and without the wish for figures, more at once than it has slots. What it has in
    its cache it does not count as taken in, so that only what it gives out is compared.
    """
    before, first = await server.figures(), len(bed.records)

    async def ask(http, number):
        body = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 3 + number % 7}
        body |= {"stream": True} if number % 2 else {}
        body |= {"stream_options": {"include_usage": True}} if number % 4 == 1 else {}
        async with http.post(bed.url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        await asyncio.gather(*(ask(http, number) for number in range(24)))
    await until(lambda: len(bed.records) == first + 24)
    after, name = await server.figures(), "llamacpp:tokens_predicted_total"
    assert sum(record.completion_tokens for record in bed.records[first:]) == after[name] - before[name]


async def test_a_client_that_goes_away_frees_its_slot(bed, server):
    first = len(bed.records)
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 900, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        answer = await http.post(bed.url + "/v1/completions", json=body)
        await answer.content.readany()
        answer.close()
    for _ in range(200):
        if (await server.figures())["llamacpp:requests_processing"] == 0:
            break
        await asyncio.sleep(0.05)
    assert (await server.figures())["llamacpp:requests_processing"] == 0
    await until(lambda: len(bed.records) > first)
    record = bed.records[first]
    assert (record.end, bed.gateway.status().totals.in_flight) == ("cancelled", 0)
    assert 0 < record.completion_tokens < 900


async def test_a_server_that_is_killed_is_told_well(bed, server):
    """Last of all: there is no other one. A stream that had begun ends with an error event, later ones hear 503."""
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 900, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        answer = await http.post(bed.url + "/v1/completions", json=body)
        await answer.content.readany()
        server.process.kill()
        text = (await answer.content.read()).decode()
        assert '"error"' in text.strip().splitlines()[-1]
        assert "[DONE]" not in text
        async with http.post(bed.url + "/v1/completions", json=body | {"stream": False}) as later:
            assert later.status in (502, 503)
            assert "error" in await later.json()
    assert bed.gateway.status().totals.in_flight == 0
