"""What has drifted, and what cannot be seen at all."""

import msgspec

from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, AgentTrust
from fabrictool.domain.state import Applied, Placed, State
from fabrictool.planner.drift import drift_of, out_of_reach

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="a", partition="n", replica="m/0", model="m", source="x", engine="vllm"
)


def test_drift_and_what_is_out_of_reach():
    state = State(
        applied_units={f"replica/m/{n}": Applied(cluster=c, spec=SPEC) for n, c in enumerate(("a", "gone", "off"))},
        units={
            "replica/m/0": Placed(cluster="a", partition="n"),
            "replica/m/1": Placed(cluster="gone", partition="n"),
            "replica/m/2": Placed(cluster="off", partition="n"),
        },
    )
    stray = ObservedUnit(address="replica/x/0", operation="o", state="running", spec_digest="")
    evidence = Evidence(
        fabric="f", lineage="", at=0.0, specs={}, state=state,
        clusters={
            "a": ClusterFacts(cluster="a", known=True, units=(stray,)),
            "gone": ClusterFacts(cluster="gone", known=False, reason="no answer"),
            "never": ClusterFacts(cluster="never", known=False, reason="no answer"),
        },
    )  # fmt: skip
    assert {(drift.kind, drift.address) for drift in drift_of(evidence, {})} == {
        ("missing", "replica/m/0"),
        ("unreachable", "replica/m/1"),
        ("unreachable", "replica/m/2"),
        ("orphan", "replica/x/0"),
    }
    problems = {problem.place.thing: problem for problem in out_of_reach(evidence)}
    assert {name: problem.severity for name, problem in problems.items()} == {
        "cluster/gone": "error",
        "cluster/never": "warning",
        "cluster/off": "error",
    }
    assert "replica/m/2" in problems["cluster/off"].message


def test_an_agent_that_waited_while_whom_it_serves_changed_has_drifted_until_it_is_told():
    wanted = msgspec.structs.replace(SPEC, trust=AgentTrust(groups=("a",)))

    def drift(in_force, told):
        unit = ObservedUnit(
            address="replica/m/0", operation="o", state="running", ready=True, spec_digest=spec_digest(told),
            in_force=in_force,
        )  # fmt: skip
        state = State(applied_units={"replica/m/0": Applied(cluster="a", spec=wanted)})
        clusters = {"a": ClusterFacts(cluster="a", known=True, units=(unit,))}
        evidence = Evidence(fabric="f", lineage="", at=0.0, specs={"o": told}, state=state, clusters=clusters)
        return [entry.kind for entry in drift_of(evidence, {})]

    assert drift("current", SPEC) == ["changed"]
    assert drift("current", wanted) == []
    assert drift("", SPEC) == [], "it cannot be told"
