"""A recorded run, played again: known factors come back from it, and a queue that grows is not taken for slowness."""

import csv
import gzip
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fabrictool.catalog import accelerators, model
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.cases import Case
from fabrictool.simulator.fitting import WORST
from fabrictool.simulator.fleet import Fleet
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.replay import fit, keeping_up, recorded
from fabrictool.workload.generate import Recipe, generate
from fabrictool.workload.lengths import Lengths
from fabrictool.workload.trace import Trace

REAL = Path(__file__).parents[1] / "data" / "measured" / "replay-llama-3.1-8b.csv.gz"

CASE = Case(
    device=accelerators()["h100-sxm"],
    model=model("meta-llama/Llama-3.1-8B"),
    engine="vllm",
    precision="bf16",
    kv_precision="bf16",
    cut=Parallelism(),
    input_len=1,
    output_len=1,
    concurrency=1,
)
PRIOR = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online").factors
TRUTH = replace(PRIOR, step=2 * PRIOR.step, kernel=2 * PRIOR.kernel, bandwidth=0.75 * PRIOR.bandwidth)


def run(rate, count=400, seed=1, noise=0.0):
    """What a service with other factors would have recorded; its clock may scatter."""
    lengths = Lengths("lognormal", 600, 500, 16, 4000), Lengths("lognormal", 120, 90, 1, 600)
    trace = generate(Recipe(rate, *lengths), count, seed)
    found = recorded(CASE, trace).play(TRUTH)
    scatter = np.exp(np.random.default_rng(seed).normal(0, noise, count))
    return recorded(CASE, replace(trace, ttft=found["ttft"] * scatter, latency=found["e2e"] * scatter))


def error(factors, one):
    """Worst relative error of the three mean latencies."""
    found = one.play(factors)
    return max(abs(np.nanmean(found[m]) / np.nanmean(one.measured[m]) - 1) for m in ("ttft", "tpot", "e2e"))


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_known_factors_give_their_forecasts_back_at_other_loads_too(noise):
    measured = run(8.0, noise=noise)
    assert len(measured.compared) == 400
    found = fit(measured, measured.compared, PRIOR)
    for rate in (1.0, 8.0, 16.0):
        other = run(rate, seed=2)
        assert error(PRIOR, other) > 0.3
        assert error(found, other) < 0.05


def test_a_real_run_forecasts_what_came_after_it():
    """vLLM on an RTX PRO 6000: it kept up for the first third of the run; the rest queued for its 128 places."""
    with gzip.open(REAL, "rt") as lines:
        rows = list(csv.DictReader(lines))
    arrival, prompt, output, ttft, e2e = (
        np.array([float(row[name]) for row in rows]) for name in ("arrival_s", "prompt", "output", "ttft_s", "e2e_s")
    )
    trace = Trace(arrival, prompt.astype(int), output.astype(int), latency=e2e, ttft=ttft)
    real = recorded(replace(CASE, device=accelerators()["rtxpro6000"]), trace, 128, 2048)
    assert 60 < len(real.compared) < 150
    # Not from the device's own calibration, which has seen this run.
    others = [one for one in shipped() if one.device != "rtxpro6000"]
    found = fit(real, real.compared, choose(others, "rtxpro6000", "nvidia", "vllm", "online").factors)
    rest = ~np.isin(np.arange(len(rows)), real.compared)
    played = real.play(found)
    for metric in ("ttft", "tpot", "e2e"):
        assert played[metric][rest].mean() == pytest.approx(real.measured[metric][rest].mean(), rel=0.06), metric


def test_outliers_pull_little():
    measured = run(8.0)
    spoilt = {name: values.copy() for name, values in measured.measured.items()}
    for values in spoilt.values():
        values[::10] *= 50.0
    found = fit(replace(measured, measured=spoilt), measured.compared, PRIOR)
    assert error(found, run(8.0, seed=2)) < 0.08


def test_without_a_difference_the_prior_stays():
    trace = generate(Recipe(8.0), 200, 3)
    found = recorded(CASE, trace).play(PRIOR)
    same = recorded(CASE, replace(trace, ttft=found["ttft"], latency=found["e2e"]))
    assert fit(same, same.compared, PRIOR).vector() == pytest.approx(PRIOR.vector(), abs=0.05)


