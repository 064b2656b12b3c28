"""The steady state: that warm-up does not count, and that it goes on until it can tell."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.base.units import Share
from fabrictool.domain.blueprint import Slo
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.deployment import declared_stream, of_model
from fabrictool.simulator.estimates import SURE, ShareEstimate
from fabrictool.simulator.fleet import simulate
from fabrictool.simulator.slo import Criterion, LatencyTarget, criteria
from fabrictool.simulator.steady import _estimate, _p95, steady_state
from fabrictool.workload.lengths import Lengths
from tests.simulator.fabrics import ACCELERATED, TWO_MODELS, loaded, replica


def policy():
    return routing_policy("least-loaded", random.Random(0))


@pytest.fixture
def llama(tmp_path):
    there = loaded(tmp_path, TWO_MODELS, ACCELERATED)
    return of_model("llama", there.blueprint, there.inventory, [replica("llama/0", there.inventory)], [])


def test_the_filling_of_an_empty_fleet_does_not_count(llama):
    """Near its capacity, the first requests of a fleet are its best ones."""
    busy = replace(llama, rate=41.0)
    wanted = criteria(Slo(e2e_p95="100 s"))
    seen = steady_state(busy, wanted, policy, most=5400, seed=0)
    first = simulate(busy.specs, declared_stream(busy, 400, 0), policy())
    assert seen.means["e2e"] > 1.1 * float(np.nanmean(first.e2e))


def test_it_goes_on_until_the_interval_clears_the_target(llama):
    easy = steady_state(llama, criteria(Slo(e2e_p95="60 s")), policy, most=20_000, seed=0)
    middle = easy.p95["e2e"].value
    hard = steady_state(llama, criteria(Slo(e2e_p95=f"{middle:.3f} s")), policy, most=5400, seed=0)
    assert easy.clear
    assert easy.requests < 600 < hard.requests
    assert all(estimate.low <= estimate.share <= estimate.high for estimate in (*easy.estimates, *hard.estimates))


def test_little_s_law_holds(llama):
    seen = steady_state(llama, criteria(Slo(e2e_p95="60 s")), policy, most=600, seed=0)
    assert seen.in_system == pytest.approx(10.0 * seen.means["e2e"], rel=0.15)


def test_intervals_hold_what_they_promise():
    """Of shares that are estimated from correlated batches, about nineteen of twenty intervals hold the true one."""
    (wanted, _) = criteria(Slo(e2e_p95="1 s"))
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        calm = np.repeat(rng.random(60) < 0.9, 20)  # twenty requests after each other share their luck
        found = _estimate(wanted, calm)
        inside += found.low <= 0.9 <= found.high
    assert inside >= 180
    lucky = _estimate(wanted, np.ones(400, bool), 49.0)  # eight bursts, none of them a bad one yet
    assert lucky.low < 0.7
    assert _estimate(wanted, np.ones(400, bool)).low > 0.98
    assert not ShareEstimate(wanted, 0.96, 0.94, 0.98).clear
    assert ShareEstimate(wanted, 0.97, 0.951, 0.98).clear


def test_intervals_of_percentiles_hold_what_they_promise():
    """Requests that come after each other share their luck: about nineteen of twenty intervals hold the true one."""
    rng, inside = np.random.default_rng(), 0
    for _ in range(200):
        values = np.repeat(rng.exponential(size=200), 5)
        percentile = _p95(values, 1.0)
        assert percentile.low <= percentile.value <= percentile.high
        inside += percentile.low <= -math.log(0.05) <= percentile.high
    assert inside >= 174
    same = _p95(np.full(400, 2.0), 1.0)
    assert (same.low, same.value, same.high) == (2.0, 2.0, 2.0)
    assert same.sure


def test_it_goes_on_until_the_percentiles_are_sure(llama):
    """With an SLO or without: a few hundred requests leave the 95th percentile open by a third."""
    varied = replace(llama, input=Lengths("lognormal", 800, 800, most=4000), output=Lengths("lognormal", 200, 200))
    for wanted in (criteria(Slo(e2e_p95="600 s")), ()):
        few = steady_state(varied, wanted, policy, most=600, seed=0)
        many = steady_state(varied, wanted, policy, most=20_000, seed=0)
        assert not few.sure
        assert many.sure
        assert many.p95["ttft"].high / many.p95["ttft"].low < SURE < few.p95["ttft"].high / few.p95["ttft"].low


def test_answers_of_one_token_have_no_time_between_tokens(llama):
    alone = steady_state(replace(llama, output=Lengths(mean=1)), (), policy, most=600, seed=0)
    assert alone.p95.keys() == alone.means.keys() == {"ttft", "e2e"}


def test_bursts_are_played_until_there_are_enough_of_them(llama):
    """600 requests that come in a dozen clumps say nothing: a verdict of theirs is luck."""
    middle = steady_state(llama, criteria(Slo(e2e_p95="60 s")), policy, most=20_000, seed=0).p95["e2e"].value
    wanted = criteria(Slo(e2e_p95=f"{1.5 * middle:.3f} s"))
    calm, bursts = (steady_state(replace(llama, cv=cv), wanted, policy, most=60_000, seed=0) for cv in (1.0, 5.0))
    assert bursts.requests > 5 * calm.requests


@pytest.mark.parametrize(
    ("attain", "seen", "met", "missed"),
    [
        ("95%", (0.97, 0.951, 0.98), True, False),
        ("95%", (0.96, 0.949, 0.98), False, False),
        ("95%", (0.94, 0.93, 0.951), False, False),
        ("95%", (0.94, 0.93, 0.949), False, True),
        ("100%", (1.0, 0.999, 1.0), True, False),
        ("100%", (0.999, 0.998, 1.0), False, True),
    ],
)
def test_only_an_interval_meets_or_misses(attain, seen, met, missed):
    wanted = Criterion(float(Share.parse(attain)), LatencyTarget(e2e=1.0))
    estimate = ShareEstimate(wanted, *seen)
    assert (estimate.met, estimate.missed) == (met, missed)


def test_that_all_keep_it_is_not_said_before_the_end(llama):
    every = criteria(Slo(e2e_p95="60 s", attain="100%"))
    played = steady_state(llama, every, policy, most=2000, seed=0)
    assert all(estimate.met for estimate in played.estimates)
    assert played.requests > 1200, "one more may miss it"


def test_a_run_that_ends_while_the_fleet_fills_says_so(llama):
    easy = criteria(Slo(e2e_p50="60 s"))
    short, long = (steady_state(llama, easy, policy, most=most, seed=0) for most in (30, 600))
    assert (short.full, long.full) == (False, True)
    filled = steady_state(llama, easy, policy, most=30, seed=0, fill=600)
    assert filled.full, "what only is not full goes on"
    strict = criteria(Slo(e2e_p95="60 s"))
    doubtful = steady_state(llama, strict, policy, most=30, seed=0, fill=600)
    assert (doubtful.clear, doubtful.requests < 30) == (False, True), "a doubt has its own limit"
