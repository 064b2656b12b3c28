"""An agent without a model: what it may be assigned, and what it makes of what it is assigned."""

import asyncio
import os
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio

from fabrictool.agent import agent as agent_module
from fabrictool.agent import idle
from fabrictool.agent.idle import IdleAgent, check_offer, worth_telling
from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec, BroughtEngine, HostPort, IdleOffer, encode_spec
from fabrictool.mesh.assignments import sign_assignment
from fabrictool.mesh.framing import StreamHead
from fabrictool.mesh.gossip import Push, encode
from fabrictool.mesh.identity import issue_session
from fabrictool.mesh.records import AssignedUnit, AssignmentBody, Lifecycle, NodeHardware
from fabrictool.mesh.revocation import read_revocation, revoke
from fabrictool.mesh.transport.controller import ControllerVisit
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.mesh.transport.views import fleet_status
from fabrictool.status.fleet import FleetQuery
from tests.agent.test_agent import CRASH, SERVE, FakeStream, ScriptedAdapter
from tests.mesh.conftest import Federation
from tests.mesh.test_transport import listening, node_body, until

HARDWARE = NodeHardware("a100-80g", 2, 2 << 36, driver="550", free=(60 << 30, 10 << 30))
WANTED = AssignmentBody("", bytes(16), bytes(16), 0, model="m", source="x", engine="fake")


class Scene:
    """A hub, an idle agent of alpha, and the folder of a controller of it."""

    def __init__(self, federation, hub, port):
        self.federation, self.hub, self.port = federation, hub, port
        self.looks = [HARDWARE]
        federation.node("run/identity")
        about = {"fabric": "f", "provider": "alpha", "site": "s", "cluster": "c", "partition": "n"}
        self.spec = AgentSpec(
            **about, replica="joined/1", model="", source="", engine="external", device="", drain_s=0.2,
            hubs=(HostPort("127.0.0.1", port),), brought=BroughtEngine(), idle=IdleOffer(engines=("fake",)),
        )  # fmt: skip
        run = RunFolder(federation.folder / "run")
        run.spec.write_bytes(encode_spec(self.spec))
        self.agent = IdleAgent(
            self.spec, run, SystemClock(), python=sys.executable, cache=federation.folder, look=lambda: self.looks[-1]
        )
        self.session = self.agent.mesh.session

    def controller(self, provider="alpha", role="controller"):
        folder = self.federation.folder / f"{role}-{provider}"
        folder.mkdir(exist_ok=True)
        files = IdentityFiles(folder)
        files.write(
            issue_session(self.federation.providers[provider], role, now=time.time(), seconds=90 * 86400.0),
            self.federation.root,
        )
        return ControllerVisit(files, [HostPort("127.0.0.1", self.port)], SystemClock())

    async def assign(self, wait_s=20.0, **changes):
        async with self.controller() as visit:
            member = visit.session(self.session.hex()[:8])
            outcome = await visit.say(member, msgspec.structs.replace(WANTED, **changes))
            return await visit.wait_for(outcome, wait_s)

    @property
    def member(self):
        return next(m for m in fleet_status(self.hub).members if m.session == self.session.hex())


@pytest.fixture
def adapter(monkeypatch):
    adapter = ScriptedAdapter()
    adapter.script = SERVE
    monkeypatch.setattr(idle, "adapter", lambda _: adapter)
    monkeypatch.setattr(idle, "engine_names", lambda: ("fake", "other"))
    monkeypatch.setattr(idle, "resolve", lambda source: source)
    return adapter


@pytest_asyncio.fixture
async def scene(tmp_path, adapter, monkeypatch):  # noqa: ARG001 - puts the scripted engine in its place
    monkeypatch.setattr(agent_module, "signed_build", lambda _: b"evidence")
    federation = Federation(tmp_path)
    hub, _, port = await listening(federation)
    hub.publish(node_body(hub))
    scene = Scene(federation, hub, port)
    scene.running = asyncio.create_task(scene.agent.run())
    await until(lambda: scene.hub.registry.node(scene.session) and scene.member.idle and scene.member.addresses)
    yield scene
    scene.agent.request_stop("the test is over")
    await asyncio.wait_for(scene.running, 20)
    await hub.close()


