"""The gateway's policies in virtual time: those that learn hear of every end, and it is worth something."""

import random

import numpy as np
import pytest

from fabrictool.domain.blueprint import ROUTING_POLICIES
from fabrictool.routing.policies import routing_policy
from fabrictool.routing.protocol import StreamTarget
from fabrictool.simulator import kernel
from fabrictool.simulator.demanded import GroupDemand
from fabrictool.simulator.deployment import with_groups
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


@pytest.mark.parametrize("name", ["power-of-two", "slo-headroom", "slo-packing"])
def test_who_learns_hears_an_end_of_each_start_with_handed_over_caches_too(name):
    specs = [replica(1.0, role=role) for role in ("prefill", "prefill", "decode", "decode")]
    fleet, outcome = played(name, specs, requests(200, 5.0))
    assert np.isfinite(outcome.finish).all()
    assert fleet._told == {}


class Unknown:
    """A policy that the loop does not know, so that it is asked in Python."""

    def __init__(self, policy):
        self.policy, self.name, self.learns = policy, "unknown", False

    def pick(self, *arguments):
        return self.policy.pick(*arguments)


PARTS = (GroupDemand("g", 0.3, frozenset({"p"})), GroupDemand("h", 0.3, frozenset("pq")), GroupDemand("", 0.4))


def weights_of_groups(rng, provider):
    """Of a replica, as a plan may give them."""
    allowed = [part.group for part in PARTS if part.allowed is None or provider in part.allowed]
    return {group: float(rng.choice([0.0, 0.3, 1.0])) for group in allowed}


def fabric(rng, *, groups=False):
    """Replicas of three models that come and go, some in pairs, some with weights, and requests for all: of consumer
    `groups`, of which two models have weights.
    """
    models = ("a", "b", "c")
    specs = []
    for model in models:
        roles = ("prefill", "decode") if rng.random() < 0.4 else ("unified",)
        weights = (1.0,) if rng.random() < 0.5 else (1.0, 0.3, 2.5)
        for role in roles:
            for _ in range(rng.integers(1, 6)):
                up, drain = (rng.uniform(*span) if rng.random() < 0.3 else None for span in ((0, 20), (20, 60)))
                changes = {"up": up} if up is not None else {}
                changes |= {"drain": drain, "down": drain + 5} if drain is not None else {}
                changes["provider"] = str(rng.choice(["p", "q"]))
                if groups and model != "c":
                    changes["group_weights"] = weights_of_groups(rng, changes["provider"])
                specs.append(
                    replica(rng.uniform(0.5, 2), model=model, role=role, weight=rng.choice(weights), **changes)
                )
    count = 600
    asking = {"group": rng.integers(0, 3, count), "groups": PARTS} if groups else {}
    stream = Stream(
        np.cumsum(rng.exponential(1 / 12.0, count)),
        rng.integers(20, 600, count),
        rng.integers(2, 120, count),
        model=rng.integers(0, 3, count),
        models=models,
        **asking,
    )
    return specs, stream


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", ["least-loaded", "random", "round-robin", "weighted"])
def test_the_loop_chooses_as_the_policy_does(name, groups):
    """To the last draw: afterwards the random source is where Python would have left it."""
    seed = random.SystemRandom().randrange(1 << 32)
    rng = np.random.default_rng(seed)
    for _ in range(6):
        specs, stream = fabric(rng, groups=groups)
        outcomes, policies = [], []
        for unknown in (False, True):
            policy = routing_policy(name, random.Random(seed))
            fleet = Fleet(specs, stream, Unknown(policy) if unknown else policy)
            assert bool(fleet.routing.by[0] == kernel.BY_CALLER) is unknown
            for until in (5.0, 17.0, np.inf):
                fleet.advance(until)
            outcomes.append(fleet.outcome())
            policies.append((policy, fleet))
        in_loop, in_python = outcomes
        assert (in_loop.replica == in_python.replica).all(), seed
        np.testing.assert_array_equal(in_loop.finish, in_python.finish)
        states = []
        for policy, fleet in policies:
            given = getattr(policy, "credits", {})
            credit = [given.get(part, {}).get(view, 0.0) for part in (None, "", "g", "h") for view in fleet._views]
            drawn = policy.rng.getstate() if hasattr(policy, "rng") else None
            states.append((drawn, getattr(policy, "turn", 0), credit))
        assert states[0] == states[1], seed


