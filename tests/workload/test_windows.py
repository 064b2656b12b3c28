"""Quantiles of a demand over windows: against arrivals that are drawn, and on the other half of a real trace."""

import gzip
import random
from datetime import UTC
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint import load
from fabrictool.domain.plan import inputs_digest
from fabrictool.workload.arrivals import arrivals
from fabrictool.workload.recorded import with_traces
from fabrictool.workload.statistics import gap_cv
from fabrictool.workload.trace import Trace
from fabrictool.workload.windows import (
    declared_quantile,
    declared_rates,
    fewest_windows,
    gap_cv_inside,
    hour_factors,
    quantile_rate,
    rank_of,
    window_rates,
)
from tests.seeds import seeds

CALLS = Path(__file__).parents[2] / "examples" / "llm-mesh" / "functions.csv.gz"
BUSIEST, MODELS = 10, 40


def a_trace(times):
    size = np.full(len(times), 100)
    return Trace(np.asarray(times, float), size, size)


def test_windows_without_a_request_count_and_a_part_of_one_does_not():
    assert window_rates(np.array([0.0, 1.0, 2.0, 26.0, 33.0]), 33.0, 10.0).tolist() == [0.3, 0.0, 0.1]


@pytest.mark.parametrize(("quantile", "number", "rank"), [(0.95, 19, 19), (0.95, 99, 95), (0.5, 1, 1), (0.9, 5, 6)])
def test_the_rank_leaves_room_for_the_window_that_is_to_come(quantile, number, rank):
    assert rank_of(quantile, number) == rank
    assert (number >= fewest_windows(quantile)) == (rank <= number)


@seeds(3, drawn=3, long=20)
def test_the_next_window_keeps_it_as_often_as_it_says(seed):
    """Whatever the distribution is, as long as windows come in any order."""
    rng = np.random.default_rng(seed)
    number, quantile, tries = int(rng.integers(20, 60)), float(rng.uniform(0.5, 0.95)), 4000
    drawn = np.exp(rng.normal(0.0, 1.5, (tries, number + 1)))
    kept = np.mean([row[-1] <= quantile_rate(row[:-1], quantile) for row in drawn])
    expected = rank_of(quantile, number) / (number + 1)
    assert quantile - 1e-9 <= expected
    assert abs(kept - expected) < 5 * np.sqrt(expected * (1 - expected) / tries)