@pytest.mark.asyncio
async def test_it_says_what_it_has_and_when_that_changes(scene, monkeypatch):
    member = scene.member
    assert (member.device, member.devices, member.driver) == ("a100-80g", 2, "550")
    assert (member.free, member.state, member.assignable) == ([60 << 30, 10 << 30], "serving", True)
    assert scene.agent.health().ready
    assert (scene.agent.status().engine.state, scene.agent.status().model, scene.agent.status().idle) == (
        "stopped",
        "",
        True,
    )
    monkeypatch.setattr(idle, "LOOK_S", 0.05)
    version = member.version
    scene.looks.append(msgspec.structs.replace(HARDWARE, free=(59 << 30, 10 << 30)))
    scene.looks.append(msgspec.structs.replace(HARDWARE, free=(40 << 30, 10 << 30)))
    await scene.agent._look_at_hardware()
    await until(lambda: scene.member.free[0] == 40 << 30)
    assert scene.member.version == version + 1


@pytest.mark.asyncio
async def test_it_listens_for_its_site_and_shows_its_build_like_any_agent(scene):
    for idle_again in (False, True):
        shown = scene.hub.registry.node(scene.session)
        assert shown.build == b"evidence"
        (address,) = shown.addresses
        neighbour, _ = scene.federation.node(f"neighbour-{idle_again}")
        neighbour.seek([HostPort("127.0.0.1", int(address.rpartition(":")[2]))])
        await until(lambda visitor=neighbour: visitor.neighbours == [scene.session])
        await neighbour.close()
        await scene.assign()
        await scene.assign(model="")


@pytest.mark.asyncio
async def test_whoever_keeps_a_count_is_told_why_nobody_may_be_assigned(scene):
    async with scene.controller() as visit:
        assert visit.ends_at > time.time() + 86400.0
        assert visit.refused(WANTED, FleetQuery()) is None
        assert visit.refused(WANTED, FleetQuery(device="h100-sxm")) is None, "nobody fits: that is no refusal"
    async with scene.controller(role="agent") as visit:
        assert "FT6103" in str(visit.refused(WANTED, FleetQuery()))


@pytest.mark.asyncio
async def test_it_serves_what_it_is_assigned_then_something_else_then_nothing(scene):
    outcome = await scene.assign()
    assert (outcome.version, outcome.service.lifecycle, outcome.service.model) == (1, Lifecycle.SERVING, "m")
    engine = scene.agent.status().engine.pid
    assert (scene.member.idle, scene.member.assignment.model) == (False, "m")
    again = await scene.assign(context=64)
    assert (again.version, again.former, again.service.context) == (2, "m", 64)
    assert scene.agent.status().engine.pid != engine
    planned = await scene.assign(unit=AssignedUnit("m/7", "replica-m-7-g1-00000000", "abcdef01", "p"))
    assert (planned.version, planned.service.replica) == (3, "m/7"), "its records bear the plan's name"
    assert (scene.member.assignment.operation, scene.member.assignment.partition) == ("replica-m-7-g1-00000000", "p")
    over = await scene.assign(model="")
    assert (over.version, over.service, scene.agent.status().engine.pid) == (4, None, None)
    assert scene.agent.spec.replica == "joined/1"
    await until(lambda: scene.member.idle)
    assert scene.agent.mesh.registry.node(scene.session).heard == 4, "no earlier one counts any more"
    assert [s.lifecycle for s in scene.member.services] == ["DOWN"] * 3
    assert scene.agent.status().session == scene.member.session, "it never left"


@pytest.mark.asyncio
async def test_what_its_owner_does_not_allow_is_said_and_nothing_is_started(scene, monkeypatch):
    started = []
    monkeypatch.setattr(ScriptedAdapter, "command", lambda *_: started.append(1))
    outcome = await scene.assign(engine="other")
    assert outcome.service.note.startswith("FT7106: engine 'other' may not be started here")
    assert (outcome.service.given_up, started) == (True, [])
    assert scene.agent.health().ready, "it waits for something else"
    assert not scene.member.idle, "it is not free for others until its controller says so"
    await scene.assign(model="")
    assert scene.member.idle


@pytest.mark.asyncio
async def test_an_engine_that_keeps_failing_is_given_up_and_the_next_assignment_is_served(scene, adapter, monkeypatch):
    monkeypatch.setattr("fabrictool.agent.supervisor.MAX_RESTARTS", 0)
    adapter.script = CRASH
    outcome = await scene.assign()
    assert (outcome.service.given_up, outcome.service.note[:6]) == (True, "FT7103")
    adapter.script = SERVE
    assert (await scene.assign()).service.lifecycle is Lifecycle.SERVING


