"""A trace of a member leads another one through the same life, in production and in the simulator alike."""

import json

import pytest

from fabrictool.cli import main as command_line
from fabrictool.mesh import detector
from fabrictool.mesh.identity import IdentityVerifier
from fabrictool.mesh.trace import TracedMember, replay
from fabrictool.mesh.transport.tracefile import TraceFile
from tests.mesh import world
from tests.mesh.test_invariants import played, shape
from tests.mesh.test_transport import node_body, until


@pytest.fixture
def traced(monkeypatch):
    """Traces of all members of the worlds that follow."""
    traces = []

    def member(verifier, **about):
        lines = []
        traces.append((lines, made := TracedMember(verifier, root=b"", write=lines.append, **about)))
        return made

    monkeypatch.setattr(world, "Member", member)
    return traces


@pytest.mark.parametrize("seed", range(12))
def test_every_member_of_a_simulated_mesh_replays(traced, seed):
    run = played(seed, *shape(seed))
    assert traced
    for lines, member in traced:
        again = replay(lines, run.identity)
        assert again.differs_at is None
        assert again.member.registry.root() == member.registry.root()
        assert again.inputs == len(lines) - 1 > 0


def test_code_that_decides_otherwise_is_found_at_its_first_decision(traced, monkeypatch):
    run = played(5, *shape(5))
    lines = max((lines for lines, _ in traced), key=len)
    monkeypatch.setattr(detector, "SUSPECT_AFTER_S", 0.5)
    differs = [replay(lines, run.identity).differs_at for lines, _ in traced]
    assert any(differs)
    longest = [line for line in lines if b'"received"' not in line]
    assert replay(longest, run.identity).differs_at, "an input is missing"


def test_a_trace_stops_at_its_size_and_holds_no_key(tmp_path):
    file = TraceFile(tmp_path / "mesh.trace", 100)
    for _ in range(9):
        file.write(b"x" * 30)
    assert (tmp_path / "mesh.trace").stat().st_size == 93
    assert (tmp_path / "mesh.trace").stat().st_mode & 0o077 == 0
    TraceFile(tmp_path / "none" / "mesh.trace", 100).write(b"x")  # said in the log, and nothing else happens


@pytest.mark.asyncio
async def test_a_gateways_trace_on_real_sockets_replays_and_is_told_in_words(federation, tmp_path, capsys):
    path = tmp_path / "mesh.trace"
    hub, _ = federation.node("hub", "gateway", trace=TraceFile(path, 10**6).write)
    agent, _ = federation.node("agent")
    port = await hub.listen("127.0.0.1", 0)
    hub.publish(node_body(hub))
    agent.dial([("127.0.0.1", port)])
    agent.publish(node_body(agent))
    await until(lambda: len(hub.registry) == 2)
    root = hub.registry.root()
    await agent.close()
    await until(lambda: not hub.neighbours)
    await hub.close()
    lines = path.read_bytes().splitlines()
    again = replay(lines, IdentityVerifier(federation.root.chain[0]))
    assert again.differs_at is None
    assert again.member.registry.root() == root
    key = (federation.folder / "hub" / "session.key").read_bytes().splitlines()[1]
    assert key not in path.read_bytes()

    assert command_line.main(["mesh", "replay", str(path)]) == 0
    told = capsys.readouterr()
    assert "link-up" in told.out
    assert "node SERVING" in told.out
    assert f"played {len(lines) - 1} inputs; every decision was the same" in told.err
    assert command_line.main(["mesh", "replay", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"]
    path.write_bytes(b"\n".join(line for line in lines if b'"link-up"' not in line))
    assert command_line.main(["mesh", "replay", str(path)]) == 1
    assert "this release decides otherwise" in capsys.readouterr().err
    path.write_bytes(b"\n".join(lines)[:-9])
    assert command_line.main(["mesh", "replay", str(path)]) == 65
    assert "FT6501" in capsys.readouterr().err
