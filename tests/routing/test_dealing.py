"""Consumer groups' weights: each replica gets the load that was planned, and whoever may serve a request still does."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.routing.affinity import preferred
from fabrictool.routing.candidates import TrustPolicy, select
from fabrictool.routing.dealing import part_of, weights_for
from fabrictool.routing.policies import routing_policy
from fabrictool.routing.protocol import Unnamed

BY_WEIGHT = ("weighted", "random", "round-robin")
TRUST = TrustPolicy({"lab": frozenset({"dear"}), "others": frozenset({"dear", "cheap"})}, {})


@dataclass(eq=False)
class Replica:
    provider: str = "dear"
    weight: float = 1.0
    group_weights: dict[str, float] = field(default_factory=dict)
    key: bytes = b""
    load: float = 0.0
    model: str = "m"
    ready: bool = True
    context: int = 0
    device: str = ""
    site: str = ""
    waiting: int = 0
    steps: None = None


def dealt_out(policy, replicas, shares, count=12_000, seed=1):
    """Requests by replica, of groups that ask by `shares`."""
    rng = random.Random(seed)
    groups, chances = list(shares), list(shares.values())
    counts, by_group = Counter(), Counter()
    for number in range(count):
        (group,) = rng.choices(groups, chances)
        able = select(replicas, model="m", trust=TRUST, group=group).candidates
        chosen = policy.pick(able, Unnamed(number, "m", group=group))
        counts[chosen] += 1
        by_group[group, chosen] += 1
    return {replica: counts[replica] / count for replica in replicas}, by_group


@pytest.mark.parametrize("name", BY_WEIGHT)
def test_the_replica_that_a_group_needs_for_itself_is_not_overloaded(name):
    """Half of the requests may go to the dear replica only; the others are planned for the cheap ones.

    The loads are alike, 1 : 1, and so is the one weight: by it the dear replica gets a quarter of all on top.
    """
    shares = {"lab": 0.5, "others": 0.5}
    plain = [Replica("dear"), Replica("cheap")]
    before, _ = dealt_out(routing_policy(name, random.Random(7)), plain, shares)
    assert before[plain[0]] == pytest.approx(0.75, abs=0.02), "half as much again as was planned"

    mended = [
        Replica("dear", group_weights={"lab": 1.0, "others": 0.0}),
        Replica("cheap", group_weights={"others": 1.0}),
    ]
    after, by_group = dealt_out(routing_policy(name, random.Random(7)), mended, shares)
    assert after[mended[0]] == pytest.approx(0.5, abs=0.02)
    assert by_group["others", mended[0]] == 0


@pytest.mark.parametrize("name", BY_WEIGHT)
def test_a_part_of_a_group_goes_where_another_one_has_left_room(name):
    """Of 40 % that only the dear one may serve and 60 % for both, with equal loads planned: 10 of the 60 go there."""
    weights = {"lab": 1.0, "others": 0.2}
    replicas = [Replica("dear", group_weights=weights), Replica("cheap", group_weights={"others": 1.0})]
    loads, _ = dealt_out(routing_policy(name, random.Random(7)), replicas, {"lab": 0.4, "others": 0.6})
    assert [loads[replica] for replica in replicas] == pytest.approx([0.5, 0.5], abs=0.02)


@pytest.mark.parametrize("name", BY_WEIGHT)
def test_who_is_left_serves_whatever_the_plan_says(name):
    dear, cheap = Replica("dear", group_weights={"others": 0.0}), Replica("cheap", group_weights={"others": 1.0})
    policy, asked = routing_policy(name, random.Random(7)), Unnamed(1, "m", group="others")
    assert all(policy.pick([dear, cheap], asked) is cheap for _ in range(50))
    assert all(policy.pick([dear], asked) is dear for _ in range(50)), "the cheap one has failed"
    twin = Replica("dear", weight=3.0, group_weights={"others": 0.0})
    counts = Counter(policy.pick([dear, twin], asked) is twin for _ in range(400))
    assert counts[True] == pytest.approx(300, abs=40), "by the one weight"
    assert all(policy.pick([dear, cheap], asked) is cheap for _ in range(50)), "it has come back"


def test_whoever_is_not_named_is_dealt_out_as_everybody_else():
    replicas = [Replica(weight=0.5, group_weights={"lab": 1.0, "": 0.25}), Replica(group_weights={"": 1.0})]
    for group in ("others", None, ""):
        assert part_of(replicas, group) == ""
        assert weights_for(replicas, "") == [0.25, 1.0]
    assert part_of(replicas, "lab") == "lab"
    shares_are_all = [Replica(weight=0.5, group_weights={"lab": 1.0})]
    assert part_of(shares_are_all, "others") is None
    assert weights_for(shares_are_all, None) == [0.5]


def test_a_replica_that_says_nothing_of_a_group_has_its_one_weight():
    new, known = Replica(weight=0.5), Replica(group_weights={"lab": 0.8})
    assert weights_for([new, known], part_of([new, known], "lab")) == [0.5, 0.8]


@given(
    tables=st.lists(
        st.tuples(
            st.floats(0.02, 1.0),
            st.dictionaries(st.sampled_from(["lab", "others", ""]), st.sampled_from([0.0, 0.3, 1.0])),
        ),
        min_size=1,
        max_size=6,
    ),
    groups=st.lists(st.sampled_from(["lab", "others", None]), min_size=1, max_size=60),
    name=st.sampled_from(BY_WEIGHT),
)
def test_nobody_is_picked_that_the_group_has_no_weight_for_while_another_one_is_there(tables, groups, name):
    replicas = [Replica(weight=weight, group_weights=its) for weight, its in tables]
    policy = routing_policy(name, random.Random(7))
    for number, group in enumerate(groups):
        weights = weights_for(replicas, part_of(replicas, group))
        assert max(weights) > 0.0
        chosen = policy.pick(replicas, Unnamed(number, "m", group=group))
        assert weights[replicas.index(chosen)] > 0.0


def test_conversations_have_their_homes_where_their_group_goes():
    rng = random.Random(3)
    weights = ({"lab": 1.0, "others": 0.0}, {"others": 0.25}, {"others": 0.75})
    replicas = [Replica("dear", key=rng.randbytes(32), group_weights=its) for its in weights]
    talks = [rng.getrandbits(32) for _ in range(8000)]
    homes = Counter(replicas.index(preferred(replicas, talk, "others")) for talk in talks)
    assert homes[0] == 0
    assert homes[2] / 8000 == pytest.approx(0.75, abs=0.02)
    fewer = [preferred(replicas[1:], talk, "others") for talk in talks]
    assert fewer == [preferred(replicas, talk, "others") for talk in talks], "nobody moves when who has none leaves"
    plain = [Replica(key=replica.key) for replica in replicas]
    alike = [Replica(key=replica.key, group_weights={"lab": 0.5}) for replica in replicas]
    assert [plain.index(preferred(plain, talk, "lab")) for talk in talks] == [
        alike.index(preferred(alike, talk, "lab")) for talk in talks
    ], "equal weights are as none"


def test_conversations_keep_their_homes_while_a_replica_of_other_groups_is_idle():
    rng = random.Random(4)
    homes = [Replica(key=rng.randbytes(32), load=20.0, group_weights={"lab": 1.0, "others": 0.0}) for _ in range(2)]
    others = Replica(key=rng.randbytes(32), group_weights={"lab": 0.0, "others": 1.0})
    talks = [rng.getrandbits(32) for _ in range(400)]
    assert all(preferred([*homes, others], talk, "lab") in homes for talk in talks)
    homes[0].load = 0.0
    kept = {preferred([*homes, others], talk, "lab") for talk in talks}
    assert kept == {homes[0], None}, "load counts among its own"


def test_a_group_keeps_its_small_part_of_a_replica_that_another_one_fills():
    """Whose loads are as planned keeps its conversations: loads are of all groups, and so is the weight they go by."""
    rng = random.Random(5)
    weights = ({"lab": 0.1, "others": 1.0}, {"lab": 1.0})
    replicas = [Replica(key=rng.randbytes(32), load=20.0, group_weights=its) for its in weights]
    talks = [rng.getrandbits(32) for _ in range(400)]
    assert {preferred(replicas, talk, "lab") for talk in talks} == set(replicas)
