"""Applying against a cluster that only remembers what it was told: interrupts, stale plans, crashes."""

import contextlib
import json

import msgspec
import pytest

from fabrictool.applier import apply as module
from fabrictool.applier.apply import Applier, Interrupt
from fabrictool.applier.journal import Journal
from fabrictool.applier.state import FabricFolder, operation_id
from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import InterruptedByUserError, InvalidInputError, StaleError
from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan
from fabrictool.domain.specs import Address, AgentSpec

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", node="n", replica="m/0", model="m", source="x", engine="vllm",
    hubs=(Address("h", 1),),
)  # fmt: skip
ADDRESS = "replica/m/0"


def operation(number):
    return operation_id("", ADDRESS, number)


class FakeCluster:
    """Every started unit runs; `ready` says which of them serve."""

    name = "c"

    def __init__(self, **states):
        self.states = states
        self.told = []
        self.on_status = lambda: None

    def observe(self):
        units = [ObservedUnit(address=ADDRESS, operation=o, state=s, spec_digest="") for o, s in self.states.items()]
        return ClusterFacts(cluster="c", known=True, units=tuple(units))

    def state(self, name):
        return self.states.get(name)

    def prepare(self, name, spec, secrets):
        self.states[name] = "prepared"

    def start(self, name):
        self.told.append(("start", name))
        self.states[name] = "running"

    def stop(self, name):
        self.told.append(("stop", name))
        self.states[name] = "ended"

    def forget(self, name):
        self.told.append(("forget", name))
        del self.states[name]

    def status_url(self, name):
        self.on_status()
        return ""


class FakeTrust:
    def root(self):
        pass

    def provider(self, name):
        pass

    def session_files(self, provider, role, *, now, seconds):
        return {}


class Silent:
    def step(self, *_):
        pass


def plan(*actions, facts=None, lineage=""):
    return Plan(
        fabric="f", lineage=lineage, blueprint_digest="b", read_set=facts or {}, actions=actions,
        placement=Placement(), forecast=Forecast(models=(), cost_per_hour=0, currency="", power_w=0, basis=""),
        certificate=Certificate(solver="", seed=0, optimal=True, stages=(), tables_sha256=""),
    )  # fmt: skip


def action(kind, new=None, old=None):
    names = {"operation": operation(new) if new else "", "former": operation(old) if old else ""}
    return Action(kind=kind, address=ADDRESS, cluster="c", summary="", spec=SPEC if new else None, **names)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """An applier over a fake cluster; units are ready at once."""
    monkeypatch.setattr(module, "_readiness", lambda *_: (True, ""))

    def make(cluster):
        return Applier(
            folder=FabricFolder(tmp_path), trust=FakeTrust(), clusters={"c": cluster}, clock=SystemClock(),
            reporter=Silent(), keys=None, read_set=lambda: facts(cluster), interrupt=Interrupt(),
        )  # fmt: skip

    return make


def facts(cluster):
    from fabrictool.applier.planning import unit_facts

    return unit_facts(Observed(clusters={"c": cluster.observe()}))


def test_a_second_ctrl_c_leaves_the_old_replica_serving(bench, monkeypatch):
    monkeypatch.setattr(module, "_readiness", lambda *_: (False, "loading"))
    cluster = FakeCluster(**{operation(1): "running"})
    applier = bench(cluster)
    cluster.on_status = applier.interrupt.press
    with pytest.raises(InterruptedByUserError):
        applier.apply(plan(action("replace", new=2, old=1), facts=facts(cluster)))
    assert cluster.told == [("start", operation(2))]
    assert cluster.states == {operation(1): "running", operation(2): "running"}


@pytest.mark.parametrize(("stop_first", "order"), [(False, ["start", "stop"]), (True, ["stop", "start"])])
def test_a_replacement_stops_the_old_one_first_where_there_is_no_room(bench, stop_first, order):
    cluster = FakeCluster(**{operation(1): "running"})
    wanted = msgspec.structs.replace(action("replace", new=2, old=1), stop_first=stop_first)
    bench(cluster).apply(plan(wanted, facts=facts(cluster)))
    assert [verb for verb, _ in cluster.told if verb != "forget"] == order
    assert cluster.states == {operation(2): "running"}


