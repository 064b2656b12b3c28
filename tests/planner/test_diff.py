"""Wanted against observed: every kind of action, and that unknown is never absent."""

import pytest

from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, AgentTrust, GatewaySpec, HostPort
from fabrictool.domain.state import State, operation_id
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.readset import unit_facts
from fabrictool.planner.succession import Succession

COUNTED = {"replica/m/0": 7}


def agent(replica="m/0", cluster="a", **changes):
    fields = {
        "fabric": "f", "provider": "p", "site": "s", "cluster": cluster, "partition": "n", "replica": replica,
        "model": "m",
        "source": "file:///m", "engine": "reference",
    }  # fmt: skip
    return AgentSpec(**(fields | changes))


def gateway(**changes):
    fields = {
        "fabric": "f", "provider": "p", "site": "s", "cluster": "a", "name": "main",
        "listen": HostPort("h", 1), "mesh": HostPort("h", 2),
    }  # fmt: skip
    return GatewaySpec(**(fields | changes))


def address(spec):
    return f"replica/{spec.replica}" if isinstance(spec, AgentSpec) else "gateway/main"


def want(*specs):
    return {address(s): WantedUnit(address(s), s.cluster, s, "here") for s in specs}


def unit(spec, operation="op", state="running", **changes):
    return ObservedUnit(
        address=address(spec), operation=operation, state=state, spec_digest=spec_digest(spec), **changes
    )


def observed(unknown=(), **units):
    clusters = {name: ClusterFacts(cluster=name, known=True, units=tuple(found)) for name, found in units.items()}
    clusters |= {name: ClusterFacts(cluster=name, known=False, reason="no answer") for name in unknown}
    return Observed(clusters=clusters)


def plan(wanted, facts, specs=None, expiring=None):
    evidence = Evidence(
        fabric="f", lineage="l", at=0.0, clusters=facts.clusters, specs=specs or {}, state=State(generations=COUNTED)
    )
    found = actions(wanted, evidence, expiring or {})
    return [(a.kind, a.address, a.former) for a in found], found


def test_create_keep_and_delete():
    kept, gone = agent("m/0"), agent("m/9")
    kinds, _ = plan(want(kept, agent("m/1")), observed(a=[unit(kept, "k"), unit(gone, "g")]))
    assert kinds == [("create", "replica/m/1", ""), ("delete", "replica/m/9", "g"), ("keep", "replica/m/0", "k")]


def test_a_changed_spec_is_replaced_and_the_change_is_named():
    old, new = agent(context=1), agent(context=2)
    kinds, found = plan(want(new), observed(a=[unit(old, "o")]), {"o": old})
    assert kinds == [("replace", "replica/m/0", "o")]
    assert found[0].changes == ("context: 1 → 2",)
    assert found[0].operation == operation_id("l", "replica/m/0", 8)


def test_a_certificate_that_ends_soon_is_followed_by_a_new_session():
    spec = agent()
    assert plan(
        want(spec),
        observed(a=[unit(spec, "o")]),
        expiring={"o": Succession("certificate", "its certificate ends soon")},
    )[1][0].reason.startswith("its certificate")
    assert (
        plan(want(spec), observed(a=[unit(spec, "o")]), expiring={"other": Succession("certificate", "x")})[0][0][0]
        == "keep"
    )


@pytest.mark.parametrize(("state", "said"), [("killed", "was killed"), ("ended", "ended: why")])
def test_a_dead_unit_is_created_anew_with_the_reason(state, said):
    spec = agent()
    found = plan(want(spec), observed(a=[unit(spec, "o", state, reason="why" if state == "ended" else "")]))[1]
    assert found[0].kind == "create"
    assert said in found[0].reason


def test_nothing_happens_on_an_unknown_cluster():
    kinds, found = plan(want(agent(), agent("m/1", "b")), observed(unknown=["a"], b=[]))
    assert kinds == [("create", "replica/m/1", ""), ("unknown", "replica/m/0", "")]
    assert "no answer" in found[1].reason
    assert found[1].operation == ""


def test_a_unit_on_a_cluster_that_is_gone_from_sight_is_not_deleted():
    assert plan({}, observed(unknown=["a"], b=[]))[0] == []


def test_gateways_start_first_and_stop_last():
    assert [a for _, a, _ in plan(want(agent(), gateway()), observed(a=[]))[0]] == ["gateway/main", "replica/m/0"]
    both = observed(a=[unit(gateway(), "g"), unit(agent(), "r")])
    assert [a for _, a, _ in plan({}, both)[0]] == ["replica/m/0", "gateway/main"]


