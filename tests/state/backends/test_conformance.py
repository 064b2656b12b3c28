"""Every place for the state is asked the same."""

import contextlib
import json
import threading
import time

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError, InvalidInputError, StaleError
from fabrictool.domain.state import Placed, State
from tests.manual_clock import ManualClock

SECRET = "planted-state-token"


def codes(error):
    return [problem.code for problem in error.value.problems]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def placed(state, number):
    units = {**state.units, f"replica/m/{number}": Placed(cluster="c", partition="n", operation=f"o{number}")}
    return msgspec.structs.replace(state, units=units)


def test_there_is_an_empty_state_before_the_first_write(shelf):
    store = shelf.open()
    assert store.read() == State()
    assert store.raw() is None
    assert store.holder() is None


def test_what_is_written_is_read_elsewhere_one_serial_later(shelf):
    first = shelf.open()
    written = first.write(placed(State(), 0), read=State())
    assert (written.serial, len(written.lineage)) == (1, 16)
    assert shelf.open().read() == written
    again = first.write(placed(written, 1), read=written)
    assert (again.serial, again.lineage) == (2, written.lineage)
    assert shelf.open().read() == again
    assert json.loads(shelf.content())["serial"] == 2


def test_a_write_on_what_has_moved_is_refused_and_changes_nothing(shelf):
    one, other = shelf.open(), shelf.open()
    start = one.write(State(), read=State())
    assert other.read() == start
    moved = other.write(placed(start, 7), read=start)
    with pytest.raises(StaleError) as error:
        one.write(placed(start, 8), read=start)
    assert codes(error) == ["FT4002"]
    assert shelf.open().read() == moved
    assert one.write(placed(moved, 8), read=moved).serial == 3


def test_of_many_writers_at_once_one_wins(shelf):
    start = shelf.open().write(State(), read=State())
    stores, outcome = [shelf.open() for _ in range(4)], []

    def write(number):
        try:
            outcome.append(stores[number].write(placed(start, number), read=start))
        except FabrictoolError as error:
            outcome.append(error.problems[0].code)

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [each for each in outcome if isinstance(each, State)]
    assert len(won) == 1, outcome
    assert [each for each in outcome if each not in won] == ["FT4002"] * 3
    assert shelf.open().read() == won[0]


def test_a_damaged_state_is_named_and_left_alone(shelf):
    store = shelf.open()
    start = store.write(State(), read=State())
    shelf.spoil(b'{"schema": 1, "serial": ')
    with pytest.raises(InvalidInputError) as error:
        shelf.open().read()
    assert codes(error) == ["FT4001"]
    assert "state rebuild" in error.value.problems[0].hint
    with pytest.raises(InvalidInputError) as error:
        store.write(placed(start, 1), read=start)
    assert codes(error) == ["FT4001"]
    assert shelf.open().raw() == b'{"schema": 1, "serial": '


def test_a_later_schema_is_refused(shelf):
    shelf.open().write(State(), read=State())
    shelf.spoil(b'{"schema": 99}')
    with pytest.raises(InvalidInputError) as error:
        shelf.open().read()
    assert codes(error) == ["FT4001"]


def test_replace_puts_a_state_there_whatever_was_there(shelf):
    store = shelf.open()
    store.write(State(), read=State())
    shelf.spoil(b"rubbish")
    rebuilt = State(lineage="abc", serial=9)
    with store.lease("rebuild", now=0.0):
        assert store.replace(rebuilt) == rebuilt
    assert shelf.open().read() == rebuilt


def test_versions_are_kept_youngest_first(shelf):
    store = shelf.open()
    state = State()
    for number in range(3):
        state = store.write(placed(state, number), read=state)
    found = shelf.open().history() if shelf.kind != "local" else store.history()
    assert [version.state.serial for version in found] == ([] if shelf.kind.startswith("http") else [3, 2, 1])
    assert all(abs(version.at - time.time()) < 600 for version in found)


# -- leases -------------------------------------------------------------------------------------------------------


def test_one_lease_at_a_time_and_the_second_is_told_whose(shelf):
    one, other = shelf.open(), shelf.open()
    with one.lease("apply abc", now=time.time()) as lease:
        assert other.holder().id == lease.id
        with pytest.raises(StaleError) as error, other.lease("destroy", now=time.time()):
            pytest.fail("two writers")
        assert codes(error) == ["FT4003"]
        text = str(error.value)
        assert "apply abc" in text
        assert lease.id in text
        assert f"pid {lease.pid}" in text
    assert other.holder() is None
    with other.lease("destroy", now=time.time()):
        pass


