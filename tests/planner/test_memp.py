"""The papers' baseline: its shares are those of the paper, and it is never better than the exact solver."""

from dataclasses import replace

import pytest
import yaml

from fabrictool.base.errors import InfeasibleError
from fabrictool.blueprint import load
from fabrictool.planner.build import build_problem
from fabrictool.planner.instances import synthetic
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.memp import MempSolver

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}}
sites: {s: {provider: p}}
clusters:
  ampere: {site: s, kind: local, partitions: {gpu: {device: a100-80g, devices_per_node: 8, nodes: 3}}}
  hopper: {site: s, kind: local, partitions: {gpu: {device: gh200, devices_per_node: 4, nodes: 8}}}
"""
SOURCES = {
    "a": ("meta-llama/Llama-2-13b-hf", 110, 4096),
    "b": ("codellama/CodeLlama-34b-hf", 185.5, 4096),
    "c": ("meta-llama/Llama-3.3-70B-Instruct", 221, 32768),
}
"""Model, req/s, context: the largest one needs four A100 for that."""


def problem_of(folder, blueprint, inventory):
    (folder / "inventory.yaml").write_text(inventory)
    (folder / "blueprint.yaml").write_text(blueprint)
    loaded = load(folder / "blueprint.yaml", environment={})
    usable = list(loaded.inventory.clusters)
    return build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})[0]


def test_shares_are_those_of_the_papers_table_1(tmp_path):
    """24 A100 and 32 GH200: 4, 16 and 36 devices for 13B, 34B and 70B; the 70B gets all GH200."""
    models = {
        name: {
            "source": f"hf://{source}",
            "engine": "vllm",
            "variant": {"precision": "fp16", "context": f"{context} tok"},
            "demand": {"rate": f"{rate} req/s", "input": "600 tok", "output": "300 tok"},
            "replicas": {"min": 1, "max": 64},
        }
        for name, (source, rate, context) in SOURCES.items()
    }
    document = {
        "apiVersion": "fabrictool/v1", "kind": "Blueprint", "fabric": "f", "inventory": "inventory.yaml",
        "models": models, "objective": ["latency"],
    }  # fmt: skip
    problem = problem_of(tmp_path, yaml.safe_dump(document), INVENTORY)
    (solution,) = MempSolver().solve(problem, deadline_s=30, seed=0)
    devices = dict.fromkeys(SOURCES, 0)
    on_gh200 = dict.fromkeys(SOURCES, 0)
    for i, count in solution.counts.items():
        option = problem.options[i]
        devices[option.model] += option.tp * count
        on_gh200[option.model] += option.tp * count * (option.pool.device == "gh200")
    assert devices == {"a": 4, "b": 16, "c": 36}
    assert on_gh200["c"] == 32
    assert solution.stages[0].objective >= solution.stages[0].bound > 0, "the paper's rates overload the machines"


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_never_better_than_exact(tmp_path, seed):
    documents = synthetic.documents(synthetic.parse("4x2x48"), seed, 0.6)
    texts = {name: yaml.safe_dump(document) for name, document in documents.items()}
    problem = problem_of(tmp_path, texts["blueprint.yaml"], texts["inventory.yaml"])
    (baseline,) = MempSolver().solve(problem, deadline_s=30, seed=0)
    best = next(s for s in ExactSolver().solve(problem, deadline_s=30, seed=0) if len(s.stages) == 2)
    mine, theirs = ([s.objective for s in solution.stages[:2]] for solution in (best, baseline))
    assert mine <= theirs or mine[0] == pytest.approx(theirs[0], abs=1e-3)
    assert best.stages[1].bound <= best.stages[1].objective


def test_a_rule_that_it_does_not_look_at_is_an_error(tmp_path):
    documents = synthetic.documents(synthetic.parse("2x1x16"), 1, 0.5)
    texts = {name: yaml.safe_dump(document) for name, document in documents.items()}
    problem = problem_of(tmp_path, texts["blueprint.yaml"], texts["inventory.yaml"])
    pinned = replace(problem.needs[0], pins={("north-a100-80g", ""): 0, ("south-a100-80g", ""): 0}, minimum=0)
    with pytest.raises(InfeasibleError):
        list(MempSolver().solve(replace(problem, needs=(pinned, *problem.needs[1:])), deadline_s=30, seed=0))
