"""`spread: node` on Slurm: which replica has which part of a partition's nodes, over plans and healings."""

import json
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from fabrictool.domain.address import number_of
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.node_parts import nodes_of
from fabrictool.domain.observed import ClusterFacts, NodeKind, ObservedUnit, Queue
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, NodePart, encode_spec
from fabrictool.domain.state import Applied, State
from fabrictool.planner.healing import heal
from fabrictool.planner.node_parts import too_close, with_node_parts, with_too_close
from fabrictool.planner.one_node import least_nodes
from fabrictool.planner.succession import Succession
from fabrictool.planner.verify import violations
from tests.planner.test_one_node import GPUS, LOGIN, SPREAD, loaded, planned, refused, told

FOUR = GPUS | {"nodes": 4}
THREE = SPREAD | {"replicas": {"min": 3, "max": 8}}


def parts(whole):
    """Of what starts, stays or is told."""
    return {action.address.removeprefix("replica/"): action.spec.node_part for action in whole.actions if action.spec}


def kinds(whole):
    return {action.address.removeprefix("replica/"): action.kind for action in whole.actions}


def queue(names, away=""):
    there = NodeKind(nodes=names, devices=4)
    gone = (NodeKind(nodes=away, devices=4, away=True),) if away else ()
    return Queue(nodes=9, devices=4, kinds=(there, *gone))


def seen(specs, nodes, names="n[1-4]", *, told_now=True):
    """`specs` by replica; `nodes`: replica → where it runs, "" of a job that waits."""
    units = tuple(
        ObservedUnit(
            address=f"replica/{name}", operation=f"replica-m-{number_of(name)}-g1-l", node=node,
            state="running" if node else "pending", spec_digest=spec_digest(specs[name]), job="7", ready=bool(node),
            in_force="current" if node and told_now else "",
        )
        for name, node in nodes.items()
    )  # fmt: skip
    facts = ClusterFacts(
        cluster="c", known=True, units=units, scheduler="slurm 24.11", queues={"p": queue(*names.split("/"))}, now=0.0
    )
    told = {unit.operation: specs[unit.address.removeprefix("replica/")] for unit in units}
    applied = {f"replica/{name}": Applied(cluster="c", spec=spec) for name, spec in specs.items()}
    state = State(fabric="f", lineage="l", applied_units=applied)
    return Evidence(fabric="f", lineage="l", at=0.0, clusters={"c": facts}, specs=told, state=state)


def first_plan(there):
    whole = planned(there)
    return {action.spec.replica: action.spec for action in whole.actions}


def test_each_replica_of_a_minimum_has_its_own_part_and_the_plan_is_sure_of_it(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=THREE)
    whole = planned(there)
    assert parts(whole) == {f"m/{at}": NodePart((at,), 3) for at in range(3)}
    assert "part 1 of 3 of the nodes" in whole.actions[0].summary
    assert not told(whole)
    assert least_nodes(there.inventory, [action.spec for action in whole.actions]) == 3
    assert violations(there.blueprint, there.inventory, whole.placement) == []


def test_small_replicas_on_cpus_have_parts_as_well(tmp_path):
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "64 GiB"}
    small = {"engine": "reference", "architecture": "HuggingFaceTB/SmolLM2-135M-Instruct", "source": "file:///m.gguf"}
    whole = planned(loaded(tmp_path, "slurm", {"p": cpu}, m=SPREAD | small))
    assert parts(whole) == {"m/0": NodePart((0,), 2), "m/1": NodePart((1,), 2)}
    assert not told(whole)


@pytest.mark.parametrize(
    ("kind", "partition", "model"),
    [
        ("slurm", FOUR, {}),
        ("slurm", FOUR | {"whole_nodes": True}, SPREAD),
        ("slurm", FOUR, SPREAD | {"parallelism": {"tp": 4}}),
        ("slurm", FOUR, SPREAD | {"replicas": {"min": 1, "max": 8}}),
        ("local", FOUR, SPREAD),
        ("pbs", FOUR | {"whole_nodes": True}, SPREAD),
    ],
    ids=["no rule", "whole nodes", "no two fit a node", "one replica", "devices of ours", "another scheduler"],
)
def test_who_needs_no_part_is_written_as_ever(tmp_path, kind, partition, model):
    whole = planned(loaded(tmp_path, kind, {"p": partition}, m=model))
    assert whole.actions
    assert all(b"node_part" not in encode_spec(action.spec) for action in whole.actions)


