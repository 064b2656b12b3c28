"""Replicas that ended for want of requests: who starts again, and what a plan and a look leave as it is."""

import msgspec
import pytest

from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AdapterSpec, AgentSpec, GatewaySpec, HostPort, WakeRule
from fabrictool.domain.state import Applied, State, operation_id
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.dormant import UNKNOWN_LOAD_S, UNKNOWN_WAIT_S
from fabrictool.planner.healing import MOST_STARTS, heal

NOW = 1_800_000_000.0
LINEAGE = "0123456789abcdef"
IDLE_AFTER_S = 900.0
GATEWAY = GatewaySpec(
    fabric="f", provider="p", site="s", cluster="c", name="main", mesh=HostPort("h", 1), wakes={"m": WakeRule(60.0, 0)}
)


def agent(number, **more):
    usual = {"model": "m", "source": "x", "engine": "vllm", "idle_after_s": IDLE_AFTER_S}
    place = {"fabric": "f", "provider": "p", "site": "s", "cluster": "c", "partition": "gpu", "replica": f"m/{number}"}
    return AgentSpec(**place, **(usual | more))


def seen(replicas, wanted=None, specs=None, known=True, **state):
    """`replicas`: for each number its state, or "dormant"; `wanted` is what the gateway's requests wait for."""
    specs = specs or [agent(number) for number in range(len(replicas))]
    units, applied = [], {"gateway/main": Applied(cluster="c", spec=GATEWAY)}
    for number, (what, spec) in enumerate(zip(replicas, specs, strict=True)):
        address = f"replica/m/{number}"
        applied[address] = Applied(cluster="c", spec=spec)
        if what:
            about = {"dormant": {"state": "ended", "dormant": True, "reason": "nobody asked"}}.get(
                what, {"state": what}
            )
            living = {"ready": what == "running", "spec_digest": spec_digest(spec), "job": "7"}
            operation = operation_id(LINEAGE, address, 1)
            units.append(ObservedUnit(address=address, operation=operation, **about, **living))
    operation = operation_id(LINEAGE, "gateway/main", 1)
    units.append(
        ObservedUnit(
            address="gateway/main", operation=operation, state="running", ready=True, spec_digest=spec_digest(GATEWAY),
            wanted=wanted or {},
        )
    )  # fmt: skip
    told = {unit.operation: applied[unit.address].spec for unit in units}
    memory = State(lineage=LINEAGE, serial=1, applied_units=applied, **state)
    facts = ClusterFacts(cluster="c", known=known, units=tuple(units) if known else ())
    return Evidence(fabric="f", lineage=LINEAGE, at=NOW, clusters={"c": facts}, specs=told, state=memory)


def started(evidence):
    healing = heal(evidence, {}, now=NOW)
    return [action.address for action in healing.plan.changes if action.kind == "create"]


@pytest.mark.parametrize(
    ("replicas", "wanted", "starts"),
    [
        (["dormant", "dormant"], {}, []),
        (["dormant", "dormant"], {"m": 1}, ["replica/m/0"]),
        (["dormant", "dormant"], {"other": 1}, []),
        (["pending", "dormant"], {"m": 1}, []),
        (["running", "dormant"], {"m": 1}, []),
        (["running", "dormant", "dormant"], {"m": 2}, ["replica/m/1"]),
        (["dormant", "running"], {"m": 2}, ["replica/m/0"]),
        (["dormant", "dormant"], {"m": 9}, ["replica/m/0", "replica/m/1"]),
        (["ended", "dormant"], {}, ["replica/m/0"]),
        (["", "dormant"], {"m": 1}, ["replica/m/0", "replica/m/1"]),
    ],
)
def test_as_many_start_as_requests_wait_for_and_are_not_on_their_way(replicas, wanted, starts):
    assert started(seen(replicas, wanted)) == starts


def test_it_is_no_drift_and_a_plan_keeps_it_whatever_it_would_be_told_next():
    evidence = seen(["dormant"])
    healing = heal(evidence, {}, now=NOW)
    assert (healing.drift, healing.held, healing.dormant) == ((), (), 1)
    other = msgspec.structs.replace(agent(0), options={"max-num-seqs": "4"})
    wanted = {"replica/m/0": WantedUnit("replica/m/0", "c", other, "")}
    (kept,) = [action for action in actions(wanted, evidence) if action.address == "replica/m/0"]
    assert (kept.kind, kept.spec, kept.operation, kept.former) == ("keep", other, "", "")
    assert "nobody asked" in kept.reason
    (asked,) = [action for action in actions(wanted, seen(["dormant"], {"m": 1})) if action.address == "replica/m/0"]
    assert (asked.kind, asked.spec, asked.operation) == ("create", other, operation_id(LINEAGE, "replica/m/0", 2))


