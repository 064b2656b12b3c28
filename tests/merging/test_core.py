"""Replicas that merge and split while they answer."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabrictool.merging.core import MergingReplicas
from fabrictool.merging.groups import BlockPool, ReplicaGroup
from fabrictool.merging.requests import MergingOptions, MergingRequest, Split, Transition
from fabrictool.merging.triggers import LoadTrigger

NUMBERS = itertools.count()
POOL = BlockPool(20, 16)


def request(prompt=16, most=5, began=0.0, *, priority=1):
    return MergingRequest(next(NUMBERS), prompt, most, began, priority)


class Bench:
    """Steps in virtual time; each lasts as long as its group's degree says."""

    def __init__(self, replicas, seconds=lambda step: 1.0 / step.group.degree):
        self.replicas, self.seconds, self.now, self.steps, self.done = replicas, seconds, 0.0, [], []

    def begin(self):
        for step in self.replicas.next_steps(self.now):
            self.steps.append((step.begins + self.seconds(step), step))
        return [step for _, step in self.steps]

    def end(self):
        """The step that is over first."""
        at, step = min(self.steps, key=lambda pair: pair[0])
        self.steps.remove((at, step))
        self.now = max(self.now, at)
        emitted = self.replicas.ended(step, lambda r: r.emitted >= r.most)
        self.done += [r for r in emitted if r.emitted >= r.most]
        return step

    def run(self, until=10_000):
        for _ in range(until):
            if not self.begin():
                return
            self.end()
        pytest.fail("it does not end")


def computed_by(bench):
    """Group → ids in its step, of the steps under way."""
    return {step.group: {r.id for r, _ in step.parts} for step in bench.begin()}


def test_replicas_work_side_by_side():
    replicas = MergingReplicas(2, POOL)
    mine = [request() for _ in range(4)]
    for r in mine:
        assert replicas.arrive(r, 0.0) is None
    bench = Bench(replicas)
    assert [len(ids) for ids in computed_by(bench).values()] == [2, 2]
    bench.run()
    assert all(r.emitted == 5 for r in mine)
    assert replicas.free == [20, 20]


def test_a_long_request_merges_as_many_as_it_needs():
    replicas = MergingReplicas(4, POOL)
    long = request(prompt=500)
    assert replicas.arrive(long, 0.0) is None
    bench = Bench(replicas)
    assert list(computed_by(bench)) == [ReplicaGroup(0, 2)]
    assert replicas.free == [4, 4, 20, 20]
    bench.run()
    assert long.emitted == 5
    assert replicas.formed == []


def test_what_not_even_all_together_hold_is_refused():
    replicas = MergingReplicas(4, POOL)
    assert replicas.arrive(request(prompt=1281), 0.0) == 1280
    assert not replicas.waiting


def test_priority_pauses_others_and_they_go_on_where_they_were():
    replicas = MergingReplicas(2, POOL, MergingOptions(priority_degree=2, pause_s=math.inf))
    ordinary = [request(most=20) for _ in range(2)]
    for r in ordinary:
        replicas.arrive(r, 0.0)
    bench = Bench(replicas)
    for _ in range(4):
        bench.begin()
        bench.end()
    cached = [r.cached for r in ordinary]
    urgent = request(began=bench.now, priority=0)
    replicas.arrive(urgent, bench.now)
    while replicas.formed != [ReplicaGroup(0, 2)]:
        bench.begin()
        bench.end()
    while urgent.emitted < urgent.most:
        assert set(computed_by(bench)) <= {ReplicaGroup(0, 2)}
        bench.end()
    assert all(r.cached >= c for r, c in zip(ordinary, cached, strict=True))
    bench.run()
    assert all(r.emitted == 20 for r in ordinary)
    assert replicas.counts.recomputed == replicas.counts.evicted == 0


@pytest.mark.parametrize("replicas", [2, 4])
def test_who_has_paused_for_long_has_turns_or_begins_anew_elsewhere(replicas):
    mine = MergingReplicas(replicas, POOL, MergingOptions(priority_degree=2, pause_s=3.0))
    ordinary = [request(most=20) for _ in range(replicas)]
    for r in ordinary:
        mine.arrive(r, 0.0)
    bench = Bench(mine)
    bench.begin()
    urgent = request(most=200, priority=0)
    mine.arrive(urgent, 0.0)
    while not all(r.emitted == 20 for r in ordinary):
        bench.begin()
        bench.end()
    assert urgent.emitted < 200
    assert bool(mine.counts.recomputed) == (replicas == 4)
    bench.run()
    assert urgent.emitted == 200


