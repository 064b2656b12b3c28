"""Programs of counts alone, which are told what loads cost at least."""

import contextlib
import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import effort, placing, programs
from fabrictool.planner.solvers.core import core_of, with_sites
from fabrictool.planner.stages import stage_names
from fabrictool.planner.tangents import BY_LOAD, LoadPrices, slo_prices
from fabrictool.planner.told import ToldFormulation
from fabrictool.planner.work import StepwiseWork
from tests.planner.test_exact import fits, random_instance, solve
from tests.seeds import some

OBJECTIVES = (("slo", "cost", "latency"), ("latency", "cost"), ("slo", "latency"), ("quality", "slo", "cost"))
SLACK = 1e-6


def with_slo(seed, crowded=1.0):
    """An instance some of whose replicas miss their SLO at their largest loads, or behind their first variant."""
    rng = random.Random(seed)
    instance = random_instance(rng)
    needs = tuple(replace(need, rate=crowded * need.rate) for need in instance.needs)
    options = []
    for option in instance.options:
        keeps = rng.randint(0, len(option.levels))
        levels = tuple(
            replace(level, attains=at < keeps, excess=0.0 if at < keeps else rng.choice([0.1, 0.5]) * (1 + at))
            for at, level in enumerate(option.levels)
        )
        options.append(replace(option, levels=levels, steps_down=rng.randint(0, 1)))
    return with_sites(replace(instance, needs=needs, options=tuple(options), objective=rng.choice(OBJECTIVES)))


def random_counts(instance, rng):
    """That keep all rules; None where the first tries do not."""
    for _ in range(20):
        counts = [rng.randint(0, 3) for _ in instance.options]
        if fits(instance, counts):
            return dict(enumerate(counts))
    return None


def by_loads(instance, counts, names):
    """Values of all stages in turn with given counts, and the prices of each."""
    loads, values, prices = Formulation.of_counts(instance, counts), {}, []
    for name in names:
        answer = loads.minimise(name, seconds=60.0, seed=0)
        values[name] = loads.value(name, answer)
        prices.append(loads.prices(name, answer))
        loads.keep(name, values[name] + SLACK)
    return values, prices


def told_of(instance, counts, prices, values, names):
    """The same values, as a program says that was told these prices."""
    program = ToldFormulation(instance, range(len(instance.options)))
    heard = {}
    for name in names:
        for price in prices:
            program.tell(price)
        answer = program.minimise(name, seconds=60.0, seed=0, counts=counts)
        heard[name] = None if answer is None else answer.objective
        program.keep(name, values[name] + SLACK)
    return heard


@pytest.mark.parametrize("first", some(range(0, 120, 40), 1))
def test_what_loads_cost_is_told_exactly_where_it_was_asked_and_never_too_high(first):
    felt, elsewhere = 0, 0
    for seed in range(first, first + 40):
        instance, rng = with_slo(seed), random.Random(seed)
        here, there = random_counts(instance, rng), random_counts(instance, rng)
        if here is None or there is None:
            continue
        names = [name for name in stage_names(instance) if name in ("served", *BY_LOAD)]
        values, prices = by_loads(instance, here, names)
        for name, value in told_of(instance, here, prices, values, names).items():
            # Of what is kept at nothing there is slack, which a price multiplies.
            assert value == pytest.approx(values[name], rel=1e-3, abs=2e-3), (seed, name)
            felt += name in BY_LOAD and values[name] > 0.1
        others, _ = by_loads(instance, there, names)
        for name, value in told_of(instance, there, prices, others, names).items():
            assert value is not None, (seed, name)
            assert value <= others[name] * (1 + 1e-6) + 1e-4, (seed, name)
            elsewhere += value < others[name] - 1e-3
    assert felt, "some of it costs something"
    assert elsewhere, "prices of one placement say less of another"


def test_any_prices_are_true():
    """Whatever is asked for a request, and however stages are weighed: no placement costs less than it is told to."""
    below = 0
    for seed in range(60):
        instance, rng = with_slo(seed), random.Random(seed)
        counts = random_counts(instance, rng)
        if counts is None:
            continue
        names = [name for name in stage_names(instance) if name in ("served", *BY_LOAD)]
        values, _ = by_loads(instance, counts, names)
        weighed = [name for name in names if name in BY_LOAD]
        prices = [
            LoadPrices(
                {need.model: 10 ** rng.uniform(-2, 2) for need in instance.needs},
                {name: 10 ** rng.uniform(-2, 2) for name in rng.sample(weighed, rng.randint(1, len(weighed)))},
            )
            for _ in range(10)
        ]
        for name, value in told_of(instance, counts, prices, values, names).items():
            assert value is not None, (seed, name)
            assert value <= values[name] * (1 + 1e-6) + 1e-4, (seed, name)
            below += name in BY_LOAD and value > 1e-3
    assert below, "some of them say something"


def test_what_misses_the_slo_is_told_before_anything_is_asked():
    missed = 0
    for seed in range(80):
        instance = replace(with_slo(seed), objective=("slo", "cost"))
        counts = random_counts(instance, random.Random(seed))
        if counts is None:
            continue
        names = ["served", "slo"]
        values, _ = by_loads(instance, counts, names)
        heard = told_of(instance, counts, list(slo_prices(instance)), values, names)
        assert heard["slo"] == pytest.approx(values["slo"], abs=1e-3), seed
        missed += values["slo"] > 0.1
    assert missed, "some miss it"


