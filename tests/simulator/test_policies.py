"""The gateway's policies in virtual time: those that learn hear of every end, and it is worth something."""

import random

import numpy as np
import pytest

from fabrictool.domain.blueprint import ROUTING_POLICIES
from fabrictool.routing.policies import routing_policy
from fabrictool.routing.protocol import StreamTarget
from fabrictool.simulator.fleet import Fleet, ReplicaSpec, Stream
from fabrictool.simulator.steptimes import StepTimes

TARGET = StreamTarget(ttft_s=1.0, tpot_s=0.05)


def replica(pace, **more):
    """`pace`: so many times as fast as the first."""
    decode = (0.01 + 0.0008 * np.arange(65)) / pace
    mixed = (0.012 + 2e-4 * np.arange(577)) / pace
    times = StepTimes(decode, mixed, np.zeros(65))
    return ReplicaSpec(times, max_num_seqs=64, token_budget=512, kv_tokens=1 << 20, **more)


def requests(count, rate, seed=1):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    return Stream(arrival, rng.integers(20, 600, count), rng.integers(5, 120, count))


def played(name, specs, stream, seed=0):
    policy = routing_policy(name, random.Random(seed), {"": TARGET})
    fleet = Fleet(specs, stream, policy)
    fleet.advance()
    fleet._tell_ends()
    return fleet, fleet.outcome()


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_every_policy_serves_every_request_and_the_same_again(name):
    specs, stream = [replica(1.0), replica(2.0), replica(1.0, drain=20.0, down=30.0)], requests(400, 8.0)
    (fleet, first), (_, second) = (played(name, specs, stream) for _ in range(2))
    assert np.isfinite(first.finish).sum() + len(first.lost) == 400
    assert (first.replica == second.replica).all()
    assert fleet._told == {}


@pytest.mark.parametrize("name", ["power-of-two", "slo-headroom"])
def test_who_learns_hears_an_end_of_each_start_with_handed_over_caches_too(name):
    specs = [replica(1.0, role=role) for role in ("prefill", "prefill", "decode", "decode")]
    fleet, outcome = played(name, specs, requests(200, 5.0))
    assert np.isfinite(outcome.finish).all()
    assert fleet._told == {}


def attained(outcome):
    kept = (outcome.ttft <= TARGET.ttft_s) & (np.nan_to_num(outcome.tpot) <= TARGET.tpot_s)
    return float(kept.mean())


def test_headroom_keeps_more_targets_on_unlike_replicas_than_who_does_not_know_them():
    """Three replicas, one eight times as fast as another, weights unknown; at a load that all together can carry."""
    specs, stream = [replica(0.5), replica(1.0), replica(4.0)], requests(3000, 36.0)
    share = {name: attained(played(name, specs, stream)[1]) for name in ("random", "least-loaded", "slo-headroom")}
    assert share["slo-headroom"] > share["least-loaded"] + 0.04
    assert share["slo-headroom"] > share["random"] + 0.2
