"""What the store adds up to is what the engines counted, whatever happens to engines, clients and the database."""

import asyncio
import itertools
import json
import os
import random
import signal
import zlib

import aiohttp
import msgspec
import pytest
from aiohttp import web
from sqlalchemy import func, select

from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import RecordsSpec
from fabrictool.gateway.keeping import records_folder, spooling
from fabrictool.gateway.run import run_on_mesh
from fabrictool.gateway.runlist import run_on_list
from fabrictool.gateway.staticlist import StaticNode, StaticRegistry
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.storeprocess import StoreProcess
from fabrictool.gateway.tables import REQUESTS
from tests.gateway.conftest import until
from tests.gateway.test_run import unit

pytestmark = pytest.mark.asyncio
SUMS = select(func.count(), func.sum(REQUESTS.c.prompt_tokens), func.sum(REQUESTS.c.completion_tokens)).select_from(
    REQUESTS
)


class CountingEngine:
    """Answers, refuses and dies by lot, and counts the tokens that it read and gave away, as a real one does: a prompt
    is read before the first token, whatever becomes of the rest.
    """

    def __init__(self, draws):
        self.draws = draws
        self.prompt = self.completion = self.said = self.asked = 0

    async def start(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/tokenize", self.count)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    @staticmethod
    def tokens(raw):
        return len(raw) // 4 + zlib.crc32(raw) % 19

    async def count(self, request):
        """As vLLM does; some of the questions get no answer at once."""
        self.asked += 1
        raw = await request.read()
        count = self.tokens(raw)
        await asyncio.sleep(zlib.crc32(raw) % 3 / 50)
        return web.json_response({"count": count, "max_model_len": 4096, "tokens": [1] * count})

    async def answer(self, request):
        body = await request.json()
        lot = self.draws.random()
        if lot < 0.15:
            return web.json_response({"error": {}}, status=503)
        if lot < 0.3:
            request.transport.abort()
            return web.Response()
        prompt, completion = self.tokens(await request.read()), self.draws.randint(2, 9)
        self.prompt += prompt
        if not body.get("stream"):
            self.said, self.completion = self.said + prompt, self.completion + completion
            return web.json_response({"usage": {"prompt_tokens": prompt, "completion_tokens": completion}})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        whole = lot < 0.8
        for number in range(completion):
            word = b"go" if not whole and number == completion - 1 else b"x"
            await response.write(b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % word)
            self.completion += 1
        if not whole:
            await asyncio.sleep(60)
        self.said += prompt
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def spool_octets(bed):
    (line,) = [line for line in bed.gateway.exposition().splitlines() if line.startswith(b"fabric_spool_octets ")]
    return float(line.split()[1])


async def ask(bed, http, stream, number):
    """A client that goes when it is told to, so that nothing is on its way then."""
    text = "word " * random.Random(asked := next(number)).randint(100, 900)
    body = {"model": "m", "messages": [{"role": "user", "content": f"{asked} {text}"}], "stream": stream}
    async with http.post(bed.url + "/v1/chat/completions", json=body) as answer:
        read = b""
        while chunk := await answer.content.readany():
            read += chunk
            if b'"go"' in read:
                answer.close()
                return


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
async def test_sums_are_the_engines_under_churn_cancels_and_the_loss_of_the_database(
    make_bed, postgres, tmp_path, kind
):
    """Exactly, where an engine says what a prompt is; else those of the prompts that were given up are about so."""
    draws, number = random.Random(11), itertools.count()
    engines = [CountingEngine(draws) for _ in range(4)]
    nodes = [StaticNode(await engine.start(), ["m"], f"p{n}", engine=kind) for n, engine in enumerate(engines)]
    bed = await make_bed().start(nodes=nodes)
    bed.gateway._rules.trust.groups["everyone"] = frozenset(f"p{n}" for n in range(4))
    ended = []
    bed.gateway.sinks.append(ended.append)
    headers = {"authorization": f"Bearer {bed.KEY}"}
    process = StoreProcess(lambda: postgres.url)
    async with (
        spooling(tmp_path, process, "f", "g") as spool,
        aiohttp.ClientSession(headers=headers) as http,
    ):
        bed.gateway.record_in(spool, opt_out=False)
        for turn in range(6):
            if turn == 2:
                await asyncio.to_thread(postgres.kill)
            if turn == 4:
                await asyncio.to_thread(postgres.start)
            await asyncio.gather(*(ask(bed, http, n % 3 > 0, number) for n in range(40)))
            await until(lambda turn=turn: len(ended) == 40 * (turn + 1))
            if turn == 3:
                assert spool_octets(bed) > 40 * 100, "the records of two turns wait"
        await until(lambda: spool_octets(bed) == 0)
    assert b"fabric_records_lost_total 0.0" in bed.gateway.exposition()
    await asyncio.to_thread(process.close)
    await bed.stop()
    for engine in engines:
        await engine.runner.cleanup()
    assert {record.end for record in ended} >= {"answered", "cancelled"}
    assert spool.lost == 0
    store = RecordStore(postgres.url, read_only=True)
    ((requests, prompt, completion),) = store.read(SUMS)
    ((_, said, _),) = store.read(SUMS.where(REQUESTS.c.counted))
    store.close()
    assert (requests, completion) == (240, sum(engine.completion for engine in engines))
    assert said == sum(engine.said for engine in engines)
    read = sum(engine.prompt for engine in engines)
    assert said < 0.9 * read, "of those that were given up no engine says at once what it read"
    given_up = sum(record.end == "cancelled" and record.status == 200 for record in ended)
    if kind == "vllm":
        assert prompt == read
        assert sum(engine.asked for engine in engines) == given_up
    else:
        assert prompt != read
        assert prompt == pytest.approx(read, rel=0.02)
        assert not any(engine.asked for engine in engines)


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_client_opts_out_where_it_may(bed, tmp_path, allowed):
    headers = {"authorization": f"Bearer {bed.KEY}"}
    process = StoreProcess(lambda: str(tmp_path / "r.db"))
    async with spooling(tmp_path, process, "f", "g") as spool, aiohttp.ClientSession(headers=headers) as http:
        bed.gateway.record_in(spool, opt_out=allowed)
        for more in ({}, {"x-fabric-record": "no"}):
            body = {"model": "m", "messages": []}
            async with http.post(bed.url + "/v1/chat/completions", json=body, headers=more) as answer:
                assert answer.status == 200
    await asyncio.to_thread(process.close)
    store = RecordStore(str(tmp_path / "r.db"), read_only=True)
    keys = [key for (key,) in store.read(select(REQUESTS.c.key))]
    store.close()
    assert [len(key) for key in keys] == [12] * (1 if allowed else 2)
    assert bed.gateway.status().totals.requests == 2


async def test_a_gateways_records_outlive_its_run_folder(tmp_path):
    """The next one, in another folder, goes on in the same file."""
    folder, spec = unit(tmp_path)
    spec = msgspec.structs.replace(spec, tenants={}, records=RecordsSpec(opt_out=True))
    for name in ("run", "run2"):
        here = RunFolder(folder.path.with_name(name))
        if not here.path.exists():
            folder.path.rename(here.path)
        (here.path / "process.json").unlink(missing_ok=True)
        running = asyncio.create_task(run_on_mesh(spec, here, SystemClock()))
        await until(lambda here=here, running=running: running.done() or here.process().get("listen"))
        url = f"http://{here.process()['listen']}/v1/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json={"model": "x", "prompt": ""}) as answer:
            assert answer.status in (404, 503)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 10)
    place = records_folder(tmp_path, "t", "g")
    assert place.parent.parent == tmp_path.with_name(f"{tmp_path.name}.records")
    store = RecordStore(str(place / "records.db"), read_only=True)
    assert store.read(SUMS)[0][0] == 2
    store.close()
    assert list((place / "spool").iterdir()) == []


async def test_a_plain_gateway_keeps_records_where_it_is_told_to(tmp_path):
    engine = CountingEngine(random.Random(1))
    engine.draws.random = lambda: 0.7
    url = await engine.start()
    address = asyncio.get_running_loop().create_future()
    options = {"policy_name": "least-loaded", "retries": 0, "keyring": None, "tls": None, "records": tmp_path / "kept"}
    nodes = StaticRegistry([StaticNode(url, ["m"])])
    serving = run_on_list(nodes, SystemClock(), host="127.0.0.1", port=0, ready=address.set_result, **options)
    running = asyncio.create_task(serving)
    url = f"http://{await address}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json={"model": "m"}) as answer:
        assert answer.status == 200
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    await engine.runner.cleanup()
    store = RecordStore(str(tmp_path / "kept" / "records.db"))
    assert store.read(SUMS) == [(1, engine.prompt, engine.completion)]
    store.close()
