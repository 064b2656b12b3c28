"""The search for large problems, on problems small enough to know the answer."""

import itertools
import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import part, parties, placing, programs
from fabrictool.planner.solvers.exact import ExactSolver
from tests.planner.test_exact import cheapest_load, fits, option, pool, problem, random_instance, solve
from tests.planner.test_phases import between, phase, random_pairs
from tests.seeds import some


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(programs, "TINY", 0)
    monkeypatch.setattr(programs, "FEW", 0)
    monkeypatch.setattr(parties, "TOGETHER", 3)
    monkeypatch.setattr(parties, "TOGETHER_BY_CAPACITY", 3)  # several parties, also of two models


def both(instance, monkeypatch):
    """(found as a large problem, the optimum); None where nothing keeps the rules."""
    answers = []
    for small in (0, 1500):
        monkeypatch.setattr(programs, "TINY", small)
        try:
            answers.append(solve(instance))
        except InfeasibleError:
            answers.append(None)
    return answers


@pytest.mark.parametrize("first", some(range(0, 120, 40), 1))
def test_it_is_never_better_than_the_optimum_and_claims_no_wrong_bound(first, monkeypatch):
    near = 0
    for seed in range(first, first + 40):
        instance = random_instance(random.Random(seed))
        found, best = both(instance, monkeypatch)
        assert (found is None) == (best is None), seed
        if found is None or best is None:
            near += 1
            continue
        counts = [found.counts.get(i, 0) for i in range(len(instance.options))]
        assert fits(instance, counts), seed
        values, optimum = ({s.name: s for s in one.stages} for one in (found, best))
        unserved, _ = cheapest_load(instance, counts)
        assert unserved == pytest.approx(values["served"].objective, abs=2e-3)
        assert values["served"].objective >= optimum["served"].objective - 1e-4, seed
        assert values["served"].bound <= optimum["served"].objective + 1e-4, seed
        near += values["served"].objective <= optimum["served"].objective + 1e-3
    assert near >= 38, "most of the tiny ones are served as well as can be"


def test_pairs_keep_their_rules(monkeypatch):
    for seed in range(25):
        instance = random_pairs(seed)
        found, best = both(instance, monkeypatch)
        assert found.stages[0].objective >= best.stages[0].objective - 1e-4, seed
        assert found.stages[0].bound <= best.stages[0].objective + 1e-4, seed


def test_parties_that_ask_for_too_much_together_are_undone(monkeypatch):
    """Here each party is told that it has all of the link between two sites to itself."""
    monkeypatch.setattr(part, "_links_left", lambda whole, members: whole.links)
    for seed in range(40):
        rng = random.Random(seed)
        a, b = (pool(name, nodes=4, site=name, price=rng.choice((1.0, 4.0))) for name in "ab")
        needs, options, ways = [], [], {}
        for model in ("m", "n", "o"):
            needs.append(ModelNeed(model, rng.choice((0.5, 2.0, 4.0)), 0, 4))
            options += [phase(which, model, where) for which in ("prefill", "decode") for where in (a, b)]
            for one, other in itertools.product((a, b), repeat=2):
                if one != other or rng.random() < 0.5:
                    ways |= between(model, one, other, octets=1e6, link=None if one == other else ("a", "b"))
        made = problem(needs, options, [a, b], objective=("latency", "cost"))
        instance = replace(made, transfers=ways, links={("a", "b"): rng.choice((5e5, 2e6))})
        found, best = both(instance, monkeypatch)
        assert found.stages[0].objective >= best.stages[0].objective - 1e-4, seed
        assert found.stages[0].bound <= best.stages[0].objective + 1e-4, seed


def five_models():
    rng = random.Random(3)
    pools = [pool(name, nodes=6, per_node=2, price=rng.uniform(1, 9)) for name in "abc"]
    needs = [ModelNeed(f"m{n}", rng.uniform(0.5, 3.0), 1, 9) for n in range(5)]
    options = [option(f"m{n}", where, latency=rng.uniform(1, 3)) for n in range(5) for where in pools]
    return problem(needs, options, pools, objective=("latency", "cost"))


@pytest.mark.parametrize("calls", [1, 4, 9, 20, 30])
def test_a_search_that_a_clock_ends_is_found_again_by_the_work_that_it_had_done(calls):
    """Whatever ended it: the number that it ended at is a limit with which it ends there again."""
    clock = itertools.chain(itertools.repeat(9.0, calls), itertools.repeat(0.0))
    *_, hurried = ExactSolver(lambda: next(clock)).solve(five_models(), deadline_s=60, seed=0)
    *_, again = ExactSolver().solve(five_models(), deadline_s=hurried.work, seed=0)
    *_, complete = ExactSolver().solve(five_models(), deadline_s=60, seed=0)
    assert again == hurried
    assert hurried.work < complete.work
    assert hurried.repeatable


def test_later_stages_keep_the_earlier_ones():
    """Parties change from sweep to sweep; what one uses of another's slack must not be used twice."""
    instance = five_models()
    stages = {}
    for solution in ExactSolver().solve(instance, deadline_s=30, seed=0):
        for stage in solution.stages:
            first = stages.setdefault(stage.name, stage.objective)
            slack = 0.011 * first if stage.name == "latency" else 1e-3
            if stage is not solution.stages[-1]:
                assert stage.objective <= stages[stage.name] + slack
            stages[stage.name] = min(stage.objective, first)
    assert list(stages)[:3] == ["served", "latency", "cost"]


def test_the_same_seed_finds_the_same():
    instance = replace(random_instance(random.Random(7)), objective=("latency",))
    assert solve(instance, seed=4) == solve(instance, seed=4)


def test_what_cannot_be_rounded_is_found_by_the_integer_program(monkeypatch):
    monkeypatch.setattr(placing, "first_placement", lambda *_: None)
    a, b = pool("a", nodes=4), pool("b", nodes=4)
    options = [option("m", a), option("m", b, latency=9.0)]
    instance = problem([ModelNeed("m", 0.1, 0, 4, pins={("b", ""): 2})], options, [a, b])
    found = solve(instance)
    assert {instance.options[i].pool.cluster: k for i, k in found.counts.items()}["b"] == 2
