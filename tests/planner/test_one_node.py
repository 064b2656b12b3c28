"""`spread: node` from blueprint to plan, and what a plan says of replicas that one node's loss takes."""

import json

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.plan import Placement
from fabrictool.domain.state import State
from fabrictool.planner import units
from fabrictool.planner.device_choice import NO_NODES
from fabrictool.planner.one_node import broken_spreads, least_nodes, one_node_sentences
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.verify import violations
from tests.planner.fabrics import applied

MODEL = {
    "source": "hf://meta-llama/Llama-3.1-8B-Instruct",
    "engine": "vllm",
    "variant": {"precision": "bf16", "context": "4096 tok"},
    "parallelism": {"tp": 1},
    "demand": {"rate": "1 req/s", "input": "500 tok", "output": "100 tok"},
    "replicas": {"min": 2, "max": 8},
}
SPREAD = {"place": {"spread": "node"}}
GPUS = {"device": "h100-sxm", "devices_per_node": 4, "nodes": 3}
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
LOGIN = [{"host": "login.example.org", "user": "u", "host_keys": [f"ssh-ed25519 {KEY}"]}]


def loaded(folder, kind="local", partitions=None, **models):
    cluster = {"site": "a", "kind": kind, "partitions": partitions or {"p": GPUS}}
    cluster |= {"login": LOGIN} if kind in ("slurm", "pbs") else {}
    head = {"apiVersion": "fabrictool/v1"}
    inventory = head | {
        "kind": "Inventory", "providers": {"p": {}}, "sites": {"a": {"provider": "p"}}, "clusters": {"c": cluster},
    }  # fmt: skip
    blueprint = head | {
        "kind": "Blueprint", "fabric": "f", "inventory": "inventory.yaml", "objective": ["cost"],
        "models": {name: MODEL | its for name, its in (models or {"m": {}}).items()},
    }  # fmt: skip
    (folder / "inventory.yaml").write_text(json.dumps(inventory))
    (folder / "blueprint.yaml").write_text(json.dumps(blueprint))
    return load(folder / "blueprint.yaml", environment={})


def planned(there, evidence=None, **options):
    seen = {"c": ClusterFacts(cluster="c", known=True)}
    empty = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    return plan(there.blueprint, there.inventory, evidence or empty, PlanOptions(**options), now=0.0)


def devices(whole, model="m"):
    return [action.spec.device_indices for action in whole.actions if action.address.startswith(f"replica/{model}/")]


def told(whole):
    return [text for text in whole.warnings if "node" in text]


def refused(there):
    with pytest.raises(InfeasibleError) as caught:
        planned(there)
    return [(problem.code, problem.message, problem.hint) for problem in caught.value.problems]


def test_a_minimum_of_two_is_on_two_nodes_and_costs_nothing(tmp_path):
    whole = planned(loaded(tmp_path, m={}, n={}))
    assert devices(whole) == [(0,), (4,)]
    assert devices(whole, "n") == [(1,), (5,)]
    assert not told(whole)


def test_what_runs_on_one_node_stays_until_it_is_a_rule(tmp_path):
    there = loaded(tmp_path)
    first = planned(there)
    beside = [
        msgspec.structs.replace(action, spec=msgspec.structs.replace(action.spec, device_indices=(at,)))
        for at, action in enumerate(first.actions)
    ]
    evidence = applied(there, msgspec.structs.replace(first, actions=tuple(beside)))
    again = planned(there, evidence, improve=True)
    assert {action.kind for action in again.actions} == {"keep"}
    assert [text for text in told(again) if "m: its 2 replicas are on one node of c/p" in text]
    spread = loaded(tmp_path, m=SPREAD)
    moved = planned(spread, evidence)
    assert sorted(action.kind for action in moved.actions) == ["keep", "replace"]
    (replaced,) = moved.changes
    assert replaced.spec.device_indices == (4,)
    assert not told(moved)
    few = planned(spread, evidence, max_moves=0)
    assert few.changes == moved.changes, "the placement is the same"
    assert [text for text in few.warnings if "replaced or deleted beside what --max-moves counts" in text]


def test_schedulers_choose_themselves_and_the_plan_says_so(tmp_path):
    (text,) = told(planned(loaded(tmp_path, "slurm")))
    assert text.startswith("m: its 2 replicas may be on one node of c/p")
    assert "`place: {spread: node}`" in text, "what to write"
    narrow = {"p": GPUS | {"devices_per_node": 1}}
    assert not told(planned(loaded(tmp_path, "slurm", narrow)))
    assert not told(planned(loaded(tmp_path, "slurm", {"p": GPUS | {"whole_nodes": True}})))
    assert not told(planned(loaded(tmp_path, "slurm", {"p": GPUS | {"nodes": 1}}))), "there is no other node"


def test_where_a_scheduler_chooses_only_what_has_no_room_together_is_apart(tmp_path):
    problems = refused(loaded(tmp_path, "pbs", m=SPREAD))
    assert problems[0] == (
        "FT2003",
        "m: 2 nodes are to hold a replica (`spread: node`), 1 can for certain",
        "lower replicas.min to 1, or `spread: none`, or `whole_nodes: true` of a partition",
    )
    whole = planned(loaded(tmp_path, "pbs", {"p": GPUS | {"whole_nodes": True}}, m=SPREAD))
    assert (len(whole.placement.replicas), told(whole)) == (2, [])
    free = planned(loaded(tmp_path, "pbs", m=SPREAD | {"parallelism": {}}))
    assert {replica.tp for replica in free.placement.replicas} == {4}, "half a node each would have room on one"
    assert "`spread: node`" in "; ".join(planned(loaded(tmp_path, m=SPREAD), explain=True).reasons)


