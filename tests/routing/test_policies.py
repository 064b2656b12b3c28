"""What each policy promises beyond picking a candidate; plug-ins through a real entry point."""

import importlib
import itertools
import os
import random
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog import accelerators
from fabrictool.domain.blueprint import ROUTING_POLICIES
from fabrictool.domain.steps import SHORTEST, MeasuredSteps, microseconds
from fabrictool.routing.headroom import KNOWN, STALE_S, HeadroomPolicy, Line, PackingPolicy
from fabrictool.routing.policies import (
    CREDITS_KEPT,
    LeastLoadedPolicy,
    PowerOfTwoPolicy,
    WeightedPolicy,
    policy_names,
    routing_policy,
    targets_of,
)
from fabrictool.routing.protocol import LOST, PolicyMeans, RequestOutcome, StreamTarget, Unnamed

EXAMPLE = Path(__file__).parents[2] / "examples" / "routing-plugin"


@dataclass(eq=False)
class Replica:
    load: float = 0.0
    weight: float = 1.0
    group_weights: dict[str, float] = field(default_factory=dict)
    model: str = "m"
    provider: str = "alpha"
    site: str = "here"
    device: str = ""
    waiting: int = 0
    ready: bool = True
    context: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    steps: MeasuredSteps | None = None


def asked(number, prompt=100, most=None):
    return Unnamed(number, "m", prompt, most)


@given(
    name=st.sampled_from(ROUTING_POLICIES),
    weights=st.lists(st.floats(0.02, 1.0), min_size=1, max_size=12),
    ends=st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.floats(0.001, 9), st.floats(0.001, 1)), max_size=60),
    seed=st.integers(0, 99),
)
def test_whatever_happens_a_policy_picks_a_candidate_and_forgets_who_is_gone(name, weights, ends, seed):
    policy = routing_policy(name, random.Random(seed))
    replicas = [Replica(weight=weight) for weight in weights]
    now, opened = 0.0, []
    for number, (which, answered, ttft, tpot) in enumerate(ends):
        now += ttft
        chosen = policy.pick(replicas, asked(number), now)
        assert any(chosen is replica for replica in replicas)
        policy.on_request_start(chosen, asked(number), now)
        opened.append((number, chosen))
        chosen.load += 1
        if which < len(opened):
            ended, where = opened.pop(which)
            where.load -= 1
            policy.on_request_end(where, asked(ended), RequestOutcome(answered, ttft, tpot, 100, 20))
    for number, where in opened:
        policy.on_request_end(where, asked(number), LOST)
    if isinstance(policy, PowerOfTwoPolicy):
        assert policy._work == policy._open == {}
    if isinstance(policy, HeadroomPolicy):
        assert not any(learned.open for learned in policy._learned.values())


def test_weighted_deals_out_the_plans_split_to_the_request():
    replicas = [Replica(weight=weight) for weight in (1.0, 0.2, 0.2)]
    policy = WeightedPolicy()
    turns = [replicas.index(policy.pick(replicas)) for _ in range(700)]
    assert [turns.count(number) for number in range(3)] == [500, 100, 100]
    assert max(len(list(run)) for which, run in itertools.groupby(turns) if which) == 1
    assert all(Counter(turns[at : at + 7])[0] == 5 for at in range(0, 700, 7))


def test_weighted_forgets_who_left():
    policy = WeightedPolicy()
    for _ in range(CREDITS_KEPT):
        policy.pick([Replica(), Replica()])
    assert len(policy.credits[None]) <= CREDITS_KEPT


def test_weighted_forgets_no_model_for_another():
    """Turn about, 40 models of three replicas: each deals out its own split."""
    models = [[Replica(weight=weight) for weight in (2.0, 1.0, 1.0)] for _ in range(40)]
    policy = WeightedPolicy()
    turns = [[replicas.index(policy.pick(replicas)) for replicas in models] for _ in range(40)]
    for chosen in zip(*turns, strict=True):
        assert [chosen.count(number) for number in range(3)] == [20, 10, 10]


