"""The agent's own doings, with an engine that is a script."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from fabrictool.agent import agent as agent_module
from fabrictool.agent.agent import Agent, EngineFailedError
from fabrictool.agent.supervisor import MAX_RESTARTS
from fabrictool.base.clock import SystemClock
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec
from fabrictool.engines.protocol import EngineCommand, Metrics, Readiness
from fabrictool.mesh.framing import StreamHead
from fabrictool.mesh.records import Lifecycle
from tests.mesh.conftest import Federation

pytestmark = pytest.mark.asyncio

CRASH = "print('错误 显存不足' * 120, flush=True); raise SystemExit(1)"


class Crashing:
    name = "fake"
    readiness = Readiness("/health", 5, 0.05)
    metrics = Metrics("r", "w", "k")

    def command(self, launch):
        return EngineCommand((sys.executable, "-c", CRASH), {})


@pytest.fixture
def agent(tmp_path, monkeypatch):
    Federation(tmp_path).node("run/identity")
    monkeypatch.setattr(agent_module, "adapter", lambda name: Crashing())
    monkeypatch.setattr(agent_module, "resolve", lambda source: source)
    about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
    spec = AgentSpec(**about, model="m", source="x", engine="fake", drain_s=0.1)
    return Agent(spec, RunFolder(tmp_path / "run"), SystemClock(), python=sys.executable, cache=tmp_path)


async def test_a_crash_is_told_in_any_language_and_counts_as_a_restart(agent):
    running = asyncio.create_task(agent.run())
    while agent._supervisor.restarts < 2:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.02)
    notes = [r.body.note for r in agent.mesh.registry if getattr(r.body, "note", "")]
    assert notes
    assert all(note.startswith("restart ") for note in notes)
    # The log is read for a second at most after the end: on a busy machine one of the restarts may go without it.
    assert any("显存不足" in note for note in notes)
    agent.request_stop("enough")
    assert await asyncio.wait_for(running, 20) == "told to stop"


async def test_every_step_of_leaving_is_taken_whatever_another_raises(agent, monkeypatch):
    stopped = []

    async def stop():
        stopped.append(True)

    def refuse(_):
        raise RuntimeError("no record today")

    async def fail():
        monkeypatch.setattr(agent.mesh, "publish", refuse)
        raise EngineFailedError.of("FT7103", f"failed {MAX_RESTARTS} times")

    monkeypatch.setattr(agent._supervisor, "run", fail)
    monkeypatch.setattr(agent._supervisor, "stop", stop)
    left = asyncio.create_task(agent.run())
    with pytest.raises(RuntimeError, match="no record today"):
        await asyncio.wait_for(left, 10)
    assert stopped
    assert agent.mesh.neighbours == []


async def test_each_gateway_is_told_of_the_others_requests_and_never_of_its_own(agent):
    def peer(name):
        return SimpleNamespace(session=name * 16, claims=SimpleNamespace(role="gateway", uri=lambda: "gateway"))

    agent._service, agent._supervisor.state, agent._supervisor.port = b"s" * 16, "ready", 1
    head = StreamHead(b"s" * 16, "POST", "/v1/completions", (), 0)
    forwarders = [agent.stream_opened(None, head, peer(name)) for name in (b"a", b"a", b"b")]
    assert [agent.load(name * 16)[0][4] for name in (b"a", b"b", b"c")] == [1, 2, 3]
    for forwarder in forwarders[:2]:
        forwarder._finished()
    assert [agent.load(name * 16)[0][4] for name in (b"a", b"b", b"c")] == [1, 0, 1]
    assert agent._node_lifecycle is Lifecycle.JOIN
