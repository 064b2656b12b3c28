"""Replicas over several nodes: what they take, what a blueprint may say of it, and what is told of them."""

import random

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.plan import node_blocks
from fabrictool.domain.state import State
from fabrictool.planner.assign import assign
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.verify import _packs, violations
from tests.planner.test_exact import option, pool
from tests.planner.test_properties import documents, problem_of, solved

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}}
sites: {a: {provider: alpha}}
clusters:
  gpus:
    site: a
    kind: slurm
    login: [{host: login.example, user: u, host_keys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILmUnzB17gKWybRRj5qtR6JyJz4S5PO9d5jFtr/HAOpo]}]
    partitions:
      big: {device: h100-sxm, devices_per_node: 4, nodes: 8, memory_per_node: 1TiB}
"""  # noqa: E501
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://%s
    engine: %s
    variant: {precision: bf16, context: 4096 tok}
    demand: {rate: 0.1 req/s, input: 500 tok, output: 100 tok}
    parallelism: {%s}
    replicas: {min: 1, max: 1}
"""


def planned(tmp_path, parallelism, model="meta-llama/Llama-3.1-70B-Instruct", engine="vllm"):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    file = tmp_path / "blueprint.yaml"
    file.write_text(BLUEPRINT % (model, engine, parallelism))
    loaded = load(file, environment={})
    seen = {"gpus": ClusterFacts(cluster="gpus", known=True)}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    made = plan(loaded.blueprint, loaded.inventory, evidence, PlanOptions(), now=0.0)
    assert violations(loaded.blueprint, loaded.inventory, made.placement) == []
    (action,) = made.changes
    return made, action


@pytest.mark.parametrize(
    ("tp", "pp", "per_node", "blocks"),
    [
        (1, 1, 4, (1, 1)), (4, 1, 4, (1, 4)), (2, 2, 4, (1, 4)), (4, 2, 4, (2, 4)), (8, 1, 4, (2, 4)),
        (16, 2, 4, (8, 4)), (4, 2, 6, (2, 4)), (2, 3, 4, (3, 2)), (2, 4, 4, (2, 4)), (1, 6, 4, (2, 3)),
        (1, 7, 4, (7, 1)),
    ],
)  # fmt: skip
def test_a_replica_stands_on_as_few_nodes_as_hold_it_with_as_many_devices_on_each(tp, pp, per_node, blocks):
    assert node_blocks(tp, pp, per_node) == blocks


def test_the_blocks_of_any_replica_are_its_devices_and_fit_a_node():
    rng = random.Random()
    for _ in range(2000):
        per_node = rng.randint(1, 16)
        tp = rng.choice([*range(1, per_node + 1), *(per_node * n for n in (2, 3, 4))])
        pp = rng.randint(1, 12)
        nodes, devices = node_blocks(tp, pp, per_node)
        assert nodes * devices == tp * pp
        assert devices <= per_node
        assert devices % tp == 0 or tp % devices == 0


def test_a_column_over_several_nodes_takes_blocks_of_them():
    where = pool("a", nodes=8, per_node=4, price=4.0)
    assert dict(option("m", where, tp=8).blocks) == {(where.key, 4): 2}
    assert option("m", where, tp=8).devices == 8
    assert option("m", where, tp=8).cost == 8.0


@pytest.mark.parametrize(
    ("parallelism", "told", "nodes"),
    [
        ("tp: 8", "8×h100-sxm on 2 nodes", 2),
        ("tp: 4, pp: 2", "2×4×h100-sxm on 2 nodes", 2),
        ("tp: 4, pp: 4", "4×4×h100-sxm on 4 nodes", 4),
        ("tp: 2, pp: 2", "2×2×h100-sxm  vllm", 1),
        ("pp: 2", "2×1×h100-sxm  vllm", 1),
        ("tp: 4", "4×h100-sxm  vllm", 1),
    ],
)
def test_what_the_blueprint_says_is_planned(tmp_path, parallelism, told, nodes):
    made, action = planned(tmp_path, parallelism)
    assert told in action.summary
    assert action.spec.on_nodes == nodes
    open_networks = [warning for warning in made.warnings if "neither encrypted nor authenticated" in warning]
    assert len(open_networks) == (nodes > 1)


def test_what_no_node_holds_stands_on_several_without_a_word(tmp_path):
    _, action = planned(tmp_path, "", model="deepseek-ai/DeepSeek-V3")
    assert action.spec.on_nodes > 1


@pytest.mark.parametrize(
    ("parallelism", "engine", "why"),
    [
        ("tp: 6", "vllm", "has not 6 devices of a node, or of whole nodes"),
        ("tp: 64", "vllm", "has not 64 devices of a node, or of whole nodes"),
        ("pp: 2", "reference", "has no pipeline"),
    ],
)
def test_what_cannot_be_cut_so_says_why(tmp_path, parallelism, engine, why):
    with pytest.raises(InfeasibleError) as caught:
        planned(tmp_path, parallelism, engine=engine, model="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert why in "; ".join(problem.message for problem in caught.value.problems)


def partitions_of(number, most):
    """Every way to cut up to `number` devices into blocks of at most `most`, the largest first."""
    yield ()
    for size in range(min(number, most), 0, -1):
        for rest in partitions_of(number - size, size):
            yield (size, *rest)


@pytest.mark.parametrize(("per_node", "nodes"), [(4, 3), (6, 2), (8, 2)])
def test_blocks_of_any_sizes_that_the_rows_allow_fit_their_nodes(per_node, nodes):
    """A pipeline can take six devices of a node: two such blocks leave no room for four in two nodes of eight."""
    place = pool("gpus", per_node=per_node, nodes=nodes)
    refused = set()
    for sizes in partitions_of(per_node * nodes, per_node):
        fits = _packs(sizes, nodes, per_node)
        allowed = all(
            sum(place.parts_lost(size, part) for size in sizes if size >= part) <= nodes * (per_node // part)
            for part in set(sizes)
        )
        assert fits or not allowed, sizes
        if fits and not allowed:
            refused.add(sizes)
    if per_node != 6:
        odd = [sizes for sizes in refused if any(size & (size - 1) for size in sizes)]
        assert refused == set(odd), "powers of two are exact"


@pytest.mark.parametrize("solver", ["exact", "cp", "tabu"])
def test_no_solver_puts_a_block_where_parts_of_nodes_are_left(solver):
    """It was drawn by chance once: c0 has two nodes of eight, and 16 devices were given out as 6, 6 and 4."""
    blueprint, inventory, problem = problem_of(*documents(random.Random(685615090)))
    solution = solved(solver, problem)
    assert violations(blueprint, inventory, assign(solution.whole(problem), solution, {})) == []