def test_power_of_two_counts_work_and_not_requests():
    few_long, many_short = Replica(load=2), Replica(load=5)
    policy = PowerOfTwoPolicy(random.Random(1))
    for number in range(2):
        policy.on_request_start(few_long, asked(number, prompt=100_000), 0.0)
    for number in range(2, 7):
        policy.on_request_start(many_short, asked(number, prompt=100), 0.0)
    assert all(policy.pick([few_long, many_short], asked(9)) is many_short for _ in range(20))


def test_power_of_two_counts_what_other_gateways_sent():
    theirs, ours = Replica(load=9), Replica(load=1)
    policy = PowerOfTwoPolicy(random.Random(1))
    policy.on_request_start(ours, asked(1), 0.0)
    assert all(policy.pick([theirs, ours], asked(9)) is ours for _ in range(20))


def test_two_choices_keep_the_longest_queue_short():
    """Balls into bins: the fullest of n bins holds log log n with two choices, and log n / log log n with one."""
    longest = {}
    for name in ("power-of-two", "random"):
        policy, replicas = routing_policy(name, random.Random(5)), [Replica() for _ in range(1000)]
        for number in range(1000):
            chosen = policy.pick(replicas, asked(number))
            chosen.load += 1
            policy.on_request_start(chosen, asked(number), 0.0)
        longest[name] = max(replica.load for replica in replicas)
    assert longest["power-of-two"] <= 3 < longest["random"]


# -- headroom --------------------------------------------------------------------------------------------------------


def taught(target, *, prefill, decode, at=0.0, number=20, kind=HeadroomPolicy):
    """A policy that saw streams of replicas, which take `prefill[i]` s for a token of a prompt, `decode[i]` after."""
    replicas = [Replica() for _ in prefill]
    means = PolicyMeans(random.Random(3), {"m": target})
    policy = kind(means, LeastLoadedPolicy(random.Random(3)))
    for which, replica in enumerate(replicas):
        for turn in range(number):
            prompt = 100 * (1 + turn % 5)
            policy.on_request_start(replica, asked((which, turn), prompt), at)
            outcome = RequestOutcome(True, prefill[which] * prompt, decode[which], prompt, 50)
            policy.on_request_end(replica, asked((which, turn), prompt), outcome)
    return policy, replicas


def test_headroom_prefers_who_is_fast_until_he_has_too_much():
    policy, (slow, fast) = taught(StreamTarget(2.0, 0.1), prefill=(1e-3, 1e-4), decode=(0.05, 0.02))
    chosen = []
    for number in range(300):
        replica = policy.pick([slow, fast], asked(number, prompt=1000), 1.0)
        policy.on_request_start(replica, asked(number, prompt=1000), 1.0)
        replica.load += 1
        chosen.append(replica is fast)
    assert all(chosen[:5])
    assert not all(chosen[:20]), "ten prompts in front of it take a second"
    late = sum(chosen)
    assert 200 < late < 299, "ten times as fast, so most of the work"


def test_headroom_goes_by_load_where_it_knows_nothing_and_tries_again_who_was_not_heard_of():
    unknown = HeadroomPolicy(PolicyMeans(random.Random(1), {}), LeastLoadedPolicy(random.Random(1)))
    busy, idle = Replica(load=3), Replica()
    assert unknown.pick([busy, idle], asked(1), 0.0) is idle
    policy, (slow, fast) = taught(StreamTarget(), prefill=(1e-2, 1e-4), decode=(0.2, 0.02))
    fast.load = 2
    assert policy.pick([slow, fast], asked(1, 500), 10.0) is fast
    assert policy.pick([slow, fast], asked(1, 500), STALE_S + 30.0) is slow, "the least loaded one"
    assert KNOWN <= 20


def measured(prompt_s, token_s):
    """Steps as a replica says them: for each token of a prompt, and for a token of each request."""
    prompts = tuple(microseconds(prompt_s * (SHORTEST << place)) for place in range(6))
    return MeasuredSteps(prompts, (microseconds(token_s),) * 4)


