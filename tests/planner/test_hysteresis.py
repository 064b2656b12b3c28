"""Demand that goes up and down by little moves nothing twice; by more it does."""

import random
from dataclasses import replace

import pytest

from fabrictool.planner.chosen import SearchOptions, best
from fabrictool.planner.hysteresis import standing_sentences, steadied
from fabrictool.planner.problem import ModelNeed, ResourceLimit
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.stages import values_of
from fabrictool.planner.survival import after_loss
from tests.planner.fabrics import situation
from tests.planner.test_exact import MOST, option, pool, problem, solve
from tests.planner.test_phases import between, phase
from tests.seeds import seeds

GROWTH = 0.1


def fabric(rate, current, *, maximum=9, others=(), nodes=9):
    where = pool("a", nodes=nodes, price=2.0)
    needs = [ModelNeed("m", rate, 1, maximum), *others]
    options = [option("m", where), *(option(need.model, where) for need in others)]
    running = {option("m", where).key: current} if current else {}
    return problem(needs, options, [where], objective=("slo", "cost"), current=running)


def count(instance, model="m"):
    solution, standing = steadied(instance, solve(instance), GROWTH, 0)
    return sum(k for i, k in solution.counts.items() if instance.options[i].model == model), standing


@pytest.mark.parametrize(
    ("asked", "running", "stays"),
    [
        (3.0, 4, {"m": 1}),  # three are just enough, and with a tenth more they are not
        (2.7, 4, {}),  # 2.97: three do with a tenth more
        (2.0, 4, {"m": 1}),  # 2.2 need three
        (1.7, 4, {}),
        (0.95, 2, {}),  # who needs one does not pay for two
        (4.0, 3, {}),  # it grows by what it needs
    ],
)
def test_what_a_tenth_more_would_need_stays(asked, running, stays):
    needed = -(-round(asked * 1000) // 1000)
    assert count(fabric(asked * MOST, running)) == (needed + sum(stays.values()), stays)


@seeds(3, drawn=5, long=100)
def test_a_demand_that_wavers_is_planned_for_once(seed):
    rng = random.Random(seed)
    middle = rng.uniform(1.2, 6.0) * MOST
    current, changes = 0, []
    for _ in range(12):
        now, _ = count(fabric(middle * rng.uniform(1 - GROWTH / 2.1, 1 + GROWTH / 2.1), current))
        changes.append(now - current)
        current = now
    assert all(change >= 0 for change in changes), "none is stopped that might be started again"


def test_others_come_first():
    """Of nine nodes six are asked for by somebody else: what would stand by has to go."""
    other = ModelNeed("n", 6 * MOST, 1, 9)
    assert count(fabric(3.0 * MOST, 4, others=[other])) == (3, {})
    assert count(fabric(3.0 * MOST, 4, others=[replace(other, rate=5 * MOST)])) == (4, {"m": 1})


def test_a_rule_that_forbids_it_holds():
    assert count(fabric(3.0 * MOST, 4, maximum=3)) == (3, {})
    instance = fabric(3.0 * MOST, 4)
    limit = ResourceLimit("few", "devices", "devices", 3.0, frozenset({instance.pools[0].key}))
    assert count(replace(instance, limits=(limit,))) == (3, {})


def test_each_model_by_itself_where_not_all_can_stay():
    """Two could keep one each, and there is one node for both."""
    where = pool("a", nodes=7, price=2.0)
    options = [option(model, where) for model in "mno"]
    needs = [ModelNeed("m", 3.0 * MOST, 1, 9), ModelNeed("n", 2.0 * MOST, 1, 9), ModelNeed("o", 1.0 * MOST, 1, 1)]
    running = {options[0].key: 4, options[1].key: 3}
    instance = problem(needs, options, [where], objective=("slo", "cost"), current=running)
    solution, standing = steadied(instance, solve(instance), GROWTH, 0)
    assert standing == {"m": 1}
    assert sum(solution.counts.values()) == 7


def test_of_pairs_each_half_has_its_own():
    """Two of each would do; with a tenth more the prompts need a third reader, and who answers has room."""
    where = pool("a", nodes=9, price=2.0)
    options = [phase("prefill", "m", where, rate=1.0), phase("decode", "m", where, rate=1.5)]
    running = {its.key: 3 for its in options}
    instance = problem([ModelNeed("m", 2.0, 0, 9)], options, [where], objective=("slo", "cost"), current=running)
    instance = replace(instance, transfers=between("m", where, where))
    solution, standing = steadied(instance, solve(instance), GROWTH, 0)
    by_phase = {instance.options[i].phase: k for i, k in solution.counts.items()}
    assert (by_phase, standing) == ({"prefill": 3, "decode": 2}, {"m": 1})


def test_the_search_is_judged_by_what_it_had_and_the_loads_are_of_all():
    instance = fabric(3.0 * MOST, 4)
    found = solve(instance)
    solution, _ = steadied(instance, found, GROWTH, 0)
    cost = next(stage for stage in solution.stages if stage.name == "cost")
    assert cost.objective == pytest.approx(values_of(found)["cost"] + 2.0, rel=0.02)
    assert cost.searched == pytest.approx(values_of(found)["cost"])
    assert sum(settled(instance, solution, 0).loads.values()) == pytest.approx(3.0 * MOST)


def test_only_a_plan_keeps_them_and_its_explanations_are_of_what_it_needs(tmp_path):
    """Of what-ifs that keep what stands by, a smaller demand would save nothing; and a second best beats no plan."""
    first = best(situation(tmp_path, old="rate: 200 req/s", new="rate: 50 req/s"), SearchOptions(work_s=5.0))
    of_each = after_loss(
        next(o for i, o in enumerate(first.problem.options) if o.model == "m" and i in first.solution.counts)
    )
    there = situation(tmp_path, old="rate: 200 req/s", new=f"rate: {3.9 * of_each:.6g} req/s")
    again = best(there, SearchOptions(work_s=5.0))
    running = {again.problem.options[i].key: count for i, count in again.solution.counts.items()}
    key = next(key for key in running if key[0] == "m")
    larger = replace(there, current=running | {key: running[key] + 1})
    plain, steady = (best(larger, SearchOptions(work_s=5.0, steady=steady)) for steady in (False, True))
    assert (plain.solution.counts, dict(plain.standing_by), plain.needed) == (again.solution.counts, {}, None)
    assert steady.standing_by == {"m": 1}
    assert sum(steady.solution.counts.values()) == sum(running.values()) + 1
    assert steady.needed.counts == plain.solution.counts


def test_it_is_said():
    assert standing_sentences({"m": 1, "b": 2}, 0.1) == (
        (
            "b: 2 replicas stay that the demand of now does not need: with 10% more it would need them again"
            " (`hysteresis`; `plan --improve` stops them)"
        ),
        (
            "m: 1 replica stays that the demand of now does not need: with 10% more it would need it again"
            " (`hysteresis`; `plan --improve` stops it)"
        ),
    )
