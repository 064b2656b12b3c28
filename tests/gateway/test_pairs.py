"""Prefill/decode pairs: who is asked for what, and that a client notices nothing when the prompt's replica fails.

The servers keep caches as vLLM's do with the NIXL connector; `tests/vllm` has the real ones.
"""

import asyncio
import json
from types import SimpleNamespace

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from fabrictool.gateway.exchange import SHARE
from fabrictool.gateway.pairs import HANDED_HEADER, HANDED_OCTETS, prompt_request
from fabrictool.gateway.patience import UNKNOWN
from fabrictool.gateway.staticlist import StaticNode
from fabrictool.routing.ejection import OUT_MAX_S, OUT_S
from tests.gateway.conftest import until

PROMPT = "the quick brown fox jumps over the lazy dog " * 40


class FakePairEngine:
    """A server that computes prompts for others and fetches theirs, by script; it is no model."""

    def __init__(self, name, caches):
        self.name, self.caches = name, caches
        self.asked, self.bodies, self.mode = [], [], "ok"
        self.release, self.cancelled = asyncio.Event(), asyncio.Event()
        self.recomputed = 0

    async def start(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{tail:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self):
        self.release.set()
        await self.runner.cleanup()

    async def answer(self, request):
        raw = await request.read()
        asked = json.loads(raw)
        self.bodies.append(raw)
        self.asked.append(asked)
        wish = asked.get("kv_transfer_params") or {}
        if self.mode.isdigit():
            return web.json_response({"error": {"message": self.mode}}, status=int(self.mode))
        if self.mode == "reset":
            request.transport.abort()
        if self.mode == "hang":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if wish.get("do_remote_decode"):
            return await self.compute(asked)
        if wish.get("do_remote_prefill"):
            if self.caches.pop(wish["remote_block_ids"][0], None) != words(asked):
                return web.json_response({"error": {"message": "no such cache"}}, status=500)
        else:
            self.recomputed += 1
        return await self.say(request, asked)

    async def compute(self, asked):
        block = f"{self.name}{len(self.asked)}"
        self.caches[block] = words(asked)
        handed = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [block],
            "remote_engine_id": self.name, "remote_host": "10.0.0.1", "remote_port": 5600,
        }  # fmt: skip
        handed = {"nothing": None, "text": "cache"}.get(self.mode, handed)
        body = json.dumps({"id": "p", "choices": [], "kv_transfer_params": handed}).encode()
        if self.mode == "garbage":
            body = b"{]"
        if self.mode == "endless":
            body = b'{"text": "' + b"x" * (2 * HANDED_OCTETS) + body
        return web.Response(body=body, content_type="application/json")

    async def say(self, request, asked):
        usage = {"prompt_tokens": 400, "completion_tokens": 2, "total_tokens": 402}
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": self.name}, "finish_reason": "stop"}
            return web.json_response({"id": "c", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for word in ("by ", self.name):
            event = {"id": "c", "choices": [{"index": 0, "delta": {"content": word}}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if (asked.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + json.dumps({"id": "c", "choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def words(asked):
    """What a prompt is computed from."""
    return json.dumps([asked.get("messages"), asked.get("prompt")])


@pytest_asyncio.fixture
async def pairs(make_bed):
    """Prefill p and q, decode d and e; p and d are at site one."""
    caches, engines = {}, {}
    for name in "pqde":
        engines[name] = FakePairEngine(name, caches)
        await engines[name].start()
    places = {"p": ("prefill", "one"), "q": ("prefill", "two"), "d": ("decode", "one"), "e": ("decode", "two")}
    nodes = [
        StaticNode(engines[name].url, ["m"], "alpha", phase=phase, site=site, engine="vllm")
        for name, (phase, site) in places.items()
    ]
    bed = await make_bed().start(nodes=nodes)
    bed.gateway.count_caches({"m": 1024.0})
    bed.site_of = lambda engine: places[engine.name][1]
    bed.caches = caches
    bed.of = SimpleNamespace(**engines)
    yield bed
    await bed.stop()
    for engine in engines.values():
        await engine.stop()


async def ask(bed, *, path="/v1/chat/completions", key=None, headers=None, raw=None, **fields):
    headers = {"authorization": f"Bearer {key or bed.KEY}", "content-type": "application/json"} | (headers or {})
    body = raw or json.dumps({"model": "m", "messages": [{"role": "user", "content": PROMPT}]} | fields).encode()
    async with aiohttp.ClientSession() as http, http.post(bed.url + path, data=body, headers=headers) as answer:
        return SimpleNamespace(status=answer.status, headers=answer.headers, text=await answer.text())


def handed(bed):
    """Outcomes, as the metrics have them."""
    lines = bed.gateway.exposition().decode().splitlines()
    counted = [line for line in lines if line.startswith("fabric_handed_prompts_total{")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in counted}


def at_rest(bed):
    return all(target.in_flight == 0 for target in bed.gateway.directory)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_computed_by_one_and_answered_by_another(pairs, stream):
    raw = b'{"model": "m", "max_tokens":  64, "stream": %s, "messages": [{"role": "user", "content": "%s"}]}' % (
        json.dumps(stream).encode(), PROMPT.encode()
    )  # fmt: skip
    answer = await ask(pairs, raw=raw)
    assert answer.status == 200
    (prefiller,) = [engine for engine in (pairs.of.p, pairs.of.q) if engine.asked]
    (decoder,) = [engine for engine in (pairs.of.d, pairs.of.e) if engine.asked]
    wish = prefiller.asked[0]
    assert (wish["max_tokens"], wish["stream"], "stream_options" in wish) == (1, False, False)
    assert wish["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert decoder.asked[0]["kv_transfer_params"]["remote_engine_id"] == prefiller.name
    assert decoder.bodies[0].endswith(raw[1:]), "the client's own octets"
    assert decoder.recomputed == 0
    assert pairs.caches == {}, "the cache was fetched"
    assert answer.headers[HANDED_HEADER] == f"127.0.0.1:{prefiller.port}"
    assert answer.headers["x-fabric-replica"] == f"127.0.0.1:{decoder.port}"
    assert decoder.name in answer.text
    (record,) = pairs.records
    assert (record.prompt_tokens, record.completion_tokens, record.retries) == (400, 2, 0)
    assert record.replica == f"127.0.0.1:{decoder.port}"
    assert handed(pairs) == {"handed": 1.0}
    assert at_rest(pairs)
    (row,) = pairs.gateway.status().handed
    site = pairs.site_of(decoder)
    assert (row.model, row.sender, row.receiver) == ("m", pairs.site_of(prefiller), site)
    assert (row.prompts, row.tokens, row.octets) == (1, 400, 400 * 1024)
    line = f'fabric_cache_octets_total{{model="m",receiver="{site}",sender="{row.sender}"}} 409600.0'
    assert line in pairs.gateway.exposition().decode()
    took = {target.replica: target.ttft_s for target in pairs.gateway.directory if target.ttft_s is not None}
    both = {f"127.0.0.1:{prefiller.port}"} | ({f"127.0.0.1:{decoder.port}"} if stream else set())
    assert took.keys() == both, "each phase by itself"


@pytest.mark.asyncio
async def test_who_computes_is_at_the_site_of_who_answers(pairs):
    for _ in range(12):
        assert (await ask(pairs)).status == 200
    assert len(pairs.of.p.asked) == len(pairs.of.d.asked) == 6
    assert len(pairs.of.q.asked) == len(pairs.of.e.asked) == 6


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "short"}]}),
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT]}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 5}),
        ("/v1/embeddings", {"input": PROMPT}),
    ],
)
async def test_what_cannot_be_split_is_answered_by_a_replica_for_decoding(pairs, path, fields):
    assert (await ask(pairs, path=path, **fields)).status == 200
    assert pairs.of.p.asked == pairs.of.q.asked == []
    assert pairs.of.d.recomputed + pairs.of.e.recomputed == 1


