"""The engine over real HTTP on loopback, with the tiny model."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.base.clock import SystemClock
from fabrictool.engines.reference.answers import EngineLimits
from fabrictool.engines.reference.engine import ReferenceEngine
from fabrictool.engines.reference.server import EngineServer
from fabrictool.engines.reference.tokenizer import Tokenizer

ASK = {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "temperature": 0}


class Running:
    def __init__(self, server, engine, url, http):
        self.server, self.engine, self.url, self.http = server, engine, url, http

    async def post(self, body, path="/v1/completions"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data) as answer:
            return answer.status, await answer.json()

    async def get(self, path):
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def stream(self, body, path="/v1/completions"):
        async with self.http.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            chunks = [line[6:].strip() async for line in answer.content if line.startswith(b"data: ")]
        assert chunks.pop() == b"[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def hold(self, steps=0):
        """From now on the engine computes `steps` steps and then stands still, so that nothing depends on speed."""
        self.permits, self.still = threading.Semaphore(steps), threading.Event()
        step = self.engine._model.step

        def gated(*arguments):
            if not self.permits.acquire(blocking=False):
                self.still.set()
                self.permits.acquire()
            return step(*arguments)

        self.engine._model.step = gated

    def let_go(self):
        self.permits.release(1_000_000)


async def until(condition):
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never happened")


@contextlib.asynccontextmanager
async def serving(weights, limits=None, max_waiting=64):
    engine = ReferenceEngine(
        weights, Tokenizer(weights.metadata), limits or EngineLimits(512, 4, 200, 8, 64), SystemClock()
    )
    server = EngineServer(SystemClock(), max_waiting=max_waiting)
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.start()
    async with aiohttp.ClientSession() as http:
        try:
            yield Running(server, engine, f"http://127.0.0.1:{runner.addresses[0][1]}", http)
        finally:
            await asyncio.to_thread(engine.stop)
            await runner.cleanup()


@pytest_asyncio.fixture
async def running(tiny):
    async with serving(tiny) as one:
        one.server.serve(one.engine, {"tiny": one.engine})
        yield one


@pytest.mark.asyncio
async def test_completion_and_its_usage(running):
    status, answer = await running.post(ASK)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    prompt = len(running.engine.tokenizer.encode(ASK["prompt"]))
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}


@pytest.mark.asyncio
async def test_what_a_prompt_is_can_be_asked_by_itself(running):
    chat = {**ASK, "messages": [{"role": "user", "content": "hello there"}], "stream": True}
    del chat["prompt"]
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", chat)):
        _, answer = await running.post(body | {"stream": False}, path)
        status, counted = await running.post(body, "/tokenize")
        assert status == 200
        assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
    for wrong in (b"{", b"[]", {**ASK, "model": "other"}, {"model": "tiny"}, {**chat, "messages": []}):
        status, answer = await running.post(wrong, "/tokenize")
        assert status in (400, 404)
        assert answer["error"]["message"]


@pytest.mark.asyncio
async def test_token_ids_are_the_same_prompt(running):
    numbers = running.engine.tokenizer.encode(ASK["prompt"])
    _, text = await running.post(ASK)
    for prompt in (numbers, [ASK["prompt"]]):
        status, same = await running.post({**ASK, "prompt": prompt})
        assert (status, same["choices"]) == (200, text["choices"])


@pytest.mark.asyncio
@pytest.mark.parametrize("extra", [{}, {"stop": ["e", "zz"]}, {"temperature": 1.3, "seed": 4}])
async def test_stream_is_the_answer_in_pieces(running, extra):
    body = {**ASK, "max_tokens": 40, **extra}
    _, whole = await running.post(body)
    chunks = await running.stream({**body, "stream_options": {"include_usage": True}})
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole["choices"][0]["finish_reason"]]


@pytest.mark.asyncio
async def test_chat_stream_opens_with_the_role_and_hides_usage_unless_asked(running):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
    chunks = await running.stream(body, "/v1/chat/completions")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in chunk for chunk in chunks)
    _, whole = await running.post(body, "/v1/chat/completions")
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    _, same = await running.post({**body, "messages": parts}, "/v1/chat/completions")
    assert same["choices"] == whole["choices"]


@pytest.mark.asyncio
async def test_stop_string_ends_the_answer_before_it(running):
    _, free = await running.post({**ASK, "max_tokens": 40})
    text = free["choices"][0]["text"]
    stop = text[10:14]
    _, answer = await running.post({**ASK, "max_tokens": 40, "stop": stop})
    assert answer["choices"][0] == {
        "index": 0,
        "text": text[: text.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }


@pytest.mark.asyncio
async def test_seeds_decide_the_draws(running):
    warm = {**ASK, "temperature": 1.0, "max_tokens": 20}
    texts = [(await running.post({**warm, "seed": s}))[1]["choices"][0]["text"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    unseeded = {(await running.post(warm))[1]["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.asyncio
async def test_concurrent_answers_are_those_made_alone(running):
    bodies = [{**ASK, "prompt": f"number {i}", "max_tokens": 15} for i in range(8)]
    alone = [(await running.post(body))[1]["choices"] for body in bodies]
    together = [answer["choices"] for _, answer in await asyncio.gather(*map(running.post, bodies))]
    assert together == alone


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[1]", 400, "invalid_json", None),
        (b"\xff\xfe", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        ({**ASK, "model": "other"}, 404, "model_not_found", "model"),
        ({"prompt": "x"}, 400, None, None),
        ({**ASK, "max_tokens": 0}, 400, None, "max_tokens"),
        ({**ASK, "max_tokens": "9"}, 400, None, "max_tokens"),
        ({**ASK, "temperature": -1}, 400, None, "temperature"),
        ({**ASK, "top_p": 0}, 400, None, "top_p"),
        ({**ASK, "seed": 2**70}, 400, None, "seed"),
        ({**ASK, "prompt": ""}, 400, None, "prompt"),
        ({**ASK, "prompt": []}, 400, None, "prompt"),
        ({**ASK, "prompt": [1, 999999]}, 400, None, "prompt"),
        ({**ASK, "prompt": [-1]}, 400, None, "prompt"),
        ({**ASK, "prompt": ["a", "b"]}, 400, "unsupported_parameter", "prompt"),
        ({**ASK, "n": 2}, 400, "unsupported_parameter", "n"),
        ({**ASK, "echo": True}, 400, "unsupported_parameter", "echo"),
        ({**ASK, "stop": ["a"] * 5}, 400, None, "stop"),
        ({**ASK, "stop": ""}, 400, None, "stop"),
        ({**ASK, "prompt": "x" * 600}, 400, "context_length_exceeded", "prompt"),
        ({**ASK, "max_tokens": 5000}, 400, "context_length_exceeded", "max_tokens"),
    ],
)
async def test_wrong_requests_get_typed_errors(running, body, status, code, param):
    got, answer = await running.post(body)
    assert got == status
    assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)
    assert answer["error"]["message"]
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.asyncio
async def test_wrong_chats_and_routes(running):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}
    assert (await running.post(chat, "/v1/chat/completions"))[0] == 400
    assert (await running.post({"model": "tiny", "messages": []}, "/v1/chat/completions"))[0] == 400
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405), ("/v1/models/other", 404)):
        got, text = await running.get(path)
        assert got == status
        assert "message" in json.loads(text)["error"]
    status, text = await running.get("/v1/models")
    assert [(m["id"], m["max_model_len"]) for m in json.loads(text)["data"]] == [("tiny", 512)]
    assert json.loads((await running.get("/v1/models/tiny"))[1])["id"] == "tiny"


@pytest.mark.asyncio
async def test_a_client_that_leaves_frees_its_blocks(running):
    engine, body = running.engine, {**ASK, "max_tokens": 450}
    running.hold(steps=2)
    async with running.http.post(running.url + "/v1/completions", json={**body, "stream": True}) as answer:
        await answer.content.readline()
        await until(running.still.is_set)  # from here on nobody empties the inbox
        assert engine.stats.running == 1
        assert engine._allocator.free < engine._allocator.total
        answer.close()
    asked = asyncio.create_task(running.post(body))
    await until(lambda: engine._inbox.qsize() == 2)  # the cancellation of the first, and the second
    asked.cancel()
    await until(lambda: engine._inbox.qsize() == 3)
    running.let_go()
    await until(lambda: engine.stats.finished["cancelled"] == 2)
    await until(lambda: engine.stats.running == engine.stats.waiting == 0)
    assert engine._allocator.free == engine._allocator.total
    assert (await running.post(ASK))[0] == 200


@pytest.mark.asyncio
async def test_a_small_pool_and_a_long_queue(tiny):
    async with serving(tiny, EngineLimits(64, 2, 8, 8, 16), max_waiting=2) as one:
        one.server.serve(one.engine, {"tiny": one.engine})
        body = {**ASK, "max_tokens": 50}
        one.hold()
        asked = [asyncio.create_task(one.post(body)) for _ in range(12)]
        await until(lambda: sum(task.done() for task in asked) == 8)
        one.let_go()
        answers = await asyncio.gather(*asked)
        done = [answer["choices"][0]["text"] for status, answer in answers if status == 200]
        refused = [answer["error"]["code"] for status, answer in answers if status == 429]
        assert refused == ["queue_full"] * 8
        assert len(done) == 4  # two in the batch, two in the queue
        assert len(set(done)) == 1  # preempted or not, the same text
        await until(lambda: one.engine.stats.running == 0)
        assert one.engine._allocator.free == 8


@pytest.mark.asyncio
async def test_health_and_metrics_through_the_life(tiny):
    async with serving(tiny) as one:
        one.server.progress = 40
        status, text = await one.get("/health")
        assert (status, json.loads(text)) == (503, {"status": "loading", "progress": 40})
        assert (await one.post(ASK))[0] == 503
        one.server.serve(one.engine, {"tiny": one.engine})
        assert (await one.get("/health"))[0] == 200
        await one.post(ASK)
        _, metrics = await one.get("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        assert lines['vllm:num_requests_running{model_name="tiny"}'] == "0"
        assert lines['vllm:kv_cache_usage_perc{model_name="tiny"}'] == "0.0"
        assert lines['vllm:generation_tokens_total{model_name="tiny"}'] == "12"
        assert lines['vllm:time_to_first_token_seconds_count{model_name="tiny"}'] == "1"
        assert lines['vllm:inter_token_latency_seconds_count{model_name="tiny"}'] == "11"
        await one.server.drain(1.0)
        assert (await one.get("/health"))[0] == 503
        assert (await one.post(ASK))[1]["error"]["code"] == "stopping"


@pytest.mark.asyncio
async def test_draining_lets_a_request_end_and_stopping_ends_it(tiny):
    async with serving(tiny) as one:
        one.server.serve(one.engine, {"tiny": one.engine})
        one.hold(steps=1)
        asked = asyncio.create_task(one.post(ASK))
        await until(lambda: one.engine.stats.running == 1)
        drained = asyncio.create_task(one.server.drain(30.0))
        await until(lambda: one.server.stopping)
        assert (await one.post(ASK))[0] == 503
        assert not drained.done()
        one.let_go()
        await drained
        assert (await asked)[0] == 200
    async with serving(tiny) as one:
        one.server.serve(one.engine, {"tiny": one.engine})
        one.hold(steps=1)
        asked = asyncio.create_task(one.post(ASK))
        await until(lambda: one.engine.stats.running == 1)
        stopped = asyncio.create_task(asyncio.to_thread(one.engine.stop))
        await until(lambda: one.engine._inbox.qsize() == 1)
        one.let_go()
        await stopped
        assert (await asked)[0] == 503


@pytest.mark.asyncio
async def test_a_failing_engine_says_so_and_ends_every_request(tiny, caplog):
    failures = []
    async with serving(tiny) as one:
        one.server.serve(one.engine, {"tiny": one.engine})
        one.engine._on_failure = failures.append
        one.engine._model.step = lambda *_: 1 / 0
        status, answer = await one.post(ASK)
        assert (status, answer["error"]["code"]) == (500, "engine_failed")
        status, text = await one.get("/health")
        assert status == 500
        assert "ZeroDivisionError" in text
        await until(lambda: failures == ["ZeroDivisionError: division by zero"])
    assert "the compute thread failed" in caplog.text


@pytest.mark.asyncio
async def test_openai_sdk(running):
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="unused", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=6, seed=1)
        assert answer.usage.completion_tokens == 6
        stream = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_completion_tokens=6,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage == answer.usage
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="none", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="tiny", messages=messages, max_tokens=10_000)


RACE = """\
import importlib, sys, threading
from fabrictool.engines.reference import api

BODY = b'{"model": "m", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}'
sys.setswitchinterval(1e-6)

def parse(start, chat):
    start.wait()
    try:
        api.parse(BODY, chat=chat, models={})
    except api.ApiError as error:
        assert error.status == 404

for number in range(40):
    importlib.reload(api)  # classes that nobody used yet
    start = threading.Barrier(8)
    threads = [threading.Thread(target=parse, args=(start, number % 2 == 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_requests_may_come_at_the_same_time():
    """In a process of its own: what went wrong there was a crash of the process."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