def test_what_is_compared_and_what_is_only_load():
    trace = generate(Recipe(8.0), 200, 3)
    found = recorded(CASE, trace).play(PRIOR)
    ttft, latency = found["ttft"].copy(), found["e2e"].copy()
    latency[0] = math.nan
    ttft[1] = math.nan
    ttft[2] = latency[2] + 1
    ttft[3] = 0.0
    one = recorded(CASE, replace(trace, ttft=ttft, latency=latency))
    assert one.compared.tolist() == list(range(4, 200))
    # They were sent all the same: the others' forecasts are as with them.
    for metric, values in one.play(PRIOR).items():
        np.testing.assert_array_equal(values, found[metric])
    assert not recorded(CASE, trace).usable.any()


def test_the_hull_is_what_was_seen():
    hull = run(8.0).hull()
    assert hull.models == (CASE.model.id,)
    assert hull.devices == (1.0, 1.0)
    assert 100 < hull.input_len[0] < 400
    assert 1000 < hull.input_len[1] < 2500
    # By Little's law about 8 × 1.5 s of latency were in flight.
    assert 1 <= hull.concurrency[0] < 12 < hull.concurrency[1] < 60


def queue(arrival, rate):
    """TTFTs of a server that gives `rate` first tokens a second, each after 50 ms of its own."""
    free = 0.0
    found = []
    for at in arrival:
        free = max(free, at) + 1 / rate
        found.append(free - at + 0.05)
    return np.array(found)


def test_keeping_up():
    rng = np.random.default_rng(0)

    def arrivals(*pieces):
        return np.cumsum(np.concatenate([rng.exponential(1 / rate, count) for rate, count in pieces]))

    calm = arrivals((5, 1000))
    assert keeping_up(calm, queue(calm, 20)).all()
    over = arrivals((30, 1000))
    assert not keeping_up(over, queue(over, 20)).any()
    # A rush of ten seconds, and what is left of it for some five seconds more.
    rush = arrivals((5, 500), (40, 400), (5, 1000))
    kept = keeping_up(rush, queue(rush, 30))
    begun, ended = rush[500], rush[900]
    assert not kept[500:900].any()
    assert kept[rush < begun - 15].all()
    assert kept[rush > ended + 30].all()
    # Unknown latencies judge nothing.
    assert not keeping_up(calm, np.full(1000, np.nan)).any()
    assert keeping_up(calm[:1], np.array([0.1])).all()
    assert keeping_up(np.zeros(3), np.full(3, 0.1)).all()


def test_a_refusal_counts_as_a_whole_error():
    trace = generate(Recipe(8.0), 200, 3)
    found = recorded(CASE, trace).play(PRIOR)
    known = replace(trace, ttft=found["ttft"], latency=found["e2e"])
    refused = recorded(CASE, replace(known, prompt=np.where(np.arange(200) < 100, 9_000_000, trace.prompt)))
    assert refused.refused.tolist() == list(range(100))
    assert not recorded(CASE, known).refused.any()
    stretches = [np.arange(100), np.arange(50, 150)]
    every, half = refused.mean_errors(PRIOR, stretches)
    assert set(every.values()) == {WORST}
    assert all(0.4 < 1 - math.exp(-value) < 0.7 for value in half.values())


def test_latencies_that_cannot_be_true_are_not_compared():
    trace = generate(Recipe(8.0), 200, 3)
    found = recorded(CASE, trace).play(PRIOR)
    ttft, latency = found["ttft"].copy(), found["e2e"].copy()
    ttft[0] = 1e-300
    latency[1] = 1e11
    latency[2] = math.nan
    one = recorded(CASE, replace(trace, ttft=ttft, latency=latency))
    assert np.flatnonzero(one.absurd).tolist() == [0, 1]
    assert one.compared.tolist() == list(range(3, 200))


def test_interrupting_a_fit_ends_it(monkeypatch):
    measured = run(8.0, count=100)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Fleet, "advance", stop)
    with pytest.raises(KeyboardInterrupt):
        fit(measured, measured.compared, PRIOR)