@pytest.mark.parametrize("prompt", [PROMPT, [1, 2, 3] * 400, [PROMPT]])
def test_one_prompt_may_be_text_or_tokens(prompt):
    body = json.dumps({"model": "m", "prompt": prompt, "n": 1, "min_tokens": 9, "stop": ["x"]}).encode()
    asked = prompt_request("/v1/completions?x=1", body)
    if prompt == [PROMPT]:
        assert asked is None
    else:
        asked = json.loads(asked)
        assert (asked["prompt"], asked["max_tokens"], asked["stop"], "min_tokens" in asked) == (prompt, 1, ["x"], False)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["500", "503", "429", "400", "reset", "garbage", "nothing", "text", "endless"])
async def test_a_prefill_replica_that_fails_costs_no_answer(pairs, mode):
    pairs.of.p.mode = pairs.of.q.mode = mode
    answers = [await ask(pairs, stream=stream) for stream in (False, True, False, True)]
    assert [answer.status for answer in answers] == [200] * 4
    assert all(HANDED_HEADER not in answer.headers for answer in answers)
    assert pairs.of.d.recomputed + pairs.of.e.recomputed == 4
    assert handed(pairs) == {"alone": 4.0}
    assert [record.retries for record in pairs.records] == [0] * 4, "who answers was asked once"
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_another_prefill_replica_is_asked_where_the_first_refuses(pairs):
    pairs.of.p.mode = "reset"
    for _ in range(4):
        assert (await ask(pairs)).status == 200
    assert handed(pairs) == {"handed": 4.0}
    assert pairs.of.d.recomputed + pairs.of.e.recomputed == 0
    assert len(pairs.of.q.asked) == 4


