"""Rates are kept over time, and a purse gives no more than it holds."""

from hypothesis import given
from hypothesis import strategies as st

from fabrictool.domain.terms import KeyLimits
from fabrictool.routing.allowances import Allowance, Purse


def test_requests_a_minute():
    allowance = Allowance(KeyLimits(requests_per_minute=2), 0.0)
    for _ in range(2):
        assert allowance.refusal(0.0) is None
        allowance.begin()
    assert allowance.refusal(0.0) == ("requests", 30.0)
    assert allowance.refusal(15.0) == ("requests", 15.0)
    assert allowance.refusal(30.0) is None


def test_tokens_a_minute_are_made_good_afterwards():
    allowance = Allowance(KeyLimits(tokens_per_minute=60), 0.0)
    allowance.begin()
    allowance.end(120)
    assert allowance.refusal(0.0) == ("tokens", 61.0)
    assert allowance.refusal(61.0) is None


def test_open_requests():
    allowance = Allowance(KeyLimits(concurrency=1), 0.0)
    allowance.begin()
    assert allowance.refusal(9.0) == ("concurrency", 1.0)
    allowance.end(0)
    assert allowance.refusal(9.0) is None


def test_other_limits_do_not_fill_a_bucket():
    allowance = Allowance(KeyLimits(requests_per_minute=60), 0.0)
    for _ in range(60):
        allowance.begin()
    allowance.change(KeyLimits(requests_per_minute=120, concurrency=61), 0.0)
    assert allowance.refusal(0.0) == ("requests", 0.5)
    allowance.change(KeyLimits(requests_per_minute=120, concurrency=60), 5.0)
    assert allowance.refusal(5.0) == ("concurrency", 1.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=60), st.integers(1, 100))
def test_no_minute_has_more_requests_than_two_buckets(steps, rate):
    """One that was full at its begin, and what flowed in meanwhile."""
    allowance, now, begun = Allowance(KeyLimits(requests_per_minute=rate), 0.0), 0.0, []
    for wait, wanted in steps:
        now += wait
        for _ in range(wanted):
            if allowance.refusal(now) is None:
                allowance.begin()
                begun.append(now)
    for first in begun:
        assert sum(first <= at < first + 60 for at in begun) <= 2 * rate + 1


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))))
def test_a_purse_gives_what_it_was_filled_with(steps):
    purse, filled, used = Purse(0.0), 0, 0
    for grant, most, part in steps:
        purse.held += grant
        filled += grant
        if purse.reserve(most, 0.0):
            purse.settle(most, min(part, most))
            used += min(part, most)
        assert used + purse.held + purse.reserved == filled
        assert used <= filled


def test_what_is_learned_later_is_corrected_within_what_a_purse_holds():
    purse = Purse(0.0)
    purse.held = 150
    assert purse.reserve(100, 0.0)
    purse.settle(100, 40)
    purse.correct(-10)
    assert (purse.held, purse.reserved) == (120, 0)
    purse.correct(30)
    assert purse.held == 90
    purse.correct(1000)
    assert purse.held == 0, "what another request could not have is not owed"
