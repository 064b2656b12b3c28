"""The gateway through the `openai` SDK and plain HTTP."""

import asyncio
import dataclasses
import inspect
import json
from types import SimpleNamespace

import aiohttp
import msgspec
import openai
import pytest
from aiohttp import web

from fabrictool.domain.specs import label_key, weight_key
from fabrictool.gateway.directory import Directory, RoutingTarget
from fabrictool.gateway.exchange import CHAT_PATH, Exchange
from fabrictool.gateway.metrics import GatewayMetrics
from fabrictool.gateway.modelrequest import ModelRequest
from fabrictool.gateway.openai import peek, renamed
from fabrictool.gateway.rules import RoutingRules
from fabrictool.gateway.staticlist import StaticNode, StaticRegistry, static_targets
from fabrictool.gateway.upstream import Connector
from fabrictool.mesh.records import AssignedUnit, Lifecycle, NodeBody, ServiceBody
from fabrictool.mesh.registry import Serving
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.policies import RoundRobinPolicy
from fabrictool.routing.requirements import Requirements, requirements_of
from tests.gateway.conftest import until

pytestmark = pytest.mark.asyncio
HELLO = [{"role": "user", "content": "hello"}]


def sdk(bed, key=None):
    return openai.AsyncOpenAI(base_url=bed.url + "/v1", api_key=key or bed.KEY, max_retries=0)


async def test_chat_and_round_robin(bed):
    async with sdk(bed) as client:
        answers = {
            (await client.chat.completions.create(model="m", messages=HELLO)).choices[0].message.content for _ in "12"
        }
    assert answers == {"from a", "from b"}


async def test_stream_with_usage(bed):
    async with sdk(bed) as client:
        stream = await client.chat.completions.create(
            model="only-a", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "from a"
    assert chunks[-1].usage.completion_tokens == 3
    assert bed.a.seen[0][1]["stream_options"] == {"include_usage": True}


async def test_wrong_key_unknown_model_and_request_id(bed):
    async with sdk(bed, "not-a-key") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model="m", messages=HELLO)
    assert refused.value.code == "invalid_api_key"
    async with sdk(bed) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=HELLO)
        assert unknown.value.code == "model_not_found"
        assert unknown.value.param == "model"
        assert "-" in unknown.value.request_id
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, extra_headers={"x-request-id": "mine-1"}
        )
    assert raw.headers["x-request-id"] == "mine-1"
    seen = [request.headers["x-request-id"] for engine in (bed.a, bed.b) for request, _ in engine.seen]
    assert seen == ["mine-1"], "the engine's log can be joined with the client's"


async def test_the_key_does_not_reach_the_engine(bed):
    async with sdk(bed) as client:
        await client.chat.completions.create(model="only-a", messages=HELLO)
    assert "authorization" not in bed.a.seen[0][0].headers


async def test_models_are_listed_by_what_the_key_may_use(bed):
    async with sdk(bed) as client:
        assert [m.id async for m in client.models.list()] == ["m", "only-a"]
        assert (await client.models.retrieve("m")).owned_by == "alpha,beta"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")
    async with sdk(bed, bed.NOBODY_KEY) as client:
        assert [m.id async for m in client.models.list()] == []


async def test_the_group_and_the_header_restrict_providers(bed):
    async with sdk(bed, bed.ALPHA_KEY) as client:
        for _ in range(4):
            await client.chat.completions.create(model="m", messages=HELLO)
    assert bed.b.seen == []
    async with sdk(bed) as client:
        for _ in range(4):
            await client.chat.completions.create(
                model="m", messages=HELLO, extra_headers={"x-fabric-providers": "beta"}
            )
        assert len(bed.b.seen) == 4
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.chat.completions.create(
                model="only-a", messages=HELLO, extra_headers={"x-fabric-providers": "beta"}
            )
    assert refused.value.code == "no_allowed_provider"
    async with sdk(bed, bed.ALPHA_KEY) as client:
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(
                model="m", messages=HELLO, extra_headers={"x-fabric-providers": "beta"}
            )


