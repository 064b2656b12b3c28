"""When a server is left alone, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.routing.ejection import ALIKE, OUT_MAX_S, OUT_S, Ejection, available


class Server:
    def __init__(self):
        self.ejection = Ejection()


def test_who_refuses_is_out_at_once_and_for_longer_each_time():
    ejection, now, lasts = Ejection(), 0.0, []
    for _ in range(7):
        ejection.began(now)
        ejection.failed(now, now, refused=True)
        assert not ejection.available(now)
        lasts.append(ejection.out_until - now)
        now = ejection.out_until
        assert ejection.available(now)
    assert lasts == [OUT_S, 2, 4, 8, 16, OUT_MAX_S, OUT_MAX_S]
    ejection.answered()
    now += 1.0
    ejection.failed(now, now, refused=True)
    assert ejection.out_until - now == OUT_S, "who answered begins anew"


def test_who_breaks_off_is_out_after_two_on_end():
    ejection = Ejection()
    ejection.failed(0.0, 0.0)
    assert ejection.available(0.0)
    ejection.answered()
    ejection.failed(1.0, 1.0)
    assert ejection.available(1.0)
    ejection.failed(2.0, 2.0)
    assert not ejection.available(2.0)


@pytest.mark.parametrize("refused", [True, False])
def test_what_was_begun_before_it_went_out_does_not_keep_it_out_for_longer(refused):
    ejection = Ejection()
    for number in range(8):  # were open when it was started anew
        ejection.failed(5.0 + 0.01 * number, 1.0 + 0.1 * number, refused=refused)
    assert ejection.out_until - 5.0 <= OUT_S + 0.01
    now = ejection.out_until
    ejection.began(now)
    ejection.failed(now + 0.5, 4.9, refused=refused)
    assert not ejection.available(now + 0.5), "the one that tries it is still under way"
    ejection.failed(now + 0.6, now)
    assert ejection.out_until == now + 0.6 + 2 * OUT_S
    ejection.failed(now + 0.7, now + 0.65, refused=refused)
    assert ejection.out_until == now + 0.6 + 2 * OUT_S, "all were out, so it was asked: nothing new"


def test_one_request_alone_tries_who_was_out():
    ejection = Ejection()
    ejection.failed(0.0, 0.0, refused=True)
    now = ejection.out_until
    ejection.began(now)
    assert not ejection.available(now), "one is under way"
    ejection.given_up()
    assert not ejection.available(now + 0.9 * OUT_S)
    now += OUT_S
    assert ejection.available(now), "its client went away: after as long as it was out the next one tries"
    ejection.began(now)
    ejection.failed(now, now)
    assert ejection.out_until == now + 2 * OUT_S, "one failure is enough for who was out"


def test_a_status_counts_by_whose_fault_it_may_be():
    ejection = Ejection()
    for now in range(9):
        ejection.heard(501, now, now, "anna")
        ejection.heard(404, now, now, "anna")
    assert not ejection.out_until
    for status in (502, 503):
        ejection.heard(status, 10.0, 10.0, "anna")
    assert ejection.out_until == 10.0 + OUT_S


def test_one_askers_500s_count_once_until_there_are_many_on_end():
    ejection = Ejection()
    for now in range(ALIKE - 1):
        ejection.heard(500, now, now, "anna")
    assert not ejection.out_until, "his requests may be what is wrong"
    ejection.answered()
    for now in range(10, 9 + ALIKE):
        ejection.heard(500, now, now, "anna")
    ejection.heard(500, 20.0, 20.0, "ben")
    assert ejection.out_until == 20.0 + OUT_S, "two askers: the server is what is wrong"


def test_a_server_that_answers_nothing_but_500_is_out_and_stays_out_where_there_is_one_asker():
    ejection = Ejection()
    for now in range(ALIKE):
        ejection.heard(500, now, now, "")
    now = ejection.out_until
    assert now == ALIKE - 1 + OUT_S
    ejection.began(now)
    ejection.heard(500, now, now, "")
    assert ejection.out_until == now + 2 * OUT_S


def test_a_500_that_does_not_count_ends_the_attempt_that_tried_whether_it_is_back():
    ejection = Ejection()
    ejection.heard(500, 0.0, 0.0, "anna")
    ejection.failed(1.0, 1.0)
    now = ejection.out_until
    ejection.began(now)
    ejection.heard(500, now, now, "anna")
    assert not ejection.available(now)
    assert ejection.available(now + OUT_S)


def test_a_whole_answer_that_takes_minutes_does_not_bar_others_who_try_it_meanwhile():
    ejection = Ejection()
    ejection.failed(0.0, 0.0, refused=True)
    now, tries = ejection.out_until, []
    while now < 120.0:
        if ejection.available(now):
            ejection.began(now)
            tries.append(now)
        now += 0.5
    assert tries == [1, 2, 4, 8, 16, 32, 62, 92], "and who hangs is not sent a request a second"
    ejection.failed(now, tries[0])
    assert not ejection.available(now + 0.9 * OUT_MAX_S)
    ejection.failed(now + 1.0, tries[1])
    assert ejection.out_until == now + OUT_MAX_S, "the others say nothing new"


def test_tries_that_end_without_a_verdict_do_not_make_the_next_one_wait_longer():
    ejection = Ejection()
    ejection.failed(0.0, 0.0, refused=True)
    for _ in range(5):
        now = ejection.out_until
        ejection.began(now)
        ejection.given_up()
        assert ejection.out_until == now + OUT_S


def test_a_try_whose_failure_is_told_with_an_older_attempts_time_is_not_waited_for_for_ever():
    ejection = Ejection()
    ejection.failed(5.0, 5.0, refused=True)
    now = ejection.out_until
    ejection.began(now)
    ejection.failed(now, 1.0)
    assert ejection.available(now + OUT_S)


def test_if_all_are_out_all_may_be_asked():
    servers = [Server() for _ in range(3)]
    for server in servers[:2]:
        server.ejection.failed(0.0, 0.0, refused=True)
    assert available(servers, 0.5) == [servers[2]]
    servers[2].ejection.failed(0.5, 0.5, refused=True)
    assert available(servers, 0.5) == servers


STEPS = ("began", "failed", "refused", "answered", "given_up", 500, 501, 503, 200)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0.0, 60.0), st.integers(0, 5)), max_size=60))
def test_whatever_happens_a_server_may_be_tried_again_within_the_longest_time(steps):
    ejection, now, begun = Ejection(), 0.0, [0.0]
    for step, later, which in steps:
        now += later
        attempt = begun[-1 - which % len(begun)]
        if step == "began":
            ejection.began(now)
            begun.append(now)
        elif isinstance(step, int):
            ejection.heard(step, now, attempt, f"tenant {which}")
        elif step in ("failed", "refused"):
            ejection.failed(now, attempt, refused=step == "refused")
        else:
            getattr(ejection, step)()
        assert ejection.out_until <= now + OUT_MAX_S
    assert ejection.available(now + OUT_MAX_S)
