"""Every group and model: that somebody may serve it, and still when any one node is lost."""

import pytest

from fabrictool.blueprint import load
from fabrictool.domain.plan import Placement, ReplicaPlacement
from fabrictool.planner.entitled import unserved_groups

INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  one: {site: a, kind: local, partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 2}}}
  two: {site: b, kind: local, partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 2}}}
"""
BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m: {source: "hf://meta-llama/Llama-3.1-8B-Instruct", TRUST}
trust: {groups: {all: {allow: [alpha, beta]}, mine: {allow: [alpha]}}}
"""


def at(number, cluster, tp=1):
    provider, site = {"one": ("alpha", "a"), "two": ("beta", "b")}[cluster]
    return ReplicaPlacement(
        replica=f"m/{number}", model="m", provider=provider, site=site, cluster=cluster, partition="gpu",
        device="h100-sxm", tp=tp,
    )  # fmt: skip


def failing(folder, *replicas, node_loss=False, trust="tier: owned"):
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(BLUEPRINT.replace("TRUST", trust))
    loaded = load(folder / "blueprint.yaml", environment={})
    found = unserved_groups(loaded.blueprint, loaded.inventory, Placement(replicas=replicas), node_loss=node_loss)
    return [sentence.partition(" gets")[0] for sentence in found]


def test_a_group_that_allows_no_provider_of_a_model_is_named(tmp_path):
    assert failing(tmp_path, at(0, "one")) == []
    assert failing(tmp_path, at(0, "two")) == ["group mine"]
    assert failing(tmp_path, at(0, "one"), at(1, "two"), trust="trust: [beta]") == ["group mine"]


@pytest.mark.parametrize(
    ("replicas", "lost"),
    [
        ([at(0, "one")], ["group all", "group mine"]),
        ([at(0, "one"), at(1, "two")], ["group mine"]),
        ([at(0, "one", 2), at(1, "one", 2)], ["group all", "group mine"]),
        ([at(0, "one", 4), at(1, "one", 4)], []),
        ([at(n, "one") for n in range(5)], []),
        ([at(0, "one", 4), at(1, "one", 1), at(2, "two")], []),
    ],
)
def test_the_loss_of_any_one_node(tmp_path, replicas, lost):
    """Devices of one node are what two replicas have, unless both do not fit one: the scheduler says where."""
    assert failing(tmp_path, *replicas, node_loss=True) == lost
    assert failing(tmp_path, *replicas) == []
