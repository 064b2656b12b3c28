"""Traces: what a client says of its own reaches the engine, and what a collector gets of the gateway's spans.

The collector is a server of the test's own; what it is sent is read with OpenTelemetry's definitions of OTLP.
"""

import asyncio
import contextlib
import os
import random
import signal
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from fabrictool.base.clock import SystemClock
from fabrictool.domain.specs import TelemetrySpec
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import hash_key
from fabrictool.gateway.options import RECORD_HEADER
from fabrictool.gateway.run import run_on_mesh
from fabrictool.gateway.spanexport import SpanExporter, exporting
from fabrictool.gateway.tracecontext import TraceContext, trace_context
from fabrictool.gateway.tracing import QUEUE, Tracer
from tests.gateway.conftest import until
from tests.gateway.test_run import unit

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
NAMES = SimpleNamespace(fabric="fab", name="gate")


def ignore(record):
    """In the place of who else is told of a request's end."""


@pytest.mark.parametrize(
    ("parents", "states", "passed"),
    [
        ([PARENT], [], (PARENT, "")),
        ([PARENT], ["a=1", "b@v=2 x,  c/d=3"], (PARENT, "a=1,b@v=2 x,c/d=3")),
        ([PARENT.replace("-01", "-00")], ["a=1,,"], (PARENT.replace("-01", "-00"), "a=1")),
        ([f"01-{TRACE}-{SPAN}-03-later"], [], (f"01-{TRACE}-{SPAN}-03-later", "")),
        ([PARENT], ["A=1"], (PARENT, "")),
        ([PARENT], ["a=1\x7f"], (PARENT, "")),
        ([PARENT], [f"a={'x' * 600}"], (PARENT, "")),
        ([PARENT], [",".join(f"k{n}=v" for n in range(33))], (PARENT, "")),
        ([PARENT, PARENT], [], None),
        ([], ["a=1"], None),
        *(
            ([text], ["a=1"], None)
            for text in (
                "", "00", PARENT[:-1], PARENT + "-x", PARENT.upper(), PARENT.replace("00-", "ff-", 1), f" {PARENT}",
                f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", PARENT.replace("4b", "4g"), PARENT + "\u00e9",
                f"01-{TRACE}-{SPAN}-03-{'x' * 100}", PARENT.replace("4", "\u0664"),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_passed_on_of_a_clients_trace(parents, states, passed):
    context = trace_context(parents, states)
    assert (context and (context.parent, context.state)) == passed


def test_the_trace_alone_decides_whether_a_span_is_kept():
    """By the rule of OpenTelemetry's SDK."""
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    theirs, rng, kept = TraceIdRatioBased(0.25), random.Random(7), 0
    tracers = [Tracer(0.25, random.Random(seed), lambda *_: None) for seed in (1, 2)]
    for _number in range(2000):
        trace = rng.getrandbits(128)
        came = TraceContext(f"00-{trace:032x}-{SPAN}-01")
        told = [tracer.begin(came, ignore)[0] for tracer in tracers]
        wanted = theirs.should_sample(None, trace, "x").decision is Decision.RECORD_AND_SAMPLE
        assert [context is not came for context in told] == [wanted] * 2
        kept += wanted
    assert 400 < kept < 600
    assert sum(tracers[0].begin(None, ignore)[0] is not None for _ in range(2000)) == pytest.approx(500, 0.2)


class Collector:
    """Takes what OTLP's clients send, unless it is told to do something else."""

    def __init__(self):
        self.spans, self.resources, self.headers, self.statuses, self.rejects = [], [], [], [], 0

    async def start(self):
        app = web.Application()
        app.router.add_post("/v1/traces", self.take)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def take(self, request):
        body = ExportTraceServiceRequest.FromString(await request.read())
        self.headers.append(request.headers)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), headers={"location": "/v1/traces"})
        for resource in body.resource_spans:
            self.resources.append(plain(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejects
        return web.Response(body=answer.SerializeToString(), content_type="application/x-protobuf")


def plain(attributes):
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}


@pytest_asyncio.fixture
async def collector():
    started = Collector()
    await started.start()
    yield started
    await started.runner.cleanup()


@contextlib.asynccontextmanager
async def traced(bed, url, **more):
    async with exporting(bed.gateway, NAMES, TelemetrySpec(url, **more)) as exporter:
        exporter.period_s = 0.01
        yield exporter


async def ask(bed, *, path="/v1/chat/completions", key=None, headers=None, **fields):
    headers = {"authorization": f"Bearer {key or bed.KEY}"} | (headers or {})
    body = {"model": "only-a", "messages": [{"role": "user", "content": "a secret prompt"}]} | fields
    async with aiohttp.ClientSession() as http, http.post(bed.url + path, json=body, headers=headers) as answer:
        await answer.read()
        return answer


def counted(bed):
    lines = bed.gateway.exposition().decode().splitlines()
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("fabric_spans_total{")}


def told(engine):
    headers = engine.seen[-1][0].headers
    return headers.get("traceparent"), headers.get("tracestate")


@pytest.mark.asyncio
async def test_a_clients_trace_reaches_the_engine_without_telemetry(bed):
    await ask(bed, headers={"traceparent": PARENT, "tracestate": "a=1"})
    assert told(bed.a) == (PARENT, "a=1")
    await ask(bed, headers={"traceparent": "00-nonsense", "tracestate": "a=1"})
    assert told(bed.a) == (None, None)
    await ask(bed)
    assert told(bed.a) == (None, None)


@pytest.mark.asyncio
async def test_a_span_has_its_place_and_says_what_happened(bed, collector):
    kept = []
    bed.gateway.sinks.append(kept.append)
    async with traced(bed, collector.url):
        await ask(bed, stream=True, headers={"traceparent": PARENT, "tracestate": "a=1"})
        await until(lambda: counted(bed).get("exported"))  # counted when the collector's answer has come
    (span,), (record,) = collector.spans, kept
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, SPAN, "a=1")
    assert told(bed.a) == (f"00-{TRACE}-{span.span_id.hex()}-01", "a=1"), "the engine's parent is our span"
    assert span.span_id.hex() != SPAN
    assert (span.name, span.kind, span.status.code) == ("chat only-a", span.SPAN_KIND_SERVER, 0)
    assert span.start_time_unix_nano == int(record.at * 1e9)
    assert span.end_time_unix_nano >= span.start_time_unix_nano
    says = plain(span.attributes)
    assert says.pop("gen_ai.response.time_to_first_chunk") == record.ttft_s
    assert says.pop("fabric.time_per_output_token") == record.tpot_s
    assert says == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
        "fabric.provider": "alpha", "gen_ai.request.model": "only-a",
        "gen_ai.request.stream": True, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3, "http.request.method": "POST", "http.response.status_code": 200,
        "url.path": "/v1/chat/completions", "fabric.replica": f"127.0.0.1:{bed.a.port}", "fabric.retries": 0,
        "fabric.end": "answered", "fabric.request": record.id,
    }  # fmt: skip
    about = collector.resources[0]
    assert (about["service.name"], about["service.namespace"]) == ("fabrictool-gateway", "fab")
    assert about["service.instance.id"] == "gate"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"
    assert counted(bed)["exported"] == 1