def test_a_part_makes_no_unit_another_one(tmp_path):
    spec = first_plan(loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD))["m/0"]
    without = msgspec.structs.replace(spec, node_part=msgspec.UNSET)
    assert spec.node_part == NodePart((0,), 2)
    assert spec_digest(spec) == spec_digest(without)


def test_replicas_beyond_the_minimum_may_be_anywhere(tmp_path):
    pin = {"place": {"spread": "node", "pin": [{"cluster": "c", "replicas": 4}]}}
    whole = planned(loaded(tmp_path, "slurm", {"p": FOUR}, m=pin))
    assert list(parts(whole).values()) == [NodePart((0,), 2), NodePart((1,), 2), msgspec.UNSET, msgspec.UNSET]
    assert not told(whole)


def test_where_the_inventory_names_nodes_itself_the_rule_is_refused(tmp_path):
    for options in ({"nodelist": "n1"}, {"nodefile": "f"}, {"exclude": "/etc/bad"}, {"nodel": "n1"}):
        there = loaded(tmp_path, "slurm", {"p": FOUR | {"job": {"options": options}}}, m=SPREAD)
        assert refused(there)[0][0] == "FT2003"
    whole = planned(loaded(tmp_path, "slurm", {"p": FOUR | {"job": {"options": {"exclude": "n9"}}}}, m=SPREAD))
    assert parts(whole)["m/1"] == NodePart((1,), 2)


def test_nodes_that_are_added_replace_nothing(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD)
    specs = first_plan(there)
    again = planned(there, seen(specs, {"m/0": "n3", "m/1": "n2"}))
    assert kinds(again) == {"m/0": "keep", "m/1": "keep"}
    more = loaded(tmp_path, "slurm", {"p": GPUS | {"nodes": 5}}, m=SPREAD)
    after = planned(more, seen(specs, {"m/0": "n3", "m/1": "n2"}, "a1,n[1-4]"))
    assert kinds(after) == {"m/0": "update", "m/1": "update"}, "told what will follow them"
    assert parts(after) == {"m/0": NodePart((1,), 2), "m/1": NodePart((0,), 2)}, "the parts in which they stand"


def test_a_kept_replica_keeps_its_part_and_a_lost_one_gets_the_other(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD)
    specs = first_plan(there)
    assert parts(planned(there, seen(specs, {"m/1": "n4"})))["m/0"] == NodePart((0,), 2)
    moved = specs | {"m/1": msgspec.structs.replace(specs["m/1"], node_part=NodePart((0,), 2))}
    lost = planned(there, seen(moved, {"m/1": "n3"}))
    assert (kinds(lost), parts(lost)) == ({"m/0": "create", "m/1": "keep"}, {"m/0": NodePart((1,), 2)})


def test_what_waits_in_the_queue_keeps_the_part_that_its_job_was_given(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD)
    specs = first_plan(there)
    swapped = {
        name: msgspec.structs.replace(spec, node_part=NodePart((1 - number_of(name),), 2))
        for name, spec in specs.items()
    }
    again = planned(there, seen(swapped, {"m/0": "", "m/1": ""}))
    assert kinds(again) == {"m/0": "keep", "m/1": "keep"}


def test_a_job_that_may_start_beside_another_leaves_the_queue(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD)
    anywhere = {
        name: msgspec.structs.replace(spec, node_part=msgspec.UNSET) for name, spec in first_plan(there).items()
    }
    again = planned(there, seen(anywhere, {"m/0": "n1", "m/1": ""}))
    assert kinds(again) == {"m/0": "update", "m/1": "replace"}
    (replaced,) = [action for action in again.actions if action.kind == "replace"]
    assert replaced.stop_first
    assert "its job may start on a node with another replica" in replaced.reason


