"""Replicas on nodes that join by themselves: as many as there are, one a node, and something ends first where none is
idle.
"""

import pytest

from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import as_assigned
from fabrictool.domain.state import State
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.joined import as_there
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.solvers.exact import ExactSolver
from tests.planner import fabrics
from tests.planner.test_diff import agent

GIVEN = """\
  given:
    site: b
    kind: joined
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 3, price: 1 CHF/h}}
"""


@pytest.fixture
def loaded(tmp_path):
    def read(rules=""):
        file = fabrics.write_fabric(tmp_path, rules)
        inventory = tmp_path / "inventory.yaml"
        inventory.write_text(fabrics.INVENTORY + GIVEN)
        return load(file, environment={})

    return read


def evidence(given, specs=None):
    clusters = {name: ClusterFacts(cluster=name, known=True) for name in ("dear", "cheap", "spot")}
    return Evidence(
        fabric="f", lineage="l", at=0.0, clusters=clusters | {"given": given}, specs=specs or {}, state=State()
    )


def facts(idle, *units):
    return ClusterFacts(cluster="given", known=True, units=units, idle={"gpu": idle})


def unit(spec, operation, **changes):
    address = f"replica/{spec.replica}"
    digest = spec_digest(spec)
    return ObservedUnit(address=address, operation=operation, state="running", spec_digest=digest, **changes)


def given(replica="m/0", **changes):
    return as_assigned(agent(replica, "given", partition="gpu", **changes))


def nodes(inventory):
    return inventory.clusters["given"].partitions["gpu"].nodes


def test_as_many_nodes_count_as_are_idle_or_ours_and_the_inventory_allows(loaded):
    inventory = loaded().inventory
    for idle, expected in ((0, 0), (2, 2), (9, 3)):
        assert nodes(as_there(inventory, evidence(facts(idle)))) == expected
    ours = given()
    assert nodes(as_there(inventory, evidence(facts(1, unit(ours, "op")), {"op": ours}))) == 2
    assert nodes(as_there(inventory, evidence(ClusterFacts(cluster="given", known=True)))) == 3, "nobody was asked"
    assert as_there(inventory, evidence(facts(1))).clusters["given"].partitions["gpu"].held(1) == 8, (
        "one replica a node"
    )
    assert as_there(inventory, evidence(facts(1))).clusters["dear"] == inventory.clusters["dear"]


def placed(loaded, given_facts):
    options = PlanOptions(0, 30.0, ExactSolver())
    planned = plan(loaded.blueprint, loaded.inventory, evidence(given_facts), options, now=0.0)
    return planned, [replica for replica in planned.placement.replicas if replica.cluster == "given"]


def test_replicas_stand_on_the_nodes_that_are_there(loaded):
    planned, there = placed(loaded(), facts(2))
    assert len(there) == 2, "they are the cheapest, and there are two"
    (create, _) = [action for action in planned.actions if action.cluster == "given"]
    assert (create.kind, create.spec.assigned, create.spec.device_indices, create.spec.hubs) == ("create", True, (), ())
    assert create.summary.endswith("assigned to a node that joined idle")
    _, there = placed(loaded(), facts(0))
    assert there == []


def test_nothing_is_created_where_the_mesh_does_not_answer(loaded):
    planned, there = placed(loaded(), ClusterFacts(cluster="given", known=False, reason="nobody"))
    assert there == []
    assert [action for action in planned.actions if action.cluster == "given"] == []


def test_a_model_with_options_does_not_go_there_for_an_assignment_carries_none(loaded):
    _, there = placed(loaded(), facts(2))
    assert "m" in {replica.model for replica in there}
    _, there = placed(loaded("options: {enforce-eager: true}"), facts(2))
    assert "m" not in {replica.model for replica in there}


def steps(wanted, given_facts, specs=None):
    wants = {f"replica/{s.replica}": WantedUnit(f"replica/{s.replica}", "given", s, "") for s in wanted}
    return [
        (action.kind, action.address, action.stop_first) for action in actions(wants, evidence(given_facts, specs), {})
    ]


def test_a_changed_replica_starts_elsewhere_first_where_a_node_is_idle():
    old, new = given(context=1), given(context=2)
    there = unit(old, "o")
    assert steps([new], facts(1, there), {"o": old}) == [("replace", "replica/m/0", False)]
    assert steps([new], facts(0, there), {"o": old}) == [("replace", "replica/m/0", True)]


def test_what_nobody_asks_for_ends_first_where_its_node_is_needed():
    old, new = given("old/0", model="old"), given("new/0", model="new")
    there, specs = unit(old, "o"), {"o": old}
    create, delete = ("create", "replica/new/0", False), ("delete", "replica/old/0", False)
    assert steps([new], facts(1, there), specs) == [create, delete]
    assert steps([new], facts(0, there), specs) == [delete, create]