@pytest.mark.asyncio
async def test_nobody_waits_for_a_session_that_leaves(scene, adapter):
    adapter.script = CRASH
    assigning = asyncio.create_task(scene.assign(wait_s=60.0))
    await until(lambda: scene.agent.status().engine.restarts)
    scene.agent.request_stop("enough")
    with pytest.raises(FabrictoolError, match="FT6108"):
        await asyncio.wait_for(assigning, 20)


@pytest.mark.asyncio
async def test_a_request_that_is_open_is_finished_first_and_who_is_told_to_leave_meanwhile_leaves(scene):
    await scene.assign()
    agent = scene.agent
    agent.spec = msgspec.structs.replace(agent.spec, drain_s=30.0)
    peer = SimpleNamespace(session=scene.hub.session, claims=SimpleNamespace(role="gateway", provider="alpha"))
    head = StreamHead(agent._service, "POST", "/v1/completions", (), 0)
    request = agent.stream_opened(None, head, peer)
    unassigning = asyncio.create_task(scene.assign(model=""))
    await until(lambda: scene.member.services and not scene.member.services[0].accepting)
    engine = agent.status().engine.pid
    os.kill(engine, 0)
    agent.request_stop("enough")
    request.connection_made(FakeStream())
    request.connection_lost(None)
    await until(lambda: scene.member.lifecycle == "LEFT")
    await unassigning
    await asyncio.wait_for(scene.running, 20)
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
    assert not scene.agent.status().accepting


@pytest.mark.asyncio
async def test_a_revoked_controllers_word_ends_and_its_session_may_be_assigned_anew(scene):
    await scene.assign()
    signer = scene.hub.registry.assignment(scene.session).by
    text = revoke(scene.federation.providers["alpha"], signer, now=time.time(), until=time.time() + 3600)
    scene.hub.take(read_revocation(text)[0])
    await until(lambda: scene.member.idle)
    assert scene.agent.status().engine.pid is None
    assert (scene.member.assignment, scene.agent.mesh.registry.node(scene.session).follows) == (None, False)
    assert (await scene.assign()).version == 2


@pytest.mark.asyncio
async def test_who_is_assigned_nothing_any_more_goes_on_until_it_is_told_to_stop(scene):
    """As after a renewal beyond its controller's time, when the record is gone everywhere. Its own records say on what
    it serves, and as which unit of a plan.
    """
    unit = AssignedUnit("m/7", "replica-m-7-g1-00000000", "abcdef01", "p")
    await scene.assign(unit=unit, context=64)
    told = scene.member.assignment
    engine = scene.agent.status().engine.pid
    for mesh in (scene.hub, scene.agent.mesh):
        mesh.registry._unassign(scene.session)
    text = revoke(scene.federation.providers["alpha"], b"s" * 16, now=time.time(), until=time.time() + 3600)
    scene.hub.take(read_revocation(text)[0])
    await until(lambda: scene.agent.mesh.registry.root() == scene.hub.registry.root())
    await asyncio.sleep(0.1)
    assert (scene.agent.status().engine.pid, scene.agent.status().engine.state) == (engine, "ready")
    assert scene.member.assignment == msgspec.structs.replace(told, by="")
    assert not scene.member.idle
    async with scene.controller() as visit:
        assert (visit.assigned("m"), visit.missing(WANTED, FleetQuery(), 2)) == (1, [])
    assert (await scene.assign(model="")).version == 2, "it heard the first, and no other of that version counts"
    assert scene.agent.status().engine.pid is None
    for mesh in (scene.hub, scene.agent.mesh):
        mesh.registry._unassign(scene.session)
    await until(lambda: scene.member.idle)
    assert scene.member.assignment is None, "nor does what it served before"


