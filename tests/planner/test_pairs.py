"""Prefill/decode pairs of an engine whose halves find each other by themselves: at one site, and of one kind."""

import msgspec
import pytest

from fabrictool.applier.checks import unstartable
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.specs import AgentSpec
from fabrictool.domain.state import State
from fabrictool.planner.plan import PlanOptions, plan

HEAD = "apiVersion: fabrictool/v1\n"
CLUSTER = "kind: local, software: {engines: {sglang: {}, vllm: {}}}"
DEVICES = "partitions: {g: {device: h100-sxm, devices_per_node: 2, nodes: 1}}"


def planned(folder, engine, *, model="phases: split, replicas: {min: 2, max: 4}"):
    """Two sites of two devices each, with a fast network between them."""
    (folder / "inventory.yaml").write_text(
        f"{HEAD}kind: Inventory\nproviders: {{p: {{}}}}\nsites: {{one: {{provider: p}}, two: {{provider: p}}}}\n"
        "links: [{between: [one, two], bandwidth: 100 Gbit/s, latency: 1 ms}]\n"
        f"clusters: {{a: {{site: one, {CLUSTER}, {DEVICES}}}, b: {{site: two, {CLUSTER}, {DEVICES}}}}}\n"
    )
    served = f"source: hf://meta-llama/Llama-3.1-8B-Instruct, engine: {engine}, {model}"
    (folder / "blueprint.yaml").write_text(
        f"{HEAD}kind: Blueprint\nfabric: f\ninventory: inventory.yaml\n"
        f"models: {{m: {{{served}, demand: {{rate: 1 req/s, input: 500 tok, output: 100 tok}}}}}}\n"
        "gateway: {cluster: a, listen: 127.0.0.1:1, mesh: 127.0.0.1:2}\n"
    )
    loaded = load(folder / "blueprint.yaml", environment={})
    seen = {name: ClusterFacts(cluster=name, known=True) for name in "ab"}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    return plan(loaded.blueprint, loaded.inventory, evidence, PlanOptions(), now=0.0)


def agents(made):
    return [action.spec for action in made.actions if isinstance(action.spec, AgentSpec)]


def with_one(made, phase, **changes):
    """The plan with its first replica of a phase made otherwise, as no planner would."""
    at = next(i for i, a in enumerate(made.actions) if isinstance(a.spec, AgentSpec) and a.spec.phase == phase)
    actions = list(made.actions)
    actions[at] = msgspec.structs.replace(actions[at], spec=msgspec.structs.replace(actions[at].spec, **changes))
    return msgspec.structs.replace(made, actions=tuple(actions))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_both_halves_of_a_pair_are_planned_and_can_be_started(tmp_path, engine):
    made = planned(tmp_path, engine)
    assert {spec.phase for spec in agents(made)} == {"prefill", "decode"}
    assert unstartable(made) is None
    if engine == "sglang":
        places = {phase: {s.site for s in agents(made) if s.phase == phase} for phase in ("prefill", "decode")}
        assert places["prefill"] == places["decode"]


def test_a_half_that_is_alone_at_its_site_is_not_started(tmp_path):
    made = planned(tmp_path, "sglang", model="phases: split, replicas: {min: 1, max: 2}")
    (site,) = {spec.site for spec in agents(made)}
    problem = unstartable(with_one(made, "decode", site="elsewhere"))
    assert (problem.code, "needs a prefill and a decode replica at one site" in problem.message) == ("FT4008", True)
    assert {"elsewhere", site} & set(problem.message.replace(";", "").split())
    apart = with_one(planned(tmp_path, "vllm", model="phases: split, replicas: {min: 1, max: 2}"), "decode", site="x")
    assert unstartable(apart) is None, "the gateway carries the word from one to the other"


def test_two_engines_that_share_requests_in_different_ways_are_no_pair(tmp_path):
    made = planned(tmp_path, "sglang", model="phases: split, replicas: {min: 1, max: 2}")
    problem = unstartable(with_one(made, "prefill", engine="vllm"))
    assert problem.code == "FT4008"
    assert "sglang (together) and vllm (relayed)" in problem.message