@pytest.mark.asyncio
async def test_who_failed_to_compute_is_left_alone_for_a_while(pairs):
    await pairs.of.p.stop()
    for _ in range(10):
        assert (await ask(pairs)).status == 200
    failures = [target.failures for target in pairs.gateway.directory if target.phase == "prefill"]
    assert sorted(failures) == [0, 1]


@pytest.mark.asyncio
async def test_a_prefill_replica_that_hangs_is_given_up(pairs):
    pairs.of.p.mode = pairs.of.q.mode = "hang"
    asking = asyncio.create_task(ask(pairs))
    await until(lambda: pairs.of.p.asked or pairs.of.q.asked)
    pairs.clock.advance(3600.0)
    answer = await asyncio.wait_for(asking, 10)
    assert answer.status == 200
    assert len(pairs.of.p.asked) + len(pairs.of.q.asked) == 1, "a slow failure is not repeated"
    assert handed(pairs) == {"alone": 1.0}
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_a_prompt_that_takes_half_of_a_requests_time_is_computed_by_who_answers(pairs):
    pairs.of.p.mode = pairs.of.q.mode = "hang"
    asking = asyncio.create_task(ask(pairs))
    await until(lambda: pairs.of.p.asked or pairs.of.q.asked)
    for _ in range(int(SHARE * UNKNOWN.deadline_s) + 2):
        pairs.clock.advance(1.0)
        for connection in list(pairs.gateway.connections):
            connection.expire()
    assert (await asyncio.wait_for(asking, 10)).status == 200
    assert pairs.of.d.recomputed + pairs.of.e.recomputed == 1
    assert [record.retries for record in pairs.records] == [0]
    assert not any(target.ejection.out_until for target in pairs.gateway.directory)
    assert at_rest(pairs)


def prefiller(bed, site):
    (target,) = [target for target in bed.gateway.directory if (target.phase, target.site) == ("prefill", site)]
    return target


@pytest.mark.asyncio
async def test_a_prefill_replica_that_is_tried_after_another_was_slow_is_judged_by_its_own_time(pairs):
    p, q = prefiller(pairs, "one").ejection, prefiller(pairs, "two").ejection
    for target in pairs.gateway.directory:
        if (target.phase, target.site) == ("decode", "two"):
            target.ejection.out_until = 1e9
    pairs.of.p.mode, pairs.of.q.mode = "hang", "reset"
    asking = asyncio.create_task(ask(pairs))
    await until(lambda: pairs.of.p.asked)
    pairs.clock.advance(1.0)
    q.failed(1.0, 1.0, refused=True)
    pairs.clock.advance(4.0)

    async def refuse(asked):
        return web.json_response(asked, status=503)

    pairs.of.p.compute = refuse
    pairs.of.p.release.set()
    assert (await asking).status == 200
    assert len(pairs.of.q.asked) == 1
    assert q.out_until == 5.0 + 2 * OUT_S, "it was tried, and failed again"
    pairs.of.q.mode = "ok"
    pairs.clock.advance(OUT_MAX_S)
    p.out_until = 1e9
    assert (await ask(pairs)).status == 200
    assert (len(pairs.of.q.asked), q.out_until) == (2, 0.0)


