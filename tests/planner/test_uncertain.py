"""In how many windows of its demand a placement holds: against solving each window, for one model and for several."""

import math
import random
from types import SimpleNamespace

import pytest

from fabrictool.base.units import Share
from fabrictool.cli.plan_text import _at_once, _windows
from fabrictool.domain.plan import Forecast, ModelForecast
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import Level, ModelNeed
from fabrictool.planner.stages import in_order
from fabrictool.planner.uncertain import together, windows_of
from fabrictool.workload.windows import quantile_rate
from tests.planner.test_exact import option, pool, problem, solve
from tests.seeds import seeds


def a_demand(rates, quantile, planned, trace="t"):
    return SimpleNamespace(
        quantile=Share(quantile), windows=tuple(rates), rate=planned, mean=sum(rates) / len(rates), window_s=60.0,
        trace=trace,
    )  # fmt: skip


def levels(rng):
    good = rng.choice([0.4, 0.8])
    return Level(0.4, 0.4, attains=True), Level(0.8, 1.6, good > 0.4, 0.0 if good > 0.4 else 0.5)


def an_instance(rng, number):
    pools = [pool(name, nodes=rng.randint(2, 4), per_node=2) for name in "ab"]
    models = "mn"[:number]
    options = [option(m, where, tp=tp, levels=levels(rng)) for m in models for where in pools for tp in (1, 2)]
    windows = {m: [round(math.exp(rng.gauss(0.0, 0.7)), 3) for _ in range(30)] for m in models}
    planned = {m: quantile_rate(rates, 0.8) for m, rates in windows.items()}
    needs = [ModelNeed(m, planned[m], 0, 12) for m in models]
    demands = {m: a_demand(windows[m], 0.8, planned[m]) for m in models}
    return problem(needs, options, pools, objective=("slo", "cost")), demands


def solved_for(instance, counts, rates):
    """(unserved, load that misses the SLO) at these rates, by the program itself."""
    needs = tuple(ModelNeed(need.model, rates[need.model], 0, need.maximum) for need in instance.needs)
    at_rates = problem(needs, instance.options, instance.pools, objective=("slo",))
    loads = Formulation.of_counts(at_rates, counts)
    values, _ = in_order(loads, ["served", "slo"], seconds=30, seed=0)
    return values.get("served", 0.0), values.get("slo", 0.0)


@seeds(8, drawn=8, long=100)
def test_it_is_what_solving_each_window_says(seed):
    rng = random.Random(seed)
    instance, demands = an_instance(rng, 1)
    solution = solve(instance)
    if not solution.counts:
        return
    outcomes = [solved_for(instance, solution.counts, {"m": rate}) for rate in demands["m"].windows]
    its = windows_of(instance, solution, "m", demands["m"])
    number = len(outcomes)
    assert its.served == pytest.approx(sum(unserved < 1e-6 for unserved, _ in outcomes) / number)
    assert its.held == pytest.approx(sum(unserved < 1e-6 and misses < 1e-6 for unserved, misses in outcomes) / number)
    assert its.unserved == pytest.approx(sum(unserved for unserved, _ in outcomes) / number, abs=1e-5)
    assert its.low <= its.planned <= its.high


@seeds(4, drawn=4, long=40)
def test_what_can_be_had_holds_in_its_share_and_several_in_what_these_leave(seed):
    """One model in its share exactly; of several at once no more than the sum of what the shares leave is lost."""
    instance, demands = an_instance(random.Random(seed), 2)
    solution = solve(instance)
    blueprint = SimpleNamespace(models={m: SimpleNamespace(demand=demands[m]) for m in "mn"})
    each = {m: windows_of(instance, solution, m, demands[m]) for m in "mn"}
    if any(stage.name in ("served", "slo") and stage.objective > 1e-6 for stage in solution.stages):
        return
    assert all(its.held >= 0.8 for its in each.values())
    at_once = together(blueprint, instance, solution, 0)
    rates = [dict(zip("mn", pair, strict=True)) for pair in zip(*(demands[m].windows for m in "mn"), strict=True)]
    outcomes = [solved_for(instance, solution.counts, pair) for pair in rates]
    exact = sum(unserved < 1e-6 and misses < 1e-6 for unserved, misses in outcomes) / len(outcomes)
    assert exact >= 1.0 - sum(1.0 - its.held for its in each.values()) - 1e-5
    assert at_once == pytest.approx(exact, abs=5 * math.sqrt(0.25 / 1000)), "of one trace, the same window for all"
    assert at_once == together(blueprint, instance, solution, 0)


def test_models_with_traces_of_their_own_have_windows_of_their_own():
    instance, demands = an_instance(random.Random(1), 2)
    solution = solve(instance)
    demands["n"].trace = "another"
    blueprint = SimpleNamespace(models={m: SimpleNamespace(demand=demands[m]) for m in "mn"})
    product = math.prod(windows_of(instance, solution, m, demands[m]).held for m in "mn")
    assert together(blueprint, instance, solution, 0) == pytest.approx(product, abs=5 * math.sqrt(0.25 / 1000))
    blueprint.models["n"].demand = None
    assert together(blueprint, instance, solution, 0) is None, "one by itself is told of already"


def test_who_plans_by_the_mean_is_told_nothing():
    instance, demands = an_instance(random.Random(1), 1)
    solution = solve(instance)
    demands["m"].quantile = None
    assert windows_of(instance, solution, "m", demands["m"]) is None
    assert windows_of(instance, solution, "m", None) is None


NOTHING_ELSE = {"cost_per_hour": 0.0, "currency": "", "power_w": 0.0, "basis": ""}


def told_of(its, **more):
    return ModelForecast(
        model="m", replicas=1, utilisation=1.0, served=1.0, ttft_p95_s=None, tpot_p95_s=None, e2e_p95_s=None,
        demand=its, **more,
    )  # fmt: skip


def test_slos_are_spoken_of_where_there_are_any():
    here = pool("a", nodes=1)
    instance = problem([ModelNeed("m", 0.8, 0, 1)], [option("m", here)], [here])
    its = windows_of(instance, solve(instance), "m", a_demand([0.2, 0.4, 0.8, 1.0], 0.6, 0.8))
    for slo, words in (("meets", "served within their SLOs in 75%"), ("", "served in 75%")):
        forecast = Forecast(models=(told_of(its, slo=slo),), **NOTHING_ELSE, held_together=0.75)
        assert _at_once(forecast) == [f"these models at once: {words} of windows"]
    assert _at_once(Forecast(models=(told_of(its),), **NOTHING_ELSE)) == []


def test_it_is_told_in_words():
    here = pool("a", nodes=1)
    instance = problem([ModelNeed("m", 0.8, 0, 1)], [option("m", here)], [here])
    its = windows_of(instance, solve(instance), "m", a_demand([0.2, 0.4, 0.8, 1.0], 0.6, 0.8))
    assert _windows(told_of(its)) == (
        "m: planned for 0.8 req/s (0.2–1), mean 0.6: 60% of 1m windows of its trace ask for no more;"
        " served in 75% of them, 0.05 req/s unserved in the mean"
    )
