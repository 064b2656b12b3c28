"""Who is refused before a token comes late."""

import math

import pytest

from fabrictool.sharing.validation import Refusal, Tentative, refusal
from tests.sharing.scene import loaded, model, node, request, table


def ask(target, asked, now=0.0, **others):
    others.setdefault("tentative", Tentative())
    return refusal(target, asked, now, **others)


def test_an_idle_replica_takes_a_request():
    assert ask(loaded(node(0), model()), request()) is None


def test_a_long_prompt_is_late_itself():
    assert ask(loaded(node(0), model()), request(prompt=2500)) is Refusal.LATE


def test_the_iteration_under_way_counts():
    target = loaded(node(0), model())
    target.node.busy_until = 1.9
    assert ask(target, request(prompt=500)) is Refusal.LATE


def test_a_prompt_makes_a_neighbours_late():
    where = node(0)
    loaded(where, model("b"), waiting=[request("b", prompt=1000, began=1.6)])
    target = loaded(where, model("a"))
    assert ask(target, request("a", prompt=1000, began=1.5), 1.6) is Refusal.OTHERS
    assert ask(target, request("a", prompt=700, began=1.5), 1.6) is None


def test_who_is_late_already_refuses_nobody():
    where = node(0)
    loaded(where, model("b"), request("b", began=-5.0))
    target = loaded(where, model("a"), waiting=[request("a", began=-9.0, prompt=10)])
    assert ask(target, request("a", prompt=500)) is None


def test_all_steps_together_are_too_slow():
    where = node(0)
    slow = table(decode=0.1)
    for name in ("b", "c"):
        loaded(where, model(name, gpu=slow), request(name))
    assert ask(loaded(where, model("a", gpu=slow)), request("a")) is Refusal.SLOW


def test_the_strictest_of_all_targets_counts():
    where = node(0)
    loaded(where, model("b"), request("b", tpot=0.03))
    assert ask(loaded(where, model("a")), request("a")) is Refusal.SLOW


def test_an_replica_that_waits_for_memory_takes_nobody():
    target = loaded(node(0), model())
    target.ready_at = math.inf
    assert ask(target, request()) is Refusal.HELD


def test_a_growth_that_came_to_the_station_later_holds_as_well():
    where = node(0, memory=5000)
    target = loaded(where, model(), cache=500)
    other = loaded(where, model("b"), cache=2000)
    where.ledger.grant(target.id, 1800, 0.0)  # under way
    where.ledger.grant(other.id, 1000, 0.0)  # being freed
    where.ledger.grant(target.id, 3500, 0.0)
    where.ledger.changed(target.id, 1.0)
    assert where.ledger.is_waiting(target.id)
    assert math.isfinite(target.ready_at)
    assert ask(target, request()) is Refusal.HELD


def test_changing_memory_takes_its_time():
    target = loaded(node(0), model())
    assert ask(target, request(), resize_s=1.5) is None
    assert ask(target, request(), resize_s=2.5) is Refusal.LATE


def test_who_leaves_is_not_in_the_way():
    where = node(0)
    neighbour = loaded(where, model("b"), waiting=[request("b", prompt=1000, began=1.6)])
    target = loaded(where, model("a"))
    assert ask(target, request("a", prompt=1000, began=1.5), 1.6, without=neighbour) is None


def test_requests_of_a_search_count_like_those_that_are_there():
    target, tentative = loaded(node(0), model()), Tentative()
    for _ in range(2):
        tentative.add(target, request(prompt=800), 0)
    assert ask(target, request(prompt=800), tentative=tentative) is Refusal.LATE


def test_a_target_must_be_on_its_node():
    stray = loaded(node(0), model())
    del stray.node.replicas[stray.id]
    with pytest.raises(ValueError, match="not on its node"):
        ask(stray, request())