def test_nothing_is_told_twice_and_no_load_has_a_column():
    instance = with_slo(4)
    every = range(len(instance.options))
    told, full = ToldFormulation(instance, every), Formulation(instance, every, whole=True)
    assert told.program.columns == len(instance.options) + len(instance.needs) < full.program.columns
    prices = LoadPrices({need.model: 2.0 for need in instance.needs}, {"latency": 1.0})
    assert told.tell(prices)
    rows = len(told.program.rows())
    assert not told.tell(prices)
    assert len(told.program.rows()) == rows


@pytest.mark.parametrize("crowded", [0.5, 1.0, 3.0])
def test_a_search_by_tangents_comes_to_the_optimum_and_claims_no_wrong_bound(crowded, monkeypatch):
    """With programs that are not tiny, so that loads are told; against the proof of a program with all of them."""
    missed = 0
    for seed in range(40):
        instance = with_slo(seed, crowded)
        answers = []
        for tiny in (1500, 0):
            monkeypatch.setattr(programs, "TINY", tiny)
            try:
                answers.append({stage.name: stage for stage in solve(instance).stages})
            except InfeasibleError:
                answers.append(None)
        best, searched = answers
        assert (best is None) == (searched is None), seed
        if best is None:
            continue
        for name in stage_names(instance):
            if name not in best or name not in searched or name in ("replicas", "tie-break"):
                continue
            optimum, stage = best[name].objective, searched[name]
            assert stage.bound <= optimum * 1.005 + 2e-3, (seed, name)
            if stage.objective > optimum * 1.01 + 2e-3:  # then it does not say otherwise
                assert stage.bound < stage.objective - 1e-3, (seed, name)
                break
            missed += name == "slo" and optimum > 0.1
    assert missed or crowded < 1, "some miss it"


def test_a_demand_that_has_no_rate_costs_nothing():
    instance = with_slo(4)
    idle = replace(instance, needs=tuple(ModelNeed(need.model, 0.0, 0, need.maximum) for need in instance.needs))
    program = ToldFormulation(idle, range(len(idle.options)))
    program.tell(LoadPrices({need.model: 5.0 for need in idle.needs}, {"latency": 1.0}))
    answer = program.minimise("latency", seconds=60.0, seed=0)
    assert answer.objective == pytest.approx(0.0, abs=1e-9)


def test_asked_again_with_what_its_answers_cost_a_program_comes_to_the_optimum():
    too_little = 0
    for seed in range(40):
        instance = replace(with_slo(seed), objective=("latency", "cost"))
        every = range(len(instance.options))
        full, told = Formulation(instance, every, whole=True), ToldFormulation(instance, every)
        best = {}
        for name in ("served", "latency"):
            answer = full.minimise(name, seconds=60.0, seed=0)
            if answer is None:
                break
            best[name] = answer.objective
            full.keep(name, answer.objective + SLACK)
        if len(best) < 2 or {option.model for option in instance.options} < {need.model for need in instance.needs}:
            continue
        told.keep("served", best["served"] + SLACK)
        claimed = []
        for _ in range(12):
            answer = told.minimise("latency", seconds=60.0, seed=0)
            claimed.append(answer.objective)
            assert claimed[-1] <= best["latency"] * (1 + 1e-6) + 1e-4, seed
            _, prices = by_loads(instance, told.counts(answer), ["served", "latency"])
            news = [told.tell(price) for price in prices]
            if True not in news:
                break
        assert claimed[-1] == pytest.approx(best["latency"], rel=1e-3, abs=2e-3), seed
        too_little += claimed[0] < best["latency"] - 1e-2
    assert too_little, "at first it thinks too little of what loads cost"


def test_prices_that_are_known_are_kept_once():
    instance = with_slo(1)
    relaxed = Formulation(instance, range(len(instance.options)), whole=False)
    known = programs.SearchPrograms(
        instance, core_of(instance, relaxed, StepwiseWork(1_000), 0, closely=False, leans=False)
    )
    known.by_tangents, before = True, len(known._prices)
    for _ in range(2):
        known.learn(LoadPrices({need.model: 3.5 for need in instance.needs}, {"slo": 1.0}))
    assert len(known._prices) == before + 1


def test_the_second_pass_leaves_its_time_to_what_is_far_from_its_bound(monkeypatch):
    monkeypatch.setattr(programs, "TINY", 0)
    monkeypatch.setattr(effort, "NODES_BY_TANGENTS", ((), (1_000,)))
    searched, asked = placing.PlacementSearch._searched, []

    def watched(search, name, nodes):
        if search._part == "second" and search._spared_time:
            asked.append((name in search._spared_time, search._gap(name) > effort.AGAIN))
        return searched(search, name, nodes)

    monkeypatch.setattr(placing.PlacementSearch, "_searched", watched)
    for seed in range(60):
        with contextlib.suppress(InfeasibleError):
            solve(with_slo(seed, 3.0))
    assert (False, True) in asked, "what was far is searched"
    assert (True, False) not in asked, "what was near, and still is, is not"