@pytest.mark.parametrize("transition", Transition)
def test_transitions_differ_in_how_long_one_waits(transition):
    """A straggler has 30 tokens to go when a request with priority comes."""
    options = MergingOptions(priority_degree=2, priority_transition=transition)
    replicas = MergingReplicas(2, POOL, options)
    straggler = request(most=30)
    replicas.arrive(straggler, 0.0)
    bench = Bench(replicas)
    bench.begin()
    urgent = request(most=10, priority=0)
    replicas.arrive(urgent, 0.0)
    while not urgent.emitted:
        bench.begin()
        bench.end()
    if transition is Transition.HARD:
        assert straggler.emitted <= 1
    elif transition is Transition.SOFT:
        assert straggler.emitted <= 3
        assert urgent.group.degree == 1
    else:
        assert straggler.emitted == 30
        assert urgent.group.degree == 2
    bench.run()
    assert urgent.emitted == 10


def test_a_soft_transition_computes_the_prefix_again_and_keeps_the_tokens():
    options = MergingOptions(priority_degree=2, priority_transition=Transition.SOFT)
    replicas = MergingReplicas(2, POOL, options)
    straggler, urgent = request(most=6), request(most=40, priority=0)
    replicas.arrive(straggler, 0.0)
    bench = Bench(replicas)
    bench.begin()
    replicas.arrive(urgent, 0.0)
    while not replicas.formed:
        bench.begin()
        bench.end()
    emitted = urgent.emitted
    assert emitted > 1
    assert urgent.group == ReplicaGroup(0, 2)
    assert replicas.counts.recomputed == 16 + (emitted - 1) - 1  # the group has sent one more since
    bench.run()
    assert urgent.emitted == 40


def test_paused_requests_give_up_blocks_that_priority_needs():
    replicas = MergingReplicas(2, BlockPool(4, 16), MergingOptions(priority_degree=2))
    ordinary = [request(prompt=40, most=20, began=i) for i in range(2)]
    for r in ordinary:
        replicas.arrive(r, 0.0)
    bench = Bench(replicas)
    bench.begin()
    bench.end()
    urgent = request(prompt=60, priority=0, began=2.0)
    replicas.arrive(urgent, bench.now)
    bench.run()
    assert replicas.counts.evicted
    assert {r.emitted for r in ordinary} == {20}
    assert urgent.emitted == urgent.most


@pytest.mark.parametrize("split", Split)
def test_a_burst_splits_a_group_that_works(split):
    trigger = LoadTrigger(100.0, 50.0)
    options = MergingOptions(split=split, switch_s=0.0)
    replicas = MergingReplicas(2, BlockPool(200, 16), options, trigger)
    calm = request(most=60)
    replicas.arrive(calm, 0.0)
    bench = Bench(replicas)
    assert list(computed_by(bench)) == [ReplicaGroup(0, 2)]
    for _ in range(12):
        bench.begin()
        bench.end()
    emitted = calm.emitted
    burst = [request(began=bench.now) for _ in range(12)]
    for r in burst:
        replicas.arrive(r, bench.now)
    for _ in range(3):
        bench.begin()
        bench.end()
    assert not trigger.merged
    if split is Split.FINISH:
        assert calm.group == ReplicaGroup(0, 2)
        assert not replicas.counts.recomputed
    else:
        assert calm.group.degree == 1
        assert replicas.counts.recomputed >= 16 + emitted - 1
    assert {r.group.degree for r in burst if r.group} == {1}
    bench.run()
    assert calm.emitted == 60


def test_what_outgrows_the_replicas_that_are_left_is_given_up():
    replicas = MergingReplicas(2, BlockPool(8, 16))
    growing = request(prompt=100, most=100)
    replicas.arrive(growing, 0.0)
    bench = Bench(replicas)
    bench.begin()
    lose(bench, 1)
    bench.run()
    assert replicas.given_up == [growing]
    assert growing.emitted == 28
    assert replicas.arrive(request(prompt=100, most=29), bench.now) == 128


