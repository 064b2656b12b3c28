"""Waiting for a slot: the order, the bounds, and what becomes of goodput and haste at four times what can be served."""

import heapq
import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.routing.admission import (
    BATCH,
    INTERACTIVE,
    LEARNED,
    PATIENCE_S,
    STANDARD,
    AdmissionQueue,
    Waiter,
    usable_slots,
    with_room,
)


@dataclass(eq=False)
class Replica:
    slots: int = 0
    load: float = 0.0


def waiter(item, priority=STANDARD, deadline=100.0, kind="any"):
    return Waiter(item, priority, deadline, kind)


def started(queue, room=math.inf, now=0.0):
    """What is sent on while there is room for so many."""
    left = itertools.count()
    return [entry.item for entry in queue.starting(lambda _: next(left) < room, now)]


def test_the_more_important_first_and_then_the_earliest_deadline():
    queue = AdmissionQueue()
    for item, priority, deadline in (
        ("b", BATCH, 1.0), ("s late", STANDARD, 9.0), ("i", INTERACTIVE, 50.0),
        ("s", STANDARD, 3.0), ("s too", STANDARD, 3.0),
    ):  # fmt: skip
        assert queue.offer(waiter(item, priority, deadline), 0.0) == (None, None)
    assert started(queue, 2) == ["i", "s"]
    assert started(queue) == ["s too", "s late", "b"]
    assert len(queue) == 0


def test_batch_leaves_a_tenth_of_the_slots_and_one_who_is_alone_still_gets_in():
    assert [usable_slots(20, priority) for priority in (INTERACTIVE, STANDARD, BATCH)] == [22, 22, 18]
    assert usable_slots(1, BATCH) == 1
    unknown, full, half = Replica(load=900), Replica(20, 22), Replica(20, 18)
    assert with_room([unknown, full, half], STANDARD) == [unknown, half]
    assert with_room([full, half], BATCH) == []


def test_who_finds_no_room_does_not_hold_up_others_who_may_go_elsewhere():
    queue = AdmissionQueue()
    for item, kind in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        queue.offer(waiter(item, kind=kind), 0.0)
    asked = []

    def room(entry):
        asked.append(entry.item)
        return entry.kind == "b"

    assert [entry.item for entry in queue.starting(room, 0.0)] == ["b1"]
    assert asked == ["a1", "b1"], "a2 may go where a1 may: it is not asked for"


def test_a_full_queue_refuses_or_drops_the_last_of_the_least_important():
    queue = AdmissionQueue(limit=2)
    queue.offer(waiter("b", BATCH), 0.0)
    queue.offer(waiter("s"), 0.0)
    busy, gone = queue.offer(waiter("b2", BATCH), 0.0)
    assert (busy.full, busy.retry_after_s, gone) == (True, 1.0, None)
    busy, gone = queue.offer(waiter("i", INTERACTIVE), 0.0)
    assert (busy, gone.item) == (None, "b")
    assert queue.offer(waiter("s2"), 0.0)[0].full
    assert started(queue) == ["i", "s"]


def test_who_would_be_too_late_is_refused_at_once_and_told_when_to_come_again():
    queue = AdmissionQueue()
    for number in range(LEARNED + 12):
        queue.offer(waiter(number, deadline=1000.0), 0.0)
    for turn in range(LEARNED + 2):
        started(queue, 1, now=3.0 * turn)
    busy, _ = queue.offer(waiter("hasty", deadline=27.0 + 2.0), 27.0)
    assert (busy.full, busy.retry_after_s) == (False, 3.0), "three seconds, were it the first"


def test_who_does_not_want_to_wait_is_told_at_once_and_gets_no_slot_before_others():
    queue = AdmissionQueue()
    assert queue.offer(waiter("patient", deadline=1000.0), 1.0) == (None, None)
    busy, gone = queue.offer(waiter("at once", INTERACTIVE, deadline=1.0), 1.0)
    assert (busy.full, busy.retry_after_s, gone) == (False, 1.0, None)
    assert [w.item for w in queue.starting(lambda _: True, 1.0)] == ["patient"]


