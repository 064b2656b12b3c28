"""Which stream gives its place to a request that would be late everywhere."""

import random
from dataclasses import dataclass

import pytest

from fabrictool.domain.steps import SHORTEST, MeasuredSteps, microseconds
from fabrictool.routing.admission import BATCH, INTERACTIVE, STANDARD
from fabrictool.routing.headroom import HeadroomPolicy
from fabrictool.routing.making_room import RunningStream, move_for
from fabrictool.routing.policies import LeastLoadedPolicy
from fabrictool.routing.protocol import PolicyMeans, StreamTarget, Unnamed

TARGET = StreamTarget(2.0, 0.1)
NOW = 10.0


@dataclass(eq=False)
class Replica:
    steps: MeasuredSteps | None
    load: float = 0.0
    weight: float = 1.0
    model: str = "m"
    device: str = ""


def steps(prompt_s, token_s):
    """For each token of a prompt, and for a token for each request of a batch: 0.02 s alone, 0.04 s for two."""
    prompts = tuple(microseconds(prompt_s * (SHORTEST << place)) for place in range(7))
    return MeasuredSteps(prompts, tuple(microseconds(token_s * (1 << place)) for place in range(4)))


class Scene:
    """A fast replica with four streams, which is as many as keep their pace, and a slow one that is idle."""

    def __init__(self, slow=None, streams=4):
        means = PolicyMeans(random.Random(1), {"m": TARGET})
        self.policy = HeadroomPolicy(means, LeastLoadedPolicy(random.Random(1)))
        self.fast, self.slow = Replica(steps(1e-4, 0.02)), slow or Replica(steps(2e-3, 0.02))
        self.streams = [self.stream(self.fast, number) for number in range(streams)]

    def stream(self, at, name, sent=60, priority=STANDARD):
        """One that began five seconds ago."""
        began = NOW - 5.0
        self.policy.late([at], Unnamed(name, "m", 10), began)  # what it measured is known from here on
        self.policy.on_request_start(at, Unnamed(name, "m", 100), began)
        at.load += 1
        due = began + TARGET.ttft_s + TARGET.tpot_s * sent
        return RunningStream(name, "m", at, priority, 100 + sent, due, lambda: [self.slow])

    def move(self, prompt=1500, priority=STANDARD, ttft_s=TARGET.ttft_s):
        self.urgent = Unnamed("urgent", "m", prompt)
        return move_for(self.urgent, priority, NOW + ttft_s, self.streams, self.policy, NOW)


def test_a_request_that_is_late_everywhere_takes_the_place_of_the_stream_with_most_headroom():
    scene = Scene(streams=3)
    scene.streams.insert(1, scene.stream(scene.fast, "ahead", sent=90))
    urgent = Unnamed("urgent", "m", 1500)
    assert scene.policy.late([scene.fast, scene.slow], urgent, NOW), "the one has four, the other reads for 3 s"
    move = scene.move()
    assert (move.stream.id, move.to) == ("ahead", scene.slow)
    assert scene.policy.in_time_without(scene.fast, urgent, "ahead", NOW)
    assert scene.policy.late([scene.fast], urgent, NOW), "looking changed nothing"


def test_who_is_in_time_somewhere_or_at_somebody_unknown_is_not_late():
    scene = Scene()
    assert not scene.policy.late([scene.fast, scene.slow], Unnamed("short", "m", 100), NOW)
    assert not scene.policy.late([scene.fast, Replica(None)], Unnamed("urgent", "m", 1500), NOW)
    roomy = Scene(streams=3)
    assert not roomy.policy.late([roomy.fast], Unnamed("urgent", "m", 1500), NOW)


def test_a_stream_stays_where_the_other_replica_would_be_late_or_is_not_known():
    assert Scene().move() is not None
    assert Scene(slow=Replica(steps(0.1, 0.02))).move() is None, "its text would be read for 15 s"
    assert Scene(slow=Replica(steps(2e-3, 0.2))).move() is None, "its tokens would come too slowly"
    assert Scene(slow=Replica(None)).move() is None
    busy = Scene()
    for number in range(4):
        busy.stream(busy.slow, f"there {number}")
    assert busy.move() is None, "those that are there would be late"


@pytest.mark.parametrize("priority", [INTERACTIVE, STANDARD, BATCH])
def test_nobody_gives_way_to_a_less_important_class(priority):
    moved = Scene().move(priority=priority)
    assert (moved is not None) == (priority <= STANDARD)


def test_who_has_less_headroom_than_the_request_or_none_stays():
    assert Scene().move(ttft_s=9.0) is None
    late = Scene(streams=0)
    late.streams = [late.stream(late.fast, number, sent=20) for number in range(4)]
    assert all(stream.due < NOW for stream in late.streams)
    assert late.move() is None


def test_a_request_that_no_move_helps_gets_none():
    assert Scene(streams=8).move() is None, "seven and it would still be too many"
    assert Scene().move(prompt=100_000) is None
    unheard = Scene()
    unheard.policy.on_request_end(unheard.fast, Unnamed(0, "m", 100))
    unheard.streams = unheard.streams[:1]
    assert unheard.move() is None, "the policy knows nothing of it there"
