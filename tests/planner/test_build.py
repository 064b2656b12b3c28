"""From YAML to columns: what is permitted, what fits, and what a plan of the demo looks like."""

import math
import os
from pathlib import Path

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.domain.blueprint import Slo
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.plan import ReplicaPlacement, decode_plan
from fabrictool.domain.state import State
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.forecast import forecast
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.targets import slo_misses
from fabrictool.simulator.capacity import Latency
from fabrictool.state.planfile import encode_file

ROOT = Path(__file__).parents[2]
INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  gpus:
    site: a
    kind: local
    partitions:
      big: {device: h100-sxm, devices_per_node: 8, nodes: 2, memory_per_node: 1TiB}
      small: {device: t4, devices_per_node: 1, nodes: 4, memory_per_node: 64GiB}
  other:
    site: b
    kind: local
    partitions:
      cpu: {device: cpu, devices_per_node: 2, nodes: 2, memory_per_node: 128GiB, tier: scavenger}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: ENGINE
    variant: {precision: PRECISION, context: 4096 tok}
    demand: {rate: 1 req/s, input: 500 tok, output: 100 tok}
    EXTRA
"""


def options(tmp_path, engine="vllm", precision="bf16", extra="", usable=("gpus", "other")):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    text = BLUEPRINT.replace("ENGINE", engine).replace("PRECISION", precision).replace("EXTRA", extra)
    (tmp_path / "blueprint.yaml").write_text(text)
    loaded = load(tmp_path / "blueprint.yaml", environment={})
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
    return {(o.pool.partition, o.tp) for o in problem.options if o.pp == 1}


def test_a_model_goes_where_it_fits_and_degrees_stay_inside_a_node(tmp_path):
    found = options(tmp_path)
    assert {("big", 1), ("big", 2), ("big", 4), ("big", 8)} <= found
    assert not any(partition == "small" for partition, _ in found), "16 GB of weights do not fit into a T4"


def test_an_engine_without_tensor_parallelism_gets_one_device(tmp_path):
    found = options(tmp_path, "reference", "q4_1")
    assert {tp for _, tp in found} == {1}
    assert {partition for partition, _ in found} == {"cpu"}, "it computes in fp32, which no GPU of the catalogue lists"


@pytest.mark.parametrize(
    ("extra", "partitions"),
    [
        ("trust: [beta]", {"cpu"}),
        ("tier: owned", {"big"}),
        ("trust: [alpha, beta]", {"big", "cpu"}),
    ],
)
def test_trust_and_tier_rule_columns_out(tmp_path, extra, partitions):
    assert {partition for partition, _ in options(tmp_path, extra=extra)} == partitions


def test_nothing_is_planned_on_a_cluster_that_did_not_answer(tmp_path):
    assert {partition for partition, _ in options(tmp_path, usable=["other"])} <= {"cpu"}


def demo_plan(seed=0):
    loaded = load(ROOT / "blueprints/local.yaml", environment=os.environ)
    seen = {name: ClusterFacts(cluster=name, known=True) for name in loaded.inventory.clusters}
    evidence = Evidence(fabric="local", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    return plan(loaded.blueprint, loaded.inventory, evidence, PlanOptions(seed), now=0.0, warnings=loaded.warnings)


def test_the_demos_plan_is_the_same_bytes_each_time_and_survives_its_file():
    first, second = demo_plan(), demo_plan()
    assert encode_file(first) == encode_file(second)
    assert decode_plan(encode_file(first)) == first
    assert decode_plan(encode_file(first)).id == first.id
    other = msgspec.structs.replace(first, fabric="other")
    assert other.id != first.id


def test_the_demos_plan_is_proved_and_spread():
    plan = demo_plan()
    assert plan.certificate.optimal
    assert all(stage.gap < 1e-5 for stage in plan.certificate.stages)  # the MIP engine's own tolerance
    assert sorted(r.site for r in plan.placement.replicas) == ["alpha-campus", "beta-campus"]
    assert [a.kind for a in plan.actions] == ["create"] * 3
    (model,) = plan.forecast.models
    assert model.ttft_p95_s.low < model.ttft_p95_s.value < model.ttft_p95_s.high
    assert plan.reasons


def test_replicas_on_a_cluster_that_does_not_answer_carry_their_load(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    text = BLUEPRINT.replace("ENGINE", "vllm").replace("PRECISION", "bf16").replace("EXTRA", "trust: [alpha, beta]")
    (tmp_path / "blueprint.yaml").write_text(text.replace("rate: 1 req/s", "rate: 10 req/s"))
    loaded = load(tmp_path / "blueprint.yaml", environment={})
    unseen = ReplicaPlacement(
        replica="m/0", model="m", provider="alpha", site="a", cluster="gpus", partition="big", device="h100-sxm", tp=8
    )
    problem, tables = build_problem(loaded.blueprint, loaded.inventory, usable=["other"], unseen=[unseen], current={})
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    assert {problem.options[i].key: k for i, k in solution.counts.items()} == {("m", "gpus", "big", 8, 1, "unified"): 1}
    (line,) = forecast(loaded.blueprint, problem, solution, tables, "", {}, {}).models
    assert line.replicas == 1
    assert line.served == 1.0
    assert [r.cluster for r in assign(problem, solution, {}, [unseen]).replicas] == ["gpus"]


def test_an_unseen_replica_without_a_column_still_counts(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    text = (
        BLUEPRINT.replace("ENGINE", "vllm").replace("PRECISION", "bf16").replace("EXTRA", "replicas: {min: 3, max: 4}")
    )
    (tmp_path / "blueprint.yaml").write_text(text)
    loaded = load(tmp_path / "blueprint.yaml", environment={})
    lost = ReplicaPlacement(
        replica="m/0", model="m", provider="beta", site="b", cluster="other", partition="gone", device="cpu", tp=1
    )
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=["gpus"], unseen=[lost], current={})
    assert (problem.needs[0].minimum, problem.needs[0].maximum) == (2, 3)


def test_heads_bound_the_degree(tmp_path):
    def figures(source):
        (tmp_path / "inventory.yaml").write_text(INVENTORY)
        text = BLUEPRINT.replace("ENGINE", "vllm").replace("PRECISION", "bf16").replace("EXTRA", "")
        text = text.replace("context: 4096", "context: 2048")
        (tmp_path / "blueprint.yaml").write_text(text.replace("hf://meta-llama/Llama-3.1-8B-Instruct", source))
        loaded = load(tmp_path / "blueprint.yaml", environment={})
        built, _ = build_problem(loaded.blueprint, loaded.inventory, usable=["gpus"], unseen=(), current={})
        return {o.tp: o.figures for o in built.options if o.pool.partition == "big"}

    assert set(figures("hf://Qwen/Qwen2-7B-Instruct\n    architecture: Qwen/Qwen2-7B")) == {1, 2, 4}, "28 heads"


def test_quantiles_grow_with_the_tail_alone():
    flat = Latency(0.5, 1.0, ttft_mean=2.0, ttft_p95=2.0, tpot_mean=0.1, tpot_p95=0.1, e2e_p95=12.0)
    assert slo_misses(Slo(ttft_p50="1.9 s", ttft_p99="2.1 s", e2e_p99="12.1 s"), flat) == [
        "TTFT p50 2 s is over the target of 1.9s"
    ]
    tail = Latency(0.5, 1.0, ttft_mean=1.0, ttft_p95=math.log(20), tpot_mean=0.0, tpot_p95=0.0, e2e_p95=math.log(20))
    assert slo_misses(Slo(ttft_p50="0.69 s", ttft_p99="4.60 s"), tail) == [
        "TTFT p50 0.693 s is over the target of 690ms",
        "TTFT p99 4.61 s is over the target of 4.6s",
    ]


def test_a_demand_that_is_served_but_for_the_solvers_tolerance_misses_nothing():
    (model,) = demo_plan().forecast.models
    assert (model.served, model.misses) == (1.0, ())
