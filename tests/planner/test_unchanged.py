"""Who applies a plan and plans again is told of no change, however soon the search had ended."""

import random
from dataclasses import replace

import msgspec
import pytest
import yaml

from fabrictool.base.errors import InfeasibleError
from fabrictool.blueprint import load
from fabrictool.cli.executors import Here
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.state import State
from fabrictool.planner.explaining.whatif import started, sweep
from fabrictool.planner.instances import synthetic
from fabrictool.planner.plan import PlanOptions, destruction, plan
from fabrictool.planner.problem import Option
from fabrictool.planner.situation import situation_of
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.memp import MempSolver
from tests.planner.fabrics import applied
from tests.planner.test_replay import GROUPS_BLUEPRINT, GROUPS_INVENTORY
from tests.seeds import seeds

ONE_MODEL = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {context: 8192 tok}
    replicas: {min: 2, max: 4}
"""
INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}}
sites: {s: {provider: p}}
clusters:
  a: {site: s, kind: local, partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 2}}}
"""
SOON = PlanOptions(work_s=0.05)
"""Ends before anything is proved."""
LONG = PlanOptions(work_s=3.0)


def fabric(folder, rng):
    """The first made-up fabric, beyond what it can serve or not, whose models have room for what they must have."""
    while True:
        types = rng.randint(1, 4)
        size = synthetic.parse(f"{rng.randint(2, 8)}x{types}x{rng.randint(8 * types, 96)}")
        for name, document in synthetic.documents(size, rng.randrange(10**6), rng.uniform(0.5, 1.3)).items():
            if name == "blueprint.yaml":
                document["objective"] = rng.choice([["latency"], ["slo", "latency"], ["slo", "cost", "latency"]])
            (folder / name).write_text(yaml.safe_dump(document, sort_keys=False))
        there = load(folder / "blueprint.yaml", environment={})
        try:
            plan(there.blueprint, there.inventory, nothing(there), SOON, now=0.0)
        except InfeasibleError:
            continue
        return there


def nothing(there):
    clusters = {name: ClusterFacts(cluster=name, known=True) for name in there.inventory.clusters}
    return Evidence(fabric="f", lineage="l", at=0.0, clusters=clusters, specs={}, state=State(fabric="f", lineage="l"))


def planned(there, evidence, options=SOON):
    return plan(there.blueprint, there.inventory, evidence, options, now=0.0)


def test_a_plan_of_what_was_applied_is_empty_with_weights_by_group_too(tmp_path):
    (tmp_path / "inventory.yaml").write_text(GROUPS_INVENTORY)
    gateway = "gateway: {cluster: dear, listen: 127.0.0.1:8801, mesh: 127.0.0.1:8802}\n"
    (tmp_path / "blueprint.yaml").write_text(GROUPS_BLUEPRINT.replace("RATE", "135") + gateway)
    there = load(tmp_path / "blueprint.yaml", environment={})
    first = planned(there, nothing(there), LONG)
    assert planned(there, applied(there, first), LONG).changes == ()
    former = tuple(
        msgspec.structs.replace(its, spec=msgspec.structs.replace(its.spec, group_weights=msgspec.UNSET))
        if its.address.startswith("gateway/")
        else its
        for its in first.actions
    )
    (change,) = planned(there, applied(there, msgspec.structs.replace(first, actions=former)), LONG).changes
    assert change.address == "gateway/main", "of an earlier release"
    assert [its.partition(":")[0] for its in change.changes] == ["group_weights"]


