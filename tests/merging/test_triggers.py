"""When load merges replicas, and splits them."""

import pytest

from fabrictool.merging.triggers import DWELL_S, LoadTrigger


def arrivals(trigger, rate, since, until):
    count = int((until - since) * rate)
    for i in range(count):
        trigger.arrived(since + i / rate)


def test_rates_are_those_of_the_last_seconds():
    trigger = LoadTrigger(10.0, 100.0)
    arrivals(trigger, 5.0, 0.0, 40.0)
    assert trigger.rate(40.0) == pytest.approx(5.0, rel=0.1)
    assert trigger.rate(60.0) < 0.1


def test_a_burst_splits_and_calm_merges():
    trigger = LoadTrigger(10.0, 100.0)
    arrivals(trigger, 3.0, 0.0, 30.0)
    assert trigger.decide(30.0, 0, 10)
    arrivals(trigger, 9.0, 30.0, 45.0)
    assert not trigger.decide(45.0, 0, 50)
    arrivals(trigger, 2.0, 45.0, 75.0)
    assert not trigger.decide(75.0, 0, 150)  # too many are in flight to hold them in one group
    assert trigger.decide(76.0, 0, 20)


def test_a_queue_splits_at_once():
    assert not LoadTrigger(10.0, 100.0).decide(0.0, 9, 0)


def test_a_mode_is_kept_for_a_while():
    trigger = LoadTrigger(10.0, 100.0)
    assert not trigger.decide(0.0, 9, 0)
    assert not trigger.decide(DWELL_S - 0.1, 0, 0)
    assert trigger.decide(DWELL_S, 0, 0)
    assert trigger.decide(2 * DWELL_S - 0.1, 9, 0)