def test_new_keys_and_rules_reach_a_gateway_that_serves():
    old, new = gateway(keys="1", retries=2), gateway(keys="2", retries=2)
    serving = unit(old, "g", in_force="current")
    kinds, (update,) = plan(want(new), observed(a=[serving]), {"g": old})
    assert kinds == [("update", "gateway/main", "")]
    assert (update.operation, update.changes) == ("g", ("keys: 1 → 2",))
    assert plan(want(old), observed(a=[serving]), {"g": old})[0] == [("keep", "gateway/main", "g")]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"keys": "2"}, ""),  # of an earlier release, or in a namespace: it does not take over another spec
        ({"listen": HostPort("h", 9)}, "current"),
        ({"mesh": HostPort("h", 9)}, "current"),
        ({"keys": "2", "fabric": "g"}, "current"),
    ],
)
def test_what_a_gateway_cannot_take_over_replaces_it(changed, says):
    old = gateway(keys="1")
    serving = unit(old, "g", in_force=says)
    assert plan(want(gateway(**changed)), observed(a=[serving]), {"g": old})[0] == [("replace", "gateway/main", "g")]


def test_whom_it_serves_is_told_to_an_agent_that_serves_and_costs_no_other_its_place():
    old, new = agent(trust=AgentTrust(groups=("a",))), agent(trust=AgentTrust(groups=("a", "b")))
    serving = unit(old, "r", in_force="current")
    kinds, (update,) = plan(want(new), observed(a=[serving]), {"r": old})
    assert kinds == [("update", "replica/m/0", "")]
    assert (update.operation, len(update.changes)) == ("r", 1)
    assert plan(want(old), observed(a=[serving]), {"r": old})[0] == [("keep", "replica/m/0", "r")]
    for deaf in (unit(old, "r"), unit(old, "r", state="pending", job="7")):  # of an earlier release; in a queue
        assert plan(want(new), observed(a=[deaf]), {"r": old})[0] == [("keep", "replica/m/0", "r")]
    untold = unit(agent(), "r", in_force="current")
    assert plan(want(new), observed(a=[untold]), {"r": agent()})[0] == [("update", "replica/m/0", "")]
    other = agent(trust=new.trust, max_num_seqs=9)
    assert plan(want(other), observed(a=[serving]), {"r": old})[0] == [("replace", "replica/m/0", "r")]


def test_agents_are_told_before_any_gateway_sends_what_they_would_refuse():
    old, new = agent(trust=AgentTrust(groups=("a",))), agent(trust=AgentTrust(groups=("a", "b")))
    was, rules = gateway(groups={"a": ("p",)}), gateway(groups={"a": ("p",), "b": ("p",)})
    units = observed(a=[unit(old, "r", in_force="current"), unit(was, "g", in_force="current")])
    told = plan(want(rules, new, agent("m/1")), units, {"r": old, "g": was})[0]
    order = [("update", "replica/m/0"), ("create", "replica/m/1"), ("update", "gateway/main")]
    assert [entry[:2] for entry in told] == order


def test_a_spec_that_was_written_and_is_not_in_force_is_written_again():
    spec = gateway()
    refusing = unit(spec, "g", in_force="former", detail="the key file is wrong")
    kinds, (update,) = plan(want(spec), observed(a=[refusing]), {"g": spec})
    assert kinds == [("update", "gateway/main", "")]
    assert "the key file is wrong" in update.reason


def test_a_certificate_that_ends_soon_needs_another_gateway():
    old, new = gateway(keys="1"), gateway(keys="2")
    ending = {"g": Succession("certificate", "its certificate ends soon")}
    serving = observed(a=[unit(old, "g", in_force="current")])
    assert plan(want(new), serving, {"g": old}, ending)[0] == [("replace", "gateway/main", "g")]


def test_a_job_that_leaves_its_queue_after_the_plan_was_made_does_not_make_it_stale():
    waiting = observed(a=[unit(agent(), "r", state="pending"), unit(gateway(), "g", in_force="current")])
    running = observed(a=[unit(agent(), "r", in_force="current"), unit(gateway(), "g", in_force="current")])
    assert unit_facts(waiting) == unit_facts(running)
    assert unit_facts(running)["unit/gateway/main"] == f"g on a as {spec_digest(gateway())}"
    starting = observed(a=[unit(gateway(), "g", in_force="")])
    assert unit_facts(starting)["unit/gateway/main"] == unit_facts(running)["unit/gateway/main"]
