"""Applying against a cluster that only remembers what it was told: interrupts, stale plans, crashes."""

import contextlib
import json
from dataclasses import replace

import msgspec
import pytest

from fabrictool.applier import driver
from fabrictool.applier.apply import Applier
from fabrictool.applier.journal import Journal
from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import (
    AppliedInPartError,
    FabrictoolError,
    InterruptedByUserError,
    InvalidInputError,
    StaleError,
    UnreachableError,
)
from fabrictool.clusters.joined import JoinedCluster
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
from fabrictool.domain.plan import Action, Band, Certificate, Forecast, ModelForecast, Placement, Plan
from fabrictool.domain.specs import AgentSpec, HostPort
from fabrictool.domain.state import State, operation_id
from fabrictool.mesh.identity import describe_chain
from fabrictool.planner.drift import stuck
from fabrictool.planner.readset import unit_facts
from fabrictool.planner.succession import SIGNAL_SLACK_S, UNKNOWN_LOAD_S
from fabrictool.state.controllers import accept_controller, write_controller
from fabrictool.state.fabric import Fabric
from fabrictool.state.folder import FabricFolder
from fabrictool.state.truststore import TrustStore
from tests.manual_clock import ManualClock

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m", source="x", engine="vllm",
    hubs=(HostPort("h", 1),),
)  # fmt: skip
ADDRESS = "replica/m/0"


def operation(number):
    return operation_id("", ADDRESS, number)


class FakeCluster:
    """Every started unit runs; `ready` says whether units serve, `refused` which starts fail."""

    name = "c"
    poll_s = 0.0

    def __init__(self, *, ready=True, refused=(), **states):
        self.states = states
        self.ready = ready
        self.refused = refused
        self.told = []
        self.on_look = lambda: None

    def observe(self, *, brief=False, patient=False):
        if brief:
            self.on_look()
        units = [
            ObservedUnit(
                address=address_of(o), operation=o, state=s, spec_digest="", ready=s == "running" and self.ready,
                detail="" if self.ready else "loading",
            )
            for o, s in self.states.items()
        ]  # fmt: skip
        return ClusterFacts(cluster="c", known=True, units=tuple(units))

    def start(self, units):
        for unit in units:
            self.told.append(("start", unit.operation))
            if unit.operation not in self.refused:
                self.states[unit.operation] = "running"
        error = UnreachableError.of("FT5404", "no")
        return {unit.operation: error for unit in units if unit.operation in self.refused}

    def stop(self, names):
        for name in names:
            self.told.append(("stop", name))
            self.states[name] = "ended"

    def kill(self, names):
        for name in names:
            self.told.append(("kill", name))
            self.states[name] = "killed"

    def forget(self, names):
        for name in names:
            self.told.append(("forget", name))
            del self.states[name]

    def log_tail(self, name, lines):
        return []


def address_of(name):
    """Of an operation's id, for the two replicas that these tests know."""
    return "replica/m/1" if name.startswith("replica-m-1") else ADDRESS


class FakeTrust:
    exists = False

    def root(self):
        pass

    def provider(self, name):
        pass

    def check_sessions(self, provider, role, model="", *, now):
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
    """An applier over a fake cluster."""
    monkeypatch.setattr(driver, "TICK_S", 0.0)

    def make(cluster):
        fabric = Fabric("f", FabricFolder(tmp_path), FakeTrust(), {"c": cluster})
        return Applier(fabric, SystemClock(), Silent(), None, lambda _, observed: unit_facts(observed), checked=True)

    return make


def facts(cluster):
    return unit_facts(Observed(clusters={"c": cluster.observe()}))


def test_a_second_ctrl_c_leaves_the_old_replica_serving(bench):
    cluster = FakeCluster(ready=False, **{operation(1): "running"})
    applier = bench(cluster)
    cluster.on_look = applier.interrupt.press
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


class FakeJoined(FakeCluster, JoinedCluster):
    """Nodes that joined by themselves: what is to end there, a controller of their provider has to say."""

    provider = "p"


