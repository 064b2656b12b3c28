"""Rates at which several models hold at once: against all ways to leave windows out, and in a plan."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint import load
from fabrictool.planner import at_once
from fabrictool.planner.at_once import cheapest_rates, planned_at_once
from fabrictool.planner.chosen import SearchOptions, best, forecast_of
from fabrictool.planner.situation import Situation
from fabrictool.planner.uncertain import SAMPLES, windows_at_once
from fabrictool.workload.recorded import with_traces
from tests.planner.fabrics import write_fabric
from tests.planner.test_uncertain import a_demand
from tests.seeds import seeds


def dearest_left(windows, least, price, left_out):
    """By trying all: what the rates come to without so many windows."""
    values = []
    for gone in itertools.combinations(range(len(windows)), left_out):
        kept = np.delete(windows, gone, axis=0)
        values.append(float(np.maximum(kept.max(axis=0), least) @ price))
    return min(values)


def drawn_windows(rng, number, models):
    rates = [[round(rng.lognormvariate(0.0, 1.0), 2) for _ in range(models)] for _ in range(number)]
    if rng.random() < 0.3:  # some are the same
        rates = [[float(round(rate)) for rate in row] for row in rates]
    return np.array(rates)


@seeds(30, drawn=30, long=1000)
def test_no_windows_to_leave_out_are_better(seed):
    rng = random.Random(seed)
    windows = drawn_windows(rng, rng.randint(4, 9), rng.randint(2, 4))
    left_out = rng.randint(0, 3)
    least = np.array([rng.choice([0.0, float(np.median(column))]) for column in windows.T])
    price = np.array([rng.choice([0.0, rng.uniform(0.1, 9.0)]) for _ in windows.T])
    rates = cheapest_rates(windows, least, price, left_out)
    assert (rates >= least).all()
    assert int((windows > rates + 1e-9).any(axis=1).sum()) <= left_out
    assert float(rates @ price) == pytest.approx(dearest_left(windows, least, price, left_out), rel=2e-3, abs=1e-9)


def test_where_nothing_better_is_known_what_was_left_out_one_after_the_other_holds(monkeypatch):
    rng = random.Random(5)
    windows, price = drawn_windows(rng, 200, 4), np.array([1.0, 2.0, 3.0, 4.0])
    exact = cheapest_rates(windows, np.zeros(4), price, 20)
    monkeypatch.setattr(at_once, "_searched", lambda *_: None)
    simple = cheapest_rates(windows, np.zeros(4), price, 20)
    assert int((windows > simple).any(axis=1).sum()) <= 20
    assert float(exact @ price) <= float(simple @ price) <= 1.2 * float(exact @ price)


def test_windows_of_a_trace_are_those_at_the_same_time_and_of_several_are_drawn():
    same = {"m": a_demand([1.0, 2.0, 3.0], 0.5, 2.0), "n": a_demand([30.0, 20.0, 10.0], 0.5, 20.0)}
    windows, drawn = windows_at_once(same, random.Random(0))
    assert (windows.tolist(), drawn) == ([[1.0, 30.0], [2.0, 20.0], [3.0, 10.0]], False)
    other = same | {"o": a_demand([5.0, 6.0], 0.5, 5.0, trace="another")}
    windows, drawn = windows_at_once(other, random.Random(0))
    assert (windows.shape, drawn) == ((SAMPLES, 3), True)
    assert {tuple(row[:2]) for row in windows.tolist()} == {(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)}
    assert {row[2] for row in windows.tolist()} == {5.0, 6.0}


# -- a plan -----------------------------------------------------------------------------------------------------------


def trace_of(folder, minutes=60):
    """Two models that are busy in different minutes, so that each by itself says little of both."""
    rows = sorted(
        (60 * minute + number * 0.4, model)
        for minute in range(minutes)
        for model, busy in (("m", minute % 10 == 3), ("other", minute % 10 == 7))
        for number in range(120 if busy else 30 + minute % 5)
    )
    lines = "".join(f"{at:.1f},500,100,{model}\n" for at, model in [*rows, (60.0 * minutes, "m")])
    (folder / "trace.csv").write_text(f"t,in,out,model\n{lines}")


def situation_of_trace(folder, quantile, shared=""):
    trace_of(folder)
    file = write_fabric(folder)
    text = file.read_text()
    demand = f"demand: {{trace: trace.csv, quantile: {quantile}, window: 1m}}"
    for rate in ("200", "1"):
        text = text.replace(f"demand: {{rate: {rate} req/s, input: 500 tok, output: 100 tok}}", demand)
    if shared:
        text = text.replace("objective: [cost]", f"objective: [cost]\ntogether: {shared}")
    file.write_text(text)
    loaded = load(file, environment={})
    blueprint = with_traces(loaded.blueprint, folder, lambda name: None)
    return Situation(blueprint, loaded.inventory, ("dear", "cheap", "spot"), (), {}, 0.0)


def test_the_busy_windows_of_the_cheaper_model_are_planned_for(tmp_path):
    """Each is busy in 10 % of windows, and 15 % may be left out: those of one model, and a few others."""
    raised = planned_at_once(situation_of_trace(tmp_path, "80%", "85%"))
    rates = {name: float(model.demand.rate) for name, model in raised.blueprint.models.items()}
    assert sorted(rate >= 2.0 for rate in rates.values()) == [False, True]


@pytest.mark.parametrize("free", ["", ", price: 8 CHF/h"])
def test_what_costs_nothing_is_weighed_by_its_devices(tmp_path, free):
    """A cluster of one's own beside those that are paid for: rates of 0 would be planned for every busy window."""
    instance = situation_of_trace(tmp_path, "80%", "85%")
    file = tmp_path / "inventory.yaml"
    assert ", price: 8 CHF/h" in file.read_text()
    file.write_text(file.read_text().replace(", price: 8 CHF/h", free))
    inventory = load(tmp_path / "blueprint.yaml", environment={}).inventory
    raised = planned_at_once(replace(instance, inventory=inventory))
    rates = sorted(float(model.demand.rate) for model in raised.blueprint.models.values())
    assert rates[0] < 0.7
    assert rates[1] == 2.0


