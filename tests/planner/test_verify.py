"""The verifier finds each broken rule, and finds nothing in what the solver made."""

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.domain.plan import Placement, ReplicaPlacement
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.verify import violations

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  ours:
    site: a
    kind: local
    partitions:
      big: {device: h100-sxm, devices_per_node: 4, nodes: 2}
      spare: {device: h100-sxm, devices_per_node: 4, nodes: 1, tier: scavenger}
    software: {engines: {vllm: {}}}
  theirs:
    site: b
    kind: local
    partitions: {big: {device: a100-80g, devices_per_node: 8, nodes: 1}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {precision: bf16, context: 4096 tok}
    demand: {rate: 20 req/s, input: 500 tok, output: 100 tok}
    trust: [alpha]
    tier: owned
    replicas: {min: 1, max: 4}
  big:
    source: hf://meta-llama/Llama-3.3-70B-Instruct
    engine: vllm
    variant: {precision: bf16, context: 4096 tok}
    demand: {rate: 0.5 req/s, input: 500 tok, output: 100 tok}
    replicas: {min: 1, max: 4}
    place: {pin: [{cluster: theirs, replicas: 1}]}
"""


@pytest.fixture
def loaded(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "blueprint.yaml").write_text(BLUEPRINT)
    return load(tmp_path / "blueprint.yaml", environment={})


@pytest.fixture
def placed(loaded):
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=["ours", "theirs"], unseen=(), current={})
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    return assign(problem, solution, {})


def at(replica, model="m", provider="alpha", site="a", cluster="ours", partition="big", device="h100-sxm", tp=1):
    return ReplicaPlacement(
        replica=replica, model=model, provider=provider, site=site, cluster=cluster, partition=partition,
        device=device, tp=tp,
    )  # fmt: skip


THERE = {"provider": "beta", "site": "b", "cluster": "theirs", "device": "a100-80g"}
GOOD = (at("m/0"), at("big/0", "big", tp=4, **THERE))


def test_what_the_solver_makes_is_in_order(loaded, placed):
    assert len(placed.replicas) >= 2
    assert violations(loaded.blueprint, loaded.inventory, placed) == []
    assert violations(loaded.blueprint, loaded.inventory, Placement(replicas=GOOD)) == []


@pytest.mark.parametrize(
    ("replicas", "complaint"),
    [
        ((GOOD[0],), "0 replicas on owned capacity"),
        ((*GOOD, at("m/0")), "placed 2 times"),
        ((*GOOD, at("m/1", **THERE)), "beta is not trusted"),
        ((*GOOD, at("m/1", partition="spare")), "scavenger capacity"),
        ((*GOOD, at("m/1", tp=8)), "more than a node has"),
        ((*GOOD, *(at(f"m/{i}", tp=4) for i in (1, 2))), "do not fit its nodes"),
        ((*GOOD, *(at(f"m/{i}") for i in range(1, 5))), "at most 4 are wanted"),
        ((*GOOD, at("big/1", "big", tp=1)), "of weights do not fit"),
        ((GOOD[0], at("big/0", "big", tp=4)), "are pinned there"),
        ((*GOOD, at("m/1", cluster="nowhere")), "no such model or place"),
        ((*GOOD, at("n/0", "n")), "no such model or place"),
        ((*GOOD, at("m/1", device="a100-80g")), "ours/big has no a100-80g"),
    ],
)
def test_each_broken_rule_is_found(loaded, replicas, complaint):
    found = violations(loaded.blueprint, loaded.inventory, Placement(replicas=tuple(replicas)))
    assert [one for one in found if complaint in one], found


def test_an_engine_that_is_not_installed_is_found(loaded):
    models = dict(loaded.blueprint.models)
    models["m"] = models["m"].model_copy(update={"engine": "sglang"})
    blueprint = loaded.blueprint.model_copy(update={"models": models})
    assert [v for v in violations(blueprint, loaded.inventory, Placement(replicas=GOOD)) if "not installed" in v]


def test_what_cannot_be_seen_counts_and_is_not_judged(loaded):
    elsewhere = msgspec.structs.replace(GOOD[1], tp=1)
    placement = Placement(replicas=(GOOD[0], elsewhere))
    assert violations(loaded.blueprint, loaded.inventory, placement)
    assert violations(loaded.blueprint, loaded.inventory, placement, unseen=["theirs"]) == []