def test_a_controller_that_has_ended_is_said_before_anything_is_deleted(bench, tmp_path):
    clock = ManualClock(wall=SystemClock().wall())
    trust = TrustStore(tmp_path / "trust")
    trust.init("f", now=clock.wall())
    trust.issue("p", now=clock.wall())
    write_controller(trust, "p", tmp_path / "controller", days=2, now=clock.wall())
    accept_controller(trust, tmp_path / "controller", now=clock.wall())
    cluster = FakeJoined(**{operation(1): "running"})
    applier = bench(cluster)
    applier = replace(applier, fabric=replace(applier.fabric, trust=trust), clock=clock)
    wanted = plan(action("delete", old=1), facts=facts(cluster))
    clock.advance(3 * 86400.0)
    with pytest.raises(FabrictoolError, match="FT6005"):
        applier.apply(wanted)
    assert cluster.told == []
    clock.advance(-2 * 86400.0)
    applier.apply(wanted)
    assert cluster.told[0] == ("stop", operation(1))


class FakeBatch(FakeCluster):
    """Keeps what it was given."""

    def start(self, units):
        self.given = list(units)
        return super().start(units)


@pytest.mark.parametrize(("days", "count"), [(90, 3), (3, 2), (1, 0)])
def test_what_may_follow_a_job_is_prepared_with_it_each_with_a_session_that_lasts(bench, tmp_path, days, count):
    clock = ManualClock(wall=SystemClock().wall())
    trust = TrustStore(tmp_path / "trust")
    trust.init("f", now=clock.wall())
    trust.issue("p", now=clock.wall() - 60.0, days=days)
    cluster = FakeBatch()
    applier = bench(cluster)
    fabric = replace(applier.fabric, trust=trust, stated_waits={"c": {"n": 5000.0}})
    applier = replace(applier, fabric=fabric, clock=clock)
    spec = msgspec.structs.replace(SPEC, walltime_s=86000.0, successors=3)
    applier.apply(plan(msgspec.structs.replace(action("create", new=1), spec=spec)))
    (unit,) = cluster.given
    lineage = applier.fabric.folder.read_state().lineage
    assert [f.operation for f in unit.followers] == [operation_id(lineage, ADDRESS, n + 2) for n in range(count)]
    assert unit.lead_s == 5000.0 + UNKNOWN_LOAD_S + spec.drain_s + SIGNAL_SLACK_S, "as the inventory states the wait"
    keys = {follower.files["identity/session.key"] for follower in (unit, *unit.followers)}
    assert len(keys) == count + 1
    for number, follower in enumerate(unit.followers, start=2):
        described = describe_chain(follower.files["identity/session.crt"])
        assert described.end - clock.wall() >= number * 86000.0


def test_a_job_that_a_deleted_unit_had_submitted_in_the_moment_before_is_told_to_leave(bench):
    cluster = FakeCluster(**{operation(1): "running"})
    told = facts(cluster)
    cluster.on_look = lambda: cluster.states.setdefault(operation(2), "running")
    bench(cluster).apply(plan(action("delete", old=1), facts=told))
    assert [what for what in cluster.told if what[0] == "stop"] == [("stop", operation(1)), ("stop", operation(2))]
    assert cluster.states == {}, "both have ended, and their files are gone"


class FakeFollowed(FakeCluster):
    """Its replicas run by another spec than the one that was given."""

    def observe(self, **more):
        seen = super().observe(**more)
        units = tuple(msgspec.structs.replace(unit, spec_digest="another") for unit in seen.units)
        return msgspec.structs.replace(seen, units=units)


def test_one_that_the_job_before_it_had_submitted_by_a_former_spec_is_told_of(bench):
    cluster = FakeFollowed()
    with pytest.raises(AppliedInPartError, match=r"FT5113.*as it was prepared then"):
        bench(cluster).apply(plan(action("create", new=1)))
    assert cluster.states == {operation(1): "running"}, "it serves"


def test_a_second_ctrl_c_keeps_the_evidence_of_the_dead(bench):
    cluster = FakeCluster(ready=False, **{operation(1): "killed"})
    applier = bench(cluster)
    cluster.on_look = applier.interrupt.press
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


