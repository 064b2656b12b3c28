"""What `status` and `logs` make of what they see."""

import pytest

from fabrictool.applier.drift import drift_of, out_of_reach
from fabrictool.applier.state import Applied, Placed, State
from fabrictool.cli.watching import _after
from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
from fabrictool.domain.specs import AgentSpec

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="a", partition="n", replica="m/0", model="m", source="x", engine="vllm"
)


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        (["c"], ["a", "b", "c"], []),
        (["a", "b", "c"], ["a", "b", "c", "d"], ["d"]),
        (["a", "b", "c"], ["c", "d"], ["d"]),
        (["a", "a"], ["a", "a", "a"], []),
        (["a"], ["x", "y"], ["x", "y"]),
        ([], ["x"], ["x"]),
    ],
)
def test_following_a_log_prints_each_line_once(before, now, new):
    assert _after(before, now) == new


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
    observed = Observed(
        clusters={
            "a": ClusterFacts(cluster="a", known=True, units=(stray,)),
            "gone": ClusterFacts(cluster="gone", known=False, reason="no answer"),
            "never": ClusterFacts(cluster="never", known=False, reason="no answer"),
        }
    )
    found = {(each.kind, each.address) for each in drift_of(state, observed, {})}
    assert found == {
        ("missing", "replica/m/0"),
        ("unreachable", "replica/m/1"),
        ("unreachable", "replica/m/2"),
        ("orphan", "replica/x/0"),
    }
    found = {problem.place.thing: problem for problem in out_of_reach(state, observed)}
    assert {name: problem.severity for name, problem in found.items()} == {
        "cluster/gone": "error",
        "cluster/never": "warning",
        "cluster/off": "error",
    }
    assert "replica/m/2" in found["cluster/off"].message