@pytest.mark.asyncio
@pytest.mark.parametrize("signer", ["controller-of-another-provider", "agent-of-its-own"])
async def test_a_gateway_and_the_agent_refuse_what_somebody_else_signed(scene, signer):
    """It is put on the wire as it is, past the sender's own check."""
    stranger, _ = (
        scene.federation.node("stranger", role="controller", provider="beta", seconds=90 * 86400.0)
        if signer == "controller-of-another-provider"
        else scene.federation.node("stranger", seconds=90 * 86400.0)
    )
    stranger.dial([("127.0.0.1", scene.port)])
    await until(lambda: stranger.neighbours and stranger.registry.root() == scene.hub.registry.root())
    body = msgspec.structs.replace(
        WANTED, federation=stranger.federation, session=scene.session, by=stranger.session, version=1
    )
    forged = sign_assignment(stranger.credential, body).envelope
    stranger.tunnel(scene.hub.session).gossip(encode(Push([forged])))
    await until(lambda: scene.hub.refused_records == 1)
    merge = scene.agent.mesh.registry.merge(forged, wall=time.time())
    assert merge.reason.startswith("FT6103")
    assert (scene.member.idle, scene.member.assignment, scene.agent.status().model) == (True, None, "")
    await stranger.close()


@pytest.mark.asyncio
async def test_what_counts_is_that_the_gateway_holds_it_not_that_the_mesh_is_calm(scene, monkeypatch):
    """Its map is never twice the same, as where thousands of records change in a second."""
    async with scene.controller() as visit:
        monkeypatch.setattr("fabrictool.mesh.transport.controller.SPREAD_S", 1.5)
        calm = scene.hub.beat
        monkeypatch.setattr(
            scene.hub, "beat", lambda session: msgspec.structs.replace(calm(session), root=os.urandom(8))
        )
        outcome = await visit.say(visit.session(scene.session.hex()[:8]), WANTED)
        assert scene.hub.registry.assignment(scene.session).version == outcome.version == 1


@pytest.mark.asyncio
async def test_a_gateway_that_does_not_show_it_may_have_it_all_the_same(scene, monkeypatch):
    async with scene.controller() as visit:
        monkeypatch.setattr("fabrictool.mesh.transport.controller.SPREAD_S", 1.5)
        monkeypatch.setattr(scene.hub._member.gossip, "_send_whole", lambda peer, keys: None)
        with pytest.raises(FabrictoolError, match=r"FT6107.*it may hold it all the same"):
            await visit.say(visit.session(scene.session.hex()[:8]), WANTED)
        assert scene.hub.registry.assignment(scene.session).version == 1


@pytest.mark.asyncio
async def test_of_two_controllers_who_spoke_first_is_told_that_it_does_not_count(scene, monkeypatch):
    async with scene.controller() as visit, scene.controller() as other:
        take = visit.mesh.take

        def at_once(envelope):
            body = msgspec.structs.replace(
                WANTED, federation=scene.hub.federation, session=scene.session, by=other.mesh.session, version=2
            )
            scene.hub.take(sign_assignment(other.mesh.credential, body).envelope)
            take(envelope)

        monkeypatch.setattr(visit.mesh, "take", at_once)
        with pytest.raises(FabrictoolError, match=r"FT6107.*that is over"):
            await visit.say(visit.session(scene.session.hex()[:8]), WANTED)
        assert scene.hub.registry.assignment(scene.session).version == 2


@pytest.mark.asyncio
async def test_what_our_own_map_refuses_was_not_said(scene):
    """A session that claims to have heard far more than any controller said."""
    far, _ = scene.federation.node("far")
    far.dial([("127.0.0.1", scene.port)])
    far.publish(node_body(far, assignable=True, heard=2**20))
    async with scene.controller() as visit:
        with pytest.raises(FabrictoolError, match=r"FT6107.*version jumps too far"):
            await visit.say(visit.session(far.session.hex()), WANTED)
        assert visit.mesh.registry.assignment(far.session) is None
    await far.close()


@pytest.mark.asyncio
async def test_a_controller_hears_why_it_cannot(scene):
    async with scene.controller("beta") as foreign:
        with pytest.raises(FabrictoolError, match="FT6106"):
            foreign.session(scene.session.hex()[:8])
        with pytest.raises(FabrictoolError, match="FT6103"):
            await foreign.say(scene.member, WANTED)
    placed, _ = scene.federation.node("placed")
    placed.dial([("127.0.0.1", scene.port)])
    placed.publish(node_body(placed))
    async with scene.controller() as visit:
        with pytest.raises(FabrictoolError, match="FT6104"):
            visit.session(placed.session.hex())
    await placed.close()