def test_nothing_that_serves_is_touched_after_a_canary_failed(bench):
    other = "replica/m/1"
    names = {n: operation_id("", other, n) for n in (1, 2)}
    cluster = FakeCluster(refused=[operation(2)], **{operation(1): "running", names[1]: "running"})
    second = Action(
        kind="replace", address=other, cluster="c", summary="", operation=names[2], former=names[1], spec=SPEC
    )
    with pytest.raises(AppliedInPartError) as caught:
        bench(cluster).apply(plan(action("replace", new=2, old=1), second, facts=facts(cluster)))
    assert [problem.code for problem in caught.value.problems] == ["FT5404", "FT4104"]
    assert cluster.told == [("start", operation(2))]
    assert cluster.states == {operation(1): "running", names[1]: "running"}


def test_all_new_replicas_are_started_at_once_and_replacements_one_after_the_other():
    from fabrictool.applier.rollout import waves

    def act(kind, address):
        return Action(kind=kind, address=address, cluster="c", summary="", spec=None if kind == "delete" else SPEC)

    found = waves(
        [act("create", f"replica/a/{n}") for n in range(3)]
        + [act("replace", "replica/a/7"), act("replace", "replica/a/8"), act("replace", "replica/b/0")]
        + [act("delete", "replica/a/9"), act("delete", "replica/b/9"), act("delete", "gateway/main")]
    )
    assert [[(a.kind, a.address[-3:]) for a in wave] for wave in found] == [
        [("create", "a/0"), ("create", "a/1"), ("create", "a/2")],
        [("replace", "a/7"), ("replace", "b/0")],
        [("replace", "a/8")],
        [("delete", "a/9"), ("delete", "b/9")],
        [("delete", "ain")],
    ]


def test_gateways_are_replaced_one_after_the_other():
    from fabrictool.applier.rollout import waves

    def act(kind, address):
        return Action(kind=kind, address=address, cluster="c", summary="", spec=None if kind == "delete" else SPEC)

    cut = waves(
        [
            *(act("create", name) for name in ("gateway/a", "gateway/b", "replica/a/0")),
            *(act("replace", name) for name in ("gateway/c", "gateway/d", "replica/a/7")),
            *(act("delete", name) for name in ("replica/a/9", "gateway/e", "gateway/f")),
        ]
    )
    assert [[(a.kind, a.address[-3:]) for a in wave] for wave in cut] == [
        [("create", "y/a"), ("create", "y/b")],
        [("create", "a/0")],
        [("replace", "y/c")],
        [("replace", "y/d")],
        [("replace", "a/7")],
        [("delete", "a/9")],
        [("delete", "y/e"), ("delete", "y/f")],
    ]


def test_state_remembers_the_unit_until_its_own_end(bench, tmp_path):
    cluster = FakeCluster()
    bench(cluster).apply(plan(action("create", new=1)))
    assert json.loads((tmp_path / "state.json").read_bytes())["units"][ADDRESS]["operation"] == operation(1)


def test_the_starts_of_healings_are_in_the_state_that_operators_share(bench, tmp_path):
    """Not in a journal of one machine: two who reconcile the same fabric have one cap."""
    cluster = FakeCluster()
    bench(cluster).apply(plan(action("create", new=1)))
    state = json.loads((tmp_path / "state.json").read_bytes())
    assert state["healed"] == {}
    second = operation_id(state["lineage"], ADDRESS, 2)
    change = msgspec.structs.replace(action("replace", new=2, old=1), operation=second)
    healing = plan(change, facts=facts(cluster), lineage=state["lineage"])
    bench(cluster).apply(healing, heals=True)
    (starts,) = json.loads((tmp_path / "state.json").read_bytes())["healed"].values()
    assert len(starts) == 1


def kept(number):
    return Action(kind="keep", address=ADDRESS, cluster="c", summary="", former=operation(number))


def test_what_is_kept_and_does_not_serve_yet_is_waited_for(bench):
    cluster = FakeCluster(ready=False, **{operation(1): "running"})
    cluster.spec = lambda _: SPEC
    looks = []

    def look():
        looks.append(1)
        cluster.ready = len(looks) > 5

    cluster.on_look = look
    assert bench(cluster).apply(plan(kept(1), facts=facts(cluster)))
    assert len(looks) > 5
    assert cluster.told == []


def test_what_is_kept_and_never_serves_is_no_success(bench, monkeypatch):
    monkeypatch.setattr("fabrictool.applier.wave.READY_MARGIN_S", 0.0)
    cluster = FakeCluster(ready=False, **{operation(1): "running"})
    cluster.spec = lambda _: msgspec.structs.replace(SPEC, start_timeout_s=0.05)
    with pytest.raises(AppliedInPartError) as caught:
        bench(cluster).apply(plan(kept(1), facts=facts(cluster)))
    assert [problem.code for problem in caught.value.problems] == ["FT5106"]
    assert "loading" in caught.value.problems[0].message


