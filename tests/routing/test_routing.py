"""Candidate filter and pick policies."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.blueprint import ROUTING_POLICIES
from fabrictool.routing.candidates import TrustPolicy, select
from fabrictool.routing.policies import routing_policy
from fabrictool.routing.protocol import RequestOutcome, Unnamed


@dataclass(eq=False)
class FakeReplica:
    model: str = "m"
    provider: str = "alpha"
    ready: bool = True
    context: int = 0
    load: float = 0.0
    weight: float = 1.0
    group_weights: dict[str, float] = field(default_factory=dict)
    device: str = ""
    steps: None = None


OPEN = TrustPolicy({}, {})
NAMES = st.sampled_from(["alpha", "beta", "gamma"])


@given(
    replicas=st.lists(st.builds(FakeReplica, model=st.sampled_from(["m", "n"]), provider=NAMES, ready=st.booleans())),
    groups=st.dictionaries(st.sampled_from(["g", "h"]), st.frozensets(NAMES)),
    models=st.dictionaries(st.sampled_from(["m", "n"]), st.frozensets(NAMES)),
    group=st.sampled_from([None, "g", "h", "missing"]),
    requested=st.none() | st.frozensets(NAMES),
)
def test_no_candidate_is_ever_outside_any_allowlist(replicas, groups, models, group, requested):
    found = select(replicas, model="m", trust=TrustPolicy(groups, models), group=group, requested=requested)
    for replica in found.candidates:
        assert replica.model == "m"
        assert replica.ready
        assert group is None or replica.provider in groups.get(group, frozenset())
        assert "m" not in models or replica.provider in models["m"]
        assert requested is None or replica.provider in requested
    assert bool(found.candidates) == (found.refusal is None)


def test_refusals_name_the_true_reason():
    busy, other = FakeReplica(ready=False), FakeReplica(model="n")
    assert select([other], model="m", trust=OPEN).refusal == "unknown-model"
    assert select([busy], model="m", trust=OPEN, requested={"beta"}).refusal == "not-allowed"
    assert select([busy], model="m", trust=OPEN).refusal == "not-ready"
    ready = FakeReplica()
    assert select([ready], model="m", trust=OPEN, exclude=[ready]).refusal == "not-ready"


@pytest.mark.parametrize("name", [name for name in ROUTING_POLICIES if name != "slo-packing"])
def test_every_policy_but_packing_uses_every_idle_replica(name):
    replicas = [FakeReplica() for _ in range(4)]
    chosen = routing_policy(name, random.Random(7))
    counts = Counter(id(chosen.pick(replicas)) for _ in range(400))
    assert len(counts) == 4
    assert min(counts.values()) > 60


def test_packing_goes_on_with_who_served_last_however_long_ago():
    """Or where little is asked each would be tried in turn, and none would ever be idle."""
    replicas, policy = [FakeReplica() for _ in range(4)], routing_policy("slo-packing", random.Random(7))
    chosen, now = Counter(), 0.0
    for number in range(100):
        now += 70.0
        request = Unnamed(number, "m", 100)
        replica = policy.pick(replicas, request, now)
        policy.on_request_start(replica, request, now)
        policy.on_request_end(replica, request, RequestOutcome(True, 0.1, 0.01, 100, 20))
        chosen[id(replica)] += 1
    assert len(chosen) == 1


def test_least_loaded_weighs_load_by_weight():
    slow, fast = FakeReplica(load=2.0, weight=1.0), FakeReplica(load=3.0, weight=4.0)
    assert routing_policy("least-loaded", random.Random(1)).pick([slow, fast]) is fast


def test_random_follows_weights():
    light, heavy = FakeReplica(weight=1.0), FakeReplica(weight=9.0)
    chosen = routing_policy("random", random.Random(3))
    counts = Counter(id(chosen.pick([light, heavy])) for _ in range(1000))
    assert 850 < counts[id(heavy)] < 950


def test_round_robin_follows_weights_and_spreads_the_turns():
    light, heavy = FakeReplica(weight=1.0), FakeReplica(weight=9.0)
    chosen = routing_policy("round-robin", random.Random(3))
    picked = [chosen.pick([light, heavy]) is light for _ in range(1000)]
    assert 95 <= sum(picked) <= 105
    assert not any(early and late for early, late in itertools.pairwise(picked)), "never twice in a row"


def test_of_idle_replicas_least_loaded_takes_the_heaviest():
    light, heavy = FakeReplica(weight=0.2), FakeReplica(weight=1.0)
    chosen = routing_policy("least-loaded", random.Random(3))
    assert all(chosen.pick([light, heavy]) is heavy for _ in range(50))
    heavy.load = 5.0
    assert chosen.pick([light, heavy]) is light, "what is too much for it goes to the other"


def test_an_unknown_policy_is_an_error():
    with pytest.raises(InvalidInputError):
        routing_policy("best", random.Random())