@pytest.mark.interpreted
@pytest.mark.asyncio
async def test_a_gateway_without_files_leaves_a_prefill_replica_as_it_was(pairs, monkeypatch):
    tried = [target for target in pairs.gateway.directory if target.phase == "prefill"]
    for target in tried:
        target.ejection.failed(0.0, 0.0, refused=True)
        monkeypatch.setattr(target.connector, "start", lambda *asked, anew: asked[5].exhausted("no file is left"))
    for _ in range(2):
        pairs.clock.advance(OUT_S)
        assert [(await ask(pairs)).status for _ in tried] == [503] * len(tried)
        assert {target.ejection.out_until for target in tried} == {pairs.clock.monotonic() + OUT_S}
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_a_client_that_goes_away_frees_the_prefill_replica(pairs):
    pairs.of.p.mode = pairs.of.q.mode = "hang"
    asking = asyncio.create_task(ask(pairs))
    await until(lambda: pairs.of.p.asked or pairs.of.q.asked)
    asking.cancel()
    await until(lambda: pairs.of.p.cancelled.is_set() or pairs.of.q.cancelled.is_set())
    await until(lambda: pairs.records)
    assert (pairs.records[0].status, pairs.records[0].end) == (499, "cancelled")
    assert pairs.of.d.asked == pairs.of.e.asked == []
    assert at_rest(pairs)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["503", "reset"])
async def test_another_replica_answers_without_the_cache_where_the_first_fails(pairs, mode):
    pairs.of.d.mode = mode
    for _ in range(4):
        assert (await ask(pairs)).status == 200
    retried = [asked for asked in pairs.of.e.asked if "kv_transfer_params" not in asked]
    assert len(retried) == pairs.of.e.recomputed >= 1, "the cache was another's"
    assert at_rest(pairs)


@pytest.mark.asyncio
async def test_where_nobody_is_left_for_decoding_a_prefill_replica_answers(pairs):
    await pairs.of.d.stop()
    await pairs.of.e.stop()
    for _ in range(6):
        answer = await ask(pairs)
        assert answer.status == 200
        assert json.loads(answer.text)["choices"][0]["message"]["content"] in "pq"
    assert at_rest(pairs)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["kv_transfer_params", "kv_transfer\\u005fparams"])
async def test_a_client_cannot_name_a_cache(pairs, name):
    other = '{"do_remote_prefill": true, "remote_block_ids": ["p1"], "remote_host": "10.0.0.1", "remote_port": 5600}'
    raw = f'{{"model": "m", "{name}": {other}, "prompt": "{PROMPT}"}}'.encode()
    answer = await ask(pairs, path="/v1/completions", raw=raw)
    assert (answer.status, "FT8162" in answer.text) == (400, True)
    assert not any(engine.asked for engine in vars(pairs.of).values())


@pytest.mark.asyncio
async def test_no_prompt_goes_to_a_provider_that_may_not_see_it(make_bed):
    engines = {name: FakePairEngine(name, {}) for name in ("p", "d")}
    for engine in engines.values():
        await engine.start()
    nodes = [
        StaticNode(engines["p"].url, ["m"], "beta", phase="prefill"),
        StaticNode(engines["d"].url, ["m"], "alpha", phase="decode"),
    ]
    bed = await make_bed().start(nodes=nodes)
    try:
        assert (await ask(bed, key=bed.ALPHA_KEY)).status == 200
        assert (await ask(bed, headers={"x-fabric-providers": "alpha"})).status == 200
        assert engines["p"].asked == []
        await engines["d"].stop()
        assert (await ask(bed, key=bed.ALPHA_KEY)).status in (502, 503)
        assert engines["p"].asked == []
    finally:
        await bed.stop()
        for engine in engines.values():
            await engine.stop()
