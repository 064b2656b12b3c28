"""Two real vLLM servers as a prefill/decode pair behind the gateway, started with our adapter's own arguments; and the
spans of both in the trace of a client.
"""

import asyncio
import signal
from types import SimpleNamespace

import aiohttp
import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from fabrictool.domain.specs import TelemetrySpec
from fabrictool.engines.adapter import EngineLaunch, adapter
from fabrictool.engines.protocol import CacheHandover
from fabrictool.gateway.pairs import HANDED_HEADER
from fabrictool.gateway.spanexport import exporting
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import Bed, until
from tests.ports import free_port
from tests.vllm.conftest import CONTEXT, Vllm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(1500)]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def launched(prefill, collector):
    """What our adapter has a vLLM started with for its part of a pair, and where it sends its spans."""
    handover = CacheHandover(prefill, "127.0.0.1", free_port(), "cpu")
    launch = EngineLaunch(
        engine="vllm", model="/m", served_name="m", host="127.0.0.1", port=1, handover=handover,
        options={"otlp-traces-endpoint": f"{collector}/v1/traces"},
    )  # fmt: skip
    command = adapter("vllm").command(launch)
    at = command.argv.index("--kv-transfer-config")
    trace = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    # Of two cores it would keep one for itself and one for the transfer, and bind each server to the same.
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {"more": command.argv[at:], "settings": command.env | trace | cores}


@pytest.fixture(scope="module")
def places():
    return SimpleNamespace(collector=f"http://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory, random_model, places):
    folder = tmp_path_factory.mktemp("pair")
    servers = {}
    try:
        for name in ("prefill", "decode"):
            (folder / name).mkdir()
            servers[name] = Vllm(folder / name, random_model, **launched(name == "prefill", places.collector))
            servers[name].start()
            servers[name].wait()
        yield SimpleNamespace(**servers)
    finally:
        for server in servers.values():
            server.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed(pair):
    nodes = [
        StaticNode(getattr(pair, phase).url, ["m"], "alpha", engine="vllm", context=CONTEXT, phase=phase)
        for phase in ("prefill", "decode")
    ]
    started = await Bed().start(nodes=nodes)
    yield started
    await started.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(bed):
    async with openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=bed.KEY, max_retries=0, timeout=120) as client:
        yield client


def prompt(number):
    return f"{number}: " + " ".join(f"word {n * number % 97}" for n in range(150))


def fetched(server):
    """How many caches a server says that it fetched."""
    lines = httpx.get(server.url + "/metrics", timeout=10).text.splitlines()
    name = "vllm:nixl_xfer_time_seconds_count"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def alone(server, text, tokens):
    """What a server says to a prompt that it computes by itself."""
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=120) as client:
        answer = await client.completions.create(model="m", prompt=text, max_tokens=tokens, temperature=0)
        return answer.choices[0].text


async def test_two_servers_say_what_one_would(bed, sdk, pair):
    before, text = fetched(pair.decode), prompt(1)
    raw = await sdk.completions.with_raw_response.create(model="m", prompt=text, max_tokens=12, temperature=0)
    answer = raw.parse()
    assert raw.headers[HANDED_HEADER] == pair.prefill.url.removeprefix("http://")
    stream = await sdk.completions.create(model="m", prompt=text, max_tokens=12, temperature=0, stream=True)
    streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert answer.choices[0].text == streamed == await alone(pair.prefill, text, 12)
    assert fetched(pair.decode) > before
    whole, stream_record = bed.records[-2:]
    assert (whole.prompt_tokens, whole.completion_tokens) == (answer.usage.prompt_tokens, 12)
    assert stream_record.completion_tokens == 12
    assert whole.replica == pair.decode.url.removeprefix("http://")


async def test_chats_of_many_at_once_are_handed_over(bed, sdk, pair):
    before, first = pair.prefill.counters(), len(bed.records)

    async def chat(number):
        messages = [{"role": "user", "content": prompt(10 + number)}]
        stream = await sdk.chat.completions.create(model="m", messages=messages, max_tokens=8, stream=True)
        return [chunk async for chunk in stream]

    answers = await asyncio.gather(*(chat(number) for number in range(12)))
    assert all(answers)
    records = bed.records[first:]
    assert {(record.status, record.end, record.counted) for record in records} == {(200, "answered", True)}
    prompts, said = (now - then for now, then in zip(pair.prefill.counters(), before, strict=True))
    assert prompts == sum(record.prompt_tokens for record in records), "all prompts were computed there"
    assert said == 12, "a token each, and nobody is shown it"
    assert all(target.in_flight == 0 for target in bed.gateway.directory)


async def test_the_engines_spans_are_below_ours_and_ours_below_the_clients(bed, places):
    spans = []

    async def take(request):
        body = ExportTraceServiceRequest.FromString(await request.read())
        for resource in body.resource_spans:
            kind = next(e.value.string_value for e in resource.resource.attributes if e.key == "service.name")
            spans.extend((kind, span) for scope in resource.scope_spans for span in scope.spans)
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(places.collector.rsplit(":", 1)[1])).start()
    names = SimpleNamespace(fabric="fab", name="gate")
    try:
        async with exporting(bed.gateway, names, TelemetrySpec(places.collector)):
            headers = {"authorization": f"Bearer {bed.KEY}", "traceparent": f"00-{TRACE}-{SPAN}-01"}
            body = {"model": "m", "prompt": prompt(40), "max_tokens": 4}
            url = bed.url + "/v1/completions"
            async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200
            await until(lambda: len([1 for _, span in spans if span.trace_id.hex() == TRACE]) >= 3, 60)
    finally:
        await runner.cleanup()
        bed.gateway._tracer = None
    mine = [(kind, span) for kind, span in spans if span.trace_id.hex() == TRACE]
    (ours,) = [span for kind, span in mine if kind == "fabrictool-gateway"]
    theirs = [span for kind, span in mine if kind != "fabrictool-gateway"]
    assert ours.parent_span_id.hex() == SPAN
    assert len(theirs) == 2, "of the one that computed the prompt, and of the one that answered"
    assert {span.parent_span_id for span in theirs} == {ours.span_id}


async def test_the_prefill_server_dies_and_nobody_notices(bed, sdk, pair):
    async def ask(number):
        answer = await sdk.completions.create(model="m", prompt=prompt(60 + number), max_tokens=8, temperature=0)
        return answer.choices[0].text

    asking = [asyncio.create_task(ask(number)) for number in range(16)]
    first = len(bed.records)
    await until(lambda: len(bed.records) > first, 60)
    pair.prefill.signal(signal.SIGKILL)
    assert len(await asyncio.gather(*asking)) == 16
    assert await ask(99) == await alone(pair.decode, prompt(159), 8)
    assert {(record.status, record.retries) for record in bed.records[first:]} == {(200, 0)}
    assert all(target.in_flight == 0 for target in bed.gateway.directory)
