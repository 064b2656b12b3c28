"""The event loop's second opinion."""

import pytest

from fabrictool.blueprint import load
from fabrictool.domain.plan import Placement, ReplicaPlacement
from fabrictool.planner.replay import replay

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
