"""How many second attempts a gateway makes after slow failures."""

import pytest

from fabrictool.routing.retry_budget import ALWAYS, RECENT_S, RETRIED, RetryBudget


def spent(budget, now, most=10**6):
    """How many second attempts are made if that many are wanted at once."""
    number = 0
    while number < most and budget.allows(now):
        budget.spend(now)
        number += 1
    return number


def play(budget, begin, seconds, rate, failing=0.0):
    """So many requests a second, of which a share fails slowly and wants to be tried anew; how many of these are."""
    retried = 0
    for second in range(begin, begin + seconds):
        budget.begun += rate
        budget.tick(second)
        retried += spent(budget, second, round(failing * rate))
    return retried


def test_a_gateway_without_requests_has_some_and_gets_them_back():
    budget = RetryBudget()
    assert spent(budget, 0.0) == ALWAYS
    assert not budget.allows(1.0)
    assert spent(budget, 0.1 * RECENT_S) == 0
    assert spent(budget, 50 * RECENT_S) == ALWAYS


@pytest.mark.parametrize("rate", [1, 50, 1000])
def test_where_all_fail_a_tenth_is_tried_anew(rate):
    budget = RetryBudget()
    play(budget, 0, 600, rate)
    play(budget, 600, 300, rate, failing=1.0)
    retried = play(budget, 900, 600, rate, failing=1.0)
    allowed = 600 * (RETRIED * rate + ALWAYS / RECENT_S)
    assert 0.95 * allowed <= retried <= 1.05 * allowed


def test_one_replica_in_twenty_that_hangs_costs_nobody_an_answer():
    budget, rate = RetryBudget(), 100
    play(budget, 0, 600, rate)
    held = 30 * rate // 20  # all that it was sent while it was waited for; they fail in the same second
    assert play(budget, 600, 1, rate) == 0
    assert spent(budget, 601.0, held) == held
    assert play(budget, 601, 600, rate, failing=0.05) == 600 * rate // 20


def test_what_was_long_ago_counts_no_more():
    budget = RetryBudget()
    play(budget, 0, 600, 1000)
    assert spent(budget, 600.0 + 50 * RECENT_S) == ALWAYS
