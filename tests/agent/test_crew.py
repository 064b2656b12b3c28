"""An engine on several nodes: the leader's and the members' agents, with engines that are scripts."""

import asyncio
import os
import signal
import sys

import pytest

from fabrictool.agent import crew, member
from fabrictool.agent.compiled import CompiledCache
from fabrictool.agent.crew import LEADER, Leader
from fabrictool.agent.launching import first_node, interface_of, launch_of
from fabrictool.agent.member import MemberAgent, rank_here
from fabrictool.agent.supervisor import EngineFailedError, Supervisor
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec, encode_spec
from fabrictool.engines.protocol import Capabilities, EngineCommand, MetricNames, Readiness
from fabrictool.mesh.transport.tls import IdentityFiles
from tests.agent.test_supervisor import alive, until
from tests.mesh.conftest import Federation

pytestmark = pytest.mark.asyncio

HEAD = """
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Page).serve_forever()
"""
PART = "import time; print('part', flush=True); time.sleep(600)"


class ScriptedEngine:
    """Says what it was started with; all but the first node's part have no API."""

    name = "fake"
    readiness = Readiness("/health", 5, 0.05)
    metrics = MetricNames("r", "w", "k")
    capabilities = Capabilities()

    def __init__(self):
        self.launches = []

    def command(self, launch):
        self.launches.append(launch)
        script = PART if launch.node.rank else HEAD
        return EngineCommand((sys.executable, "-c", script, str(launch.port)), {})