@pytest.mark.parametrize("by_load", [False, True])
def test_short_requests_join_a_group_that_a_long_one_needs(by_load):
    trigger = LoadTrigger(math.inf, 4.0) if by_load else None
    replicas = MergingReplicas(2, POOL, MergingOptions(places=8), trigger)
    long = request(prompt=400, most=100)
    replicas.arrive(long, 0.0)
    bench = Bench(replicas)
    for _ in range(3):
        bench.begin()
        bench.end()
    short = [request(most=3, began=bench.now) for _ in range(20)]
    for r in short:
        replicas.arrive(r, bench.now)
    while not all(r.emitted == 3 for r in short):
        bench.begin()
        bench.end()
    assert long.emitted < 60
    bench.run()
    assert long.emitted == 100


def test_a_burst_is_answered_beside_a_long_request_that_stays_in_its_group():
    trigger = LoadTrigger(math.inf, 100.0)
    replicas = MergingReplicas(2, POOL, MergingOptions(places=8), trigger)
    long = request(prompt=10, most=500)
    replicas.arrive(long, 0.0)
    bench = Bench(replicas)
    while long.emitted < 320:
        bench.begin()
        bench.end()
    short = [request(most=3, began=bench.now) for _ in range(20)]
    for r in short:
        replicas.arrive(r, bench.now)
    while not all(r.emitted == 3 for r in short):
        bench.begin()
        bench.end()
    assert long.emitted < 420
    bench.run()


OPTIONS = st.builds(
    MergingOptions,
    places=st.integers(1, 6),
    budget=st.integers(16, 64),
    priority_degree=st.sampled_from((1, 2, 4)),
    load_transition=st.sampled_from(Transition),
    priority_transition=st.sampled_from(Transition),
    split=st.sampled_from(Split),
    turns=st.integers(1, 5),
    fixed=st.sampled_from((None, None, None, 1, 2, 4)),
)


@settings(max_examples=25)
@given(OPTIONS, st.integers(0, 10**6), st.booleans())
def test_whatever_comes_all_are_answered_and_no_block_is_lost(options, seed, by_load):
    rng = random.Random(seed)
    trigger = LoadTrigger(rng.uniform(0.5, 5.0), rng.uniform(1.0, 20.0)) if by_load else None
    replicas = MergingReplicas(4, POOL, options, trigger)
    bench = Bench(replicas, lambda step: rng.uniform(0.2, 1.5) / step.group.degree)
    asked, layouts, lost = [], {}, rng.random() < 0.5
    for turn in range(250):
        if rng.random() < 0.25:
            asked.append(request(rng.randint(1, 700), rng.randint(1, 30), bench.now, priority=rng.randint(0, 2)))
            if replicas.arrive(asked[-1], bench.now) is not None:
                asked.pop()
        if asked and rng.random() < 0.05:
            leaver = rng.choice(asked)
            if leaver not in bench.done and leaver not in replicas.given_up and replicas.cancel(leaver):
                asked.remove(leaver)
                layouts.pop(leaver.id, None)
        if turn == 150 and lost:
            lose(bench, rng.randrange(4))
        if bench.begin():
            check(bench, asked, layouts)
            bench.end()
        else:
            bench.now += 1.0
    bench.run()
    assert all(r.emitted == r.most or r in replicas.given_up for r in asked)
    assert len(bench.done) + len(replicas.given_up) == len(asked)
    assert lost or not replicas.given_up
    assert replicas.free == [POOL.blocks] * 4


def lose(bench, replica):
    """A replica is gone: steps of its groups come to nothing."""
    for at, step in list(bench.steps):
        if replica in step.group.members:
            bench.steps.remove((at, step))
            bench.replicas.failed(step)
    bench.replicas.lost(replica)


def check(bench, asked, layouts):
    busy = [member for _, step in bench.steps for member in step.group.members]
    assert len(busy) == len(set(busy))  # nobody is in two steps
    free = [POOL.blocks] * 4
    for r in asked:
        for member in r.group.members if r.group else ():
            free[member] -= r.blocks
        before = layouts.get(r.id)
        if before is not None and before != r.group:
            assert r.cached == 0  # another layout begins with an empty cache
        layouts[r.id] = r.group
    assert bench.replicas.free == free
    assert min(free) >= 0
    for _, step in bench.steps:
        assert step.parts
        assert all(r.group == step.group for r, _ in step.parts)
        assert step.tokens <= bench.replicas.options.budget
