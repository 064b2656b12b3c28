"""Replicas beyond the planned ones: they start while requests wait and nodes are idle, and nobody misses them."""

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit, Queue
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, GatewaySpec
from fabrictool.domain.state import Applied, State, operation_id
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.healing import heal
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.state.overview import _missing_rows
from tests.planner.fabrics import INVENTORY, write_fabric
from tests.planner.test_dormant import GATEWAY, LINEAGE, NOW, agent

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILmUnzB17gKWybRRj5qtR6JyJz4S5PO9d5jFtr/HAOpo"
SLURM = f"kind: slurm\n    login: [{{host: l, user: u, host_keys: [{HOST_KEY}]}}]"
BOX = """clusters:
  box:
    site: a
    kind: local
    partitions: {c: {device: cpu, nodes: 1, memory_per_node: 1GiB}}"""
PLANNED = 1


def extra(number, **more):
    return agent(number, extra=True, **more)


def seen(states, wanted=0, idle=8, extras=3):
    """`states` of replicas by their numbers, of which the first is planned; the gateway wants so many in all."""
    specs = [agent(number) for number in range(PLANNED)] + [extra(PLANNED + number) for number in range(extras)]
    applied = {f"replica/{spec.replica}": Applied(cluster="c", spec=spec) for spec in specs}
    applied["gateway/main"] = Applied(cluster="c", spec=GATEWAY)
    units = [
        ObservedUnit(
            address=f"replica/m/{number}", operation=operation_id(LINEAGE, f"replica/m/{number}", 1),
            spec_digest=spec_digest(specs[number]), job="7",
            **({"state": "ended", "dormant": True, "reason": "nobody asked"} if what == "dormant" else
               {"state": what, "ready": what == "running"}),
        )
        for number, what in states.items()
    ]  # fmt: skip
    units.append(
        ObservedUnit(
            address="gateway/main", operation=operation_id(LINEAGE, "gateway/main", 1), state="running", ready=True,
            spec_digest=spec_digest(GATEWAY), wanted={"m": wanted} if wanted else {},
        )
    )  # fmt: skip
    told = {unit.operation: applied[unit.address].spec for unit in units}
    state = State(lineage=LINEAGE, serial=1, applied_units=applied)
    facts = ClusterFacts(
        cluster="c", known=True, units=tuple(units), scheduler="slurm", queues={"gpu": Queue(nodes=9, idle=idle)}
    )
    return Evidence(fabric="f", lineage=LINEAGE, at=NOW, clusters={"c": facts}, specs=told, state=state)


def started(evidence):
    return [action.address for action in heal(evidence, {}, now=NOW).plan.changes if action.kind == "create"]


@pytest.mark.parametrize(
    ("states", "wanted", "idle", "starts"),
    [
        ({0: "running"}, 0, 8, []),
        ({0: "running"}, 2, 8, ["replica/m/1"]),
        ({0: "running"}, 2, 0, []),  # nothing that runs makes room for it
        ({0: "running"}, 9, 2, ["replica/m/1", "replica/m/2"]),
        ({0: "running", 1: "running"}, 2, 8, []),
        ({0: "running", 1: "running"}, 3, 8, ["replica/m/2"]),
        ({0: "running", 1: "pending"}, 2, 8, []),
        ({0: "running", 1: "dormant"}, 2, 8, ["replica/m/1"]),
        ({0: "running", 1: "killed"}, 0, 8, []),
        ({0: "dormant"}, 1, 8, ["replica/m/0"]),
        ({0: "dormant", 1: "dormant"}, 2, 8, ["replica/m/0", "replica/m/1"]),
    ],
)
def test_one_more_starts_while_requests_wait_and_a_node_is_idle(states, wanted, idle, starts):
    assert started(seen(states, wanted, idle)) == starts


def test_nobody_misses_what_does_not_run():
    evidence = seen({0: "running"})
    healing = heal(evidence, {}, now=NOW)
    assert (healing.drift, healing.held, healing.dormant, healing.extra) == ((), (), 0, 3)
    assert _missing_rows(evidence.state.applied_units, evidence.observed) == []