def test_a_plan_holds_in_as_many_windows_as_the_blueprint_asks_for(tmp_path):
    alone = situation_of_trace(tmp_path, "85%")
    assert planned_at_once(alone) is alone
    held = forecast_of(best(alone, SearchOptions()), "CHF").held_together
    asked = situation_of_trace(tmp_path, "85%", "95%")
    raised = planned_at_once(asked)
    rates = {name: float(model.demand.rate) for name, model in raised.blueprint.models.items()}
    assert rates == {"m": 2.0, "other": 2.0}, "less than all busy minutes cannot be left out"
    assert {float(model.demand.quantile) for model in raised.blueprint.models.values()} == {1.0}
    forecast = forecast_of(best(raised, SearchOptions()), "CHF")
    assert forecast.wanted_together == 0.95
    assert forecast.held_together >= max(0.95, held)


@pytest.mark.parametrize(
    ("quantile", "shared", "words"),
    [("85%", "40%", "`together` is 40%"), ("85%", "100%", "`together` is 100%"), ("85%", "99.5%", "99.5% needs 199")],
)
def test_what_cannot_be_asked_for_is_refused(tmp_path, quantile, shared, words):
    with pytest.raises(InvalidInputError) as caught:
        situation_of_trace(tmp_path, quantile, shared)
    assert all(words in problem.message for problem in caught.value.problems)


def test_it_is_of_several_models(tmp_path):
    write_fabric(tmp_path)
    file = tmp_path / "blueprint.yaml"
    file.write_text(file.read_text().replace("objective: [cost]", "objective: [cost]\ntogether: 90%"))
    with pytest.raises(InvalidInputError) as caught:
        load(file, environment={})
    assert [problem.code for problem in caught.value.problems] == ["FT1297"]