@pytest.mark.asyncio
async def test_names_that_are_attributes_are_opentelemetrys():
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    from fabrictool.gateway import otlp

    theirs = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    flat = [word for word in otlp._span.__code__.co_consts if isinstance(word, str)]
    ours = {word for word in flat if word.startswith("gen_ai.")}
    assert len(ours) == 8
    assert ours <= theirs


@pytest.mark.asyncio
async def test_retries_and_failures_have_spans_and_what_no_replica_was_sought_for_has_none(bed, collector):
    async with traced(bed, collector.url):
        bed.a.mode = "reset"
        await ask(bed, model="m")
        await ask(bed, model="m")
        await ask(bed)
        await ask(bed, model="nope")
        await ask(bed, model=3)
        await ask(bed, path="/v1/embeddings", model="nope")
        await ask(bed, key="wrong")
        await until(lambda: len(collector.spans) == 5)
    said = [(s.name, plain(s.attributes)) for s in collector.spans]
    assert [says["fabric.retries"] for _, says in said[:3]] == [1, 1, 0]
    name, says = said[2]
    assert (name, says["http.response.status_code"], says["error.type"]) == ("chat only-a", 502, "502")
    assert collector.spans[2].status.code == collector.spans[2].status.STATUS_CODE_ERROR
    assert [(name, says["http.response.status_code"]) for name, says in said[3:]] == [
        ("chat", 404), ("embeddings", 404),
    ]  # fmt: skip
    assert all("error.type" not in says for _, says in said[3:]), "a client's mistake is no failure of the server"