@pytest.mark.parametrize("kind", [HeadroomPolicy, PackingPolicy])
def test_who_measured_itself_is_known_before_its_first_stream(kind):
    means = PolicyMeans(random.Random(1), {"m": StreamTarget(2.0, 0.1)})
    policy = kind(means, LeastLoadedPolicy(random.Random(1)))
    slow, fast = Replica(steps=measured(1e-2, 0.2)), Replica(steps=measured(1e-4, 0.02), load=2)
    assert policy.pick([slow, fast], asked(1, 500), 0.0) is fast, "the other one is idle, and would be late"
    assert policy.pick([slow, fast], asked(1, 500), 10 * STALE_S) is fast, "also when nothing was heard of it for long"
    nobody = Replica(load=1)
    assert policy.pick([slow, nobody], asked(1, 500), 0.0) is (slow if kind is HeadroomPolicy else nobody)


def test_what_a_replica_measured_yields_to_what_its_streams_take():
    means = PolicyMeans(random.Random(1), {"m": StreamTarget(2.0, 0.1)})
    policy = HeadroomPolicy(means, LeastLoadedPolicy(random.Random(1)))
    boaster, honest = Replica(steps=measured(1e-5, 0.001)), Replica(steps=measured(1e-3, 0.02))
    assert policy.pick([boaster, honest], asked(0, 500), 0.0) is boaster
    for number in range(40):
        policy.on_request_start(boaster, asked(number, 500), 1.0)
        policy.on_request_end(boaster, asked(number, 500), RequestOutcome(True, 1.5, 0.09, 500, 50))
    assert policy.pick([boaster, honest], asked(99, 500), 2.0) is honest


def test_packing_fills_a_replica_as_long_as_it_keeps_the_targets():
    policy, replicas = taught(StreamTarget(1.0, 0.1), prefill=(1e-3,) * 3, decode=(0.02,) * 3, kind=PackingPolicy)
    counts = []
    for number in range(24):
        chosen = policy.pick(replicas, asked(number, prompt=100), 1.0)
        policy.on_request_start(chosen, asked(number, prompt=100), 1.0)
        chosen.load += 1
        counts.append([replica.load for replica in replicas])
    filled = max(counts[-1])
    assert filled > 4
    assert sorted(counts[int(filled) - 1]) == [0, 0, filled], "none beside the first one while it keeps them"
    assert sorted(counts[int(2 * filled) - 1]) == [0, filled, filled]


def test_packing_takes_processors_first_and_the_unknown_last():
    policy, (first, second) = taught(StreamTarget(), prefill=(1e-3,) * 2, decode=(0.02,) * 2, kind=PackingPolicy)
    first.load, first.device, second.device = 3, "h100-sxm-80g", "xeon-6462c"
    new = Replica(device="xeon-6462c")
    assert accelerators()["xeon-6462c"].kind == "cpu"
    assert policy.pick([first, second, new], asked(1), 1.0) is second
    assert policy.pick([first, new], asked(1), 1.0) is new, "a processor that has nothing to do"
    new.load = 1
    assert policy.pick([first, new], asked(1), 1.0) is first
    assert policy.pick([first, new], asked(1, prompt=10_000), 1.0) is new, "the other one would be late"
    assert policy.pick([first], asked(1, prompt=10_000), 1.0) is first


def test_who_is_late_already_does_not_make_a_replica_hopeless():
    policy, (poisoned, other) = taught(StreamTarget(1.0, 0.1), prefill=(1e-4, 2e-4), decode=(0.02, 0.03))
    policy.on_request_start(poisoned, asked("late", 100_000), 1.0)
    policy.on_request_end(poisoned, asked("late", 100_000), LOST)
    policy.on_request_start(poisoned, asked("old", 10), 1.0)
    assert policy.pick([poisoned, other], asked("new", 10), 30.0) is poisoned


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1e-4, 1e3)), min_size=1, max_size=50), st.floats(0, 1e6))
def test_a_learned_line_never_falls_and_is_never_negative(samples, x):
    line = Line()
    for at, y in samples:
        line.learn(at, y)
    assert 0.0 <= line.at(x) <= line.at(2 * x + 1) * (1 + 1e-6) + 1e-6