@pytest.mark.asyncio
async def test_as_many_idle_ones_are_chosen_as_are_missing_and_no_more(scene):
    wanted = msgspec.structs.replace(WANTED, engine="other")
    async with scene.controller() as visit:
        for query, count, chosen in (
            (FleetQuery(device="a100", free=50 << 30), 5, [scene.session.hex()]),
            (FleetQuery(), 0, []),
            (FleetQuery(device="h100"), 5, []),
            (FleetQuery(free=50 << 30, devices=2), 5, []),
        ):
            assert [member.session for member in visit.missing(wanted, query, count)] == chosen
        await visit.say(scene.member, wanted)
        await until(lambda: any(service.note for service in scene.member.services))
        assert (visit.assigned("m"), visit.missing(wanted, FleetQuery(), 5)) == (1, []), "what gave up is not idle"
    async with scene.controller("beta") as foreign:
        assert foreign.missing(wanted, FleetQuery(), 5) == []


@pytest.mark.asyncio
async def test_who_may_not_be_assigned_a_model_is_not_chosen_for_it(scene):
    bound, _ = scene.federation.node("bound", models=("n",))
    bound.dial([("127.0.0.1", scene.port)])
    bound.publish(node_body(bound, assignable=True, hardware=msgspec.structs.replace(HARDWARE, free=(70 << 30,) * 2)))
    async with scene.controller() as visit:
        both = [bound.session.hex(), scene.session.hex()]
        wanted = msgspec.structs.replace(WANTED, model="n")
        assert [m.session for m in visit.missing(wanted, FleetQuery(), 5)] == both, "most free first"
        assert [m.session for m in visit.missing(WANTED, FleetQuery(), 5)] == both[1:]
    await bound.close()


@pytest.mark.asyncio
async def test_where_no_gateway_answers_that_is_said(tmp_path, monkeypatch):
    federation = Federation(tmp_path)
    monkeypatch.setattr("fabrictool.mesh.transport.controller.LINK_S", 0.5)
    folder = federation.folder / "c"
    folder.mkdir()
    files = IdentityFiles(folder)
    credential = issue_session(federation.providers["alpha"], "controller", now=time.time())
    files.write(credential, federation.root)
    with pytest.raises(FabrictoolError, match=r"FT6107.*refused"):
        await ControllerVisit(files, [HostPort("127.0.0.1", 1)], SystemClock()).__aenter__()


def offered(**words):
    return AgentSpec(
        fabric="f", provider="p", site="s", cluster="c", partition="n", replica="r", model="", source="",
        engine="external", idle=IdleOffer(**words),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("offer", "changes", "allowed"),
    [
        ({}, {"engine": "vllm"}, True),
        ({}, {"engine": "external"}, False),
        ({}, {"engine": "bash -c"}, False),
        ({"engines": ("reference",)}, {"engine": "vllm"}, False),
        ({"engines": ("external",)}, {"engine": "external"}, False),
        ({"sources": ("hf://Qwen/*",)}, {"source": "hf://Qwen/Qwen3"}, True),
        ({"sources": ("hf://Qwen/*",)}, {"source": "hf://Qwent/x"}, False),
        ({"sources": ("hf://Qwen/Qwen3",)}, {"source": "hf://Qwen/Qwen3-evil"}, False),
        ({"sources": ("file:///models/*",)}, {"source": "file:///models/../etc/shadow"}, False),
        ({"sources": ("file:///models/*",)}, {"source": "file:///models/%2e%2e/etc"}, False),
        ({"sources": ("file:///a%20b",)}, {"source": "file:///a%20b"}, True),
        ({}, {"model": "--trust-remote-code"}, False),
        ({}, {"tp": 2}, True),
        ({}, {"tp": 3}, False),
    ],
)
def test_the_nodes_owner_decides(offer, changes, allowed):
    wanted = msgspec.structs.replace(WANTED, **({"engine": "reference"} | changes))
    if allowed:
        check_offer(wanted, offered(**offer), HARDWARE)
    else:
        with pytest.raises(FabrictoolError, match="FT7106"):
            check_offer(wanted, offered(**offer), HARDWARE)


def test_only_changes_that_matter_are_told():
    def free(*octets):
        return msgspec.structs.replace(HARDWARE, free=octets)

    assert not worth_telling(HARDWARE, free(58 << 30, 12 << 30))
    assert worth_telling(HARDWARE, free(60 << 30, 20 << 30))
    assert worth_telling(HARDWARE, free(60 << 30))
    assert worth_telling(HARDWARE, msgspec.structs.replace(HARDWARE, driver="560"))
