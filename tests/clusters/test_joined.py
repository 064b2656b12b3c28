"""Nodes that joined the mesh, read as a cluster: what is a unit, what is free, and what nobody may say."""

import time
from contextlib import nullcontext

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.joined import JoinedCluster
from fabrictool.clusters.joined_facts import JoinedNodes
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, as_assigned
from fabrictool.mesh.identity import create_root, issue_provider, issue_session
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.status.fleet import FleetAssignment, FleetMember, FleetService, FleetStatus

DESCRIBED = ClusterSpec(
    site="s",
    kind="joined",
    partitions={
        "cpu": {"device": "cpu", "nodes": 4, "memory_per_node": "8GiB"},
        "pair": {"device": "a100-80g", "nodes": 4, "devices_per_node": 2},
        "single": {"device": "a100-80g", "nodes": 4},
    },
)
NODES = JoinedNodes("given", "f", "p", DESCRIBED)
GIB = 2**30
SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="given", partition="pair", replica="m/0", model="m", source="hf://m",
    engine="vllm", precision="bf16", context=4096, tp=2, max_num_seqs=64, device="a100-80g", devices=2, memory=5,
    walltime_s=60.0, job={}, visibility_variable="CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def member(session="1" * 32, **changes):
    row = FleetMember(
        session=session, role="agent", provider="p", site="s", cluster="given", node="host", lifecycle="SERVING",
        version=1, state="serving", linked=True, device="a100-80g", devices=2, memory=160 * GIB, assignable=True,
        idle=True, certificate_ends_at=100.0,
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def told(version=1, model="m", operation="op-1"):
    return FleetAssignment(
        by="c", version=version, model=model, engine="vllm", source="hf://m", precision="bf16", context=4096, tp=2,
        max_num_seqs=64, replica="m/0", operation=operation, lineage="abcdef01", partition="pair",
    )  # fmt: skip


def engine(lifecycle="SERVING", assigned=1, **changes):
    row = FleetService(
        service="s", replica="m/0", model="m", engine="vllm", lifecycle=lifecycle, accepting=True, assigned=assigned
    )
    return msgspec.structs.replace(row, **changes)


def assigned(*services, assignment=None, **changes):
    return member(assignment=assignment or told(), idle=False, services=list(services), **changes)


GIVEN_UP = engine("DOWN", given_up=True, note="FT7106 not here")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (assigned(), ("running", False, "engine", "on host, session 11111111: it was told")),
        (assigned(engine("JOIN")), ("running", False, "engine", "on host, session 11111111: its engine loads")),
        (assigned(engine()), ("running", True, "", "on host, session 11111111")),
        (
            assigned(engine(accepting=False)),
            ("running", False, "engine", "on host, session 11111111: its engine loads"),
        ),
        (assigned(engine(assigned=0)), ("running", False, "engine", "on host, session 11111111: it was told")),
        (assigned(engine(), state="suspected"), ("running", False, "engine", "on host, session 11111111: suspected")),
        (assigned(GIVEN_UP), ("ended", False, "", "FT7106 not here")),
        (assigned(engine(), state="left"), ("ended", False, "", "its node host left")),
        (assigned(engine(), state="evicted"), ("killed", False, "", "its node host is evicted")),
        (
            assigned(engine(), assignment=told(2, "")),
            ("running", False, "leaving", "on host, session 11111111: it was told"),
        ),
    ],
)
def test_what_a_member_says_is_a_units_state(row, expected):
    (unit,) = NODES.units([row])
    assert (unit.state, unit.ready, unit.waits_for, unit.detail or unit.reason) == expected
    assert (unit.address, unit.operation, unit.lineage) == ("replica/m/0", "op-1", "abcdef01")


@pytest.mark.parametrize(
    "row",
    [
        member(),
        assigned(engine("DOWN"), assignment=told(2, "")),
        assigned(engine(), assignment=told(operation="")),
        assigned(engine(), cluster="elsewhere"),
        assigned(engine(), provider="q"),
        assigned(engine(), role="gateway"),
    ],
)
def test_what_is_over_and_what_is_nobody_elses_is_no_unit(row):
    assert NODES.units([row]) == ()


def test_a_units_spec_is_what_the_planner_would_have_said():
    wanted = as_assigned(SPEC)
    assert wanted.assigned
    assert not SPEC.assigned
    assert NODES.spec(assigned()) == wanted
    assert NODES.units([assigned()])[0].spec_digest == spec_digest(wanted)
    assert NODES.units([assigned(engine(), assignment=told(2, ""))])[0].spec_digest == "", "it says no longer what"


def test_a_node_is_of_the_partition_with_the_most_that_it_has_all_of():
    rows = [
        (member(), "pair"),
        (member(devices=1), "single"),
        (member(devices=8), "pair"),
        (member(device="h100-sxm"), ""),
        (member(device="cpu", devices=1, memory=8 * GIB), "cpu"),
        (member(device="cpu", devices=1, memory=7 * GIB), ""),
    ]
    assert [NODES.partition_of(row) for row, _ in rows] == [name for _, name in rows]


