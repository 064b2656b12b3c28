"""What an agent measures of its engine before anybody else may ask it."""

import asyncio
import json
import random
import sys

import msgspec
import pytest

from fabrictool.agent import agent as agent_module
from fabrictool.agent import quantifying
from fabrictool.agent.agent import Agent
from fabrictool.agent.engine_address import EngineAddress
from fabrictool.agent.quantifying import ANSWER_TOKENS, EngineEndpoint, Quantifier, Sample, steps_file, version_of
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec
from fabrictool.domain.steps import SHORTEST, MeasuredSteps
from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness
from fabrictool.mesh.records import Lifecycle, ServiceBody
from tests.manual_clock import ManualClock
from tests.mesh.conftest import Federation

pytestmark = pytest.mark.asyncio

ENGINE = """
import http.server, json, sys, time
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}], "version": "1.2"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = len(asked["prompt"])
        if tokens > 500:
            self.send_response(400)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        time.sleep(tokens * 8e-4)
        for number in range(asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
            self.wfile.flush()
            time.sleep(0.004)
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


class VirtualEndpoint:
    """Steps that take exactly what they are said to take, on a clock that they move on."""

    def __init__(self, clock, context=10_000, pace=1.0):
        self.clock, self.context, self.pace = clock, context, pace
        self.asked = []

    async def sample(self, batch, tokens):
        self.asked.append((batch, tokens))
        if tokens > self.context:
            return None
        first, step = self.pace * (0.01 + 1e-4 * tokens), self.pace * (0.005 + 0.001 * batch)
        self.clock.advance(first + step)
        return Sample(first, step, first + step)


class Stuck(VirtualEndpoint):
    """Answers so many samples, and then nothing any more."""

    async def sample(self, batch, tokens):
        if len(self.asked) >= 9:
            await asyncio.Event().wait()
        return await super().sample(batch, tokens)


async def measured(place, endpoint=None, context=2048, places=8, budget_s=30.0):
    clock = ManualClock()
    endpoint = endpoint or VirtualEndpoint(clock)
    endpoint.clock = clock
    return await Quantifier(endpoint, clock, budget_s, place).run(context, places), endpoint


async def test_prompts_and_batches_of_powers_of_two_each_the_least_of_three(tmp_path):
    result, endpoint = await measured(tmp_path / "m.json")
    assert list(result.steps.of_prompts()) == [
        (n, pytest.approx(0.01 + 1e-4 * n)) for n in (32, 64, 128, 256, 512, 1024)
    ]
    assert list(result.steps.of_batches()) == [(n, pytest.approx(0.005 + 0.001 * n)) for n in (1, 2, 4, 8)]
    assert endpoint.asked.count((1, 1024)) == 3
    assert endpoint.asked.count((8, 256)) == 3
    assert "a prompt of 1024 tokens" not in result.words()
    assert "one of 1024 112 ms, a token 6.0 ms alone and 13.0 ms for 8 requests" in result.words()


async def test_what_was_measured_is_kept_and_one_sample_checks_it(tmp_path):
    place = tmp_path / "deep" / "m.json"
    first, _ = await measured(place)
    again, endpoint = await measured(place)
    assert (again.steps, again.was_kept) == (first.steps, True)
    assert endpoint.asked == [(1, SHORTEST)] * 3
    slower, endpoint = await measured(place, VirtualEndpoint(None, pace=3.0))
    assert not slower.was_kept, "what is kept says a third of it"
    assert slower.steps.prompts[0] == 3 * first.steps.prompts[0]
    assert (await measured(place, VirtualEndpoint(None, pace=3.0)))[0].was_kept
    place.write_bytes(b"[[1")
    assert not (await measured(place))[0].was_kept


async def test_a_folder_that_cannot_be_written_costs_nothing_but_the_next_measurement(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    result, _ = await measured(tmp_path / "file" / "m.json")
    assert result.steps is not None


async def test_lengths_end_where_the_engine_refuses_and_where_the_budget_does(tmp_path):
    refused, _ = await measured(None, VirtualEndpoint(None, context=200))
    assert len(refused.steps.prompts) == 3
    late, _ = await measured(tmp_path / "m.json", Stuck(None), budget_s=0.2)
    assert late.steps is None
    assert not (tmp_path / "m.json").exists(), "a single length says nothing of longer ones"
    assert "nothing that routing could go by" in late.words()


async def test_an_engine_that_refuses_all_is_not_measured():
    result, endpoint = await measured(None, VirtualEndpoint(None, context=0))
    assert result.steps is None
    assert len(endpoint.asked) == 2


class StreamingAdapter:
    """Its engine is a Python script, which is given the port."""

    name = "fake"
    readiness = Readiness("/health", 5, 0.05)
    metrics = MetricNames("r", "w", "k")
    capabilities = Capabilities(priority_option="order", version_path="/version")

    def __init__(self):
        self.launches = []

    def command(self, launch):
        self.launches.append(launch)
        return EngineCommand((sys.executable, "-c", ENGINE, str(launch.port)), {})


@pytest.fixture
def start(tmp_path, monkeypatch):
    """agent, running = await start(...): once its engine is ready."""
    adapter = StreamingAdapter()
    monkeypatch.setattr(agent_module, "adapter", lambda name: adapter)
    monkeypatch.setattr(agent_module, "resolve", lambda source: source)

    async def begin(name, **more):
        Federation(tmp_path / name).node("run/identity")
        about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
        spec = AgentSpec(
            **about, model="m", source="x", engine="fake", drain_s=0.1, context=1024, max_num_seqs=2, **more
        )
        folder = RunFolder(tmp_path / name / "run")
        agent = Agent(spec, folder, SystemClock(), python=sys.executable, cache=tmp_path / "cache")
        agent.adapter = adapter
        running = asyncio.create_task(agent.run())
        while agent.status().engine.state != "ready":
            assert not running.done(), running.exception()
            await asyncio.sleep(0.02)
        return agent, running

    return begin


def service_of(agent):
    (body,) = (r.body for r in agent.mesh.registry if isinstance(r.body, ServiceBody))
    return body


async def stopped(agent, running):
    agent.request_stop("enough")
    await asyncio.wait_for(running, 20)


async def test_an_agent_measures_before_it_serves_says_so_and_keeps_it_for_the_next_start(start, tmp_path, monkeypatch):
    # What is near enough is asked in virtual time above; a machine with much else to do may be twice as slow now.
    monkeypatch.setattr(quantifying, "still_true", lambda pairs: all(now > 0.0 for now, _ in pairs))
    agent, running = await start("first", measure_s=30.0)
    told, shown = service_of(agent), agent.status().engine.steps
    assert told.lifecycle is Lifecycle.SERVING
    assert list(shown.prompts) == ["32", "64", "128", "256"], "it refuses 512"
    assert shown.prompts["256"] >= 256 * 8e-4
    assert list(shown.batches) == ["1", "2"]
    assert all(seconds > 0.0 for seconds in shown.batches.values())
    assert dict(told.steps.of_prompts()) == {int(tokens): s for tokens, s in shown.prompts.items()}
    assert not shown.was_kept
    kinds = [event.kind for event in agent.status().events]
    assert kinds.index("measured") < kinds.index("engine-ready")
    await stopped(agent, running)
    assert service_of(agent).steps is None, "who is gone says why, and has room for it"
    assert len(list((tmp_path / "cache/steps").iterdir())) == 1

    agent, running = await start("second", measure_s=30.0)
    again = agent.status().engine.steps
    assert again.was_kept
    assert (again.prompts, again.batches) == (shown.prompts, shown.batches)
    assert len(list((tmp_path / "cache/steps").iterdir())) == 1
    await stopped(agent, running)


async def test_one_whose_routing_does_not_go_by_it_measures_nothing_and_takes_no_priorities(start, tmp_path):
    agent, running = await start("plain")
    assert agent.status().engine.steps is None
    assert (service_of(agent).steps, service_of(agent).by_priority) == (None, False)
    assert not agent.adapter.launches[0].by_priority
    assert not (tmp_path / "cache/steps").exists()
    await stopped(agent, running)


@pytest.mark.parametrize(
    ("options", "by_priority"), [({}, True), ({"order": "fcfs"}, False), ({"order": "priority"}, True)]
)
async def test_an_engine_is_started_by_priority_and_its_record_says_so(start, options, by_priority):
    agent, running = await start("urgent", priorities=True, options=options)
    assert agent.adapter.launches[0].by_priority is by_priority
    assert service_of(agent).by_priority is by_priority
    assert agent.status().engine.by_priority is by_priority
    await stopped(agent, running)


async def test_an_endpoint_is_asked_at_once_and_its_release_is_known(start):
    agent, running = await start("asked")
    at = EngineAddress(agent.status().engine.port)
    async with at.http(20) as http:
        assert await version_of(http, f"{at.url}/version") == "1.2"
        assert await version_of(http, "http://127.0.0.1:1/version") == ""
        endpoint = EngineEndpoint(http, at.url, "m", SystemClock(), random.Random(1))
        sample = await endpoint.sample(4, 100)
        assert sample.first_s >= 100 * 8e-4
        assert sample.step_s > 0
        assert sample.took_s >= 100 * 8e-4 + (ANSWER_TOKENS - 1) * 0.004
        assert await endpoint.sample(1, 501) is None
    await stopped(agent, running)


async def test_figures_of_anything_else_are_in_another_file(tmp_path):
    about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
    spec = AgentSpec(**about, model="m", source="x", engine="vllm")
    names = {steps_file(tmp_path, spec, "0.32.0")}
    for change in (
        {"source": "y"},
        {"tp": 2},
        {"context": 99},
        {"options": {"a": "b"}},
        {"device": "h100-sxm"},
        {"engine": "sglang"},
    ):
        names.add(steps_file(tmp_path, msgspec.structs.replace(spec, **change), "0.32.0"))
    names.add(steps_file(tmp_path, spec, "0.33.0"))
    assert len(names) == 8
    assert steps_file(tmp_path, msgspec.structs.replace(spec, replica="m/1", site="t"), "0.32.0") in names


async def test_figures_are_small_in_a_record():
    steps = MeasuredSteps((2**32 - 1,) * 13, (2**32 - 1,) * 9)
    encoded = msgspec.msgpack.encode(steps)
    assert len(encoded) < 128
    assert msgspec.msgpack.decode(encoded, type=MeasuredSteps) == steps
    assert json.loads(msgspec.json.encode(steps)) == [[2**32 - 1] * 13, [2**32 - 1] * 9]
