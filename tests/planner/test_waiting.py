"""Requests that may wait: never sooner than they come, never later than they may, and as cheap as brute force."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.horizon import planned
from fabrictool.planner.moving import DRAIN_S
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.steps import waits_of
from fabrictool.planner.waiting import Others, postponed
from tests.planner.fabrics import situation
from tests.planner.plain_judge import Fabric
from tests.planner.test_exact import MOST, option, pool, problem, solve
from tests.planner.test_horizon import HOUR, drawn, steps
from tests.seeds import seeds


def at_prices(every, prices):
    """The steps with these prices of a node."""
    priced = []
    for step, price in zip(every, prices, strict=True):
        pools = {where.key: replace(where, price_per_node_hour=price) for where in step.problem.pools}
        options = tuple(replace(o, pool=pools[o.pool.key]) for o in step.problem.options)
        priced.append(replace(step, problem=replace(step.problem, pools=tuple(pools.values()), options=options)))
    return tuple(priced)


def batch(demands, prices, *, nodes=4, start_s=60.0, minimum=0):
    where = pool("a", nodes=nodes)
    instance = problem(
        [ModelNeed("m", 0.0, minimum, nodes)], [replace(option("m", where), start_s=start_s)], [where],
        objective=("slo", "cost"),
    )  # fmt: skip
    return at_prices(steps(instance, [(rate,) for rate in demands]), prices)


def counts(its):
    return [sum(count for _, count in placed) for placed in its.placed]


def test_what_can_wait_is_served_when_that_is_cheap():
    every = batch([MOST, MOST, MOST, 0.0], [5.0, 5.0, 1.0, 5.0])
    its = postponed(every, Others([()] * 4), "m", 2, {})
    assert counts(its) == [0, 0, 3, 0]
    assert its.rates == pytest.approx((0.0, 0.0, 3 * MOST, 0.0), abs=1e-5)


def test_nothing_waits_longer_than_it_may():
    every = batch([MOST, MOST, 0.0, 0.0], [5.0, 5.0, 5.0, 1.0])
    assert counts(postponed(every, Others([()] * 4), "m", 2, {})) == [0, 0, 1, 1]
    assert counts(postponed(every, Others([()] * 4), "m", 3, {})) == [0, 0, 0, 2]


def test_little_is_collected_until_a_replica_is_worth_it():
    every = batch([0.25 * MOST] * 4, [1.0] * 4)
    assert sum(counts(postponed(every, Others([()] * 4), "m", 3, {}))) == 1
    assert sum(counts(postponed(every, Others([()] * 4), "m", 1, {}))) == 2


def test_what_is_too_much_is_lost_and_said_to_be():
    every = batch([9 * MOST, 0.0], [1.0, 1.0], nodes=4)
    horizon = planned(every, {}, solve, waits={"m": 1})
    # In the first minute all four load.
    assert horizon.schedule.unserved == pytest.approx(MOST * (HOUR + 4 * 60.0), rel=1e-3)
    assert horizon.at_once.unserved == pytest.approx(MOST * (5 * HOUR + 4 * 60.0), rel=1e-3)
    assert math.fsum(step.rate for step in horizon.steps) == pytest.approx(9 * MOST)


def test_it_takes_the_room_that_others_leave():
    where = pool("a", nodes=3, price=1.0)
    needs = [ModelNeed("chat", 0.0, 0, 3), ModelNeed("m", 0.0, 0, 3)]
    instance = problem(needs, [option("chat", where), option("m", where)], [where], objective=("slo", "cost"))
    every = steps(instance, [(3 * MOST, MOST), (2 * MOST, MOST), (0.0, 0.0)])
    horizon = planned(every, {}, solve, waits={"m": 2})
    assert horizon.schedule.unserved == pytest.approx(0.0, abs=1.0)
    assert horizon.at_once.unserved > MOST * HOUR * 0.9
    chat = [sum(k for key, k in part.placed if key[0] == "chat") for part in horizon.schedule.parts]
    assert chat == [3, 2, 0]
    assert [step.rate for step in horizon.came] == [4 * MOST, 3 * MOST, 0.0]


def test_a_program_ends_where_no_seconds_are_left():
    rng = random.Random(1)
    every = batch([rng.uniform(0.0, 3.0) for _ in range(60)], [rng.uniform(1.0, 5.0) for _ in range(60)], nodes=9)
    asked = []

    def left_s():
        asked.append(1)
        return 30.0 if len(asked) < 3 else 0.0

    postponed(every, Others([()] * 60), "m", 12, {}, left_s)
    assert len(asked) >= 3, "it is asked again and again, and what there was until then is taken, or nothing"


def test_where_nothing_may_wait_nothing_is_said_of_it():
    horizon = planned(batch([MOST, MOST], [1.0, 1.0]), {}, solve)
    assert (horizon.at_once, horizon.came) == (None, ())


@seeds(0, drawn=10, long=300)
def test_it_is_as_cheap_as_the_best_of_all_ways(seed):
    rng = random.Random(seed)
    number, nodes, wait = rng.randint(2, 4), rng.randint(1, 3), rng.randint(1, 3)
    demands = [round(rng.uniform(0.0, 1.5) * MOST, 2) for _ in range(number)]
    prices = [rng.choice([1.0, 2.0, 5.0]) for _ in range(number)]
    start_s, minimum = rng.choice([60.0, 900.0, 2700.0]), rng.choice([0, 0, 1])
    every = batch(demands, prices, nodes=nodes, start_s=start_s, minimum=minimum)
    running = {every[0].problem.options[0].key: rng.randint(0, nodes)}
    its = postponed(every, Others([()] * number), "m", wait, running)
    assert its is not None
    checked(demands, its.rates, wait)
    fabric = Fabric.of(every[0].problem, HOUR, number)
    lost, paid = cost(demands, prices, counts(its), wait, fabric, running)
    best = min(
        cost(demands, prices, chosen, wait, fabric, running)
        for chosen in itertools.product(range(minimum, nodes + 1), repeat=number)
    )
    assert lost <= best[0] + 1e-3
    assert paid <= best[1] * (1 + 2e-3) + 1e-3


def cost(demands, prices, chosen, wait, fabric, running):
    """(requests/s of one step that are lost, what all comes to), earliest deadline first; a late start is priced as an
    early one.
    """
    waiting, lost, paid, before = [], 0.0, 0.0, sum(running.values())
    ((key, kind),) = fabric.kinds.items()
    starts = fabric.starts([{key: count} for count in chosen], dict(running))
    for at, count in enumerate(chosen):
        waiting.append([at + wait, demands[at]])
        late = [max(0.0, serves - at * HOUR) for _, _, serves in starts[at]]
        room = (count - sum(late) / HOUR) * MOST
        for due in waiting:
            served = min(room, due[1])
            due[1], room = due[1] - served, room - served
        over = [due for due in waiting if due[0] <= at or at == len(chosen) - 1]
        lost += sum(due[1] for due in over)
        waiting = [due for due in waiting if due not in over]
        loading = kind.load if at else 0.0  # nothing was started before
        seconds = (count - before) * loading if count > before else (before - count) * DRAIN_S
        paid += prices[at] * (count + seconds / HOUR)
        before = count
    return round(lost, 6), paid


def checked(demands, rates, wait):
    """No sooner than they come; none later than they may, but for what no replica was there for."""
    assert math.fsum(rates) == pytest.approx(math.fsum(demands), abs=1e-6)
    for at in range(len(demands)):
        assert math.fsum(rates[: at + 1]) <= math.fsum(demands[: at + 1]) + 1e-5
        assert math.fsum(rates[: at + 1]) >= math.fsum(demands[: max(0, at + 1 - wait)]) - 1e-5


def two_that_wait():
    where = pool("a", nodes=6, price=1.0)
    needs = [ModelNeed("x", 0.0, 0, 6), ModelNeed("y", 0.0, 0, 6)]
    instance = problem(needs, [option("x", where), option("y", where)], [where], objective=("slo", "cost"))
    return at_prices(steps(instance, [(MOST, MOST), (MOST, MOST), (0.0, 0.0)]), [5.0, 5.0, 1.0])


def test_several_models_wait_beside_each_other():
    horizon = planned(two_that_wait(), {}, solve, waits={"x": 2, "y": 2})
    assert [part.replicas for part in horizon.schedule.parts] == [0, 0, 4]
    assert horizon.waiting == ("x", "y")
    assert horizon.schedule.running < horizon.at_once.running / 4


def test_others_wait_where_nothing_was_found_for_one(monkeypatch):
    def without_y(steps_, rest, model, *more):
        return None if model == "y" else postponed(steps_, rest, model, *more)

    monkeypatch.setattr("fabrictool.planner.horizon.postponed", without_y)
    horizon = planned(two_that_wait(), {}, solve, waits={"x": 2, "y": 2})
    assert horizon.waiting == ("x",)
    counts_ = [{key[0]: k for key, k in part.placed} for part in horizon.schedule.parts]
    assert counts_ == [{"y": 1}, {"y": 1}, {"x": 2}]


def test_what_is_to_survive_a_loss_and_what_has_variants_does_not_wait():
    every = batch([MOST, MOST, 0.0], [5.0, 5.0, 1.0])
    surviving = tuple(
        replace(
            step, problem=replace(step.problem, needs=tuple(replace(n, survive="node") for n in step.problem.needs))
        )
        for step in every
    )
    assert planned(surviving, {}, solve, waits={"m": 2}).waiting == ()
    where = pool("a", nodes=4)
    options = [option("m", where), replace(option("m", where, capacity=2.0), variant="int4", steps_down=1)]
    instance = problem([ModelNeed("m", 0.0, 0, 4)], options, [where], objective=("slo", "quality", "cost"))
    lesser = at_prices(steps(instance, [(MOST,), (MOST,), (0.0,)]), [5.0, 5.0, 1.0])
    assert planned(lesser, {}, solve, waits={"m": 2}).waiting == ()


def test_what_is_unserved_is_told_in_requests_whatever_their_priority():
    where = pool("a", nodes=1)
    needs = [ModelNeed("m", 0.0, 0, 4, priority=5)]
    instance = problem(needs, [option("m", where)], [where], objective=("slo", "cost"))
    horizon = planned(steps(instance, [(3 * MOST,)]), {}, solve)
    assert horizon.schedule.parts[0].unserved == pytest.approx(2 * MOST)
    assert horizon.schedule.parts[0].lacks == pytest.approx(5 * 2 * MOST)


def test_a_step_under_maintenance_serves_nothing():
    away = [(), [("a", "p")], ()]
    where = pool("a", nodes=4)
    instance = problem([ModelNeed("m", 0.0, 0, 4)], [option("m", where)], [where], objective=("slo", "cost"))
    every = at_prices(steps(instance, [(MOST,), (MOST,), (0.0,)], away=away), [5.0, 1.0, 2.0])
    horizon = planned(every, {}, solve, waits={"m": 2})
    # What comes back takes a minute, so two are not enough for all of both hours.
    assert [part.replicas for part in horizon.schedule.parts] == [0, 0, 3]
    assert horizon.schedule.unserved == 0.0
    assert horizon.at_once.unserved == pytest.approx(MOST * HOUR)


def test_what_waits_loads_on_what_the_others_leave_free_and_takes_nothing_from_them():
    """At noon chat needs all four devices, and two of them for an hour and more before; the batch has what is left."""
    where = pool("a", nodes=4, price=1.0)
    options = [replace(option("chat", where), start_s=1800.0), replace(option("m", where), start_s=1800.0)]
    needs = [ModelNeed("chat", 0.0, 0, 4), ModelNeed("m", 0.0, 0, 4)]
    instance = problem(needs, options, [where], objective=("slo", "cost"))
    demands = [(MOST, 0.0), (MOST, 2 * MOST), (4 * MOST, 0.0), (MOST, 0.0), (MOST, 0.0)]
    key = next(o.key for o in instance.options if o.model == "chat")
    horizon = planned(steps(instance, demands), {key: 1}, solve, waits={"m": 3})
    assert horizon.waiting == ("m",)
    assert horizon.schedule.unserved == pytest.approx(0.0, abs=1.0)
    begun = [(at, start) for at, part in enumerate(horizon.schedule.parts) for start in part.begun]
    assert all(not start.late for _, start in begun if start.key == key)
    rates = [next(n.rate for n in step.problem.needs if n.model == "m") for step in horizon.steps]
    ready = [0.0] * len(rates)
    for at, part in enumerate(horizon.schedule.parts):
        ready[at] = sum(n for its, n in part.placed if its != key)
        ready[at] -= sum(start.count * max(0.0, start.serves) / HOUR for start in part.begun if start.key != key)
    assert all(rate <= room * MOST + 1e-3 for rate, room in zip(rates, ready, strict=True))


@seeds(0, drawn=6, long=200)
def test_waiting_is_never_worse_than_serving_at_once(seed):
    instance, demands = drawn(seed, number=4)
    every = steps(instance, demands)
    waits = {need.model: random.Random(seed).randint(1, 3) for need in instance.needs[:1]}
    try:
        horizon = planned(every, {}, solve, waits=waits)
    except InfeasibleError:
        return
    assert horizon.schedule.value <= horizon.at_once.value
    (model,) = waits
    rates = [next(n.rate for n in step.problem.needs if n.model == model) for step in horizon.steps]
    came = [next(n.rate for n in step.problem.needs if n.model == model) for step in every]
    assert math.fsum(rates) == pytest.approx(math.fsum(came), abs=1e-6)
    others = [[n.rate for n in step.problem.needs if n.model != model] for step in horizon.steps]
    assert others == [[n.rate for n in step.problem.needs if n.model != model] for step in every]


def test_how_long_it_may_wait_counts_in_whole_steps(tmp_path):
    there = situation(tmp_path)
    name = next(iter(there.blueprint.models))
    demand = there.blueprint.models[name].demand
    for wait, steps_ in ((None, {}), (3000.0, {}), (9000.0, {name: 2})):
        waiting = there.with_models({name: {"demand": demand.model_copy(update={"wait": wait})}})
        assert waits_of(waiting, HOUR) == steps_
