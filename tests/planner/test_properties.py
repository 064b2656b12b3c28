"""What must hold whatever the fabric is: solvers on random problems, and on problems from random documents."""

import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.domain.blueprint import Blueprint
from fabrictool.domain.inventory import Inventory
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.planner.stages import LATENCY_TOLERANCE
from fabrictool.planner.verify import violations
from tests.planner.test_exact import random_instance
from tests.seeds import seeds

PLACING = sorted(set(SOLVERS) - {"reschedule"})
"""Solvers that need nothing to run already."""
MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct")
DEVICES = ("a100-80g", "h100-sxm", "l40s", "gh200")
PROVIDERS = ("north", "south")
FEW = seeds(16, drawn=4, long=60)


def solved(name, problem):
    """The last solution; None when there is none."""
    try:
        *_, solution = SOLVERS[name]().solve(problem, deadline_s=1, seed=0)
    except InfeasibleError:
        return None
    except FabrictoolError as error:
        if name == "tabu" and "FT2902" in str(error):  # a search that found none proves nothing
            return None
        raise
    return solution


def values(solution):
    return {stage.name: stage.objective for stage in solution.stages}


KNOWN = (
    2189,  # a stage that was kept within the engine's own tolerance was found infeasible, or worse than it is
    147456,  # a tolerance was spent twice: when a stage was good enough already, and again by later ones
)


@seeds(80, drawn=20, long=600, known=KNOWN)
def test_more_devices_never_make_it_worse(seed):
    less = random_instance(random.Random(seed))
    grown = {pool.key: replace(pool, nodes=pool.nodes + 1) for pool in less.pools[:1]}
    more = replace(
        less,
        pools=tuple(grown.get(pool.key, pool) for pool in less.pools),
        options=tuple(replace(o, pool=grown.get(o.pool.key, o.pool)) for o in less.options),
    )
    before, after = solved("exact", less), solved("exact", more)
    if before is None:
        return
    assert after is not None
    old, new = values(before), values(after)
    assert new["served"] <= old["served"] + 1e-4
    if new["served"] >= old["served"] - 1e-4:
        assert new.get("latency", 0.0) <= old.get("latency", 0.0) * (1 + LATENCY_TOLERANCE) + 1e-4


def documents(rng):
    """A small blueprint and its inventory."""
    clusters = {}
    for number in range(rng.randint(1, 3)):
        provider = rng.choice(PROVIDERS)
        partition = {
            "device": rng.choice(DEVICES),
            "devices_per_node": rng.choice((1, 4, 8)),
            "nodes": rng.randint(1, 2),
            "tier": rng.choice(("owned", "owned", "scavenger")),
            "price": f"{rng.randint(1, 9)} CHF/h",
        }
        software = rng.choice(({}, {"engines": {"vllm": {}}}, {"engines": {"sglang": {}}}))
        clusters[f"c{number}"] = {
            "site": f"site-{provider}", "kind": "local", "partitions": {"gpu": partition}, "software": software,
        }  # fmt: skip
    models = {}
    for number in range(rng.randint(1, 3)):
        least = rng.randint(0, 2)
        wanted = {
            "source": f"hf://{rng.choice(MODELS)}",
            "engine": rng.choice(("vllm", "sglang")),
            "variant": {"precision": "bf16", "context": "4096 tok"},
            "demand": {"rate": f"{rng.choice((0.5, 5, 60))} req/s", "input": "500 tok", "output": "100 tok"},
            "replicas": {"min": least, "max": rng.randint(max(1, least), 6)},
            "tier": rng.choice(("owned", "scavenger")),
            "slo": {"e2e_p95": "30 s", "priority": rng.randint(1, 3)},
            "place": {"spread": rng.choice(("none", "site", "node"))},
        }
        if rng.random() < 0.5:
            wanted["trust"] = (rng.choice(PROVIDERS),)
        if rng.randint(0, 3) == 0:
            wanted["place"]["pin"] = ({"cluster": rng.choice(sorted(clusters)), "replicas": 1},)
        models[f"m{number}"] = wanted
    objective = rng.choice((("latency",), ("slo", "cost"), ("cost",), ("energy", "latency")))
    head = {"apiVersion": "fabrictool/v1"}
    inventory = {
        **head, "kind": "Inventory", "providers": {name: {} for name in PROVIDERS}, "clusters": clusters,
        "sites": {f"site-{name}": {"provider": name} for name in PROVIDERS},
    }  # fmt: skip
    blueprint = {
        **head, "kind": "Blueprint", "fabric": "f", "inventory": "inventory.yaml", "models": models,
        "objective": objective,
    }  # fmt: skip
    return blueprint, inventory


def problem_of(blueprint, inventory):
    checked = Blueprint.model_validate(blueprint), Inventory.model_validate(inventory)
    return *checked, build_problem(*checked, usable=list(checked[1].clusters), unseen=(), current={})[0]


def shuffled(document, rng):
    """The same mappings in another order."""
    if not isinstance(document, dict):
        return document
    items = list(document.items())
    rng.shuffle(items)
    return {key: shuffled(value, rng) for key, value in items}


@pytest.mark.parametrize("name", PLACING)
@FEW
def test_what_a_solver_places_keeps_the_rules(name, seed):
    blueprint, inventory, problem = problem_of(*documents(random.Random(seed)))
    solution = solved(name, problem)
    if solution is None:
        return
    placement = assign(solution.whole(problem), solution, {})
    assert violations(blueprint, inventory, placement) == []
    for replica in placement.replicas:
        wanted = blueprint.models[replica.model]
        assert wanted.trust is None or replica.provider in wanted.trust
        installed = inventory.clusters[replica.cluster].software.engines
        assert not installed or wanted.engine in installed


@FEW
def test_a_plain_solver_is_never_better_than_the_exact_one(seed):
    *_, problem = problem_of(*documents(random.Random(seed)))
    best = solved("exact", problem)
    for name in ("cp", "cp-uniform", "memp"):  # tabu makes columns that the others do not have
        found = solved(name, problem)
        if best is None:
            assert found is None, name
        elif found is not None:
            slack = 2e-3 * sum(need.rate for need in problem.needs)
            assert values(found)["served"] >= values(best)["served"] - slack, name


@pytest.mark.parametrize("name", PLACING)
@FEW
def test_the_order_of_the_documents_does_not_matter(name, seed):
    made = documents(random.Random(seed))
    *_, problem = problem_of(*made)
    *_, again = problem_of(*(shuffled(document, random.Random(seed)) for document in made))
    assert replace(again, columns={}) == replace(problem, columns={})
    first, second, third = (solved(name, one) for one in (problem, problem, again))
    assert first == second == third
