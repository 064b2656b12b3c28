"""The first placement keeps rules by itself, and what the clock ends before there is one is told as that."""

import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import ModelNeed, ResourceLimit
from fabrictool.planner.solvers import core, placing, programs
from fabrictool.planner.solvers.core import with_sites
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.rounding import rounded
from tests.planner.test_exact import option, pool, problem
from tests.seeds import some


def is_kept(instance, counts):
    """By the rows of the program."""
    loads = Formulation.of_counts(instance, counts)
    return loads.minimise("served", seconds=60, seed=0) is not None


def of_the_relaxation(instance):
    """The relaxation rounded; None where it has no solution itself."""
    instance = with_sites(instance)
    relaxed = Formulation(instance, range(len(instance.options)), whole=False)
    answer = relaxed.minimise("served", seconds=60, seed=0)
    if answer is None:
        return None
    distance = {i: relaxed.distance(answer, i) for i in relaxed.chosen}
    return rounded(instance, relaxed.usage(answer), distance)


def with_rules(rng):
    """Roomy, so that nearly all that is asked for has a placement."""
    pools = [pool(name, nodes=rng.randint(3, 6), per_node=2, site=name[:1]) for name in ("a1", "a2", "b1", "c1")]
    needs = []
    for name in ("k", "m", "n"):
        least = rng.randint(0, 3)
        pins = {("c1", ""): 1} if rng.random() < 0.3 else {}
        needs.append(
            ModelNeed(name, rng.uniform(0.1, 5.0), least, 9, pins=pins, spread_sites=not pins and rng.random() < 0.6)
        )
    options = [option(need.model, where, capacity=rng.uniform(0.5, 2.0)) for need in needs for where in pools]
    away = (frozenset({rng.choice(pools).key}),) if rng.random() < 0.5 else ()
    every = frozenset(where.key for where in pools[:3])
    limits = (ResourceLimit("few", "devices", "devices", 11.0, every),) if rng.random() < 0.5 else ()
    return replace(problem(needs, options, pools, objective=("latency",)), outages=away, limits=limits)


@pytest.mark.parametrize("first", some(range(0, 200, 100), 1))
def test_minima_pins_and_even_sites_are_kept_by_rounding(first):
    tried = broken = 0
    for seed in range(first, first + 100):
        instance = with_rules(random.Random(seed))
        counts = of_the_relaxation(instance)
        if counts is not None:
            tried += 1
            broken += not is_kept(with_sites(instance), counts)
    assert tried >= 90
    assert broken <= tried // 20, "what little is left is for the integer program"


def test_a_minimum_comes_before_the_demand_of_others_where_a_limit_leaves_too_little_for_both():
    a, b = pool("a", nodes=9), pool("b", nodes=9)
    needs = [ModelNeed("greedy", 9.0, 0, 9, priority=9.0), ModelNeed("small", 0.1, 2, 9)]
    options = [option("greedy", a), option("small", b)]
    limit = ResourceLimit("few", "devices", "devices", 4.0, frozenset({a.key, b.key}))
    instance = replace(problem(needs, options, [a, b]), limits=(limit,))
    assert rounded(instance, {0: 4.0, 1: 0.0}, {0: 0.0, 1: 0.0}) == {0: 2, 1: 2}


def test_without_a_placement_the_search_ends_with_the_clock(monkeypatch):
    """The last engine is told when to end, and finding nothing by then is no plan."""
    a = pool("a")
    instance = problem([ModelNeed("m", 0.1, 1, 2)], [option("m", a)], [a])
    monkeypatch.setattr(placing, "first_placement", lambda *_: None)
    monkeypatch.setattr(placing.EngineSteps, "by_highs", lambda *_, **__: None)  # the clock ended it
    told = []
    monkeypatch.setattr(programs.Formulation, "minimise", _watched(programs.Formulation.minimise, told))
    with pytest.raises(FabrictoolError) as caught:
        list(ExactSolver(lambda: -1.0).solve(instance, deadline_s=60, seed=0))
    assert [trouble.code for trouble in caught.value.problems] == ["FT2902"]
    assert told == [-1.0]


def _watched(minimise, told):
    def asks(self, name, *, left_s=None, **limits):
        if any(self.program.whole_columns()):
            told.append(left_s())
            raise FabrictoolError.of("FT2902", "nothing was found in time")
        return minimise(self, name, left_s=left_s, **limits)

    return asks


@pytest.mark.parametrize("solved", range(1, 6))
def test_relaxations_that_the_clock_ends_are_left_out_again_by_the_work_that_was_done(solved, monkeypatch):
    """The clock is counted in programs that were begun: how often it is read hangs on the machine."""
    monkeypatch.setattr(core, "COLUMNS_PER_UNIT", 1)
    monkeypatch.setattr(core, "LATE_S", 0.0)
    rng = random.Random(solved)
    pools = [pool(name, nodes=6, per_node=2, price=rng.uniform(1, 9)) for name in "abc"]
    needs = [ModelNeed(f"m{n}", rng.uniform(0.5, 3.0), 1, 9) for n in range(5)]
    options = [option(f"m{n}", where, latency=rng.uniform(1, 3)) for n in range(5) for where in pools]
    instance = problem(needs, options, pools, objective=("latency", "cost"))
    asked, minimise = [], programs.Formulation.minimise
    monkeypatch.setattr(
        programs.Formulation,
        "minimise",
        lambda self, name, **limits: asked.append(name) or minimise(self, name, **limits),
    )
    *_, hurried = ExactSolver(lambda: 9.0 if len(asked) < solved else 0.0).solve(instance, deadline_s=60, seed=0)
    *_, again = ExactSolver().solve(instance, deadline_s=hurried.work, seed=0)
    *_, complete = ExactSolver().solve(instance, deadline_s=60, seed=0)
    assert again == hurried
    assert hurried.ended
    for stage, best in zip(hurried.stages, complete.stages, strict=False):
        assert stage.bound <= best.objective + 1e-6, "what was not relaxed has no bound that is none"