def test_one_that_runs_becomes_a_planned_one_where_it_is():
    evidence = seen({0: "running", 1: "running"})
    evidence = msgspec.structs.replace(
        evidence,
        clusters={
            "c": msgspec.structs.replace(
                evidence.clusters["c"],
                units=tuple(msgspec.structs.replace(u, in_force="current") for u in evidence.clusters["c"].units),
            )
        },
    )
    wanted = {"replica/m/1": WantedUnit("replica/m/1", "c", agent(1), "")}
    (action,) = [action for action in actions(wanted, evidence) if action.address == "replica/m/1"]
    assert (action.kind, action.changes) == ("update", ("extra: True → none",))


@pytest.fixture
def planned(tmp_path):
    def planned(rules, **told):
        inventory = INVENTORY.replace("kind: local", SLURM)
        file = write_fabric(tmp_path, inventory=inventory)
        text = file.read_text().replace("replicas: {min: 1, max: 40}", f"replicas: {{{rules}}}", 1)
        text = text.replace("rate: 200 req/s", "rate: 1 req/s")
        file.write_text(text + "gateway: {cluster: box, listen: 10.0.0.1:1, mesh: 10.0.0.1:2}\n")
        (tmp_path / "inventory.yaml").write_text(inventory.replace("clusters:", BOX, 1))
        loaded = load(file, environment={})
        state = State(lineage=LINEAGE)
        clusters = {
            name: ClusterFacts(cluster=name, known=True, **told.get(name, {})) for name in loaded.inventory.clusters
        }
        specs = told.get("specs", {})
        evidence = Evidence(fabric="f", lineage=LINEAGE, at=NOW, clusters=clusters, specs=specs, state=state)
        return plan(loaded.blueprint, loaded.inventory, evidence, PlanOptions(seed=0), now=NOW)

    return planned


def test_a_plan_names_them_and_starts_none_and_counts_none(planned):
    without = planned("min: 1, max: 1")
    made = planned("min: 1, max: 1, idle_after: 10m, extra: 2")
    extras = [action for action in made.actions if isinstance(action.spec, AgentSpec) and action.spec.is_extra]
    assert [(action.kind, action.address, action.former) for action in extras] == [
        ("keep", "replica/m/1", ""), ("keep", "replica/m/2", ""),
    ]  # fmt: skip
    assert all(action.spec.idle_after_s == 600.0 for action in extras)
    assert {action.spec.cluster for action in extras} == {replica.cluster for replica in made.placement.replicas[:1]}
    assert any("m: 2 more start one by one while requests wait" in reason for reason in made.reasons)
    assert made.placement == without.placement
    assert msgspec.to_builtins(made.forecast) == msgspec.to_builtins(without.forecast)
    gateways = [action.spec for action in made.actions if isinstance(action.spec, GatewaySpec)]
    assert [spec.replicas["m"] for spec in gateways] == [(0,)], "a gateway misses none of them"
    assert gateways[0].wakes["m"].stay == 1


def test_one_that_lives_keeps_its_name_and_place(planned):
    made = planned("min: 1, max: 1, idle_after: 10m, extra: 2")
    first, second = (action for action in made.actions if isinstance(action.spec, AgentSpec) and action.spec.is_extra)
    operation = operation_id(LINEAGE, second.address, 1)
    unit = ObservedUnit(
        address=second.address, operation=operation, state="running", ready=True, job="7",
        spec_digest=spec_digest(second.spec), in_force="current",
    )  # fmt: skip
    again = planned(
        "min: 1, max: 1, idle_after: 10m, extra: 2",
        specs={operation: second.spec},
        **{second.cluster: {"units": (unit,)}},
    )
    kinds = {action.address: (action.kind, action.former) for action in again.actions}
    assert kinds[second.address] == ("keep", operation)
    assert kinds[first.address] == ("keep", "")
    assert kinds["replica/m/0"][0] == "create", "it is not taken for a planned one"