def test_a_learned_line_is_the_line():
    line = Line()
    for x in range(1, 60):
        line.learn(float(x), 0.5 + 0.01 * x)
    assert line.at(100.0) == pytest.approx(1.5)


def test_targets_have_the_usual_where_nothing_is_declared():
    assert targets_of({"m": (1.0, None)}) == {"m": StreamTarget(ttft_s=1.0)}


# -- plug-ins --------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example's wheel, built and unpacked as an installer does it, and three plug-ins that misbehave."""
    build = pytest.importorskip("hatchling.build")
    here = Path.cwd()
    os.chdir(EXAMPLE)
    try:
        wheel = build.build_wheel(str(tmp_path))
    finally:
        os.chdir(here)
    site = tmp_path / "site-packages"
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(site)
    (site / "bad_policies.py").write_text(BAD)
    info = site / "bad_policies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-policies\nVersion: 1\n")
    names = ("Raises", "Strays", "Deaf", "Unmade", "Missing")
    lines = [f"{name.lower()} = bad_policies:{name}" for name in names]
    (info / "entry_points.txt").write_text("[fabrictool.routing_policies]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield
    for name in ("bad_policies", "maxflow_routing"):
        sys.modules.pop(name, None)


BAD = """
class Raises:
    def __init__(self, means): pass
    def pick(self, candidates, request, now): raise ZeroDivisionError("no")
    def on_request_start(self, candidate, request, now): raise KeyError(1)
    def on_request_end(self, candidate, request, outcome): raise KeyError(2)
class Strays(Raises):
    def pick(self, candidates, request, now): return object()
class Deaf:
    def __init__(self, means): pass
    def pick(self, candidates, request, now): return candidates[0]
class Unmade(Raises):
    def __init__(self, means): raise ValueError("not today")
"""


@pytest.mark.usefixtures("installed")
def test_a_plug_in_is_found_by_its_entry_point_and_deals_out_by_flow():
    assert "max-flow" in policy_names()
    replicas = [Replica(weight=1.0), Replica(weight=1.0, site="far-site"), Replica(weight=3.0, site="far-site")]
    complaints = []
    policy = routing_policy("max-flow", random.Random(1), complain=complaints.append)
    counts = Counter(replicas.index(policy.pick(replicas, asked(n), 0.0)) for n in range(1000))
    assert (policy.name, complaints) == ("max-flow", [])
    assert counts[0] == 500, "the far site's link lets through no more than the near replica serves"
    replicas[0].waiting = 100
    assert policy.pick(replicas, asked(1), 0.0) is not replicas[0]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["raises", "strays"])
def test_a_plug_in_that_misbehaves_costs_no_request_and_is_told_of_once(name):
    complaints, busy, idle = [], Replica(load=4), Replica()
    policy = routing_policy(name, random.Random(1), complain=complaints.append)
    for number in range(10):
        assert policy.pick([busy, idle], asked(number), 0.0) is idle
        policy.on_request_start(idle, asked(number), 0.0)
        policy.on_request_end(idle, asked(number), LOST)
    (text,) = complaints
    assert f"'{name}' misbehaves" in text
    assert policy.failures == 30


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "says"), [("deaf", "lacks"), ("unmade", "not today"), ("missing", "AttributeError")])
def test_a_plug_in_that_cannot_be_used_is_an_error_with_its_own_words(name, says):
    with pytest.raises(InvalidInputError, match=says) as caught:
        routing_policy(name, random.Random(1))
    assert caught.value.problems[0].code == "FT8130"


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_lists_those_that_are_known():
    with pytest.raises(InvalidInputError) as caught:
        routing_policy("best", random.Random(1))
    problem = caught.value.problems[0]
    assert problem.code == "FT8003"
    assert all(name in problem.message for name in (*ROUTING_POLICIES, "max-flow"))
