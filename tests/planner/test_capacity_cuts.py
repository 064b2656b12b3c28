"""Rows that whole replicas keep: no placement breaks them, and relaxations come closer."""

import random
from dataclasses import replace

import pytest

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import Level, ModelNeed, Option
from fabrictool.planner.solvers import core, placing, programs
from fabrictool.planner.solvers.capacity_cuts import CapacityCuts, add_rows
from fabrictool.planner.solvers.core import core_of, with_sites
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.work import StepwiseWork
from tests.planner.test_exact import figures, pool, problem
from tests.planner.test_splitting import fabric, optimum
from tests.seeds import seeds


def relaxation(instance):
    return Formulation(instance, range(len(instance.options)), whole=False)


def closed(instance, name="served", limit=None):
    """What the relaxation of a stage comes to, before and after; `limit`: what `served` is kept within."""
    relaxed = relaxation(instance)
    cuts = CapacityCuts(instance, relaxed)
    if limit is not None:
        relaxed.keep("served", limit)
    answer = relaxed.minimise(name, seconds=60.0, seed=0)
    before = answer.objective
    for _ in range(10):
        if not cuts.add(answer):
            break
        answer = relaxed.minimise(name, seconds=60.0, seed=0)
    return before, answer.objective


@pytest.mark.parametrize(
    ("devices", "able", "rate", "unserved"),
    [
        pytest.param(1, 1.0, 0.5, 0.5, id="half a replica would be enough for each"),
        pytest.param(15, 2.0, 15.0, 1.0, id="8 of 7.5 for one of them, and the other lacks half a replica's rate"),
    ],
)
def test_two_models_do_not_share_a_replica(devices, able, rate, unserved):
    here = pool("a", nodes=devices)
    options = [Option(model, here, 1, figures(able), (Level(able, able + 1, True),)) for model in "mn"]
    before, after = closed(problem([ModelNeed(model, rate, 0, 30) for model in "mn"], options, [here]))
    assert before == pytest.approx(0.0)
    assert after == pytest.approx(unserved)


def closer(seed):
    """By how much the bounds of a fabric that nobody chose rise; none is above what there is."""
    rng = random.Random(seed)
    instance = fabric(seed, rng.choice((0.7, 1.0, 2.0)))
    if not instance.needs:
        return 0.0
    unserved, latency = optimum(instance)
    before, after = closed(instance)
    assert before - 1e-6 <= after <= unserved + 1e-4, seed
    low, high = closed(instance, "latency", unserved + 1e-4)
    assert low - 1e-4 * abs(low) <= high <= latency + 1e-3 * max(1.0, latency), seed
    return after - before


def test_no_bound_is_above_what_there_is():
    assert sum(closer(seed) > 1e-3 for seed in range(40)) > 5


@seeds(0, drawn=10, long=1000)
def test_nor_of_fabrics_that_nobody_chose(seed):
    closer(seed)


def test_what_is_counted_and_what_is_not():
    """Each relaxation is a step: where there is no work left for all of them, none of them counts."""
    here = pool("a", nodes=15)
    options = [Option(model, here, 1, figures(2.0), (Level(2.0, 3.0, True),)) for model in "mn"]
    needs = [ModelNeed(model, 15.0, 0, 30) for model in "mn"]
    instance = with_sites(problem(needs, options, [here], objective=("latency",)))

    def unserved(work, *, closely):
        return core_of(instance, relaxation(instance), work, 0, closely=closely, leans=False).lowest["served"]

    work = StepwiseWork(100)
    assert unserved(work, closely=True) == pytest.approx(1.0)
    assert 2 <= work.spent <= 2 * core.CUT_ROUNDS
    assert not work.ended
    for limit in range(work.spent):
        short = StepwiseWork(limit)
        assert unserved(short, closely=True) == pytest.approx(0.0)
        assert short.ended
    assert unserved(StepwiseWork(100), closely=False) == pytest.approx(0.0)


def test_a_search_has_them_where_nothing_runs(monkeypatch):
    asked = []
    real = placing.core_of
    monkeypatch.setattr(
        placing, "core_of", lambda *a, closely, **k: asked.append(closely) or real(*a, closely=closely, **k)
    )
    monkeypatch.setattr(programs, "TINY", 0)
    here, there = pool("a", nodes=40), pool("b", nodes=40)
    options = [Option(model, at, 1, figures(2.0), (Level(2.0, 3.0, True),)) for model in "mn" for at in (here, there)]
    instance = problem([ModelNeed(m, 90.0, 0, 60) for m in "mn"], options, [here, there], objective=("latency",))
    for its in (instance, replace(instance, current={options[0].key: 1})):
        *_, solution = ExactSolver().solve(its, deadline_s=5.0, seed=0)
        assert solution.stages[0].objective == pytest.approx(20.0)
    assert asked[0]
    assert not any(asked[1:])


def test_integer_programs_are_told_of_them():
    """Rows speak of options as the whole knows them, also to a part of it; and the optimum stays what it was."""
    told = 0
    for seed in range(30):
        instance = fabric(seed, 1.5)
        if not instance.needs:
            continue
        relaxed = relaxation(instance)
        cuts = CapacityCuts(instance, relaxed)
        cuts.add(relaxed.minimise("served", seconds=60.0, seed=0))
        best = Formulation(instance, range(len(instance.options)), whole=True, by_capacity=True)
        answer = best.minimise("served", seconds=60.0, seed=0)
        add_rows(best, cuts.rows)
        assert best.minimise("served", seconds=60.0, seed=0).objective == pytest.approx(answer.objective, abs=1e-4)
        models = [need.model for need in instance.needs][:1]
        alone, indices = part_of(instance, {}, range(len(instance.options)), models)
        program = Formulation(alone, range(len(indices)), whole=True, by_capacity=True)
        answer = program.minimise("served", seconds=60.0, seed=0)
        before = len(program.program.rows())
        add_rows(program, cuts.rows, indices)
        told += len(program.program.rows()) - before
        assert len(program.program.rows()) - before == sum(row.model in models for row in cuts.rows)
        assert program.minimise("served", seconds=60.0, seed=0).objective == pytest.approx(answer.objective, abs=1e-4)
    assert told > 5


def test_a_relaxation_bounds_what_was_kept_within_as_much():
    """Else it is solved once more: with more left unserved than it had, less is in the system at least."""
    here = pool("a", nodes=60)
    levels = (Level(1.0, 1.0, True), Level(2.0, 3.0, True))
    options = [Option(model, here, 1, figures(2.0), levels) for model in "mn"]
    instance = problem([ModelNeed(m, 60.0, 0, 90) for m in "mn"], options, [here], objective=("latency",))
    search = placing.PlacementSearch(instance, "test", StepwiseWork(1_000), 0)
    for _ in search.stage("served"):
        pass
    least = search._core.lowest["latency"]
    assert search._relaxed_bound("latency") == least
    search._limits["served"] = replace(search._limits["served"], most=search._limits["served"].most + 1e-3)
    search._programs.keep(search._limits["served"])
    assert search._relaxed_bound("latency") < least - 1e-4
