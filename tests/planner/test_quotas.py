"""Limits of a month over a horizon: the sum is kept, by arithmetic of its own; and what that is worth."""

import itertools
import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.cli.horizon import _clock, text
from fabrictool.planner.horizon import planned
from fabrictool.planner.limits import HOURS_A_MONTH
from fabrictool.planner.problem import ModelNeed, ResourceLimit
from fabrictool.planner.quotas import is_of_a_month, quotas_of, shared_out, without_quotas
from tests.planner.plain_judge import Fabric
from tests.planner.test_exact import MOST, option, pool, problem, solve
from tests.planner.test_horizon import HOUR, LONG_AGO, steps
from tests.planner.test_waiting import at_prices
from tests.seeds import seeds


def monthly(pools, most, resource="devices"):
    """Of so much in each hour."""
    unit = "device hours/month" if resource == "devices" else "CHF/month"
    keys = frozenset(where.key for where in pools)
    return ResourceLimit("quota", resource, resource, most, keys, unit=unit, scale=float(HOURS_A_MONTH))


def alone(most, *, nodes=4, start_s=600.0, minimum=0, resource="devices", price=2.0):
    where = pool("a", nodes=nodes, price=price)
    instance = problem(
        [ModelNeed("m", 0.0, minimum, nodes)], [replace(option("m", where), start_s=start_s)], [where],
        objective=("slo", "cost"),
    )  # fmt: skip
    return replace(instance, limits=(monthly([where], most, resource),))


def replicas(schedule):
    return [part.replicas for part in schedule.parts]


def test_peaks_use_more_than_the_mean_and_nights_less():
    """Two an hour over six hours are twelve: four and four at noon are no more than that."""
    demands = [(MOST,), (MOST,), (4 * MOST,), (4 * MOST,), (0.0,), (0.0,)]
    horizon = planned(steps(alone(2.0), demands), {}, solve, lead=LONG_AGO)
    schedule = horizon.schedule
    assert replicas(schedule) == [1, 1, 4, 4, 0, 0]
    assert schedule.unserved == 0.0
    # Ten hours of devices, and ten minutes of three that load before the third hour; the first loads before the first.
    assert schedule.used == pytest.approx((10 + 3 / 6,))
    assert (schedule.quotas[0].most, schedule.quotas[0].unit) == (12.0, "device hours")
    # In each hour by itself: two of four at noon.
    assert horizon.greedy.unserved == pytest.approx(2 * 2 * MOST * HOUR)


def test_where_the_sum_is_too_little_demand_gives_way_and_the_sum_is_kept():
    demands = [(3 * MOST,)] * 4
    schedule = planned(steps(alone(1.5), demands), {}, solve, lead=LONG_AGO).schedule
    (used,) = schedule.used
    assert used <= 6.0 + 1e-9
    # Of twelve device hours six are there, less what loads before the second hour.
    assert 6 * MOST * HOUR <= schedule.unserved + 1e-6 <= 7 * MOST * HOUR


def test_money_is_spent_when_it_is_cheap():
    """Ten an hour for three hours: at 20, 5 and 5 the limit of each hour would leave the first one nothing."""
    every = at_prices(steps(alone(10.0, resource="cost", start_s=0.0), [(MOST,)] * 3), [20.0, 5.0, 5.0])
    horizon = planned(every, {}, solve, lead=LONG_AGO)
    assert replicas(horizon.schedule) == [1, 1, 1]
    assert horizon.schedule.used == pytest.approx((30.0,))
    # Nor would it leave room to load in it.
    assert horizon.greedy.unserved == pytest.approx(MOST * (HOUR + 60.0))


def test_limits_that_are_in_nobodys_way_change_nothing():
    demands = [(MOST,), (3 * MOST,)]
    free = planned(steps(replace(alone(9.0), limits=()), demands), {}, solve)
    wide = planned(steps(alone(9.0), demands), {}, solve)
    assert replicas(wide.schedule) == replicas(free.schedule)
    assert wide.schedule.used == pytest.approx((4 + 2 / 6,))


def test_minima_that_no_hour_has_room_for_are_infeasible_and_those_that_the_sum_has_are_not():
    with pytest.raises(InfeasibleError):
        planned(steps(alone(1.0, minimum=2), [(MOST,)] * 2), {}, solve)
    prices = [20.0, 1.0, 1.0, 1.0]
    every = at_prices(steps(alone(6.0, minimum=1, resource="cost", start_s=0.0), [(MOST,)] * 4), prices)
    schedule = planned(every, {}, solve, lead=LONG_AGO).schedule
    assert replicas(schedule) == [1, 1, 1, 1]
    assert schedule.used == pytest.approx((23.0,))


