"""What is lost with one node although the inventory has several: as it is written, planned for and told."""

import json

import pytest

from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.state import State
from fabrictool.planner.plan import PlanOptions, plan

MODEL = {
    "source": "file:///m.gguf",
    "architecture": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "engine": "reference",
    "variant": {"precision": "bf16", "context": "256 tok"},
    "demand": {"rate": "1 req/s", "input": "16 tok", "output": "16 tok"},
    "replicas": {"min": 1, "max": 2},
    "survive": "node",
}
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
LOGIN = [{"host": "login.example.org", "user": "u", "host_keys": [f"ssh-ed25519 {KEY}"]}]


def planned(folder, kind, partition, **model):
    cluster = {"site": "a", "kind": kind, "partitions": {"p": {"nodes": 2, "memory_per_node": "4 GiB"} | partition}}
    cluster |= {"login": LOGIN} if kind in ("slurm", "ssh") else {}
    cluster |= {"kubernetes": {"context": "c", "namespace": "n"}} if kind == "kubernetes" else {}
    providers, sites = {"p-a": {}}, {"a": {"provider": "p-a"}}
    kinds = {"apiVersion": "fabrictool/v1", "kind": "Inventory"}
    inventory = kinds | {"providers": providers, "sites": sites, "clusters": {"c": cluster}}
    blueprint = kinds | {
        "kind": "Blueprint",
        "fabric": "f",
        "inventory": "inventory.yaml",
        "models": {"m": MODEL | model},
    }
    (folder / "inventory.yaml").write_text(json.dumps(inventory))
    (folder / "blueprint.yaml").write_text(json.dumps(blueprint))
    loaded = load(folder / "blueprint.yaml", environment={})
    seen = {"c": ClusterFacts(cluster="c", known=True)}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    return plan(loaded.blueprint, loaded.inventory, evidence, PlanOptions(node_loss=True), now=0.0)


@pytest.mark.parametrize(
    ("kind", "partition", "words"),
    [
        ("slurm", {"device": "cpu"}, "may be on the same: `whole_nodes: true` of the partition gives each a node"),
        ("kubernetes", {"device": "cpu", "whole_nodes": True}, "a cluster of kind kubernetes keeps none apart without"),
        ("local", {"device": "cpu"}, "a cluster of kind local keeps none apart without accelerators"),
    ],
    ids=["slurm", "pods", "processes"],
)
def test_replicas_that_may_share_a_node_are_no_reserve_and_the_plan_says_why(tmp_path, kind, partition, words):
    made = planned(tmp_path, kind, partition)
    (model,) = made.forecast.models
    assert (model.replicas, model.survival.served, model.survival.worst) == (1, 0.0, "a node of c/p")
    assert [text for text in made.warnings if words in text], made.warnings


@pytest.mark.parametrize(
    ("partition", "engine"),
    [({"device": "cpu", "whole_nodes": True}, "reference"), ({"device": "h100-sxm"}, "vllm")],
    ids=["whole nodes", "accelerators"],
)
def test_replicas_that_the_scheduler_keeps_apart_are_a_reserve(tmp_path, partition, engine):
    made = planned(tmp_path, "slurm", partition, engine=engine)
    (model,) = made.forecast.models
    assert (model.replicas, model.survival.served, model.survival.worst) == (2, 1.0, "")
    assert not [text for text in made.warnings if "node" in text], made.warnings