async def test_an_engine_that_refuses_resets_or_is_busy_is_retried_elsewhere(bed):
    async with sdk(bed) as client:
        for mode in ("503", "reset", "half-body"):
            bed.a.mode = mode
            answers = [await client.chat.completions.create(model="m", messages=HELLO) for _ in range(4)]
            assert {a.choices[0].message.content for a in answers} == {"from b"}, mode
            bed.clock.advance(60)
        await bed.a.stop()
        answers = [await client.chat.completions.create(model="m", messages=HELLO) for _ in range(4)]
        assert {a.choices[0].message.content for a in answers} == {"from b"}
        await bed.a.start()
    status = bed.gateway.status()
    assert status.totals.failures == 0
    assert 4 <= status.totals.retries <= 8, "who failed twice is tried again a second later, by one request"


async def test_a_4xx_passes_and_is_not_retried(bed):
    bed.a.mode = bed.b.mode = "400"
    async with sdk(bed) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=HELLO)
    assert len(bed.a.seen) + len(bed.b.seen) == 1


async def test_no_replica_is_tried_twice_and_the_error_says_who_was(bed):
    bed.a.mode = bed.b.mode = "reset"
    async with sdk(bed) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="m", messages=HELLO)
    assert failed.value.status_code == 502
    assert len(bed.a.seen) == len(bed.b.seen) == 1
    assert f":{bed.a.port}" in failed.value.message
    assert f":{bed.b.port}" in failed.value.message


@pytest.mark.parametrize("mode", ["dies-in-stream", "dies-in-event"])
async def test_a_stream_that_breaks_ends_in_an_error_event(bed, mode):
    bed.a.mode = mode
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(bed.url + "/v1/chat/completions", json={"model": "only-a", "stream": True}) as answer,
    ):
        bed.a.release.set()
        text = (await answer.read()).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line]
    assert [e["choices"][0]["delta"]["content"] for e in events[:-1]] == ["from", " "]
    assert events[-1]["error"]["code"] == "upstream_failed"
    assert bed.gateway.status().totals.failures == 1


async def test_a_stream_whose_replica_dies_before_the_first_event_is_begun_elsewhere(bed):
    bed.a.mode = "head-then-dies"
    async with sdk(bed) as client:
        for _ in range(4):
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            assert "".join([c.choices[0].delta.content async for c in stream if c.choices]) == "from b"
    assert bed.gateway.status().totals.failures == 0
    assert bed.gateway.status().totals.retries >= 1


async def raw_server(answer):
    """A server that says exactly `answer`, then closes."""

    async def serve(reader, writer):
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("kind", "body", "status", "broken"),
    [
        ("application/json", b'{"id": "c"}', 200, False),
        ("application/json", b'{"id": ', 502, False),
        ("text/event-stream", b'data: {"choices": []}\n\ndata: [DONE]\n\n', 200, False),
        ("text/event-stream", b'data: {"choices": []}\n\n', 200, True),
    ],
)
async def test_an_answer_without_a_length_counts_only_when_it_is_whole(make_bed, kind, body, status, broken):
    server, port = await raw_server(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind.encode() + b"\r\n\r\n" + body)
    bed = await make_bed().start(nodes=[StaticNode(f"http://127.0.0.1:{port}", ["m"], "alpha")])
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
        http.post(bed.url + "/v1/chat/completions", json={"model": "m"}) as answer,
    ):
        text = await answer.text()
        assert answer.status == status
        assert ("upstream_failed" in text) == (broken or status == 502)
    assert bed.gateway.status().totals.failures == (broken or status == 502)
    server.close()
    await bed.stop()


class ManualClient:
    """A client of an exchange with a clock that is set by hand."""

    def __init__(self):
        self.time = 0.0
        self.sent = b""

    def now(self):
        return self.time

    def begin(self, status, kind, lines):
        pass

    def chunk(self, data):
        self.sent += data

    def finish(self):
        pass