@seeds(0, drawn=3, long=1000)
def test_a_plan_of_what_was_applied_is_empty(seed, tmp_path):
    there = fabric(tmp_path, random.Random(seed))
    first = planned(there, nothing(there))
    again = planned(there, applied(there, first), LONG)
    assert again.changes == ()
    assert again.unchanged is True
    assert again.placement == first.placement


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A fabric of which a longer search finds something better, what was planned for it in little time, and that
    running.
    """
    folder = tmp_path_factory.mktemp("fabric")
    for seed in range(19, 100):
        there = fabric(folder, random.Random(seed))
        first = planned(there, nothing(there))
        evidence = applied(there, first)
        better = planned(there, evidence, replace(LONG, improve=True))
        if better.moves is not msgspec.UNSET:
            return there, first, evidence
    pytest.fail("every search found at once what a longer one does")


def test_only_who_asks_for_it_is_shown_what_a_longer_search_finds(unfinished):
    there, first, evidence = unfinished
    again = planned(there, evidence, LONG)
    better = planned(there, evidence, replace(LONG, improve=True))
    assert again.changes == ()
    assert better.unchanged is msgspec.UNSET
    # It is not called the best.
    assert not again.certificate.optimal
    stages = {stage.name: stage for stage in again.certificate.stages}
    for stage in better.certificate.stages[:1]:
        assert stages[stage.name].bound <= stage.objective * (1 + 1e-6) + 1e-6
    assert [s.objective for s in first.certificate.stages[:1]] == [s.objective for s in again.certificate.stages[:1]]


def test_what_ifs_start_from_what_runs_as_a_plan_keeps_it(unfinished):
    there, _, evidence = unfinished
    now = situation_of(there.blueprint, there.inventory, evidence, 0.0)
    same, other = (
        sweep(Here(), now, known, [], ExactSolver(), deadline_s=LONG.work_s, seed=0).base
        for known in (evidence, nothing(there))
    )
    assert same.counts == {key: count for key, count in now.current.items() if count}
    assert started(same, other) > 0, "who searches finds something better, which nobody asked for"


def test_it_is_searched_for_again_where_a_replica_died_or_one_runs_that_nobody_remembers(unfinished):
    there, _, evidence = unfinished
    assert planned(there, evidence).unchanged is True
    assert planned(there, evidence, replace(SOON, max_moves=100)).unchanged is msgspec.UNSET
    name, facts = next((name, facts) for name, facts in evidence.clusters.items() if facts.units)
    lost = {**evidence.clusters, name: msgspec.structs.replace(facts, units=facts.units[1:])}
    assert planned(there, msgspec.structs.replace(evidence, clusters=lost)).unchanged is msgspec.UNSET
    known = dict(evidence.state.units)
    del known[next(address for address in known if address.startswith("replica/"))]
    state = msgspec.structs.replace(evidence.state, units=known)
    assert planned(there, msgspec.structs.replace(evidence, state=state)).unchanged is msgspec.UNSET


def test_it_is_searched_for_again_where_a_file_says_something_else(unfinished):
    there, _, evidence = unfinished
    model = next(iter(there.blueprint.models))
    before = there.blueprint.models[model]
    fewer = before.model_copy(update={"replicas": before.replicas.model_copy(update={"max": before.replicas.max - 1})})
    blueprint = there.blueprint.model_copy(update={"models": {**there.blueprint.models, model: fewer}})
    assert plan(blueprint, there.inventory, evidence, SOON, now=0.0).unchanged is msgspec.UNSET


def test_a_cluster_that_answers_again_is_made_use_of(unfinished):
    there, first, _ = unfinished
    free = next(iter(sorted(there.inventory.clusters)))
    wanted = [replica for replica in first.placement.replicas if replica.cluster != free]
    assert wanted
    hidden = nothing(there)
    away = msgspec.structs.replace(hidden.clusters[free], known=False, reason="no route")
    few = {name: model.model_copy(update={"replicas": model.replicas.model_copy(update={"min": 0})})
           for name, model in there.blueprint.models.items()}  # fmt: skip
    eased = replace(there, blueprint=there.blueprint.model_copy(update={"models": few}))
    without = planned(eased, msgspec.structs.replace(hidden, clusters={**hidden.clusters, free: away}))
    assert planned(eased, applied(eased, without, away=[free])).unchanged is True
    assert planned(eased, applied(eased, without)).unchanged is msgspec.UNSET


def test_what_was_destroyed_is_planned_anew(unfinished):
    _, first, evidence = unfinished
    gone, _ = destruction(first.blueprint_digest, evidence)
    assert gone.situation is msgspec.UNSET


def test_a_maintenance_that_is_over_is_a_change(tmp_path):
    """Nothing of the minimum could stand on the cheap cluster before."""
    away = "maintenance: [{begin: '2026-01-01T00:00:00Z', end: '2026-01-02T00:00:00Z'}]"
    cheap = INVENTORY.replace("nodes: 2}", f"nodes: 2, price: 8 CHF/h, {away}}}")
    (tmp_path / "inventory.yaml").write_text(
        f"{cheap}  b: {{site: s, kind: local, partitions: {{gpu: {{device: h100-sxm, devices_per_node: 4, nodes: 2,"
        " price: 80 CHF/h}}}\n"
    )
    (tmp_path / "blueprint.yaml").write_text(f"{ONE_MODEL}objective: [slo, cost]\n")
    there = load(tmp_path / "blueprint.yaml", environment={})
    begins = 1767225600.0

    def at(now, evidence):
        return plan(there.blueprint, there.inventory, evidence, SOON, now=now)

    first = at(begins - 3600, nothing(there))
    assert "b" in {replica.cluster for replica in first.placement.replicas}
    evidence = applied(there, first)
    assert at(begins - 1800, evidence).unchanged is True
    after = at(begins + 10 * 86400, evidence)
    assert after.unchanged is msgspec.UNSET
    assert {replica.cluster for replica in after.placement.replicas} == {"a"}


def test_what_another_release_thinks_of_a_device_is_a_change(unfinished, monkeypatch):
    there, _, evidence = unfinished
    assert planned(there, evidence).unchanged is True
    power = Option.power.fget
    monkeypatch.setattr(Option, "power", property(lambda option: 2.0 * power(option)))
    assert planned(there, evidence).unchanged is msgspec.UNSET


def test_what_breaks_a_rule_moves(tmp_path):
    """All that was remembered runs, and it is one fewer than must: as if another hand had ended it and written so."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "blueprint.yaml").write_text(ONE_MODEL)
    there = load(tmp_path / "blueprint.yaml", environment={})
    evidence = applied(there, planned(there, nothing(there)))
    assert planned(there, evidence).unchanged is True
    ended = next(iter(evidence.state.units))
    units = {address: placed for address, placed in evidence.state.units.items() if address != ended}
    facts = evidence.clusters["a"]
    left = msgspec.structs.replace(facts, units=tuple(unit for unit in facts.units if unit.address != ended))
    state = msgspec.structs.replace(evidence.state, units=units)
    again = planned(there, msgspec.structs.replace(evidence, clusters={"a": left}, state=state))
    assert again.unchanged is msgspec.UNSET
    assert [action.kind for action in again.changes] == ["create"]


def test_a_solver_that_keeps_to_no_number_of_moves_is_believed(unfinished):
    there, _, evidence = unfinished
    other = planned(there, evidence, replace(SOON, solver=MempSolver()))
    assert (other.unchanged is True) is not (other.moves is not msgspec.UNSET)
    assert other.moves is not msgspec.UNSET
