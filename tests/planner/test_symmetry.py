"""Partitions that are alike: one in the program, and dealt out afterwards."""

import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import exact
from fabrictool.planner.solvers.symmetry import MergedProblem, merged
from fabrictool.planner.stages import TOLERANCE_OF_WHAT_RUNS
from tests.planner.test_exact import counts, fits, option, pool, problem, random_instance, solve
from tests.seeds import seeds


def mirrored(seed):
    """A tiny instance of which one partition is there twice, with other numbers of nodes."""
    rng = random.Random(seed)
    instance = random_instance(rng)
    first = instance.pools[0]
    second = replace(first, cluster="z", provider="z", site="z", nodes=rng.randint(1, 2))
    more = [replace(one, pool=second) for one in instance.options if one.pool == first]
    pools = (*instance.pools, second)
    current = {}
    if rng.random() < 0.5:
        options = (*instance.options, *more)
        running = [rng.randint(1, 2) if rng.random() < 0.4 else 0 for _ in options]
        if fits(replace(instance, options=options, pools=pools), running):
            current = {one.key: count for one, count in zip(options, running, strict=True) if count}
    needs = tuple(replace(need, maximum=need.maximum + 1) for need in instance.needs)
    return problem(needs, [*instance.options, *more], pools, current=current, objective=("latency", "cost"))


def outcome(instance):
    try:
        return solve(instance)
    except InfeasibleError as error:
        return [complaint.code for complaint in error.problems]


@seeds(0, drawn=30, long=2000)
def test_nothing_is_lost_by_it(seed, monkeypatch):
    instance = mirrored(seed)
    smaller = merged(instance)
    twice = any(one.pool.cluster == "z" for one in instance.options)
    assert (len(smaller.problem.options) < len(instance.options)) is twice
    found = outcome(instance)
    monkeypatch.setattr(
        exact, "merged", lambda whole: MergedProblem(whole, whole, {i: (i,) for i in range(len(whole.options))})
    )
    apart = outcome(instance)
    if isinstance(apart, list):
        assert isinstance(found, list)
        return
    assert fits(instance, [found.counts.get(i, 0) for i in range(len(instance.options))])
    values, others = ({stage.name: stage for stage in one.stages} for one in (found, apart))
    for name in {"served", "cost"} & values.keys() & others.keys():
        spared = TOLERANCE_OF_WHAT_RUNS.get(name, 0.0) if instance.current else 0.0
        assert values[name].objective == pytest.approx(others[name].objective, abs=2e-3, rel=spared), name
    if instance.current and "moves" in values:
        now = [instance.current.get(one.key, 0) for one in instance.options]
        moves = sum(abs(found.counts.get(i, 0) - count) for i, count in enumerate(now))
        assert values["moves"].objective == moves
        assert values["moves"].bound <= others["moves"].objective + 1e-3
    assert sum(found.loads.values()) == pytest.approx(sum(apart.loads.values()), abs=2e-3)


def test_what_runs_stays_where_it_runs():
    a, b = pool("a", nodes=2), pool("b", nodes=2)
    for where in ("a", "b"):
        now = {("m", where, "p", 1, 1, "unified"): 1}
        instance = problem([ModelNeed("m", 1.5, 2, 2)], [option("m", a), option("m", b)], [a, b], current=now)
        found = counts(instance, solve(instance))
        assert found["m", where, "p", 1, 1, "unified"] >= 1


def test_blocks_are_dealt_out_node_by_node():
    """Three blocks of four and four of one: on nodes of four, two of one partition and two of another."""
    a, b = pool("a", nodes=2, per_node=4), pool("b", nodes=2, per_node=4)
    needs = [ModelNeed("large", 0.1, 3, 3), ModelNeed("small", 0.1, 4, 4)]
    options = [option(model, where, tp=tp) for model, tp in (("large", 4), ("small", 1)) for where in (a, b)]
    instance = problem(needs, options, [a, b])
    found = solve(instance)
    assert fits(instance, [found.counts.get(i, 0) for i in range(len(instance.options))])
    assert sum(found.counts.values()) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"price_per_node_hour": 2.0},
        {"devices_per_node": 2},
        {"stable": False},
        {"whole_nodes": True},
        {"shares_nodes": True},
        {"device": "y"},
    ],
)
def test_a_difference_that_counts_keeps_them_apart(change):
    a, b = pool("a"), pool("b")
    other = replace(b, **change)
    needs = [ModelNeed("m", 1.0, 0, 4)]
    assert len(merged(problem(needs, [option("m", a), option("m", b)], [a, b])).problem.options) == 1
    assert len(merged(problem(needs, [option("m", a), option("m", other)], [a, other])).problem.options) == 2


def test_rules_that_name_a_place_keep_it_apart():
    a, b = pool("a"), pool("b")
    options = [option("m", a), option("m", b)]
    for need in (ModelNeed("m", 1.0, 0, 4, pins={("b", ""): 1}), ModelNeed("m", 1.0, 0, 4, spread_sites=True)):
        assert len(merged(problem([need], options, [a, b])).problem.options) == 2
    survivor = ModelNeed("m", 1.0, 0, 4, survive="site")
    assert len(merged(problem([survivor], options, [a, b])).problem.options) == 2
    away = replace(problem([ModelNeed("m", 1.0, 0, 4)], options, [a, b]), outages=(frozenset({b.key}),))
    assert len(merged(away).problem.options) == 2
