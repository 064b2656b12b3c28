"""Max-min fairness: whoever lacks the largest share lacks as little as can be, and only then is all served that can."""

import itertools
import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import effort, parties, programs
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.planner.stages import amount, stage_names, values_of
from fabrictool.simulator.demanded import GroupDemand
from tests.planner.test_exact import MOST, fits, option, pool, problem, random_instance, solve
from tests.seeds import seeds


def fair(instance):
    return replace(instance, objective=("fairness", *instance.objective))


def counts_of(instance):
    return {instance.options[i].model: k for i, k in solve(instance).counts.items()}


def quick_and_slow():
    """A device serves four requests of one model, or one of the other."""
    a = pool("a", nodes=10)
    options = [option("quick", a, capacity=4.0), option("slow", a, capacity=1.0)]
    needs = [ModelNeed("quick", 40 * MOST, 0, 99), ModelNeed("slow", 10 * MOST, 0, 99)]
    return problem(needs, options, [a])


def test_served_first_starves_the_model_that_is_dear_and_fairness_does_not():
    assert counts_of(quick_and_slow()) == {"quick": 10}
    assert counts_of(fair(quick_and_slow())) == {"quick": 5, "slow": 5}
    solution = solve(fair(quick_and_slow()))
    assert values_of(solution)["fairness"] == pytest.approx(0.5, abs=1e-4)
    assert amount("fairness", 0.5, "") == "50%"


def test_a_priority_weighs_what_is_lacking():
    instance = quick_and_slow()
    needs = tuple(replace(need, priority=4.0 if need.model == "slow" else 1.0) for need in instance.needs)
    assert counts_of(fair(replace(instance, needs=needs))) == {"quick": 2, "slow": 8}


def test_what_nobody_could_serve_does_not_void_it_for_others():
    instance = quick_and_slow()
    capped = ModelNeed("capped", 1.25 * MOST, 0, 1)
    nowhere = ModelNeed("nowhere", 1.0, 0, 9)
    options = [*instance.options, option("capped", instance.pools[0])]
    eleven = replace(instance.pools[0], nodes=11)
    options = [replace(its, pool=eleven) for its in options]
    grown = problem([*instance.needs, capped, nowhere], options, [eleven])
    assert counts_of(fair(grown)) == {"capped": 1, "quick": 5, "slow": 5}


def test_a_group_counts_as_a_model_does():
    p, q = pool("p", nodes=2), pool("q", nodes=6)
    options = [option(model, where) for model in ("m", "n") for where in (p, q)]
    parts = (GroupDemand("g", 0.5, frozenset("p")), GroupDemand("", 0.5))
    needs = [ModelNeed("m", 4 * MOST, 0, 9, parts=parts), ModelNeed("n", 4 * MOST, 0, 9)]
    instance = problem(needs, options, [p, q], objective=("fairness", "cost"))
    solution = solve(instance)
    assert values_of(solution)["fairness"] == pytest.approx(0.0, abs=1e-5)
    there = {instance.options[i].pool.cluster for i in solution.counts if instance.options[i].model == "m"}
    assert "p" in there


def test_it_comes_before_all_that_is_served_and_without_it_nothing_changes():
    instance = quick_and_slow()
    assert stage_names(fair(instance))[:2] == ["fairness", "served"]
    late = replace(instance, objective=(*instance.objective, "fairness"))
    assert stage_names(late) == stage_names(fair(instance))
    assert "fairness" not in stage_names(instance)


@pytest.mark.parametrize("name", ["tabu", "reschedule"])
def test_a_solver_that_does_not_know_it_says_so(name):
    with pytest.raises(FabrictoolError, match=r"FT2030.*fairness"):
        list(SOLVERS[name]().solve(fair(quick_and_slow()), deadline_s=1, seed=0))


def brute_force(instance):
    """(largest share that lacks, requests/s unserved) of the best placement."""
    most = {need.model: need.maximum for need in instance.needs}
    tried = []
    for counts in itertools.product(*(range(most[o.model] + 1) for o in instance.options)):
        if not fits(instance, counts):
            continue
        shares, unserved = [0.0], 0.0
        for need in instance.needs:
            mine = [o for o in instance.options if o.model == need.model]
            room = sum(
                o.levels[-1].rate * k for o, k in zip(instance.options, counts, strict=True) if o.model == need.model
            )
            lack = max(0.0, need.rate - room)
            could = min(need.rate, need.maximum * max((o.levels[-1].rate for o in mine), default=0.0))
            unserved += need.priority * lack
            if could:
                shares.append(need.priority * max(0.0, lack - (need.rate - could)) / need.rate)
        tried.append((max(shares), unserved))
    if not tried:
        return None
    least = min(tried)[0]
    return least, min(unserved for share, unserved in tried if share <= least + 1e-6)


def compared(instance):
    best = brute_force(instance)
    if best is not None:
        values = values_of(solve(instance))
        assert (values["fairness"], values["served"]) == pytest.approx(best, abs=3e-3)


def a_fair_instance(seed):
    rng = random.Random(seed)
    instance = fair(random_instance(rng))
    return replace(instance, needs=tuple(replace(need, priority=float(rng.randint(1, 3))) for need in instance.needs))


@seeds(30, drawn=30, long=1000)
def test_is_the_fairest_of_all_placements_and_then_serves_most(seed):
    compared(a_fair_instance(seed))


@seeds(15, drawn=10, long=300)
def test_later_stages_keep_it_where_some_models_are_placed_at_a_time(seed, monkeypatch):
    for module, name in ((programs, "TINY"), (programs, "FEW"), (effort, "AT_ONCE"), (effort, "AT_ONCE_BY_CAPACITY")):
        monkeypatch.setattr(module, name, 0)
    monkeypatch.setattr(parties, "TOGETHER", 1)
    monkeypatch.setattr(parties, "TOGETHER_BY_CAPACITY", 1)
    instance = a_fair_instance(seed)
    if brute_force(instance) is None:
        return
    *_, solution = SOLVERS["exact"]().solve(instance, deadline_s=30, seed=0)
    lacking = []
    for need in instance.needs:
        served = sum(solution.loads.get(i, 0.0) for i in instance.of(need.model))
        could = need.reached(instance.options[i] for i in instance.of(need.model))
        if could:
            lacking.append(need.priority * max(0.0, could - served) / need.rate)
    assert max(lacking, default=0.0) <= values_of(solution)["fairness"] + 1e-3


@seeds(4, drawn=2, long=40)
def test_constraint_programming_is_as_fair(seed):
    instance = a_fair_instance(seed)
    best = brute_force(instance)
    if best is not None:
        *_, solution = SOLVERS["cp"]().solve(instance, deadline_s=2, seed=0)
        assert values_of(solution)["fairness"] == pytest.approx(best[0], abs=5e-3)
