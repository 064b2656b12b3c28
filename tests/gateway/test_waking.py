"""Who waits for a replica that has to be started first, for how long, and what is asked for meanwhile."""

import asyncio

import pytest

from fabrictool.domain.specs import WakeRule
from fabrictool.gateway.directory import Directory, RoutingTarget
from fabrictool.gateway.waking import HELD_MOST, LONGEST_AGAIN_S, SHORT_S, UNKNOWN_S, WANTED_S, Waking
from tests.manual_clock import ManualClock


class Request:
    """Writes down what becomes of it."""

    def __init__(self, model="m"):
        self.model, self.heard = model, []

    def awake(self):
        self.heard.append("awake")

    def still_asleep(self, again_s):
        self.heard.append(again_s)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def waking(clock):
    waking = Waking(clock, Directory())
    waking.rules = {"m": WakeRule(60.0, 0)}
    return waking


def held(waking, clock, longest_s=None, model="m"):
    request = Request(model)
    assert waking.hold(request, clock.monotonic(), longest_s) is None
    return request


def test_who_waits_goes_on_in_the_order_of_coming_when_a_replica_is_there(waking, clock):
    order = []
    requests = [held(waking, clock) for _ in range(3)]
    for number, request in enumerate(requests):
        request.awake = lambda number=number: order.append(number)
    assert waking.wanted() == {"m": 1}
    clock.advance(7)
    waking.came("m")
    assert order == [0, 1, 2]
    assert (waking.wanted(), waking.waiting("m")) == ({}, 0)


def test_nobody_waits_longer_than_the_rule_or_the_client_says(waking, clock):
    patient, hurried = held(waking, clock), held(waking, clock, longest_s=5.0)
    clock.advance(5)
    waking.tick(frozenset())
    assert hurried.heard == [UNKNOWN_S]
    clock.advance(54.9)
    waking.tick(frozenset())
    assert patient.heard == []
    clock.advance(0.2)
    waking.tick(frozenset())
    assert patient.heard == [UNKNOWN_S]
    assert waking.waiting("m") == 0
    assert waking.hold(Request(), clock.monotonic(), 0.0) == UNKNOWN_S, "it would not wait at all"


def test_a_second_wait_of_one_request_does_not_begin_anew(waking, clock):
    began = clock.monotonic()
    request = held(waking, clock)
    clock.advance(40)
    waking.came("m")
    assert waking.hold(request, began, None) is None
    clock.advance(21)
    waking.tick(frozenset())
    assert request.heard == ["awake", 19.0], "what it took last, less what is over"


def test_a_client_is_told_the_schedulers_word_before_what_it_took_last(waking, clock):
    held(waking, clock)
    clock.advance(50)
    waking.came("m")
    assert waking.hold(Request(), clock.monotonic(), 0.0) == 50.0
    waking.expected = {"m": clock.wall() + 600}
    assert waking.hold(Request(), clock.monotonic(), 0.0) == 600.0
    waking.expected = {"m": clock.wall() + 10 * LONGEST_AGAIN_S}
    assert waking.hold(Request(), clock.monotonic(), 0.0) == LONGEST_AGAIN_S
    waking.expected = {"m": clock.wall() - 1}
    assert waking.hold(Request(), clock.monotonic(), 0.0) == 50.0, "it is late: what it says is over"


def test_a_model_stays_wanted_for_a_while_though_nobody_waits(waking, clock):
    told = []
    waking.wanted_changed = lambda: told.append(waking.wanted())
    waking.hold(Request(), clock.monotonic(), 0.0)
    clock.advance(WANTED_S - 1)
    waking.hold(Request(), clock.monotonic(), 0.0)
    assert told == [{"m": 1}], "said once"
    clock.advance(WANTED_S - 1)
    waking.tick(frozenset())
    assert waking.wanted() == {"m": 1}
    clock.advance(2)
    waking.tick(frozenset())
    assert waking.wanted() == {}


def test_one_that_has_gone_is_not_sent_on(waking, clock):
    request = held(waking, clock)
    waking.leave(request)
    waking.leave(Request("other"))
    waking.came("m")
    assert request.heard == []


def test_what_waits_has_a_bound(waking, clock):
    for _ in range(HELD_MOST):
        held(waking, clock)
    assert waking.hold(Request(), clock.monotonic(), None) == UNKNOWN_S


def test_requests_that_wait_for_room_want_one_replica_more_than_serve(waking, clock):
    target = RoutingTarget(b"k", "m", "p", None, "m/0")
    waking._directory.replace([target])
    waking.tick({"m", "other"})
    clock.advance(SHORT_S - 0.1)
    waking.tick({"m"})
    assert waking.wanted() == {}
    clock.advance(0.2)
    assert waking.wanted() == {"m": 2}
    waking.tick(frozenset())
    assert waking.wanted() == {}, "room was made"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("written", "again"), [('{"m": 1700000090.0}', 90.0), ("{", UNKNOWN_S), ('{"m": "x"}', UNKNOWN_S)]
)
async def test_what_reconcile_wrote_is_read_and_damage_is_no_harm(waking, clock, tmp_path, written, again):
    waking.hold(Request(), clock.monotonic(), 0.0)
    path = tmp_path / "expected.json"
    hearing = asyncio.create_task(waking.hear_expected(path))
    await asyncio.sleep(0)
    path.write_text(written)
    hearing.cancel()
    hearing = asyncio.create_task(waking.hear_expected(path))
    for _ in range(200):
        await asyncio.sleep(0.01)
        if waking.hold(Request(), clock.monotonic(), 0.0) == again:
            break
    hearing.cancel()
    assert waking.hold(Request(), clock.monotonic(), 0.0) == again