def test_what_loads_counts_also_where_each_step_keeps_the_limit():
    """One device an hour, and the model moves from pool to pool: to load beside what runs is more than the sum."""
    pools = [pool("a", nodes=1), pool("b", nodes=1)]
    options = [replace(option("m", where), start_s=1800.0) for where in pools]
    instance = problem([ModelNeed("m", 0.0, 1, 1)], options, pools, objective=("slo", "cost"))
    instance = replace(instance, limits=(monthly(pools, 1.0),))
    away = [(), (("a", "p"),), (), (("b", "p"),)]
    schedule = planned(steps(instance, [(MOST,)] * 4, away=away), {}, solve).schedule
    assert schedule.used == pytest.approx((4.0,))
    assert all(start.late for part in schedule.parts for start in part.begun)


def test_a_limit_of_an_hour_or_a_day_holds_in_each_step():
    where = pool("a", nodes=4)
    limits = [monthly([where], 2.0), replace(monthly([where], 50.0, "cost"), scale=24.0, unit="CHF/day")]
    assert [is_of_a_month(limit) for limit in limits] == [True, False]
    instance = replace(alone(2.0), limits=tuple(limits))
    every = steps(instance, [(MOST,)] * 3)
    assert [quota.most for quota in quotas_of(every)] == [6.0]
    assert all(step.problem.limits == (limits[1],) for step in without_quotas(every))
    shared = shared_out(every, quotas_of(every), [(4.0,), (4.0,), (1.0,)])
    assert [step.problem.limits[1].most for step in shared] == pytest.approx([8 / 3, 8 / 3, 2 / 3])


def test_what_waits_keeps_the_sum_too():
    """Of eight device hours the model that does not wait needs five; the batch has three, and needs four."""
    where = pool("a", nodes=4, price=1.0)
    needs = [ModelNeed("chat", 0.0, 0, 4), ModelNeed("m", 0.0, 0, 4)]
    instance = problem(needs, [option("chat", where), option("m", where)], [where], objective=("slo", "cost"))
    instance = replace(instance, limits=(monthly([where], 2.0),))
    demands = [(MOST, 0.0), (2 * MOST, MOST), (MOST, 3 * MOST), (MOST, 0.0)]
    horizon = planned(steps(instance, demands), {}, solve, waits={"m": 2}, lead=LONG_AGO)
    assert horizon.schedule.used[0] <= 8.0 + 1e-9
    assert horizon.schedule.unserved == pytest.approx(MOST * HOUR, rel=2e-3)
    wider = replace(instance, limits=(monthly([where], 2.25),))
    enough = planned(steps(wider, demands), {}, solve, waits={"m": 2}, lead=LONG_AGO)
    assert enough.schedule.unserved == pytest.approx(0.0, abs=1.0)


def drawn(seed):
    rng = random.Random(seed)
    pools = [pool(name, nodes=rng.randint(1, 3), price=rng.choice([1.0, 2.0])) for name in "ab"]
    options = [replace(option(m, where), start_s=rng.choice([60.0, 900.0])) for m in "mn" for where in pools]
    instance = problem([ModelNeed(m, 0.0, 0, 4) for m in "mn"], options, pools, objective=("slo", "cost"))
    demands = [tuple(round(rng.uniform(0.0, 2.0), 2) for _ in "mn") for _ in range(4)]
    limits = [monthly(rng.choice([pools, pools[:1]]), rng.choice([0.5, 1.0, 1.5, 2.5]))]
    if rng.random() < 0.5:
        limits.append(replace(monthly(pools, rng.choice([1.0, 2.0, 4.0]), "cost"), name="money"))
    prices = [rng.choice([0.5, 1.0, 2.0]) for _ in demands]
    return replace(instance, limits=tuple(limits)), demands, prices, rng.choice([LONG_AGO, None])


def used_by_hand(fabric, placements, prices, limit, starts=None):
    """Device hours, or money, of what stands on the limit's pools, with what loads within the horizon."""
    seconds = fabric.seconds
    total = 0.0
    starts = fabric.starts(placements, {}) if starts is None else starts
    for at, (placed, begun) in enumerate(zip(placements, starts, strict=True)):
        held = [(key, n * seconds) for key, n in placed.items()]
        held += [(key, min(at * seconds, max(0.0, at * seconds - begins))) for key, begins, _ in begun]
        for key, its in held:
            if (key[1], "p") in limit.pools:
                total += its / HOUR * (1.0 if limit.resource == "devices" else prices[at])
    return total