def test_a_cluster_that_does_not_answer_is_unknown_and_starts_nothing():
    assert started(seen(["dormant"], {"m": 1}, known=False)) == []


def test_one_that_leaves_serves_nobody_any_more():
    evidence = seen(["running", "dormant"], {"m": 1})
    facts = evidence.clusters["c"]
    units = tuple(
        msgspec.structs.replace(unit, waits_for="leaving", ready=False) if unit.address == "replica/m/0" else unit
        for unit in facts.units
    )
    leaving = msgspec.structs.replace(evidence, clusters={"c": msgspec.structs.replace(facts, units=units)})
    assert started(leaving) == ["replica/m/1"]


def test_of_a_pair_both_halves_start():
    specs = [agent(0, phase="prefill"), agent(1, phase="decode"), agent(2, phase="decode")]
    assert started(seen(["dormant"] * 3, {"m": 1}, specs)) == ["replica/m/0", "replica/m/1"]
    assert started(seen(["running", "dormant", "dormant"], {"m": 1}, specs)) == ["replica/m/1"]


def test_a_request_for_an_adapter_starts_its_base():
    law = {"law": AdapterSpec(source="file:///law", rank=8)}
    evidence = seen(["dormant", "dormant"], {"law": 1}, [agent(0, adapters=law), agent(1, adapters=law)])
    assert started(evidence) == ["replica/m/0"]
    assert set(heal(evidence, {}, now=NOW).expected) == {"law"}


def test_starts_for_requests_are_no_sign_of_trouble():
    """Each quarter of an hour somebody may ask once; what dies as soon as it starts is capped all the same."""
    usual = [NOW - 600.0 * n for n in range(MOST_STARTS)]
    assert started(seen(["dormant"], {"m": 1}, healed={"replica/m/0": usual})) == ["replica/m/0"]
    often = [NOW - 60.0 * n for n in range(2 * MOST_STARTS)]
    assert heal(seen(["dormant"], {"m": 1}, healed={"replica/m/0": often}), {}, now=NOW).capped == ("replica/m/0",)


@pytest.mark.parametrize(
    ("replica", "more", "state", "expected"),
    [
        ("dormant", {}, {}, NOW + UNKNOWN_WAIT_S + UNKNOWN_LOAD_S),
        ("dormant", {}, {"waits": {"c/gpu": [10.0, 300.0, 20.0]}, "loads": {"m": [90.0]}}, NOW + 20.0 + 90.0),
        ("pending", {"begins_at": NOW + 500.0}, {"loads": {"m": [90.0]}}, NOW + 590.0),
        ("pending", {"begins_at": NOW - 5.0}, {"loads": {"m": [90.0]}}, NOW + 90.0),
        ("pending", {}, {"waits": {"c/gpu": [10.0]}, "loads": {"m": [90.0]}}, NOW + 100.0),
    ],
)
def test_when_it_is_to_serve(replica, more, state, expected):
    evidence = seen([replica], {"m": 1}, **state)
    facts = evidence.clusters["c"]
    units = tuple(
        msgspec.structs.replace(unit, **more) if unit.address == "replica/m/0" else unit for unit in facts.units
    )
    evidence = msgspec.structs.replace(evidence, clusters={"c": msgspec.structs.replace(facts, units=units)})
    healing = heal(evidence, {}, now=NOW)
    assert healing.expected == {"m": pytest.approx(expected)}
    stated = msgspec.structs.replace(evidence.clusters["c"], stated_waits={"gpu": 7200.0})
    told = heal(msgspec.structs.replace(evidence, clusters={"c": stated}), {}, now=NOW).expected
    loading = state.get("loads", {"m": [UNKNOWN_LOAD_S]})["m"][0]
    assert told == (healing.expected if more else {"m": pytest.approx(NOW + 7200.0 + loading)})
    assert healing.waiting == (("c", operation_id(LINEAGE, "gateway/main", 1)),)