def test_the_rule_moves_one_of_two_that_are_on_one_node(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD)
    anywhere = {
        name: msgspec.structs.replace(spec, node_part=msgspec.UNSET) for name, spec in first_plan(there).items()
    }
    evidence = seen(anywhere, {"m/0": "n2", "m/1": "n2"})
    whole = planned(there, evidence)
    assert (kinds(whole), parts(whole)) == (
        {"m/0": "update", "m/1": "replace"}, {"m/0": NodePart((1,), 2), "m/1": NodePart((0,), 2)},
    )  # fmt: skip
    (replaced,) = [action for action in whole.actions if action.kind == "replace"]
    assert (replaced.stop_first, replaced.reason.partition(";")[0]) == (
        False, "it is on one node with m/0 of its model (`spread: node`)",
    )  # fmt: skip


def test_what_ends_anyway_says_why_and_what_would_only_be_told_moves():
    spec = msgspec.structs.replace(AGENT, node_part=NodePart((0,), 2))
    specs = {name: msgspec.structs.replace(spec, replica=name) for name in ("m/0", "m/1")}
    evidence = seen(specs, {"m/0": "n1", "m/1": "n1"})
    operation = "replica-m-1-g1-l"
    tell = Succession("successors", "0 of 2 jobs that may follow it are prepared", in_place=True)
    end = Succession("walltime", "its allocation ends")
    for before, cause in (({}, "nodes"), ({operation: tell}, "nodes"), ({operation: end}, "walltime")):
        assert with_too_close(before, specs.values(), evidence)[operation].cause == cause
    assert set(with_too_close({"other": tell}, specs.values(), evidence)) == {"other", operation}


def test_two_on_one_node_stay_when_others_make_up_the_minimum(tmp_path):
    pin = {"place": {"spread": "node", "pin": [{"cluster": "c", "replicas": 3}]}}
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=pin)
    specs = first_plan(there)
    for third in ("n4", "n3"):  # in the other part, and in the same one
        whole = planned(there, seen(specs, {"m/0": "n1", "m/1": "n1", "m/2": third}))
        assert set(kinds(whole).values()) <= {"keep", "update"}, third


def test_a_healing_moves_what_came_beside_another_and_starts_a_lost_one_in_its_part(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD)
    specs = first_plan(there)
    beside = heal(seen(specs, {"m/0": "n2", "m/1": "n2"}), {}, now=0.0)
    assert [(drift.kind, drift.address) for drift in beside.drift] == [("changed", "replica/m/1")]
    assert [(a.kind, a.spec.node_part) for a in beside.plan.changes] == [("replace", NodePart((1,), 2))]
    lost = heal(seen(specs, {"m/0": "n1"}), {}, now=0.0)
    assert [(a.kind, a.spec.node_part) for a in lost.plan.changes] == [("create", NodePart((1,), 2))]
    assert not heal(seen(specs, {"m/0": "n1", "m/1": "n2"}), {}, now=0.0).plan.changes


def test_a_successor_has_the_part_of_its_predecessor(tmp_path):
    there = loaded(tmp_path, "slurm", {"p": FOUR | {"walltime": "24h"}}, m=SPREAD)
    specs = first_plan(there)
    evidence = seen(specs, {"m/0": "n1", "m/1": "n4"})
    facts = evidence.clusters["c"]
    ending = [msgspec.structs.replace(unit, ends_at=600.0, begins_at=-85_800.0) for unit in facts.units]
    facts = msgspec.structs.replace(facts, units=tuple(ending))
    whole = planned(there, msgspec.structs.replace(evidence, clusters={"c": facts}))
    assert set(kinds(whole).values()) == {"replace"}
    assert parts(whole) == {"m/0": NodePart((0,), 2), "m/1": NodePart((1,), 2)}
    heir = next(action.spec for action in whole.actions if action.address == "replica/m/1")
    follows = msgspec.structs.replace(
        facts, units=(facts.units[0], msgspec.structs.replace(facts.units[1], state="pending", node=""))
    )
    waiting = msgspec.structs.replace(
        evidence, clusters={"c": follows}, specs=evidence.specs | {facts.units[1].operation: heir}
    )
    assert not too_close([heir], waiting)