def test_who_waited_too_long_is_given_back_once():
    queue = AdmissionQueue()
    for item, deadline in (("a", 5.0), ("b", 7.0), ("c", 9.0)):
        queue.offer(waiter(item, deadline=deadline), 0.0)
    assert [entry.item for entry in queue.late(7.0)] == ["a", "b"]
    assert queue.late(7.0) == []
    assert len(queue) == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("offer"), st.integers(0, 2), st.floats(0, 50)),
            st.tuples(st.just("start"), st.integers(0, 3), st.none()),
            st.tuples(st.just("leave"), st.integers(0, 40), st.none()),
            st.tuples(st.just("late"), st.floats(0, 20), st.none()),
        ),
        max_size=60,
    ),
    st.integers(1, 8),
)
def test_nobody_is_lost_and_nobody_served_twice(events, limit):
    queue, inside, now = AdmissionQueue(limit), {}, 0.0
    for number, (what, which, deadline) in enumerate(events):
        if what == "offer":
            entry = waiter(number, which, now + deadline)
            busy, gone = queue.offer(entry, now)
            if gone is not None:
                assert gone.priority > which
                del inside[gone.item]
            if busy is None:
                inside[number] = entry
        elif what == "start":
            for item in started(queue, which, now):
                best = min(inside.values(), key=lambda entry: (entry.priority, *entry.order))
                assert best.item == item
                del inside[item]
        elif what == "leave" and which in inside:
            assert queue.remove(inside[which])
            assert not queue.remove(inside.pop(which))
        elif what == "late":
            now += which
            for entry in queue.late(now):
                assert inside.pop(entry.item).deadline <= now
        assert len(queue) == len(inside) <= limit
        assert [queue.waiting(p) for p in range(3)] == [sum(e.priority == p for e in inside.values()) for p in range(3)]


# -- overload, in virtual time ---------------------------------------------------------------------------------------

SLOTS, SERVICE_S = 16, 2.0
PEAK = SLOTS / SERVICE_S
"""Requests a second that a replica serves when it is full and nobody overtaxes it."""


class Engine:
    """First come, first served. An answer is useful if it begins before the patience of who asked ends."""

    def __init__(self, factor, hasty, seconds, seed):
        self.rng, self.numbers, self.seconds = random.Random(seed), itertools.count(), seconds
        self.replica, self.inside, self.running, self.events = Replica(SLOTS), [], 0, []
        self.useful, self.waits = 0, []
        rest = (factor - hasty) * PEAK / 2
        for rate, priority, patience in (
            (hasty * PEAK, INTERACTIVE, 10.0),
            (rest, STANDARD, 20.0),
            (rest, BATCH, 60.0),
        ):
            at = 0.0
            while (at := at + self.rng.expovariate(rate)) < seconds:
                self.later(at, (at, priority, at + patience))

    def later(self, at, request=None):
        heapq.heappush(self.events, (at, next(self.numbers), request))

    def send(self, request):
        self.replica.load += 1
        self.inside.append(request)

    def work(self, now):
        while self.inside and self.running < SLOTS:
            came, priority, deadline = self.inside.pop(0)
            self.running += 1
            self.useful += now <= deadline and now < self.seconds
            if priority == INTERACTIVE:
                self.waits.append(now - came)
            self.later(now + SERVICE_S * self.rng.uniform(0.5, 1.5))


def overloaded(factor, *, admission, seconds=600.0, hasty=0.3, seed=1):
    """An open loop at `factor` times the peak, of which `hasty` times the peak interactive requests.

    Returns useful answers a second, and the 99th percentile of the waits of interactive ones.
    """
    engine, queue = Engine(factor, hasty, seconds, seed), AdmissionQueue()
    while engine.events:
        now, _, request = heapq.heappop(engine.events)
        if request is None:
            engine.running -= 1
            engine.replica.load -= 1
        elif admission and (len(queue) or not with_room([engine.replica], request[1])):
            queue.offer(Waiter(request, request[1], request[2], "any"), now)
        else:
            engine.send(request)
        queue.late(now)
        for entry in queue.starting(lambda waiting: bool(with_room([engine.replica], waiting.priority)), now):
            engine.send(entry.item)
        engine.work(now)
    waits = sorted(engine.waits)
    return engine.useful / seconds, waits[int(0.99 * len(waits))]


def test_at_four_times_what_can_be_served_the_work_done_is_useful_and_haste_is_kept():
    peak, _ = overloaded(1.0, admission=True)
    goodput, hasty = overloaded(4.0, admission=True)
    lost, endless = overloaded(4.0, admission=False)
    assert goodput >= 0.9 * PEAK
    assert goodput >= 0.9 * peak
    assert hasty <= SERVICE_S, "an interactive request waits for a slot, and for nothing else"
    assert lost < 0.2 * PEAK, "without: everybody is served, too late"
    assert endless > 100.0


def test_without_pressure_nobody_waits_for_a_slot():
    _, hasty = overloaded(0.5, admission=True)
    assert hasty < 0.2 * SERVICE_S


@pytest.mark.parametrize("priority", [INTERACTIVE, STANDARD, BATCH])
def test_the_hastier_wait_for_a_shorter_time(priority):
    assert PATIENCE_S[priority] == sorted(PATIENCE_S)[priority]