def test_an_apply_without_changes_is_the_last_that_was_applied(bench, tmp_path):
    """An interrupted apply has said what is wanted; the one that finds it all running completes it."""
    cluster = FakeCluster(**{operation(1): "running"})
    cluster.spec = lambda _: SPEC
    done = plan(kept(1), facts=facts(cluster))
    assert bench(cluster).apply(done)
    assert json.loads((tmp_path / "state.json").read_text())["applied_blueprint"] == "b"
    assert not bench(cluster).apply(done)


def test_what_runs_is_what_was_applied_only_once_all_is_done(bench, tmp_path):
    """Else a plan after an apply in part, or a destroy that was interrupted, would leave what is there as it is."""
    cluster, seen = FakeCluster(), []
    applied = msgspec.structs.replace(plan(action("create", new=1), facts=facts(cluster)), situation="S")
    assert bench(cluster).apply(applied)

    def situation():
        return json.loads((tmp_path / "state.json").read_text()).get("applied_situation", "")

    assert situation() == "S"
    cluster.on_look = lambda: seen.append(situation())
    lineage = json.loads((tmp_path / "state.json").read_text())["lineage"]
    bench(cluster).apply(plan(action("delete", old=1), facts=facts(cluster), lineage=lineage))
    assert seen
    assert set(seen) == {""}
    assert situation() == ""


def test_what_was_forecast_is_kept_to_be_held_against_what_is_measured(bench, tmp_path):
    band = Band(0.5, 0.4, 0.6)
    tiny = ModelForecast(
        model="tiny", replicas=1, utilisation=0.5, served=1.0, ttft_p95_s=band, tpot_p95_s=band, e2e_p95_s=band,
        slo="meets",
    )  # fmt: skip
    cluster = FakeCluster(**{operation(1): "running"})
    cluster.spec = lambda _: SPEC
    done = plan(kept(1), facts=facts(cluster))
    bench(cluster).apply(msgspec.structs.replace(done, forecast=msgspec.structs.replace(done.forecast, models=(tiny,))))
    there = {"value": 0.5, "low": 0.4, "high": 0.6}
    assert json.loads((tmp_path / "state.json").read_text())["forecast"] == {
        "tiny": {"ttft_p95_s": there, "tpot_p95_s": there, "slo": "meets"}
    }


@pytest.mark.parametrize("blocked", ["held", "invalid"])
def test_a_job_that_can_never_start_is_not_waited_for(bench, blocked):
    class Stuck(FakeCluster):
        def observe(self, **how):
            seen = super().observe(**how)
            units = [msgspec.structs.replace(unit, state="pending", job="7", blocked=blocked) for unit in seen.units]
            return msgspec.structs.replace(seen, units=tuple(units))

    cluster = Stuck()
    with pytest.raises(AppliedInPartError) as caught:
        bench(cluster).apply(plan(action("create", new=1)))
    assert [problem.code for problem in caught.value.problems] == ["FT5111"]
    assert cluster.told == [("start", operation(1))], "its job stays where it is"
    seen = Evidence(
        fabric="f", lineage="", at=0.0, clusters={"c": cluster.observe()}, specs={}, state=State(fabric="f")
    )
    assert caught.value.problems == (stuck(seen)[operation(1)],), "`plan` says the same of it, word for word"


class Pressing:
    """A reporter that presses Ctrl-C at the first failure."""

    def __init__(self):
        self.interrupt = None

    def step(self, _action, kind, _text):
        if kind == "failed":
            self.interrupt.press()


def test_what_failed_is_said_also_after_ctrl_c(bench):
    """Progress lines give no reasons: they come with the error that ends the command."""
    applier = replace(bench(FakeCluster(refused=[operation(1)])), reporter=Pressing())
    applier.reporter.interrupt = applier.interrupt
    with pytest.raises(InterruptedByUserError) as caught:
        applier.apply(plan(action("create", new=1)))
    assert [problem.code for problem in caught.value.problems] == ["FT5404", "FT4103"]