def test_idle_are_those_that_could_be_told_something_now():
    rows = [
        member("1" * 32),
        assigned(engine(), session="2" * 32),
        assigned(GIVEN_UP, session="3" * 32),
        assigned(GIVEN_UP, session="4" * 32, assignment=told(operation="")),
        member("5" * 32, assignable=False),
        member("6" * 32, state="left", idle=False),
        member("7" * 32, devices=1),
    ]
    assert NODES.idle(rows) == {"cpu": 0, "pair": 2, "single": 1}


def test_a_node_where_it_was_given_up_comes_last_and_more_room_first():
    rows = [
        assigned(GIVEN_UP, session="1" * 32),
        member("2" * 32, services=[GIVEN_UP]),
        member("3" * 32, free=[10, 20]),
        member("4" * 32, free=[10, 30]),
    ]
    assert [row.session[0] for row in NODES.choices(rows, "pair", "m")] == ["4", "3", "2", "1"]
    assert [row.session[0] for row in NODES.choices(rows, "pair", "other")] == ["4", "3", "2", "1"]
    assert NODES.choices(rows, "cpu", "m") == []


def test_of_two_nodes_that_bear_one_operation_the_living_one_counts():
    rows = [assigned(engine(), session="1" * 32, state="left"), assigned(engine(), session="2" * 32)]
    for order in (rows, rows[::-1]):
        (unit,) = NODES.units(order)
        assert unit.state == "running"


def fleet(*members, fabric="f"):
    return FleetStatus(
        release="0", at=0.0, fabric=fabric, federation="x", session="g", role="gateway", root="", records=0,
        refused_records=0, vain_repairs=0, members=list(members), links=[],
    )  # fmt: skip


def cluster(ask, identity=nullcontext):
    return JoinedCluster("given", "f", "p", DESCRIBED, ask, identity)


def test_no_answer_and_another_fabrics_answer_are_unknown():
    def silent():
        raise UnreachableError.of("FT5204", "nobody", hint="later")

    facts = cluster(silent).observe()
    assert (facts.known, facts.reason, facts.hint, facts.idle) == (False, "nobody", "later", None)
    facts = cluster(lambda: fleet(fabric="g")).observe()
    assert not facts.known
    assert "belongs to g" in facts.reason
    assert cluster(lambda: fleet(member())).observe().idle == {"cpu": 0, "pair": 1, "single": 0}


def test_what_cannot_be_reached_is_no_obstacle_to_forgetting_and_one_to_stopping():
    def silent():
        raise UnreachableError.of("FT5204", "nobody")

    cluster(silent).forget(["op-1"])
    with pytest.raises(FabrictoolError, match="nobody"):
        cluster(silent).stop(["op-1"])
    with pytest.raises(FabrictoolError, match="FT5102"):
        cluster(lambda: fleet(assigned(engine()))).forget(["op-1"])
    cluster(lambda: fleet(member())).stop(["op-1"])  # nobody bears it: there is nothing to say


def test_a_plan_is_told_that_nobody_here_may_sign():
    def nobody():
        raise FabrictoolError.of("FT6109", "nobody may")

    units = [NewUnit("op-2", "replica/m/1", as_assigned(SPEC), {})]
    assert cluster(fleet, nobody).outlook(units) == ([], ["FT6109 nobody may"])


def test_a_plan_is_told_that_its_controller_may_end_before_a_session(tmp_path):
    now, day = time.time(), 86400.0
    root = create_root("t", now=now)
    for days, provider_days, warned in ((3, 90, True), (8, 90, False), (3, 3, False)):
        provider = issue_provider(root, "p", now=now, days=provider_days)
        files = IdentityFiles(tmp_path / f"{days}-{provider_days}")
        files.folder.mkdir()
        files.write(issue_session(provider, "controller", now=now, seconds=days * day), root)
        units = [NewUnit("op-2", "replica/m/1", as_assigned(SPEC), {})]
        outlooks, warnings = cluster(fleet, lambda files=files: nullcontext(files)).outlook(units)
        assert (outlooks, ["the controller of p ends in" in text for text in warnings]) == ([], [True] * warned)


def test_its_units_tell_what_the_mesh_says_of_them():
    there = cluster(lambda: fleet(assigned(GIVEN_UP)))
    assert there.spec("op-1") == as_assigned(SPEC)
    assert there.log_tail("op-1", 5) == ["FT7106 not here"]
    assert there.update([NewUnit("op-1", "replica/m/0", SPEC, {})])["op-1"].problems[0].code == "FT5408"
    with pytest.raises(FabrictoolError, match="FT5104"):
        there.spec("op-9")
    with pytest.raises(FabrictoolError, match="FT5408"):
        there.certificate("op-1")
