"""Memory never runs out, and everybody who was promised some gets it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.sharing.ledger import AGED_S, MemoryChange, MemoryLedger

CAPACITY = 100


def check(ledger):
    assert 0 <= ledger.budget <= CAPACITY
    assert ledger.tracked <= CAPACITY
    assert sum(holding.physical for holding in ledger.holdings.values()) <= ledger.tracked


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, CAPACITY), st.booleans()), max_size=60))
def test_memory_is_never_promised_twice_and_the_station_drains(steps):
    ledger, under_way, now = MemoryLedger(CAPACITY), [], 0.0
    for replica, size, is_report in steps:
        now += 1.0
        if is_report and under_way:
            under_way += ledger.changed(under_way.pop(size % len(under_way)).replica, now)
        elif ledger.fits(size - ledger.granted(replica)):
            under_way += ledger.grant(replica, size, now)
        check(ledger)
        assert len({change.replica for change in under_way}) == len(under_way)
    while under_way:
        now += 1.0
        under_way += ledger.changed(under_way.pop(0).replica, now)
        check(ledger)
    assert not any(ledger.is_changing(replica) for replica in ledger.holdings)
    assert ledger.budget == ledger.tracked


def test_growth_waits_for_what_is_being_freed():
    ledger = MemoryLedger(CAPACITY)
    assert ledger.grant(1, 80, 0.0) == [MemoryChange(1, 0, 80)]
    assert not ledger.changed(1, 1.0)
    assert ledger.grant(1, 30, 2.0) == [MemoryChange(1, 80, 30)]
    assert ledger.grant(2, 60, 2.0) == []
    assert ledger.is_waiting(2)
    assert ledger.changed(1, 3.0) == [MemoryChange(2, 0, 60)]


def test_a_small_growth_overtakes_a_large_one_until_that_is_old():
    ledger = MemoryLedger(CAPACITY)
    ledger.grant(1, 80, 0.0)
    ledger.changed(1, 0.0)
    ledger.grant(1, 0, 0.0)  # being freed for long
    assert not ledger.grant(2, 70, 0.0)
    assert ledger.grant(3, 10, 1.0) == [MemoryChange(3, 0, 10)]
    assert not ledger.grant(4, 5, AGED_S + 1)
    assert ledger.changed(1, AGED_S + 2) == [MemoryChange(2, 0, 70), MemoryChange(4, 0, 5)]


def test_a_later_decision_replaces_one_that_waits():
    ledger = MemoryLedger(CAPACITY)
    ledger.grant(1, 90, 0.0)
    ledger.changed(1, 0.0)
    ledger.grant(1, 0, 0.0)
    ledger.grant(2, 50, 0.0)
    assert not ledger.grant(2, 0, 1.0)
    assert not ledger.changed(1, 2.0)
    assert ledger.budget == ledger.tracked == 0


def test_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="more than the budget has left"):
        MemoryLedger(CAPACITY).grant(1, CAPACITY + 1, 0.0)
    with pytest.raises(ValueError, match="no change of replica 1"):
        ledger = MemoryLedger(CAPACITY)
        ledger.grant(1, 10, 0.0)
        ledger.changed(1, 0.0)
        ledger.changed(1, 0.0)
