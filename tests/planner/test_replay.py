"""The event loop's second opinion."""

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.domain.plan import Placement, ReplicaPlacement
from fabrictool.planner import replay as replaying
from fabrictool.planner.chosen import SearchOptions, best
from fabrictool.planner.group_flows import divided_demands
from fabrictool.planner.replay import FLEET, replay
from fabrictool.planner.situation import Situation
from fabrictool.planner.weights import planned_flows, planned_rates

INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}, q: {}}
sites: {s: {provider: p}, t: {provider: q}}
clusters:
  gpus: {site: s, kind: local, partitions: {a: {device: a100-80g, devices_per_node: 4, nodes: 2}}}
  far: {site: t, kind: local, partitions: {a: {device: a100-80g, devices_per_node: 4, nodes: 2}}}
links: [{between: [s, t], bandwidth: 10 Gbit/s, latency: 1ms}]
"""
BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: test
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    variant: {context: 4096 tok}
    demand: {rate: RATE req/s, input: 500 tok, output: 100 tok}
    slo: {ttft_p95: 2s, tpot_p95: 50ms}
    trust: [p]
    phases: any
  silent:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    variant: {context: 4096 tok}
"""


def placed(name, *, cluster="gpus", phase="unified", partition="a"):
    provider, site = ("p", "s") if cluster == "gpus" else ("q", "t")
    return ReplicaPlacement(
        replica=name, model=name.split("/")[0], provider=provider, site=site, cluster=cluster, partition=partition,
        device="a100-80g", tp=1, phase=phase,
    )  # fmt: skip


@pytest.fixture
def play(tmp_path):
    def run(rate, *replicas, seed=0):
        (tmp_path / "inventory.yaml").write_text(INVENTORY)
        (tmp_path / "blueprint.yaml").write_text(BLUEPRINT.replace("RATE", str(rate)))
        loaded = load(tmp_path / "blueprint.yaml", environment={})
        played = replay(loaded.blueprint, loaded.inventory, Placement(replicas=replicas), {}, seed)
        return {name: one.figures for name, one in played.items()}

    return run


def test_more_replicas_meet_more_of_the_slo(play):
    few = play(40, placed("m/0"))["m"]
    many = play(40, *(placed(f"m/{n}") for n in range(4)))["m"]
    assert few.attainment < 0.5 < many.attainment
    assert few.ttft_p95_s > many.ttft_p95_s


def test_little_s_law_holds(play):
    found = play(5, placed("m/0"), placed("m/1"))["m"]
    assert found.in_system < 5 * found.e2e_p95_s, "the mean stay is shorter than its 95th percentile"
    assert found.in_system > 5 * 99 * 0.005, "a hundred tokens take half a second at least"


def test_the_seed_decides(play):
    assert play(5, placed("m/0"), seed=3) == play(5, placed("m/0"), seed=3)
    assert play(5, placed("m/0"), seed=3) != play(5, placed("m/0"), seed=4)


def test_what_cannot_be_played_is_left_out(play):
    gone = placed("m/1", partition="gone")
    assert play(1, placed("silent/0"), placed("m/0", cluster="far")) == {}, "no demand; not trusted"
    assert set(play(1, placed("m/0"), gone, placed("silent/0"))) == {"m"}


def test_a_pair_hands_over(play):
    together = play(2, placed("m/0"))["m"]
    pair = play(2, placed("m/0", phase="prefill"), placed("m/1", phase="decode"))["m"]
    assert pair.attainment > 0.9
    assert pair.tpot_p95_s != together.tpot_p95_s


GROUPS_INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {ethz: {}, unibas: {}, nobody: {}}
sites: {zurich: {provider: ethz}, basel: {provider: unibas}}
clusters:
  dear:
    site: zurich
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 9, price: 40 CHF/h}}
  cheap:
    site: basel
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 9, price: 8 CHF/h}}
"""
GROUPS_BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
objective: [slo, cost]
trust: {groups: {lab-a: {allow: [ethz]}, lab-b: {allow: [ethz, unibas]}, far: {allow: [nobody]}}}
models:
  chat:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {precision: bf16, context: 4096 tok}
    demand: {rate: RATE req/s, input: 500 tok, output: 200 tok, groups: {lab-a: 60%, lab-b: 10%}}
    slo: {ttft_p95: 500ms, tpot_p95: 25ms, attain: 95%}
    replicas: {min: 1, max: 40}
routing: {policy: weighted}
"""


def planned_by_groups(folder, rate, old="", new=""):
    (folder / "inventory.yaml").write_text(GROUPS_INVENTORY)
    (folder / "blueprint.yaml").write_text(GROUPS_BLUEPRINT.replace("RATE", str(rate)).replace(old, new))
    files = load(folder / "blueprint.yaml", environment={})
    there = Situation(files.blueprint, files.inventory, ("dear", "cheap"), (), {}, 0.0)
    return there, best(there, SearchOptions(work_s=10.0))


def test_the_verdict_is_of_what_routing_does_with_each_group(tmp_path):
    """By one weight a third of all others goes to the replicas that lab-a needs for itself, and they miss the SLO."""
    there, chosen = planned_by_groups(tmp_path, 135)
    assert {its.cluster for its in chosen.placement.replicas} == {"dear", "cheap"}
    assert chosen.played["chat"].figures.attainment > 0.99
    assert chosen.played["chat"].misses == ()
    plain = Placement(
        replicas=tuple(msgspec.structs.replace(its, group_weights={}) for its in chosen.placement.replicas)
    )
    problem, solution = chosen.problem, chosen.solution
    rates = planned_rates(problem, solution)
    flows = planned_flows(problem, solution, divided_demands(problem, solution))
    by_one = replay(there.blueprint, there.inventory, plain, rates, 0, flows=flows)["chat"]
    assert by_one.misses
    assert by_one.figures.attainment < 0.8


def test_a_part_of_a_large_fleet_has_the_same_load_of_each_group_on_each_replica(tmp_path, monkeypatch):
    seen = []

    def kept(simulation, *arguments, **more):
        seen.append(simulation)
        return steady_state(simulation, *arguments, **more)

    steady_state = replaying.steady_state
    monkeypatch.setattr(replaying, "steady_state", kept)
    _, chosen = planned_by_groups(tmp_path, 600)
    rates = planned_rates(chosen.problem, chosen.solution)
    of_cluster = {key[1]: rate for key, rate in rates.items()}
    simulation = seen[-1]
    assert len(chosen.placement.replicas) > FLEET >= len(simulation.specs) - 1
    loads = [0.0] * len(simulation.specs)
    for part in simulation.parts:
        able = [r for r, spec in enumerate(simulation.specs) if part.allowed is None or spec.provider in part.allowed]
        weights = {r: simulation.specs[r].group_weights[part.group] for r in able}
        for r in able:
            loads[r] += simulation.rate * part.share * weights[r] / sum(weights.values())
    names = {"ethz": "dear", "unibas": "cheap"}
    wanted = [of_cluster[names[spec.provider]] for spec in simulation.specs]
    assert loads == pytest.approx(wanted, rel=0.01)


def test_requests_that_nobody_may_serve_are_no_load(tmp_path):
    """They are unserved, and the plan says so; whom a gateway refuses makes nobody else late."""
    _, chosen = planned_by_groups(tmp_path, 135, "lab-b: 10%", "far: 10%")
    figures = chosen.played["chat"].figures
    assert figures.attainment > 0.99
    assert chosen.played["chat"].misses == ()
