"""The agent's own doings, with an engine that is a script."""

import asyncio
import os
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fabrictool import __version__
from fabrictool.agent import agent as agent_module
from fabrictool.agent.agent import Agent
from fabrictool.agent.measured import measured_build
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec, encode_spec
from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness
from fabrictool.mesh.attestation import BUILD_FILE, SignedBuilds, sign_build
from fabrictool.mesh.framing import StreamHead
from fabrictool.mesh.identity import raw_key
from fabrictool.mesh.records import ServiceBody
from tests.mesh.conftest import Federation

pytestmark = pytest.mark.asyncio

CRASH = "print('错误 显存不足' * 120, flush=True); raise SystemExit(1)"
SERVE = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""


class FakeStream:
    """Reads nothing: the forwarder ends before it is connected."""

    def pause_reading(self):
        pass


class ScriptedAdapter:
    """Its engine is a Python script, which is given the port."""

    name = "fake"
    readiness = Readiness("/health", 5, 0.05)
    metrics = MetricNames("r", "w", "k")
    capabilities = Capabilities()
    script = CRASH

    def command(self, launch):
        return EngineCommand((sys.executable, "-c", self.script, str(launch.port)), {})


@pytest.fixture
def adapter(monkeypatch):
    adapter = ScriptedAdapter()
    monkeypatch.setattr(agent_module, "adapter", lambda name: adapter)
    monkeypatch.setattr(agent_module, "resolve", lambda source: source)
    return adapter


@pytest.fixture
def agent(tmp_path, adapter):  # noqa: ARG001 - puts the scripted engine in its place
    Federation(tmp_path).node("run/identity")
    about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
    spec = AgentSpec(**about, model="m", source="x", engine="fake", drain_s=0.1)
    return Agent(spec, RunFolder(tmp_path / "run"), SystemClock(), python=sys.executable, cache=tmp_path)


async def state_of_engine(agent, state, running):
    while agent.status().engine.state != state:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.02)


async def test_a_crash_is_told_in_any_language_and_counts_as_a_restart(agent, monkeypatch):
    tails = []
    monkeypatch.setattr(agent.mesh, "confide", lambda service, lines: tails.append("\n".join(lines)))
    running = asyncio.create_task(agent.run())
    while agent.status().engine.restarts < 2:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.02)
    notes = [r.body.note for r in agent.mesh.registry if getattr(r.body, "note", "")]
    assert notes
    assert all(note.startswith("restart ") for note in notes)
    # The log is read for a second at most after the end: on a busy machine one of the restarts may go without it.
    assert any("显存不足" in tail for tail in tails)
    assert not any("显存不足" in note for note in notes), "a record is read by all institutions"
    agent.request_stop("enough")
    assert await asyncio.wait_for(running, 20) == "told to stop"


async def test_every_step_of_leaving_is_taken_whatever_another_raises(agent, adapter, monkeypatch):
    def refuse(_):
        raise RuntimeError("no record today")

    adapter.script = SERVE
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    engine = agent.status().engine.pid
    monkeypatch.setattr(agent.mesh, "publish", refuse)
    agent.request_stop("enough")
    with pytest.raises(RuntimeError, match="no record today"):
        await asyncio.wait_for(running, 20)
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    assert agent.mesh.neighbours == []


async def test_each_gateway_is_told_of_the_others_requests_and_never_of_its_own(agent, adapter):
    def peer(name):
        return SimpleNamespace(session=name * 16, claims=SimpleNamespace(role="gateway", provider="p"))

    adapter.script = SERVE
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    (service,) = (r.body.service for r in agent.mesh.registry if isinstance(r.body, ServiceBody))
    head = StreamHead(service, "POST", "/v1/completions", (), 0)
    forwarders = [agent.stream_opened(None, head, peer(name)) for name in (b"a", b"a", b"b")]
    assert [agent.load(name * 16)[0][4] for name in (b"a", b"b", b"c")] == [1, 2, 3]
    for forwarder in forwarders[:2]:
        forwarder.connection_made(FakeStream())
        forwarder.connection_lost(None)
    assert [agent.load(name * 16)[0][4] for name in (b"a", b"b", b"c")] == [1, 0, 1]
    agent.request_stop("enough")
    await asyncio.wait_for(running, 20)


def short_lived(folder, certificate_s, walltime_s):
    Federation(folder).node("run/identity", seconds=certificate_s)
    about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
    spec = AgentSpec(**about, model="m", source="x", engine="fake", drain_s=0.1, walltime_s=walltime_s)
    run = RunFolder(folder / "run")
    run.spec.write_bytes(encode_spec(spec))
    return Agent(spec, run, SystemClock(), python=sys.executable, cache=folder)