class Replica:
    """Its agents of all nodes, here."""

    def __init__(self, path, engine, nodes=3):
        Federation(path).node("run/identity")
        self.folder = RunFolder(path / "run")
        about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n", "replica": "m/0"}
        self.spec = AgentSpec(**about, model="m", source="x", engine="fake", nodes=nodes, start_timeout_s=30)
        self.cache, self.engine, self.notes = path, engine, []
        files = IdentityFiles(self.folder.identity)
        self.leader = Leader(nodes, files, path / "run" / LEADER, lambda *note: self.notes.append(note), come_s=30)
        self.supervisor = Supervisor(engine, self.command, "m", lambda: None, start_timeout_s=30, crew=self.leader)
        self.members = {}

    def command(self, at, ports):
        node = first_node(self.leader.nodes, self.leader.meets_at)
        python, cache = sys.executable, self.cache
        return self.engine.command(
            launch_of(self.spec, model="x", at=at, ports=ports, python=python, cache=cache, compiled=cache, node=node)
        )

    def come(self, rank):
        agent = MemberAgent(self.spec, self.folder, rank, cache=self.cache)
        self.members[rank] = agent, asyncio.create_task(agent.run())

    def pid(self, rank):
        return self.members[rank][0]._process.pid

    def has_spoken(self, rank):
        """Its process runs and has printed its line: one that is killed earlier has none to leave."""
        return self.pid(rank) and self.members[rank][0]._process.lines

    async def start(self):
        for rank in range(1, self.leader.nodes):
            self.come(rank)
        await self.leader.listen("127.0.0.1")
        self.running = asyncio.create_task(self.supervisor.run())
        await until(lambda: self.supervisor.state == "ready" and all(self.has_spoken(rank) for rank in self.members))

    async def end(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.supervisor.stop()
        await self.leader.close()
        return await asyncio.wait_for(asyncio.gather(*(task for _, task in self.members.values())), 20)


@pytest.fixture
def engine(monkeypatch):
    engine = ScriptedEngine()
    monkeypatch.setattr(member, "adapter", lambda name: engine)
    monkeypatch.setattr(member, "resolve", lambda source: source)
    return engine


@pytest.fixture
def replica(tmp_path, engine):
    return Replica(tmp_path, engine)


async def test_every_node_starts_its_part_and_all_end_when_the_leader_does(replica, engine):
    await replica.start()
    parts = {launch.node.rank: launch.node for launch in engine.launches}
    assert sorted(parts) == [0, 1, 2]
    assert len({(part.nodes, part.leader) for part in parts.values()}) == 1
    assert parts[1].leader.host == "127.0.0.1"
    assert parts[2].interface == "lo"
    pids = [replica.pid(rank) for rank in (1, 2)]
    reasons = await replica.end()
    assert all("the first node's agent is gone" in reason for reason in reasons)
    assert not any(alive(pid) for pid in pids)
    assert not [note for note in replica.notes if note[0] == "node-lost"]


async def test_what_a_further_node_has_compiled_counts_as_used_at_each_start(replica):
    folder = CompiledCache(replica.spec, replica.cache).folder
    folder.mkdir(parents=True)
    os.utime(folder, (0, 0))
    await replica.start()
    assert folder.stat().st_mtime > 0
    await replica.end()


async def test_a_part_that_ends_has_all_of_them_started_anew(replica, engine):
    await replica.start()
    before = {rank: replica.pid(rank) for rank in (1, 2)}
    first = replica.supervisor.pid
    os.kill(before[2], signal.SIGKILL)
    await until(lambda: replica.supervisor.restarts == 1)
    assert "it was killed by signal 9; its last line: part" in replica.supervisor.progress
    await until(lambda: replica.supervisor.state == "ready" and all(replica.pid(rank) for rank in (1, 2)), 20)
    assert replica.supervisor.pid != first
    assert all(replica.pid(rank) != before[rank] for rank in (1, 2))
    meetings = [launch.node.leader for launch in engine.launches]
    assert len({str(meeting) for meeting in meetings}) == 2, "each start meets at a port of its own"
    await replica.end()


async def test_a_node_that_is_gone_ends_the_replica(replica):
    await replica.start()
    replica.members[1][1].cancel()
    with pytest.raises(EngineFailedError, match="FT7108") as caught:
        await asyncio.wait_for(replica.running, 20)
    assert "is lost" in str(caught.value)
    assert replica.supervisor.state == "failed"
    await asyncio.gather(replica.members.pop(1)[1], return_exceptions=True)
    await replica.end()


async def test_a_node_that_is_silent_is_gone(replica, monkeypatch):
    monkeypatch.setattr(crew, "BEAT_S", 0.05)
    await replica.start()
    monkeypatch.setattr(crew, "SILENCE_S", 2.0)  # only now: a busy machine may start nodes more slowly than that
    reader = replica.leader._members[2].wire._reader
    hear, heard = reader.feed_data, asyncio.Event()

    def last_beat(data):  # then the link is cut and swallows what is said; the wait for the next is one of 2 s
        if not heard.is_set():
            heard.set()
            hear(data)

    reader.feed_data = last_beat
    with pytest.raises(EngineFailedError, match="nothing was heard of it"):
        await asyncio.wait_for(replica.running, 20)
    await replica.end()


async def test_a_member_without_a_leader_stops_its_part(replica):
    await replica.start()
    pid = replica.pid(1)
    replica.running.cancel()
    await asyncio.gather(replica.running, return_exceptions=True)
    await replica.leader.close()
    await asyncio.wait_for(asyncio.gather(*(task for _, task in replica.members.values())), 20)
    assert not alive(pid)
    await replica.supervisor.stop()


async def test_another_session_of_the_federation_is_no_member(replica, tmp_path):
    await replica.leader.listen("127.0.0.1")
    Federation(tmp_path / "other").node("run/identity")
    other = tmp_path / "stranger"
    federation = Federation(tmp_path)  # another root
    federation.node("stranger/identity")
    (other / LEADER).write_bytes((tmp_path / "run" / LEADER).read_bytes())
    stranger = MemberAgent(replica.spec, RunFolder(other), 1, cache=tmp_path)
    joining = asyncio.create_task(stranger.run())
    await asyncio.sleep(1.5)
    assert not replica.leader._members
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    await replica.leader.close()


async def test_a_node_that_does_not_come_is_named(replica):
    replica.leader._come_s = 0.5
    replica.come(1)
    await replica.leader.listen("127.0.0.1")
    await until(lambda: replica.leader._members)
    with pytest.raises(EngineFailedError, match="FT7108: no agent came from rank 2 of 3 nodes"):
        await asyncio.wait_for(replica.supervisor.run(), 20)
    await replica.leader.close()
    await asyncio.wait_for(replica.members[1][1], 20)


async def test_a_member_that_finds_no_leader_says_so(replica):
    alone = MemberAgent(
        AgentSpec(**{name: getattr(replica.spec, name) for name in replica.spec.__struct_fields__}
                  | {"start_timeout_s": 0.2}),
        replica.folder, 1, cache=replica.cache,
    )  # fmt: skip
    with pytest.raises(FabrictoolError, match="found no leader"):
        await alone.run()


@pytest.mark.parametrize(
    ("nodes", "told", "rank"), [(3, "2", 2), (3, "0", 0), (3, "3", 0), (3, "", 0), (1, "1", 0), (3, "x", 0)]
)
async def test_which_node_this_is_only_counts_where_there_are_several(replica, nodes, told, rank):
    fields = {name: getattr(replica.spec, name) for name in replica.spec.__struct_fields__}
    replica.folder.spec.write_bytes(encode_spec(AgentSpec(**fields | {"nodes": nodes})))
    assert rank_here(replica.folder, {"SLURM_PROCID": told} if told else {}) == rank


async def test_the_interface_of_an_address_is_the_kernels_name_of_it():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