SOLE = GroupDemand("lab", 0.5, frozenset({"dear"}))
OTHERS = GroupDemand("", 0.5)


def asked_by_groups(count, rate, parts):
    return with_groups(requests(count, rate), parts, np.random.default_rng(2))


def test_a_group_that_only_one_may_serve_misses_its_targets_by_one_weight_and_keeps_them_by_its_own():
    """Half of 12 requests/s may go to the dear replica only; it and the cheap one are planned for 6 each."""
    stream = asked_by_groups(6000, 12.0, (SOLE, OTHERS))
    by_one = [replica(1.0, provider="dear"), replica(1.0, provider="cheap")]
    by_group = [
        replica(1.0, provider="dear", group_weights={"lab": 1.0, "": 0.0}),
        replica(1.0, provider="cheap", group_weights={"": 1.0}),
    ]
    seen = {}
    for name, specs in (("one", by_one), ("group", by_group)):
        _, outcome = played("weighted", specs, stream)
        loads = np.bincount(outcome.replica, minlength=2) / len(outcome.replica)
        seen[name] = loads[0], attained(outcome)
        assert (outcome.replica[stream.group == 0] == 0).all(), "trust is kept, whatever the weights say"
    assert seen["one"][0] == pytest.approx(0.75, abs=0.02), "half as much again as it is planned for"
    assert seen["group"][0] == pytest.approx(0.5, abs=0.02)
    assert seen["group"][1] > 0.9
    assert seen["one"][1] < 0.5


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_every_policy_keeps_a_group_where_it_may_go(name):
    stream = asked_by_groups(600, 8.0, (SOLE, GroupDemand("far", 0.2, frozenset({"nobody"})), OTHERS))
    specs = [replica(1.0, provider="dear"), replica(1.0, provider="cheap"), replica(2.0, provider="dear")]
    _, outcome = played(name, specs, stream)
    lab, far = stream.group == 0, stream.group == 1
    assert set(outcome.replica[lab].tolist()) <= {0, 2}
    assert set(np.flatnonzero(far).tolist()) == set(outcome.refused.tolist())
    assert np.isfinite(outcome.finish[~far]).all()


def test_the_only_replica_of_a_model_serves_those_whom_it_may():
    stream = asked_by_groups(200, 2.0, (SOLE, OTHERS))
    _, outcome = played("least-loaded", [replica(1.0, provider="cheap")], stream)
    assert set(outcome.refused.tolist()) == set(np.flatnonzero(stream.group == 0).tolist())


def test_a_policy_with_a_random_source_of_its_own_kind_is_asked_in_python():
    policy = routing_policy("least-loaded", random.SystemRandom())
    fleet = Fleet([replica(1.0), replica(1.0)], requests(50, 8.0), policy)
    assert fleet.routing.by[0] == kernel.BY_CALLER
    fleet.advance()
    assert np.isfinite(fleet.outcome().finish).all()


def attained(outcome):
    kept = (outcome.ttft <= TARGET.ttft_s) & (np.nan_to_num(outcome.tpot) <= TARGET.tpot_s)
    return float(kept.mean())


def test_headroom_keeps_more_targets_on_unlike_replicas_than_who_does_not_know_them():
    """Three replicas, one eight times as fast as another, weights unknown; at a load that all together can carry."""
    specs, stream = [replica(0.5), replica(1.0), replica(4.0)], requests(3000, 36.0)
    share = {name: attained(played(name, specs, stream)[1]) for name in ("random", "least-loaded", "slo-headroom")}
    assert share["slo-headroom"] > share["least-loaded"] + 0.04
    assert share["slo-headroom"] > share["random"] + 0.2


def test_packing_keeps_the_targets_with_fewer_replicas():
    """Eight replicas at a load that three can carry: what nobody asks for may end."""
    specs, stream = [replica(1.0) for _ in range(8)], requests(3000, 12.0)
    used, share = {}, {}
    for name in ("least-loaded", "slo-headroom", "slo-packing"):
        outcome = played(name, specs, stream)[1]
        late = outcome.replica[1500:]  # once it knows them
        counts = np.sort(np.bincount(late, minlength=8))[::-1]
        used[name] = int((counts > 0.01 * len(late)).sum())
        share[name] = attained(outcome)
    assert used["least-loaded"] == used["slo-headroom"] == 8
    assert used["slo-packing"] <= 4
    assert share["slo-packing"] > 0.9, "full replicas have no slack for chance"