def test_what_failed_is_said_also_when_the_lease_is_lost(bench, monkeypatch):
    def lost(*_):
        raise StaleError.of("FT4201", "the lease was lost")

    monkeypatch.setattr("fabrictool.applier.apply._Run._forget_dead", lost)
    with pytest.raises(StaleError) as caught:
        bench(FakeCluster(refused=[operation(1)])).apply(plan(action("create", new=1)))
    assert [problem.code for problem in caught.value.problems] == ["FT5404", "FT4201"]


def no_space(*_args, **_more):
    raise FabrictoolError.of("FT4301", "no space left")


def test_a_full_disk_keeps_nobody_from_stopping(bench, monkeypatch):
    cluster = FakeCluster(**{operation(1): "running"})
    applier = bench(cluster)
    monkeypatch.setattr(Journal, "write", no_space)
    monkeypatch.setattr(FabricFolder, "write_state", no_space)
    assert applier.apply(plan(action("delete", old=1), facts=facts(cluster)))
    assert cluster.told == [("stop", operation(1)), ("forget", operation(1))]
    assert {problem.code for problem in applier.complaints} == {"FT4301"}
    with pytest.raises(FabrictoolError):
        applier.apply(plan(action("create", new=2), facts=facts(cluster)))
    assert ("start", operation(2)) not in cluster.told


def test_a_fabric_of_that_name_from_another_state_is_left_alone_and_its_owner_named(bench):
    class Shared(FakeCluster):
        def observe(self, **how):
            theirs = ObservedUnit(
                address=ADDRESS, operation="x-g1-0", state="running", spec_digest="", lineage="a" * 16
            )
            seen = super().observe(**how)
            return msgspec.structs.replace(seen, owner=f"{'a' * 16} alice@op1", units=(*seen.units, theirs))

    cluster = Shared()
    with pytest.raises(StaleError) as caught:
        change = msgspec.structs.replace(action("create", new=1), operation=operation_id("b" * 16, ADDRESS, 1))
        bench(cluster).apply(plan(change, lineage="b" * 16))
    (problem,) = caught.value.problems
    assert (problem.code, "alice@op1" in problem.message, cluster.told) == ("FT5410", True, [])


def test_what_was_waited_for_is_known_to_have_served_and_tells_no_time_of_a_start(bench, tmp_path):
    cluster = FakeCluster(ready=False, **{operation(1): "running"})
    cluster.spec = lambda _: SPEC
    cluster.on_look = lambda: setattr(cluster, "ready", True)
    bench(cluster).apply(plan(kept(1), facts=facts(cluster)))
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["served_on"], state["loads"]) == (["c"], {})


class Timed(FakeCluster):
    """Its units began at second 100 of a minute that is long over; those that `die` end at once."""

    def __init__(self, *, die=(), **states):
        super().__init__(**states)
        self.die = die

    def observe(self, *, brief=False, patient=False):
        facts = super().observe(brief=brief, patient=patient)
        units = tuple(msgspec.structs.replace(unit, begins_at=100.0) for unit in facts.units)
        return msgspec.structs.replace(facts, units=units)

    def start(self, units):
        failed = super().start(units)
        self.states |= {unit.operation: "ended" for unit in units if unit.operation in self.die}
        return failed


def test_what_a_start_took_is_kept_by_model_cluster_and_loader(bench, tmp_path):
    spec = msgspec.structs.replace(SPEC, loader="eager")
    bench(Timed()).apply(plan(msgspec.structs.replace(action("create", new=1), spec=spec)))
    state = json.loads((tmp_path / "state.json").read_bytes())
    assert list(state["loads"]) == [f"{SPEC.model}@c/eager"]


@pytest.mark.parametrize(("loader", "failed"), [("streamer", ["@c/streamer"]), ("default", [])])
def test_a_loader_with_which_a_replica_ends_is_known_to_fail(bench, tmp_path, loader, failed):
    spec = msgspec.structs.replace(SPEC, loader=loader, loaders=("default", "streamer"))
    with pytest.raises(FabrictoolError):
        bench(Timed(die=[operation(1)])).apply(plan(msgspec.structs.replace(action("create", new=1), spec=spec)))
    state = json.loads((tmp_path / "state.json").read_bytes())
    assert state["failed_loaders"] == [f"{SPEC.model}{key}" for key in failed]