def test_two_partitions_of_schedulers_are_two_nodes(tmp_path):
    whole = planned(loaded(tmp_path, "pbs", {"p": GPUS, "q": GPUS}, m=SPREAD))
    assert sorted(replica.partition for replica in whole.placement.replicas) == ["p", "q"]
    assert not told(whole)


def test_more_nodes_than_there_are_is_a_conflict_in_plain_words(tmp_path):
    problems = refused(loaded(tmp_path, m=SPREAD | {"replicas": {"min": 4, "max": 8}}))
    assert [code for code, *_ in problems][:2] == ["FT2003", "FT2006"]
    assert "at least 4 replicas of m on owned capacity; m on 4 different nodes; 12 h100-sxm in c/p" in problems[1][1]
    assert ("FT2007", "enough would be: m on fewer nodes", "spread: none") in problems
    assert ("FT2007", "enough would be: 4 more h100-sxm in c/p", "nodes: 4") in problems


def test_more_replicas_than_nodes_are_no_conflict(tmp_path):
    whole = planned(
        loaded(tmp_path, m=SPREAD | {"place": {"spread": "node", "pin": [{"cluster": "c", "replicas": 7}]}})
    )
    assert len(whole.placement.replicas) == 7
    assert "on 2 different nodes at least" in whole.reasons[0]


def test_the_rule_says_nothing_of_one_replica_and_the_plan_says_that(tmp_path):
    whole = planned(loaded(tmp_path, m=SPREAD | {"replicas": {"min": 1, "max": 8}}))
    assert told(whole) == ["m: `spread: node` asks for as many nodes as `replicas.min`, and that is 1"]


def test_the_verifier_counts_nodes(tmp_path):
    there = loaded(tmp_path, partitions={"p": GPUS | {"nodes": 1}, "q": GPUS | {"nodes": 1}}, m=SPREAD)
    placed = planned(there).placement
    assert violations(there.blueprint, there.inventory, placed) == []
    first = msgspec.structs.replace(placed.replicas[0], replica="m/1")
    beside = Placement(replicas=(placed.replicas[0], first))
    (complaint,) = violations(there.blueprint, there.inventory, beside)
    assert complaint == "m: 2 nodes are to hold a replica, 1 can"


def test_units_are_read_whoever_chose_their_devices(tmp_path):
    there = loaded(tmp_path, partitions={"a": GPUS | {"nodes": 2}, "p": GPUS}, m=SPREAD)
    specs = [action.spec for action in planned(there).actions]
    for indices, nodes in (((8,), (11,)), 1), (((8,), (12,)), 2), (((4, 8), (5,)), 2):
        placed = [
            msgspec.structs.replace(spec, partition="p", device_indices=its)
            for spec, its in zip(specs, indices, strict=True)
        ]
        assert least_nodes(there.inventory, placed) == nodes
        words = list(one_node_sentences(there.blueprint, there.inventory, placed))
        assert (words == []) == (nodes == 2)


def together(there):
    """A plan's replicas with devices of one node."""
    specs = [action.spec for action in planned(there).actions]
    return [msgspec.structs.replace(spec, device_indices=(at,)) for at, spec in enumerate(specs)]


def test_devices_that_break_the_rule_are_refused_where_we_give_them_away(tmp_path, monkeypatch):
    there = loaded(tmp_path, m=SPREAD)
    assert len(planned(there).placement.replicas) == 2
    monkeypatch.setattr(units.WantedNodes, "by", lambda _models: NO_NODES)
    with pytest.raises(FabrictoolError) as caught:
        planned(there)
    (problem,) = caught.value.problems
    assert problem.code == "FT2903"
    assert problem.message.endswith("m: its replicas are on 1 node for certain, and `spread: node` wants them on 2")
    assert told(planned(loaded(tmp_path))), "a wish is none"


@pytest.mark.parametrize("pinned", [False, True])
def test_what_does_not_answer_is_told_and_not_refused(tmp_path, pinned):
    there = loaded(tmp_path, m=SPREAD)
    specs = together(there)
    assert len(list(broken_spreads(there.blueprint, there.inventory, specs, set()))) == 1
    if pinned:  # and nothing is remembered to be there
        there = loaded(tmp_path, m={"place": {"spread": "node", "pin": [{"cluster": "c", "replicas": 2}]}})
        specs = []
    assert list(broken_spreads(there.blueprint, there.inventory, specs, {"c"})) == []
    (text,) = one_node_sentences(there.blueprint, there.inventory, specs, {"c"})
    assert text.endswith("`spread: node` wants them on 2: c does not answer")


def test_what_a_scheduler_may_put_together_is_told_and_not_refused(tmp_path):
    specs = together(loaded(tmp_path, m=SPREAD))
    slurm = loaded(tmp_path, "slurm", m=SPREAD)
    assert list(broken_spreads(slurm.blueprint, slurm.inventory, specs, set())) == []
    assert len(list(one_node_sentences(slurm.blueprint, slurm.inventory, specs))) == 1
