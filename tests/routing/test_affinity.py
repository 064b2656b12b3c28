"""Conversations stay where their beginning is cached, unless that costs more than it saves."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from fabrictool.routing.affinity import FACTOR, SLACK, conversation_of, preferred


@dataclass
class FakeReplica:
    key: bytes
    load: float = 0.0
    weight: float = 1.0
    group_weights: dict[str, float] = field(default_factory=dict)


def replicas(number, rng):
    return [FakeReplica(rng.randbytes(32)) for _ in range(number)]


def conversations(number, rng):
    return [conversation_of("tenant", rng.randbytes(20)) for _ in range(number)]


@pytest.fixture
def rng():
    return random.Random()


def test_each_replica_has_its_share_and_keeps_it_when_others_come(rng):
    some, talks = replicas(8, rng), conversations(4000, rng)
    homes = [preferred(some, talk).key for talk in talks]
    assert min(Counter(homes).values()) > 4000 / 8 / 1.6
    more = [*some, *replicas(1, rng)]
    rng.shuffle(more)
    now = [preferred(more, talk).key for talk in talks]
    moved = [after for before, after in zip(homes, now, strict=True) if after != before]
    assert set(moved) == {replica.key for replica in more} - set(homes)
    assert len(moved) < 4000 / 9 * 1.6


def test_who_asks_and_what_is_said_first_tell_conversations_apart():
    assert conversation_of("a", b"hello") != conversation_of("b", b"hello")
    assert conversation_of("a", b"hello") != conversation_of("a", b"hallo")


def test_it_yields_to_load(rng):
    some = replicas(4, rng)
    (talk,) = conversations(1, rng)
    home = preferred(some, talk)
    for replica in some:
        replica.load = 10.0
    home.load = 10.0 + SLACK
    assert preferred(some, talk) is home
    home.load = 11.0 * FACTOR + SLACK
    assert preferred(some, talk) is None


def test_if_all_say_the_same_none_gets_more_than_its_bound(rng):
    """Who is not preferred goes to the least loaded, and nobody's load runs away."""
    some, (talk,) = replicas(8, rng), conversations(1, rng)
    for _ in range(800):
        target = preferred(some, talk) or min(some, key=lambda replica: replica.load)
        target.load += 1
    mean = sum(replica.load for replica in some) / len(some)
    assert max(replica.load for replica in some) <= mean * FACTOR + SLACK + 1


def test_one_candidate_alone_needs_no_preference(rng):
    assert preferred(replicas(1, rng), 5) is None