class Silent(Connector):
    """A way to a replica that says nothing of itself; the test speaks for it through `response`."""

    ready = True

    def start(self, method, path, headers, body, caller, listener, *, anew=False):
        self.listener = listener
        return self

    def abort(self):
        pass

    close = abort


@pytest.mark.interpreted
@pytest.mark.parametrize("usage", [b"", b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'])
async def test_time_per_token_counts_tokens_and_no_other_events(usage):
    directory, metrics, client, replica = Directory(), GatewayMetrics(), ManualClient(), Silent()
    directory.replace([RoutingTarget(b"k", "m", "alpha", replica, "r")])
    request = ModelRequest(
        "m", "POST", "/v1/chat/completions", headers=(), body=b"", group=None, requested=None, stream=True
    )
    rules = RoutingRules(RoundRobinPolicy(), TrustPolicy({}, {}), retries=0)
    records = []
    exchange = Exchange(client, request, rules, directory, metrics, records.append)
    exchange.start()
    exchange.head(200, [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")])
    exchange.body(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n')
    for second in range(1, 6):
        client.time = float(second)
        exchange.body(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
    exchange.body(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n' + usage + b"data: [DONE]\n\n")
    exchange.complete(sized=True)
    (record,) = records
    assert (record.completion_tokens, record.counted, record.ttft_s) == (5, bool(usage), 0.0)
    metrics.fold()
    assert list(metrics.models["m"].tpot) == [1.0]


@pytest.mark.parametrize("mode", ["hang", "stream-hang"])
async def test_a_client_that_goes_away_frees_the_engine(bed, mode):
    bed.a.mode = mode
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        body = {"model": "only-a", "stream": mode == "stream-hang"}
        task = asyncio.create_task(http.post(bed.url + "/v1/chat/completions", json=body))
        await until(lambda: bed.a.seen)
        if mode == "stream-hang":
            (await task).close()
        else:
            task.cancel()
        await asyncio.wait_for(bed.a.cancelled.wait(), 5)
    await until(lambda: bed.gateway.status().totals.in_flight == 0)


async def test_least_loaded_avoids_the_busy_replica(make_bed):
    bed = await make_bed().start("least-loaded")
    bed.a.mode = "hang"
    async with sdk(bed) as client:
        hanging = asyncio.create_task(client.chat.completions.create(model="only-a", messages=HELLO))
        await until(lambda: bed.a.seen)
        for _ in range(4):
            answer = await client.chat.completions.create(model="m", messages=HELLO)
            assert answer.choices[0].message.content == "from b"
        bed.a.release.set()
        await hanging
    await bed.stop()


async def test_metrics_and_status_are_read_only_and_count(bed):
    async with sdk(bed) as client:
        await client.chat.completions.create(model="m", messages=HELLO)
    async with aiohttp.ClientSession() as stranger:
        for path in ("/metrics", "/status"):
            async with stranger.get(bed.url + path) as answer:
                assert answer.status == 401, "loopback is no identity: a proxy beside the gateway is on loopback too"
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        assert (await http.get(bed.url + "/metrics")).status == 404, "other tenants' models and providers"
        text = bed.gateway.exposition().decode()
        assert 'fabric_requests_total{code="200",model="m",provider="alpha"} 1.0' in text
        assert 'fabric_tokens_total{direction="completion",model="m"} 2.0' in text
        status = await (await http.get(bed.url + "/status")).json()
        assert status["kind"] == "gateway"
        assert status["totals"]["requests"] == 1
        for method, path in (("POST", "/status"), ("DELETE", "/v1/models")):
            async with http.request(method, bed.url + path) as answer:
                assert answer.status == 405


async def test_an_agents_report_of_the_past_is_no_load_of_others():
    session, directory = b"s" * 16, Directory()
    targets = [RoutingTarget(session + bytes([i]) * 16, "m", "alpha", Silent(), f"m/{i}") for i in range(2)]
    directory.replace(targets)
    busy = (bytes([0]) * 16, 8, 0, 0.1, 0)  # eight of our own ran when the agent looked; they have ended since
    directory.report(session, (busy, (bytes([1]) * 16, 0, 0, 0.0, 3)))
    assert [target.load for target in targets] == [0, 3]
    assert targets[0].running == 8


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("TRACE", "/v1/embeddings", "POST"),
        ("DELETE", "/v1/messages", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/m", "GET, HEAD"),
    ],
)
async def test_another_method_is_405_with_those_that_there_are(bed, method, path, allowed):
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as session:
        answer = await session.request(method, bed.url + path)
        assert (answer.status, answer.headers["allow"]) == (405, allowed)
        assert ("fabric_code" in (await answer.json())["error"]) == (path != "/v1/messages"), "in the API's own words"


@pytest.mark.parametrize("path", ["completion", "models"])
async def test_a_model_that_may_come_is_503_with_a_time_to_try_again(bed, path):
    directory = bed.gateway.directory
    directory.loading = lambda: {"late"}

    async def ask(model):
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as session:
            if path == "models":
                return await session.get(f"{bed.url}/v1/models/{model}")
            return await session.post(f"{bed.url}/v1/chat/completions", json={"model": model, "messages": HELLO})

    answer = await ask("late")
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert (await ask("never")).status == 404
    directory.filling_until = bed.clock.monotonic() + 1
    assert (await ask("never")).status == 503
    bed.clock.advance(2)
    assert (await ask("never")).status == 404


async def test_a_planned_model_is_waited_for_however_long_its_job_is_in_the_queue(bed):
    bed.gateway.plan_for({"late": (0, 1)})
    bed.clock.advance(86400)
    body = {"model": "late", "messages": HELLO}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as session:
        answer = await session.post(f"{bed.url}/v1/chat/completions", json=body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        bed.gateway.plan_for({})
        assert (await session.post(f"{bed.url}/v1/chat/completions", json=body)).status == 404


async def test_a_planned_replica_that_nobody_has_is_missing_in_the_status(bed):
    planned = dict.fromkeys(bed.gateway.directory.models(), (0,)) | {"late": (0, 2)}
    bed.gateway.plan_for(planned)
    row = {row.model: row for row in bed.gateway.status().models}["late"]
    assert (row.ready, row.replicas, row.planned, row.wanted) == (0, 0, 2, 2)
    assert row.missing == ["late/0", "late/2"]


async def test_the_plans_weights_reach_the_directory():
    """By what is alike, so that one replica more of a kind needs no other gateway."""

    def serving(number, partition, tp):
        node = NodeBody(
            federation="f", session=bytes([number]) * 16, lifecycle=Lifecycle.SERVING, version=1, role="agent",
            fabric="f", provider="alpha", site="s", cluster="c", node=partition,
        )  # fmt: skip
        service = ServiceBody(
            federation="f", session=node.session, service=b"e" * 16, lifecycle=Lifecycle.SERVING, version=1,
            replica=f"m/{number}", model="m", engine="vllm", tp=tp,
        )  # fmt: skip
        return Serving(node, service)

    directory = Directory({weight_key("m", "c", "old", 2): 0.25})
    for entry in (serving(0, "old", 2), serving(1, "old", 1), serving(2, "new", 2)):
        directory.follow(entry.node.session, [entry], None, 0.0)
    joined = serving(3, "host", 2)
    joined = Serving(joined.node, msgspec.structs.replace(joined.service, assigned=1))
    said = SimpleNamespace(unit=AssignedUnit("m/3", "o", "l", "old"))
    mesh = SimpleNamespace(registry=SimpleNamespace(assignment=lambda _: said))
    directory.follow(joined.node.session, [joined], mesh, 0.0)
    weights = {target.replica: target.weight for target in directory}
    assert weights == {"m/0": 0.25, "m/1": 1.0, "m/2": 1.0, "m/3": 0.25}, "a node that joined is as its plan says"
    directory.label({label_key("alpha", "c", "old"): ("owned", "eu"), label_key("beta", "c", "new"): ("owned",)})
    labels = {target.replica: target.labels for target in directory}
    old = frozenset({"owned", "eu"})
    assert labels == {"m/0": old, "m/1": old, "m/2": frozenset(), "m/3": old}, "a cluster of its provider"
    eu = Requirements(labels=frozenset({"eu"}))
    assert len(directory.entitled("m", TrustPolicy({"g": frozenset({"alpha"})}, {}), "g", None, eu)) == 3
    directory.follow(serving(4, "old", 2).node.session, [serving(4, "old", 2)], None, 0.0)
    assert directory.get(bytes([4]) * 16 + b"e" * 16).labels == old


async def test_variants_of_a_model_are_weighed_and_asked_for_by_themselves():
    """Also on the same partition, cut in the same way."""

    def serving(number, engine, precision):
        node = NodeBody(
            federation="f", session=bytes([number]) * 16, lifecycle=Lifecycle.SERVING, version=1, role="agent",
            fabric="f", provider="alpha", site="s", cluster="c", node="gpu",
        )  # fmt: skip
        service = ServiceBody(
            federation="f", session=node.session, service=b"e" * 16, lifecycle=Lifecycle.SERVING, version=1,
            replica=f"m/{number}", model="m", engine=engine, precision=precision, tp=1,
        )  # fmt: skip
        return Serving(node, service)

    directory = Directory({weight_key("m", "c", "gpu", 1, variant="vllm fp8"): 0.5})
    for entry in (serving(0, "vllm", "bf16"), serving(1, "vllm", "fp8"), serving(2, "sglang", "fp8")):
        directory.follow(entry.node.session, [entry], None, 0.0)
    assert {target.replica: target.weight for target in directory} == {"m/0": 1.0, "m/1": 0.5, "m/2": 1.0}
    directory.weigh({weight_key("m", "c", "gpu", 1, variant="sglang fp8"): 0.25})
    assert {target.replica: target.weight for target in directory} == {"m/0": 1.0, "m/1": 1.0, "m/2": 0.25}
    directory.weigh({weight_key("m", "c", "gpu", 1): 0.75})
    assert {target.weight for target in directory} == {0.75}, "a plan of an earlier release"

    trust = TrustPolicy({"g": frozenset({"alpha"})}, {})
    for headers, wanted in (
        ({"x-fabric-min-bits": "16"}, {"m/0"}),
        ({"x-fabric-min-bits": "8"}, {"m/0", "m/1", "m/2"}),
        ({"x-fabric-min-bits": "8", "x-fabric-engines": "sglang"}, {"m/2"}),
    ):
        asked = requirements_of(headers)
        assert {target.replica for target in directory.entitled("m", trust, "g", None, asked)} == wanted


async def test_a_request_may_ask_for_what_its_replica_is(bed):
    async with sdk(bed) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="m", messages=HELLO, extra_headers={"x-fabric-min-bits": "16", "x-fabric-devices": "a100-80g"}
            )
            assert answer.choices[0].message.content == "from a"
        with pytest.raises(openai.UnprocessableEntityError, match="with a context of 5000 tokens") as unmet:
            await client.chat.completions.create(
                model="m", messages=HELLO, extra_headers={"x-fabric-min-context": "5000"}
            )
        assert unmet.value.code == "requirement_not_met"
        with pytest.raises(openai.BadRequestError, match="whole number"):
            await client.chat.completions.create(model="m", messages=HELLO, extra_headers={"x-fabric-min-bits": "a"})


async def test_a_model_has_aliases_and_the_engine_is_asked_by_its_own_name(bed):
    rules = bed.gateway._rules
    bed.gateway.reload(dataclasses.replace(rules, aliases={"meta/Only-A": "only-a"}), bed.gateway._keyring, {})
    async with sdk(bed) as client:
        answer = await client.chat.completions.create(model="meta/Only-A", messages=HELLO, temperature=0.5)
        assert answer.choices[0].message.content == "from a"
        assert bed.a.seen[-1][1] == {"model": "only-a", "messages": HELLO, "temperature": 0.5}
        listed = {model.id: model for model in (await client.models.list()).data}
        assert listed.keys() == {"m", "only-a"}
        assert listed["only-a"].aliases == ["meta/Only-A"]
        assert (await client.models.retrieve("meta/Only-A")).id == "only-a"


async def test_all_but_the_name_stays_as_it_was_written():
    written = b'{ "seed" : 1e2,"model":"x","a":[1.50, "\\u00e9"],"o":{"model":"x"}}'
    peeked, body = renamed(peek(written, CHAT_PATH), written, "org/y", CHAT_PATH)
    assert peeked.model == "org/y"
    assert body == b'{"seed":1e2,"model":"org/y","a":[1.50, "\\u00e9"],"o":{"model":"x"}}'


async def test_an_alias_in_a_body_that_is_no_text_is_400(bed):
    bed.gateway.reload(dataclasses.replace(bed.gateway._rules, aliases={"alias": "m"}), bed.gateway._keyring, {})
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as session:
        body = b'{"model": "alias", "messages": [], "\xd4": 1}'
        answer = await session.post(bed.url + "/v1/chat/completions", data=body)
        assert (answer.status, (await answer.json())["error"]["fabric_code"]) == (400, "FT8101")


@pytest.mark.interpreted
@pytest.mark.parametrize("where", ["handle", "start"])
async def test_a_mistake_of_the_gateways_own_is_answered(bed, monkeypatch, caplog, where):
    def fail(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(*((bed.gateway, "_ask") if where == "handle" else (Exchange, "_attempt")), fail)
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as session:
        answer = await session.post(bed.url + "/v1/chat/completions", json={"model": "m"})
        assert (answer.status, answer.headers["connection"]) == (500, "close")
        assert (await answer.json())["error"]["fabric_code"] == "FT8160"
        monkeypatch.undo()
        answer = await session.post(bed.url + "/v1/chat/completions", json={"model": "m"})
        assert answer.status == 200
    assert "planted" in caplog.text
    assert bed.gateway.status().totals.in_flight == 0


async def test_a_model_is_not_there_for_a_group_that_may_not_see_it(bed):
    rules = bed.gateway._rules
    trust = TrustPolicy(rules.trust.groups, {}, {"m": frozenset({"alpha-only"})})
    bed.gateway.reload(dataclasses.replace(rules, trust=trust), bed.gateway._keyring, {})
    bed.gateway.plan_for({"m": (0,), "only-a": (0,)})
    async with sdk(bed) as client:
        assert [model.id for model in (await client.models.list()).data] == ["only-a"]
        for asking in (
            client.models.retrieve("m"),
            client.chat.completions.create(model="m", messages=HELLO),
        ):
            with pytest.raises(openai.NotFoundError):
                await asking
    async with sdk(bed, bed.ALPHA_KEY) as client:
        assert {model.id for model in (await client.models.list()).data} == {"m", "only-a"}
        assert (await client.chat.completions.create(model="m", messages=HELLO)).choices


@pytest.mark.parametrize("affinity", [False, True])
async def test_a_conversation_stays_with_its_replica_and_others_do_not(bed, affinity):
    """Each begins with one system prompt, as coding agents do, and has a first message of its own."""
    rules = bed.gateway._rules
    bed.gateway.reload(dataclasses.replace(rules, affinity=affinity), bed.gateway._keyring, {})
    homes = []
    async with sdk(bed) as client:
        for number in range(12):
            talk = [{"role": "system", "content": "x" * 1000}, {"role": "user", "content": f"task {number}"}]
            answers = []
            for turn in range(3):
                answer = await client.chat.completions.create(model="m", messages=talk)
                answers.append(answer.choices[0].message.content)
                talk += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"turn {turn}"}]
            homes.append(set(answers))
    assert all(len(home) == 1 for home in homes) == affinity
    assert set.union(*homes) == {"from a", "from b"}


async def test_a_chain_of_responses_stays_with_the_replica_that_keeps_it(bed):
    async def respond(http, **fields):
        async with http.post(f"{bed.url}/v1/responses", json={"model": "m", "input": "x"} | fields) as answer:
            return answer.status, await answer.json()

    bed.a.answer_id, bed.b.answer_id = "resp_a", "resp_b"
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        assert {(await respond(http))[1]["id"] for _ in range(4)} == {"resp_a", "resp_b"}
        for name in ("resp_a", "resp_b"):
            assert {(await respond(http, previous_response_id=name))[1]["id"] for _ in range(4)} == {name}
        bed.gateway.directory.replace([t for t in bed.gateway.directory if t.provider == "alpha"])
        status, answer = await respond(http, previous_response_id="resp_b")
        assert status == 422
        assert "resp_b: it is gone" in answer["error"]["message"]
        assert (await respond(http, previous_response_id="resp_of_another_gateway"))[0] == 200


async def test_a_chain_that_another_gateway_began_is_looked_for(bed):
    """Who does not know the answer that is continued says 404; a worker or a successor knows no more than that."""

    def of_its_own(engine, name):
        async def answer(request):
            body = await request.json()
            engine.seen.append((request, body))
            bed.clock.advance(5.0)  # a busy one takes its time to say that it does not know it
            if body.get("previous_response_id") not in (None, name):
                return web.json_response({"error": {"message": "no such response"}}, status=404)
            return web.json_response({"id": f"{name}-next", "usage": {"input_tokens": 3, "output_tokens": 2}})

        engine.answer = answer

    for engine, name in ((bed.a, "resp_a"), (bed.b, "resp_b")):
        of_its_own(engine, name)
        await engine.stop()
        await engine.start()
    nodes = [StaticNode(bed.a.url, ["m"], "alpha"), StaticNode(bed.b.url, ["m"], "beta")]
    bed.gateway.directory.replace(static_targets(StaticRegistry(nodes)))
    budget = bed.gateway._metrics.retry_budget
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http:
        for turn in range(8):
            for name in ("resp_a", "resp_b", "resp_b"):
                while budget.allows(bed.clock.monotonic()):
                    budget.spend(bed.clock.monotonic())
                asked = {"model": "m", "input": f"{turn}", "previous_response_id": name}
                async with http.post(f"{bed.url}/v1/responses", json=asked) as answer:
                    assert (answer.status, (await answer.json())["id"]) == (200, f"{name}-next")
                assert budget.left >= 0.0, "a search is no failure"
        seen = len(bed.a.seen) + len(bed.b.seen)
        async with http.post(f"{bed.url}/v1/responses", json=asked | {"previous_response_id": "nobody's"}) as answer:
            assert (answer.status, await answer.json()) == (404, {"error": {"message": "no such response"}})
        assert len(bed.a.seen) + len(bed.b.seen) == seen + 2, "both were asked, once"
    assert not any(target.ejection.out_until for target in bed.gateway.directory)


@pytest.mark.interpreted
async def test_a_request_that_says_something_else_is_the_same_otherwise():
    """Each field of its own value: two of a type that were taken for each other would be seen."""
    names = list(inspect.signature(ModelRequest).parameters)
    wanted = {name: f"value of {name}" for name in names}
    request = ModelRequest(**wanted)
    other = request.saying(b"another")
    kept = {name: getattr(other, "id" if name == "record_id" else name) for name in names}
    assert kept == wanted | {"body": b"another"}
    assert len(names) == len(ModelRequest.__slots__)