@seeds(4, drawn=4, long=40)
def test_what_is_declared_is_what_its_arrivals_do(seed):
    rng = random.Random(seed)
    rate, cv, seconds = rng.choice([0.05, 1.0, 20.0]), rng.choice([0.5, 1.0, 2.0]), rng.choice([60.0, 300.0])
    number = 4000
    count = int(rate * seconds * number * 1.1) + 100
    times = arrivals("gamma", rate, count, np.random.default_rng(seed), cv=cv)
    counts = np.bincount((times // seconds).astype(int), minlength=number)[:number]
    for quantile in (0.5, 0.8, 0.95):
        most = declared_quantile(rate, cv, seconds, quantile) * seconds
        # Counts are whole, and few requests are many windows: one more or less.
        below, upto = np.mean(counts < most - 1.0), np.mean(counts < most + 1.0)
        assert below - 0.05 <= quantile <= upto + 0.05, (rate, cv, seconds, quantile)


def test_declared_windows_have_the_declared_mean_and_the_quantile():
    rates = declared_rates(4.0, 2.0, 300.0, "m")
    assert rates.mean() == pytest.approx(4.0, rel=0.01)
    assert np.mean(rates <= declared_quantile(4.0, 2.0, 300.0, 0.95)) == pytest.approx(0.95, abs=0.01)
    assert (
        declared_rates(4.0, 2.0, 300.0, "m").tolist() == rates.tolist() != declared_rates(4.0, 2.0, 300.0, "n").tolist()
    )
    assert declared_quantile(0.0, 1.0, 300.0, 0.95) == 0.0


def test_bursts_inside_windows_are_told_from_what_differs_between_them():
    rng = np.random.default_rng(3)
    busy = np.concatenate(
        [60.0 * n + np.sort(rng.random(rng.poisson(60 * (1 if n % 2 else 15)))) * 60 for n in range(200)]
    )
    assert gap_cv(a_trace(busy)) > 1.6
    assert gap_cv_inside(busy, 60.0) == pytest.approx(1.0, abs=0.05)
    assert gap_cv_inside(np.array([0.0, 100.0, 200.0]), 60.0) == 0.0


# -- a real trace --------------------------------------------------------------------------------------------------


def real_minutes():
    """Calls of the Azure Functions trace of 2019, half an hour by minutes: 40 models of a dozen functions each."""
    text = gzip.decompress(CALLS.read_bytes()).decode()
    calls = np.array([line.split(",") for line in text.split()], float)
    order = [i for i in np.argsort(-calls.sum(1), kind="stable") if calls[i].sum()][BUSIEST:]
    return np.array([calls[order[start::MODELS]].sum(0) for start in range(MODELS)])


@pytest.mark.parametrize(("quantile", "kept"), [(0.5, 0.550), (0.8, 0.823), (0.9, 0.968)])
def test_the_second_half_of_a_real_trace_keeps_the_quantile_of_the_first(quantile, kept):
    """Of fifteen windows 90 % is the busiest. `kept` is what docs/how-to/plan-for-busy-hours.md says."""
    minutes = real_minutes()
    first, second = minutes[:, :15], minutes[:, 15:]
    planned = np.array([quantile_rate(row, quantile) for row in first])
    share = np.mean(second <= planned[:, None])
    assert share >= quantile
    assert share == pytest.approx(kept, abs=0.0006)
    means = np.mean(second <= first.mean(1)[:, None])
    assert means == pytest.approx(0.642, abs=0.0006), "the mean is kept less often than 80% of windows"


# -- in a blueprint ------------------------------------------------------------------------------------------------

BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    demand: DEMAND
"""
INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {a: {}}
sites: {s: {provider: a}}
clusters: {c: {site: s, kind: local, partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 1}}}}
"""
DECLARED = "rate: 8 req/s, cv: 4, input: 500 tok, output: 200 tok"


def demand_of(folder, text):
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(BLUEPRINT.replace("DEMAND", "{" + text + "}"))
    rng = random.Random(0)
    times = sorted(rng.uniform(0, 3600) for _ in range(3600))
    (folder / "t.csv").write_text("t,in,out\n" + "".join(f"{at:.3f},100,10\n" for at in times))
    loaded = load(folder / "blueprint.yaml", environment={})
    read = with_traces(
        loaded.blueprint, folder, lambda model: loaded.blueprint_tree.nearest(("models", model))[0].place("")
    )
    return read.models["m"].demand, read, loaded.inventory


def test_the_rate_is_the_quantile_of_the_windows(tmp_path):
    demand, *_ = demand_of(tmp_path, DECLARED + ", quantile: 95%")
    assert float(demand.rate) == declared_quantile(8.0, 4.0, 300.0, 0.95) > 9.0
    assert (demand.mean, demand.cv, len(demand.windows)) == (8.0, 4, 1000)
    traced, *_ = demand_of(tmp_path, "trace: t.csv, quantile: 95%, window: 1m")
    assert float(traced.rate) == pytest.approx(quantile_rate(np.array(traced.windows), 0.95))
    assert traced.mean == pytest.approx(1.0, rel=0.01)
    assert len(traced.windows) in (59, 60)
    assert float(traced.rate) > traced.mean


def test_without_a_quantile_it_is_as_it_was(tmp_path):
    demand, read, inventory = demand_of(tmp_path, DECLARED)
    assert (float(demand.rate), demand.windows) == (8.0, ())
    other, changed, _ = demand_of(tmp_path, DECLARED + ", quantile: 95%")
    assert other.rate != demand.rate
    assert inputs_digest(read, inventory) != inputs_digest(changed, inventory)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (DECLARED + ", quantile: 100%", "FT1297"),
        (DECLARED + ", quantile: 30%", "FT1297"),
        (DECLARED.replace("cv: 4", "cv: 6") + ", quantile: 90%", "FT1297"),
        (DECLARED + ", window: 1m", "FT1297"),
        ("trace: t.csv, quantile: 95%, window: 10m", "FT1127"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, text, code):
    with pytest.raises(FabrictoolError) as caught:
        demand_of(tmp_path, text)
    assert [problem.code for problem in caught.value.problems] == [code]


TWO = BLUEPRINT.replace(
    "    demand: DEMAND\n",
    "    demand: {trace: t.csv, quantile: 50%, window: 1m}\n"
    "  n: {source: hf://Qwen/Qwen3-32B, demand: {trace: t.csv, quantile: 50%, window: 1m}}\n",
)


def two_demands(folder, times, *, blueprint=TWO):
    """Of two models in one trace."""
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(blueprint)
    rows = sorted((at, model) for model, each in times.items() for at in each)
    (folder / "t.csv").write_text("t,in,out,model\n" + "".join(f"{at:.3f},100,10,{model}\n" for at, model in rows))
    read = with_traces(load(folder / "blueprint.yaml", environment={}).blueprint, folder, lambda model: None)
    return [read.models[model].demand for model in "mn"]


@seeds(3, drawn=3, long=20)
def test_models_of_one_trace_have_their_windows_at_the_same_time(tmp_path, seed):
    """Also where one of them is asked for the first time later, by more than a window or by less."""
    rng = random.Random(seed)
    busy = [rng.random() < 0.3 for _ in range(100)]
    times = [60.0 * minute + 0.5 * k for minute, high in enumerate(busy) for k in range(120 if high else 20)]
    times.append(6000.0)
    late = rng.uniform(1.0, 200.0)
    m, n = two_demands(tmp_path, {"m": times, "n": [at for at in times if at >= late]})
    whole = int(late // 60.0) + 1
    assert len(m.windows) == len(n.windows) == 100
    assert m.windows[whole:] == n.windows[whole:]
    assert n.mean == pytest.approx(sum(n.windows) / 100, rel=0.01)


def test_a_model_that_was_asked_for_in_one_hour_of_a_day_has_the_others_too(tmp_path):
    day = [i * 60.0 for i in range(24 * 60 + 1)]
    busy = {"m": day, "n": [10 * 3600.0 + i for i in range(3600)]}
    _, n = two_demands(tmp_path, busy, blueprint=TWO.replace("1m", "1h"))
    assert len(n.windows) == 24
    assert [at for at, rate in enumerate(n.windows) if rate] == [10]
    assert n.mean == pytest.approx(1 / 24, rel=0.01)
    _, n = two_demands(
        tmp_path, busy, blueprint=TWO.replace("quantile: 50%, window: 1m", 'begins: "2026-11-02T06:00:00Z"')
    )
    assert n.factors.index(max(n.factors)) == 16, "of the trace's first request, not of the model's"
    assert max(n.factors) * float(n.rate) == pytest.approx(1.0, rel=0.01)


def hourly(days, *, weekend=1.0):
    """Requests of whole days from a Monday's 06:00 on: four times as many from 08:00 to 09:00."""
    times = []
    for hour in range(24 * days):
        number = (40 if (hour + 6) % 24 == 8 else 10) * (weekend if (hour + 6) // 24 % 7 >= 5 else 1.0)
        times += [hour * 3600.0 + i * 3600.0 / number for i in range(int(number))]
    return [*times, 24 * days * 3600.0]


def factors_of(times, begins, zone):
    return hour_factors(np.array(times), times[-1], begins, zone)


MONDAY = 1793599200.0
"""2026-11-02 06:00 UTC."""


def test_a_trace_has_the_hours_of_a_day_and_from_a_week_on_of_a_week():
    day = factors_of(hourly(1), MONDAY, UTC)
    assert day == pytest.approx([(40 if hour % 24 == 8 else 10) / (270 / 24) for hour in range(168)])
    week = factors_of(hourly(15, weekend=0.5), MONDAY, UTC)
    assert sum(week) / 168 == pytest.approx(1.0)
    assert week[8] == pytest.approx(4 * week[9]) == pytest.approx(8 * week[5 * 24 + 9])
    tokyo = factors_of(hourly(1), MONDAY, ZoneInfo("Asia/Tokyo"))
    assert tokyo.index(max(tokyo)) == 17
    assert factors_of(hourly(1)[:-60], MONDAY, UTC) == (), "no whole day"


def test_a_blueprint_takes_the_hours_of_its_trace_once_it_is_said_when_it_begins(tmp_path):
    rows = "".join(f"{at:.3f},100,10\n" for at in hourly(1))
    (tmp_path / "day.csv").write_text("t,in,out\n" + rows, "utf-8")
    assert demand_of(tmp_path, "trace: day.csv")[0].factors == ()
    its, *_ = demand_of(tmp_path, 'trace: day.csv, begins: "2026-11-02T06:00:00Z"')
    assert its.factors.index(max(its.factors)) == 8
    both, *_ = demand_of(tmp_path, 'trace: day.csv, begins: "2026-11-02T06:00:00Z", quantile: 90%')
    assert both.factors == its.factors
    assert float(both.rate) > both.mean
    short, *_ = demand_of(tmp_path, 'trace: t.csv, begins: "2026-11-02T06:00:00Z"')
    assert short.factors == (), "an hour says nothing of a day"