def test_a_lease_ends_with_an_error_too(shelf):
    store = shelf.open()
    with pytest.raises(ZeroDivisionError), store.lease("apply", now=time.time()):
        1 / 0  # noqa: B018
    assert shelf.open().holder() is None


def test_the_holder_writes_many_times_and_others_read_meanwhile(shelf):
    store, reader = shelf.open(), shelf.open()
    state = State()
    with store.lease("apply", now=time.time()):
        for number in range(3):
            state = store.write(placed(state, number), read=state)
            assert reader.read() == state
    assert state.serial == 3


def test_an_unlocked_lease_is_noticed_before_the_next_write(shelf):
    store, other = shelf.open(), shelf.open()
    start = store.write(State(), read=State())
    with store.lease("apply", now=time.time()) as lease:
        assert other.unlock(lease.id).id == lease.id
        with other.lease("another apply", now=time.time()):
            theirs = other.write(placed(start, 1), read=start)
            with pytest.raises(StaleError) as error:
                store.write(placed(theirs, 2), read=theirs)  # even with the right serial
            assert codes(error) == ["FT4201"]
            assert error.value.exit_code == 5
    assert shelf.open().read() == theirs
    assert shelf.open().holder() is None


def test_unlocking_asks_for_the_lease_that_counts(shelf):
    store, other = shelf.open(), shelf.open()
    with pytest.raises(FabrictoolError) as error:
        other.unlock("deadbeef")
    assert codes(error) == ["FT4205"]
    with store.lease("apply", now=time.time()) as lease:
        with pytest.raises(FabrictoolError) as error:
            other.unlock("deadbeef")
        assert codes(error) == ["FT4205"]
        assert lease.id in str(error.value)
        assert other.holder().id == lease.id


# -- leases that live by renewal ----------------------------------------------------------------------------------


@pytest.fixture
def renewing(shelf_of, request):
    return shelf_of(request.param)


@pytest.mark.parametrize("renewing", ["git", "http"], indirect=True)
def test_a_lease_is_renewed_as_long_as_it_is_held(renewing):
    store, other = renewing.open(ttl_s=0.6), renewing.open()
    with store.lease("apply", now=time.time()):
        first = other.holder().expires
        until(lambda: other.holder().expires > first + 0.5)


@pytest.mark.parametrize("renewing", ["git", "http"], indirect=True)
def test_a_lease_that_nobody_renews_is_taken_over_and_its_holder_notices(renewing):
    clock = ManualClock()
    store, later = renewing.open(clock=clock), ManualClock()
    other = renewing.open(clock=later)
    start = store.write(State(), read=State())
    with store.lease("apply", now=clock.wall()) as lease:
        assert lease.expires == clock.wall() + 120
        later.advance(149)  # its end, and a margin for clocks that differ
        assert other.holder().id == lease.id
        later.advance(2)
        assert other.holder() is None
        with other.lease("another apply", now=later.wall()):
            theirs = other.write(placed(start, 1), read=start)
            with pytest.raises(StaleError) as error:
                store.write(placed(theirs, 2), read=theirs)
            assert codes(error) == ["FT4201"]
            clock.advance(1000)
            with pytest.raises(StaleError) as error:
                store.write(placed(theirs, 2), read=theirs)
            assert codes(error) == ["FT4201"]
    assert renewing.open().read() == theirs


@pytest.mark.parametrize("renewing", ["git", "http"], indirect=True)
def test_a_holder_that_slept_goes_on_if_nobody_took_its_lease(renewing):
    clock = ManualClock()
    store = renewing.open(clock=clock)
    with store.lease("apply", now=clock.wall()):
        clock.advance(10_000)
        assert store.write(State(), read=State()).serial == 1
        assert renewing.open(clock=clock).holder().expires == clock.wall() + 120


@pytest.mark.parametrize("renewing", ["git", "http"], indirect=True)
def test_the_thread_that_renews_notices_an_unlocked_lease_by_itself(renewing):
    store, other = renewing.open(ttl_s=0.3), renewing.open()
    with store.lease("apply", now=time.time()) as lease, contextlib.ExitStack() as stack:
        other.unlock(lease.id)
        with contextlib.suppress(StaleError):
            # A server that lets holders lock again cannot tell a renewal from a new lock: the holder may be first.
            stack.enter_context(other.lease("another", now=time.time()))
            until(lambda: store._heart.lost)
            with pytest.raises(StaleError) as error:
                store.write(State(), read=State())
            assert codes(error) == ["FT4201"]
            return
        assert renewing.kind == "http"