@pytest.mark.parametrize("walltime", [None, 3600.0])
async def test_an_agent_warns_of_its_certificates_end_and_leaves_in_order_before_it(tmp_path, adapter, walltime):
    adapter.script = SERVE
    agent = short_lived(tmp_path, 21.0, walltime)
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    (warning,) = [event for event in agent.status().events if event.kind == "certificate-ends"]
    assert "leaves before that" in warning.text
    assert "certificate ends in" in agent.health().text
    assert await asyncio.wait_for(running, 20) == "the session's certificate ends soon"
    assert sorted(r.body.lifecycle.name for r in agent.mesh.registry) == ["DOWN", "LEFT"]
    assert agent.certificate_ends_at > time.time(), "its neighbours still believe it"


async def test_an_allocation_that_ends_first_is_no_matter_of_certificates(tmp_path, adapter):
    adapter.script = SERVE
    agent = short_lived(tmp_path, 3600.0, 17.0)
    assert await asyncio.wait_for(agent.run(), 30) == "the walltime ends soon"
    assert "certificate-ends" not in {event.kind for event in agent.status().events}


async def test_an_agent_shows_the_build_that_was_signed_for_what_it_runs(agent, adapter, monkeypatch, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("x = 1\n")
    key = Ed25519PrivateKey.generate()
    (package / BUILD_FILE).write_bytes(sign_build(__version__, measured_build(package), key))
    monkeypatch.setattr(agent_module, "package_folder", lambda: package)
    adapter.script = SERVE
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    shown = agent.mesh.registry.node(agent.mesh.session)
    assert SignedBuilds([raw_key(key.public_key())], None).refusal(shown) == ""
    agent.request_stop("enough")
    await asyncio.wait_for(running, 20)


async def test_an_agent_whose_files_were_changed_serves_and_shows_no_build(agent, adapter, monkeypatch, tmp_path):
    (tmp_path / BUILD_FILE).write_bytes(sign_build(__version__, b"d" * 32, Ed25519PrivateKey.generate()))
    monkeypatch.setattr(agent_module, "package_folder", lambda: tmp_path)
    adapter.script = SERVE
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    assert agent.mesh.registry.node(agent.mesh.session).build == b""
    (event,) = [event for event in agent.status().events if event.kind == "unsigned-build"]
    assert "FT6008" in event.text
    agent.request_stop("enough")
    await asyncio.wait_for(running, 20)


def asked_rarely(folder, idle_after_s):
    Federation(folder).node("run/identity")
    about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
    spec = AgentSpec(**about, model="m", source="x", engine="fake", drain_s=5.0, idle_after_s=idle_after_s)
    run = RunFolder(folder / "run")
    run.spec.write_bytes(encode_spec(spec))
    return Agent(spec, run, SystemClock(), python=sys.executable, cache=folder)


class AnsweredStream(FakeStream):
    """Keeps what is written to it."""

    def __init__(self):
        self.written = b""

    def write(self, data):
        self.written += data

    def write_eof(self):
        pass

    def resume_reading(self):
        pass


def gateway(name=b"a"):
    return SimpleNamespace(session=name * 16, claims=SimpleNamespace(role="gateway", provider="p", uri=lambda: "g"))


async def test_one_that_nobody_asks_ends_and_what_came_last_is_answered_before(tmp_path, adapter, monkeypatch):
    monkeypatch.setattr(agent_module, "UNASKED_LOOK_S", 0.05)
    adapter.script = SERVE
    agent = asked_rarely(tmp_path, 1.0)
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    (service,) = (r.body.service for r in agent.mesh.registry if isinstance(r.body, ServiceBody))
    head = StreamHead(service, "POST", "/v1/completions", (), 0)
    open_request = agent.stream_opened(None, head, gateway())
    open_request.connection_made(FakeStream())
    await asyncio.sleep(2.0)
    assert not running.done(), "a request is open"
    open_request.connection_lost(None)
    ended_at = time.monotonic()
    assert await asyncio.wait_for(running, 20) == "nobody asked for m for 1 s"
    assert time.monotonic() - ended_at >= 0.9
    assert agent._folder.dormant
    late = agent.stream_opened(None, head, gateway())
    late.connection_made(stream := AnsweredStream())
    assert stream.written.startswith(b"HTTP/1.1 503 ")
    assert b"x-fabric-left: yes" in stream.written


@pytest.mark.parametrize("idle_after", [1000.0, None])
async def test_one_that_is_told_to_stop_is_not_dormant(tmp_path, adapter, idle_after):
    adapter.script = SERVE
    agent = asked_rarely(tmp_path, msgspec.UNSET if idle_after is None else idle_after)
    running = asyncio.create_task(agent.run())
    await state_of_engine(agent, "ready", running)
    agent.request_stop("enough")
    await asyncio.wait_for(running, 20)
    assert not agent._folder.dormant