@pytest.mark.asyncio
async def test_a_stream_that_breaks_is_a_failure(bed, collector):
    bed.a.mode = "dies-in-stream"
    async with traced(bed, collector.url):
        await ask(bed, stream=True)
        await until(lambda: collector.spans)
    assert plain(collector.spans[0].attributes)["error.type"] == "broken"


@pytest.mark.asyncio
async def test_no_word_and_no_key_is_in_what_is_sent(bed, collector, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("Bearer collectors-own\n")
    secret.chmod(0o600)
    async with traced(bed, collector.url, headers={"authorization": f"secret://file/{secret}"}):
        await ask(bed, stream=True)
        await ask(bed)
        await until(lambda: len(collector.spans) == 2)
    text = "".join(str(span) for span in collector.spans)
    assert not [word for word in ("a secret prompt", "from", bed.KEY, "collectors-own", "t1") if f'"{word}' in text]
    assert collector.headers[0]["authorization"] == "Bearer collectors-own"


@pytest.mark.asyncio
@pytest.mark.parametrize("flag", ["00", "01"])
async def test_who_is_not_sampled_is_passed_on_as_it_came(bed, collector, flag):
    async with traced(bed, collector.url, sample=0.0 if flag == "01" else 1.0):
        await ask(bed, headers={"traceparent": PARENT[:-2] + flag})
        assert told(bed.a) == (PARENT[:-2] + flag, None)
    assert collector.spans == []


@pytest.mark.asyncio
async def test_who_wants_no_record_has_no_span(bed, collector):
    bed.gateway.record_in(SimpleNamespace(append=ignore, waiting_octets=0, lost=0), opt_out=True)
    async with traced(bed, collector.url):
        await ask(bed, headers={RECORD_HEADER: "no", "traceparent": PARENT})
        assert told(bed.a) == (PARENT, None)
    assert collector.spans == []


@pytest.mark.asyncio
async def test_what_waits_when_the_gateway_ends_is_brought(bed, collector):
    async with traced(bed, collector.url) as exporter:
        exporter.period_s = 3600.0
        for _ in range(3):
            await ask(bed)
    assert len(collector.spans) == 3


@pytest.mark.asyncio
async def test_a_collector_that_is_busy_is_asked_again(bed, collector):
    collector.statuses = [503, 429]
    async with traced(bed, collector.url):
        await ask(bed)
        await until(lambda: counted(bed).get("exported"))
    assert counted(bed) == {"exported": 1, "dropped": 0}
    assert [e.kind for e in bed.gateway.status().events] == ["telemetry", "telemetry"]


@pytest.mark.asyncio
@pytest.mark.parametrize("why", ["away", "refuses", "redirects", "rejects", "secret"])
async def test_what_a_collector_does_not_take_is_dropped_and_counted(bed, collector, tmp_path, why):
    headers = {"authorization": f"secret://file/{tmp_path}/none"} if why == "secret" else {}
    url = "http://127.0.0.1:1" if why == "away" else collector.url
    collector.statuses = {"refuses": [400], "redirects": [307]}.get(why, [])
    collector.rejects = 1 if why == "rejects" else 0
    async with traced(bed, url, headers=headers):
        assert (await ask(bed)).status == 200
        await until(lambda: counted(bed).get("dropped") == 1)
    assert counted(bed)["exported"] == 0
    listed = [(e.kind, "FT8161" in e.text) for e in bed.gateway.status().events]
    assert listed == ([] if why == "rejects" else [("telemetry", True)])


@pytest.mark.asyncio
async def test_requests_are_answered_while_the_collector_hangs(bed, monkeypatch):
    monkeypatch.setattr("fabrictool.gateway.spanexport.LAST_S", 0.05)
    held, there = asyncio.Event(), set()

    async def hang(reader, writer):
        there.add(writer)
        held.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        there.discard(writer)

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server:
        async with traced(bed, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
            await ask(bed)
            await held.wait()
            assert [(await ask(bed)).status for _ in range(20)] == [200] * 20
        assert counted(bed) == {"exported": 0, "dropped": 21}
        await until(lambda: not there)


@pytest.mark.asyncio
async def test_the_queue_has_an_end():
    outcomes = []
    tracer = Tracer(1.0, random.Random(7), lambda outcome, spans: outcomes.append((outcome, spans)))
    for _ in range(QUEUE + 3):
        tracer.begin(None, ignore)[1](SimpleNamespace())
    assert (len(tracer), outcomes) == (QUEUE, [("dropped", 1)] * 3)


@pytest.mark.asyncio
async def test_many_spans_are_brought_in_batches_and_the_loop_goes_on(bed, collector):
    """Between two slices other tasks have their turn."""
    turns = 0

    async def others():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    kept = []
    bed.gateway.sinks.append(kept.append)
    async with traced(bed, collector.url) as exporter:
        exporter.period_s = 3600.0
        await ask(bed)
        exporter._tracer.take(1)
        for _ in range(1000):
            _, ended = exporter._tracer.begin(None, ignore)
            ended(kept[0].__class__("x", kept[0].at, "/v1/embeddings", 200, "answered", 1.0))
        task = asyncio.create_task(others())
        await exporter.finish()
        task.cancel()
    assert len({span.span_id for span in collector.spans}) == 1000
    assert len(collector.headers) == 2
    assert turns >= 1000 // 32
    assert isinstance(exporter, SpanExporter)


@pytest.mark.asyncio
async def test_a_unit_of_a_fabric_traces_where_its_spec_says(tmp_path, collector):
    folder, spec = unit(tmp_path)
    keys = folder.path / "keys.json"
    keys.write_bytes(encode_keys([KeyRow("anna", hash_key("k" * 20), "all")]))
    keys.chmod(0o600)
    spec = msgspec.structs.replace(spec, telemetry=TelemetrySpec(collector.url))
    running = asyncio.create_task(run_on_mesh(spec, folder, SystemClock()))
    await until(lambda: running.done() or (folder.path / "process.json").exists())
    url = "http://" + msgspec.json.decode((folder.path / "process.json").read_bytes())["listen"]
    asked = await ask(SimpleNamespace(url=url, KEY="k" * 20), model="m", headers={"traceparent": PARENT})
    assert asked.status == 503
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == "signal SIGTERM"
    (span,) = collector.spans
    assert (span.trace_id.hex(), plain(span.attributes)["http.response.status_code"]) == (TRACE, 503)
    assert collector.resources[0]["service.instance.id"] == "g"


def test_opentelemetrys_own_propagator_understands_what_engines_are_told():
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = Tracer(1.0, random.Random(7), lambda *_: None)
    for came in (None, trace_context([PARENT], ["a=1"])):
        context, _ = tracer.begin(came, ignore)
        headers = {"traceparent": context.parent, "tracestate": context.state}
        seen = trace.get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
        assert seen.is_valid
        assert seen.trace_flags.sampled
        assert seen.span_id.to_bytes(8, "big") == context.span_id
        assert dict(seen.trace_state) == ({"a": "1"} if came else {})