@seeds(1, drawn=4, long=300)
def test_the_sum_is_kept_and_no_schedule_is_worse_than_one_that_keeps_each_step(seed):
    instance, demands, prices, lead = drawn(seed)
    every = at_prices(steps(instance, demands), prices)
    horizon = planned(every, {}, solve, lead=lead)
    fabric = Fabric.of(instance, HOUR, len(demands), now=0.0 if lead is None else lead.now)
    ways = [dict(part.placed) for part in horizon.schedule.parts]
    for quota, used in zip(horizon.schedule.quotas, horizon.schedule.used, strict=True):
        assert used <= quota.most * (1 + 1e-9)
        assert quota.most == pytest.approx(len(demands) * quota.limit.most)
    for way in (horizon.greedy, horizon.peak):
        if way is not None and not way.over:
            assert horizon.schedule.rank <= way.rank
    keys = {key for its in ways for key in its}
    assert keys <= set(fabric.kinds)
    # Where the limits were in each step's way, they were for what loads, too: it may begin later than it could.
    told = [
        [(start.key, at * HOUR + start.begins, None) for start in part.begun for _ in range(start.count)]
        for at, part in enumerate(horizon.schedule.parts)
    ]
    by_hand = [used_by_hand(fabric, ways, prices, limit, told) for limit in instance.limits]
    soonest = [used_by_hand(fabric, ways, prices, limit) for limit in instance.limits]
    assert horizon.schedule.used == pytest.approx(by_hand)
    assert all(used <= most + 1e-6 for used, most in zip(by_hand, soonest, strict=True))


@seeds(3, drawn=0, long=60)
def test_close_to_the_best_of_all_placements_that_keep_the_sum(seed):
    rng = random.Random(seed)
    where = pool("a", nodes=3)
    options = [replace(option(m, where), start_s=300.0) for m in "mn"]
    instance = problem([ModelNeed(m, 0.0, 0, 3) for m in "mn"], options, [where], objective=("slo", "cost"))
    instance = replace(instance, limits=(monthly([where], rng.choice([1.0, 1.4, 2.0])),))
    demands = [tuple(round(rng.uniform(0.0, 2.0), 2) for _ in "mn") for _ in range(3)]
    schedule = planned(steps(instance, demands), {}, solve).schedule
    fabric = Fabric.of(instance, HOUR, 3)
    keys = [o.key for o in instance.options]
    every = [{k: n for k, n in zip(keys, c, strict=True) if n} for c in itertools.product(range(4), repeat=2)]
    every = [counts for counts in every if fabric.fits(counts, 0)]
    rates = [dict(zip("mn", its, strict=True)) for its in demands]
    (limit,) = instance.limits
    best = min(
        fabric.judged(list(ways), rates, {})[0]
        for ways in itertools.product(every, repeat=3)
        if used_by_hand(fabric, list(ways), [1.0] * 3, limit) <= 3 * limit.most + 1e-9
    )
    assert schedule.value[0] <= best + 0.15 * HOUR * sum(map(sum, demands)) + 1e-3


def test_a_schedule_that_could_not_be_run_is_marked():
    """The whole demand takes 90 CHF; three hours have 31.5 of the month's, which the ways beside it do not keep to."""
    hours = steps(alone(10.5, resource="cost", minimum=1, start_s=0.0), [(3 * MOST,)] * 3)
    alone_at = at_prices(hours, [20.0, 5.0, 5.0])
    shown = text(planned(alone_at, {}, solve, lead=LONG_AGO), "CHF", UTC, 0.0).splitlines()
    marked = [line.split("  ")[0] for line in shown if "▲" in line]
    assert marked == [
        "step by step, not looking ahead ▲",
        "one placement for the peak ▲",
        "▲ uses more of a limit than there is: it could not be run",
    ]


def test_a_time_of_another_day_has_its_day():
    begin = datetime(2026, 12, 1, 1, 0, tzinfo=UTC).timestamp()
    assert _clock(begin + 3600.0, UTC, begin) == "02:00"
    assert _clock(begin - 22 * 3600.0, UTC, begin) == "Mon 03:00"