def test_more_replicas_of_a_minimum_replace_none_that_run(tmp_path):
    specs = first_plan(loaded(tmp_path, "slurm", {"p": FOUR}, m=SPREAD))
    three = planned(loaded(tmp_path, "slurm", {"p": FOUR}, m=THREE), seen(specs, {"m/0": "n1", "m/1": "n2"}))
    assert kinds(three) == {"m/0": "update", "m/1": "update", "m/2": "create"}
    assert parts(three)["m/2"] == NodePart((2,), 3)


AGENT = AgentSpec(
    fabric="f", provider="p", site="a", cluster="c", partition="p", replica="m/0", model="m", source="x", engine="vllm"
)


@settings(max_examples=200, deadline=None)
@given(
    nodes=st.integers(2, 7),
    least=st.integers(2, 5),
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=6),
    data=st.data(),
)
def test_parts_are_never_shared_stay_and_are_as_many_as_can_be(nodes, least, sizes, data):
    partition = {"device": "h100-sxm", "devices_per_node": 4, "nodes": nodes}
    written = {"site": "a", "kind": "slurm", "login": LOGIN, "partitions": {"p": partition}}
    described = ClusterSpec.model_validate_json(json.dumps(written))
    inventory = SimpleNamespace(clusters={"c": described})
    model = SimpleNamespace(place=SimpleNamespace(spread="node"), replicas=SimpleNamespace(min=least))
    blueprint = SimpleNamespace(models={"m": model})
    names = f"n[1-{nodes}]"
    specs = {
        f"m/{at}": msgspec.structs.replace(
            AGENT, replica=f"m/{at}", devices=size, nodes=size if size > 1 else msgspec.UNSET
        )
        for at, size in enumerate(sizes)
    }
    every = [f"n{at + 1}" for at in range(nodes)]
    standing = {
        name: ",".join(
            data.draw(st.lists(st.sampled_from(every), min_size=spec.on_nodes, max_size=spec.on_nodes, unique=True))
        )
        for name, spec in specs.items()
        if spec.on_nodes <= nodes and data.draw(st.booleans())
    }
    evidence = seen(specs, standing, names)
    wanted = with_node_parts(list(specs.values()), blueprint, inventory, evidence)
    given_parts = {spec.replica: spec.node_part for spec in wanted if isinstance(spec.node_part, NodePart)}
    flat = [number for part in given_parts.values() for number in part.numbers]
    assert len(flat) == len(set(flat)), "nobody shares one"
    assert all(len(part.numbers) == specs[name].on_nodes for name, part in given_parts.items())
    dealt = nodes_of(queue(names), 4)
    for spec in wanted:
        part = spec.node_part
        if isinstance(part, NodePart):
            mine = dealt.nodes_of(part.numbers, part.of)
            others = {n for name, its in standing.items() if name != spec.replica for n in its.split(",")}
            if set(sizes) == {1} and spec.replica not in standing:
                assert mine - others, "a new one has a node on which none of its model is"
    if set(sizes) == {1}:
        assert len(given_parts) in (0, min(nodes, least, len(sizes)))
        assert bool(given_parts) == (min(nodes, least, len(sizes)) > 1)
    # What was dealt out and now runs in its part keeps it, whatever comes and goes beside it.
    run = {
        name: ",".join(sorted(dealt.nodes_of(part.numbers, part.of))[: specs[name].on_nodes])
        for name, part in given_parts.items()
        if specs[name].on_nodes == 1
    }
    by_name = {spec.replica: spec for spec in wanted}
    again = with_node_parts(wanted, blueprint, inventory, seen(by_name, run, names))
    assert {spec.replica: spec.node_part for spec in again if spec.replica in run} == {
        name: given_parts[name] for name in run
    }
    assert not too_close(again, seen(by_name, run, names))
