"""Whose iteration is next."""

from fabrictool.sharing.turns import iteration, next_turn
from tests.sharing.scene import loaded, model, node, request


def test_the_most_urgent_request_goes_first():
    where = node(0)
    loaded(where, model("a"), request("a", began=1.0))
    urgent = loaded(where, model("b"), request("b", began=0.0))
    assert next_turn(where.replicas.values(), 1.0) is urgent


def test_tokens_that_were_sent_make_time():
    where = node(0)
    loaded(where, model("a"), request("a", began=0.0, emitted=20))
    urgent = loaded(where, model("b"), request("b", began=1.0))
    assert next_turn(where.replicas.values(), 1.0) is urgent


def test_who_is_late_already_makes_nobody_else_late():
    where = node(0)
    late = loaded(where, model("a"), request("a", began=0.0))
    timely = loaded(where, model("b"), request("b", began=2.0))
    assert next_turn(where.replicas.values(), 3.0) is timely
    timely.running.clear()
    assert next_turn(where.replicas.values(), 3.0) is late


def test_replicas_without_memory_or_requests_wait():
    where = node(0)
    idle = loaded(where, model("a"))
    growing = loaded(where, model("b"), request("b"))
    where.ledger.grant(growing.id, 3000, 0.0)
    assert next_turn(where.replicas.values(), 0.0) is None
    idle.running.append(request("a"))
    idle.ready_at = 1.0
    assert next_turn(where.replicas.values(), 0.5) is None
    assert next_turn(where.replicas.values(), 1.0) is idle


def test_prompts_are_read_before_tokens_and_one_at_a_time():
    where = node(0)
    waiting = [request("a", 100), request("a", 200)]
    replica = loaded(where, model("a"), request("a"), waiting=waiting)
    turn = iteration(replica)
    assert turn.prompt is waiting[0]
    assert turn.expected_s == replica.table.prefill_s(100)
    replica.waiting.clear()
    turn = iteration(replica)
    assert turn.prompt is None
    assert turn.expected_s == replica.table.decode_s(1, 50)