def test_a_second_ctrl_c_keeps_the_evidence_of_the_dead(bench, monkeypatch):
    monkeypatch.setattr(module, "_readiness", lambda *_: (False, "loading"))
    cluster = FakeCluster(**{operation(1): "killed"})
    applier = bench(cluster)
    cluster.on_status = applier.interrupt.press
    with pytest.raises(InterruptedByUserError):
        applier.apply(plan(action("create", new=2)))
    assert operation(1) in cluster.states


def test_a_unit_that_the_plan_did_not_see_makes_it_stale(bench):
    cluster = FakeCluster()
    wanted = plan(action("create", new=1), facts={f"unit/{ADDRESS}": "absent"})
    cluster.states["another-g1-00000000"] = "running"
    with pytest.raises(StaleError, match="FT4004"):
        bench(cluster).apply(wanted)
    assert cluster.told == []


def test_an_operation_that_was_started_and_is_gone_is_never_started_again(bench, tmp_path):
    cluster = FakeCluster()
    bench(cluster).apply(plan(action("create", new=1)))
    lineage = FabricFolder(tmp_path).read_state().lineage
    cluster.states.clear()
    late = Action(
        kind="create", address=ADDRESS, cluster="c", summary="", operation=operation_id(lineage, ADDRESS, 1), spec=SPEC
    )
    cluster.told.clear()
    with pytest.raises(StaleError, match="was started before"):
        bench(cluster).apply(plan(late, lineage=lineage))
    assert cluster.told == []


def test_a_crash_between_the_state_and_the_journals_end_is_no_stale_plan(bench, monkeypatch):
    cluster = FakeCluster()
    wanted = plan(action("create", new=1))
    write = Journal.write

    def crash(self, kind, **rest):
        if kind == "end":
            raise KeyboardInterrupt
        write(self, kind, **rest)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Journal, "write", crash)
        bench(cluster).apply(wanted)
    assert bench(cluster).apply(wanted) is False
    assert cluster.told == [("start", operation(1))]


@pytest.mark.parametrize(
    "change",
    [{"cluster": "other"}, {"operation": "x"}, {"operation": operation(1).replace("m-0", "m-1")}, {"spec": None},
     {"spec": msgspec.structs.replace(SPEC, provider="../../etc")}],
)  # fmt: skip
def test_an_edited_plan_is_refused_before_anything_is_done(bench, change):
    cluster = FakeCluster()
    edited = msgspec.structs.replace(action("create", new=1), **change)
    with pytest.raises(InvalidInputError, match="FT4006"):
        bench(cluster).apply(plan(edited))
    assert cluster.told == []


def test_a_torn_line_takes_no_other_line_along(tmp_path):
    journal = Journal(tmp_path, "p", SystemClock())
    journal.write("begin")
    with (tmp_path / "p.ndjson").open("ab") as file:
        file.write(b'{"at":1.0,"plan":"p","kind":"inte')
    journal.write("end")
    assert [entry.kind for entry in journal.entries()] == ["begin", "end"]
    assert journal.finished


def test_the_tenth_generation_is_younger_than_the_ninth():
    units = [ObservedUnit(address=ADDRESS, operation=operation(n), state="killed", spec_digest="") for n in (2, 10, 9)]
    facts_ = ClusterFacts(cluster="c", known=True, units=tuple(units))
    assert facts_.unit(ADDRESS).operation == operation(10)


def test_an_agent_without_a_gateway_is_ready_when_its_engine_is(monkeypatch):
    from fabrictool.status.documents import AgentStatus, EngineStatus

    document = AgentStatus(
        release="0", at=1.0, started_at=1.0, fabric="f", provider="p", site="s", cluster="c", node="n", replica="m/0",
        model="m", session="aa", lifecycle="SERVING", accepting=True, in_flight=0, ends_at=None,
        certificate_ends_at=1.0, engine=EngineStatus(engine="reference", state="ready"), links=[], dial_errors={},
        registry_root="00",
    )  # fmt: skip
    monkeypatch.setattr(module, "fetch", lambda *_, **__: document)
    assert module._readiness("http://x", msgspec.structs.replace(SPEC, hubs=())) == (True, "")
    assert module._readiness("http://x", SPEC)[0] is False


def test_state_remembers_the_unit_until_its_own_end(bench, tmp_path):
    cluster = FakeCluster()
    bench(cluster).apply(plan(action("create", new=1)))
    assert json.loads((tmp_path / "state.json").read_bytes())["units"][ADDRESS]["operation"] == operation(1)
