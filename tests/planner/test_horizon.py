"""Schedules over a horizon: against all placements in all steps, and never worse than without a look ahead."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fabrictool.base.errors import InfeasibleError, UsageError
from fabrictool.base.units import Instant
from fabrictool.domain.hours import HourlyAmounts
from fabrictool.domain.inventory import Window
from fabrictool.planner.horizon import planned
from fabrictool.planner.loading import Lead
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.schedules import Judge
from fabrictool.planner.steps import Step, steps_of
from fabrictool.planner.uncertain import busiest_hours
from fabrictool.planner.ways import Ways
from tests.planner.fabrics import situation
from tests.planner.test_exact import MOST, option, pool, problem, solve
from tests.seeds import seeds

HOUR = 3600.0
LONG_AGO = Lead(now=-86400.0)
"""The schedule was known long before: what starts for the first step may be early, too."""


def steps(instance, demands, *, seconds=HOUR, away=()):
    """A step for each of the demands, which are requests/s of each model."""
    made = []
    for at, rates in enumerate(demands):
        gone = frozenset(away[at]) if away else frozenset()
        needs = tuple(replace(n, rate=rate) for n, rate in zip(instance.needs, rates, strict=True))
        there = tuple(o for o in instance.options if o.pool.key not in gone)
        pools = tuple(p for p in instance.pools if p.key not in gone)
        lost = {o.key: o for o in instance.options if o.pool.key in gone}
        here = replace(instance, needs=needs, options=there, pools=pools)
        made.append(Step(at * seconds, seconds, here, "cost", gone, lost))
    return tuple(made)


def alone(*, start_s=600.0, nodes=4):
    where = pool("a", nodes=nodes, price=2.0)
    return problem([ModelNeed("m", 0.0, 1, nodes)], [replace(option("m", where), start_s=start_s)], [where],
                   objective=("slo", "cost"))  # fmt: skip


def replicas(schedule):
    return [part.replicas for part in schedule.parts]


def test_follows_demand_where_starting_is_cheap():
    horizon = planned(steps(alone(), [(MOST,), (3 * MOST,), (3 * MOST,), (MOST,)]), {}, solve, lead=LONG_AGO)
    assert replicas(horizon.schedule) == [1, 3, 3, 1]
    assert replicas(horizon.peak) == [3, 3, 3, 3]
    assert horizon.schedule.running == pytest.approx(2.0 * 8)
    # Three starts in all, ten minutes of 2 an hour each; two stops of a minute.
    assert horizon.schedule.switching == pytest.approx(3 * 2.0 / 6 + 2 * 2.0 / 60)


def test_a_replica_that_is_back_within_an_hour_stays_where_loading_takes_longer():
    demands = [(3 * MOST,), (MOST,), (3 * MOST,)]
    quick = planned(steps(alone(start_s=600.0), demands), {}, solve, lead=LONG_AGO)
    slow = planned(steps(alone(start_s=5400.0), demands), {}, solve, lead=LONG_AGO)
    assert replicas(quick.schedule) == [3, 1, 3]
    assert replicas(slow.schedule) == [3, 3, 3]


def test_one_kind_of_several_stays_while_others_follow():
    """No whole placement of any step has just these counts."""
    where = pool("a", nodes=9, price=2.0)
    options = [replace(option("m", where), start_s=5400.0), replace(option("n", where), start_s=60.0)]
    instance = problem([ModelNeed("m", 0, 1, 4), ModelNeed("n", 0, 1, 4)], options, [where], objective=("slo", "cost"))
    demands = [(3 * MOST, 3 * MOST), (MOST, MOST), (3 * MOST, 2 * MOST)]
    schedule = planned(steps(instance, demands), {}, solve, lead=LONG_AGO).schedule
    assert [{key[0]: k for key, k in part.placed} for part in schedule.parts] == [
        {"m": 3, "n": 3}, {"m": 3, "n": 1}, {"m": 3, "n": 2},
    ]  # fmt: skip


def test_nothing_stands_on_what_is_away_and_what_stood_there_is_stopped():
    pools = [pool("a", nodes=3, price=1.0), pool("b", nodes=3, price=5.0)]
    instance = problem(
        [ModelNeed("m", 0, 1, 3)], [option("m", where) for where in pools], pools, objective=("slo", "cost")
    )
    key = pools[0].key
    horizon = planned(steps(instance, [(MOST,)] * 4, away=[(), (key,), (), ()]), {}, solve)
    # It stays on b for a step, as nothing can load on a before that is back.
    assert [[its[1] for its, _ in part.placed] for part in horizon.schedule.parts] == [["a"], ["b"], ["b"], ["a"]]
    assert [(part.starts, part.stops) for part in horizon.schedule.parts] == [(1, 0), (1, 1), (0, 0), (1, 1)]
    assert horizon.greedy.unserved == pytest.approx(horizon.schedule.unserved + MOST * 60)
    assert {its[1] for part in horizon.peak.parts for its, _ in part.placed} == {"b"}


def test_a_step_without_any_placement_is_infeasible():
    instance = alone()
    with pytest.raises(InfeasibleError):
        planned(steps(instance, [(MOST,), (MOST,)], away=[(), (instance.pools[0].key,)]), {}, solve)


def test_what_runs_counts_in_the_first_step():
    instance = alone(start_s=5400.0)
    (key,) = [o.key for o in instance.options]
    schedule = planned(steps(instance, [(MOST,), (3 * MOST,)]), {key: 3}, solve).schedule
    assert (schedule.parts[0].starts, replicas(schedule)) == (0, [3, 3])


def survivor(maximum):
    pools = [pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=5.0)]
    options = [option("m", where) for where in pools]
    need = ModelNeed("m", 0.0, 1, maximum, survive="partition")
    return problem([need], options, pools, objective=("slo", "cost"))


def test_what_is_kept_for_a_loss_is_kept_in_every_step():
    """Whichever partition goes, the other one has the whole demand; without the wish the dear one stays empty."""
    demands = [(MOST,), (3 * MOST,), (MOST,), (2 * MOST,)]
    schedule = planned(steps(survivor(8), demands), {}, solve).schedule
    for (rate,), part in zip(demands, schedule.parts, strict=True):
        for there in ("a", "b"):
            assert sum(count for key, count in part.placed if key[1] == there) >= rate / MOST - 1e-9
    assert schedule.exposed == 0.0
    careless = replace(survivor(8), needs=(ModelNeed("m", 0.0, 1, 8),))
    assert planned(steps(careless, demands), {}, solve).schedule.running < schedule.running


def test_what_cannot_be_kept_for_a_loss_is_told():
    """Three replicas, of which two are needed: without `a` one is left, without `b` two."""
    schedule = planned(steps(survivor(3), [(2 * MOST,)] * 2), {}, solve).schedule
    assert [sum(count for key, count in part.placed if key[1] == "a") for part in schedule.parts] == [2, 2]
    assert schedule.exposed == pytest.approx(2 * HOUR * MOST)
    assert schedule.unserved == 0.0


def drawn(seed, *, most=3, number=4, loads=(60.0, 900.0, 5400.0)):
    rng = random.Random(seed)
    pools = [pool(name, nodes=rng.randint(1, most), price=rng.choice([1.0, 2.0, 5.0])) for name in "ab"]
    options = [
        replace(option(model, where, capacity=rng.choice([1.0, 1.5])), start_s=rng.choice(loads))
        for model in "mn" for where in pools if rng.random() < 0.8 or where is pools[0]
    ]  # fmt: skip
    needs = [ModelNeed(model, 0.0, rng.randint(0, 1), 4) for model in "mn"]
    demands = [tuple(round(rng.uniform(0.0, 2.0), 2) for _ in needs) for _ in range(number)]
    return problem(needs, options, pools, objective=("slo", "cost")), demands


@seeds(10, drawn=10, long=200)
def test_never_worse_than_without_a_look_ahead_or_than_the_peak_all_the_time(seed):
    instance, demands = drawn(seed, number=6)
    try:
        horizon = planned(steps(instance, demands), {}, solve)
    except InfeasibleError:
        return
    assert horizon.schedule.value <= horizon.greedy.value
    assert horizon.peak is None or horizon.schedule.value <= horizon.peak.value


@seeds(5, drawn=5, long=50, known=(286959057, 99826269, 512647439))
def test_close_to_the_best_of_all_placements_in_all_steps(seed):
    """Dynamic programming over every placement that there is gives the best: no schedule is below it."""
    # Where loads take longer than a step, it is not the best that there is.
    instance, demands = drawn(seed, most=2, number=3, loads=(60.0, 900.0, 2700.0))
    every = steps(instance, demands)
    try:
        horizon = planned(every, {}, solve)
    except InfeasibleError:
        return
    ways = Ways(Judge(every, {}))
    keys = [o.key for o in instance.options]
    all_of_them = [
        tuple(sorted((key, k) for key, k in zip(keys, counts, strict=True) if k))
        for counts in itertools.product(range(3), repeat=len(keys))
    ]
    best = ways.best([all_of_them] * len(every))
    ours, least = horizon.schedule.value, best.value
    assert [round(value, 3) for value in ours] >= [round(value, 3) for value in least], "nothing is better than all"
    lost = ours[0] - least[0]
    assert lost <= 0.1 * HOUR * sum(map(sum, demands)), "service comes first"
    assert ours[2] <= 1.3 * least[2] + 1e-6 or lost > 1.0


def test_the_busiest_hour_is_held_against_what_is_placed():
    instance = alone(nodes=4)
    at_mean = replace(instance, needs=tuple(replace(need, rate=2 * MOST) for need in instance.needs))
    factors = tuple(1.5 if at == 33 else 1.0 for at in range(168))
    demand = SimpleNamespace(factors=factors, windows=(), mean=0.0)
    blueprint = SimpleNamespace(models={"m": SimpleNamespace(demand=demand)})
    (sentence,) = busiest_hours(blueprint, at_mean, solve(at_mean))
    assert sentence == "m: in its busiest hour (Tue 09:00) 2.4 req/s are asked for, of which 0.8 cannot be served"
    demand.factors = ()
    assert list(busiest_hours(blueprint, at_mean, solve(at_mean))) == []


def test_a_step_has_the_demand_the_prices_and_the_partitions_of_its_time(tmp_path):
    there = situation(tmp_path)
    hours = HourlyAmounts.model_validate([1.0] * 12 + [3.0] * 12)
    name = min(there.blueprint.models)
    demand = there.blueprint.models[name].demand.model_copy(update={"hours": hours})
    there = there.with_models({name: {"demand": demand}})
    cluster = there.inventory.clusters["dear"]
    (partition,) = cluster.partitions
    window = Window(begin=Instant.parse("1970-01-01T12:30Z"), end=Instant.parse("1970-01-01T13:00Z"))
    changed = cluster.partitions[partition].model_copy(update={"price_hours": hours, "maintenance": (window,)})
    clusters = {**there.inventory.clusters, "dear": cluster.model_copy(update={"partitions": {partition: changed}})}
    there = replace(there, inventory=there.inventory.model_copy(update={"clusters": clusters}))
    steps_ = steps_of(there, 11 * HOUR, HOUR, 3)
    rates = [next(need.rate for need in step.problem.needs if need.model == name) for step in steps_]
    assert rates == pytest.approx([0.5 * float(demand.rate), 1.5 * float(demand.rate), 1.5 * float(demand.rate)])
    key = ("dear", partition)
    assert [step.away for step in steps_] == [frozenset(), {key}, frozenset()]
    before, during, after = ({o.key: o for o in (*step.problem.options, *step.gone.values())} for step in steps_)
    priced = [its for its, option in before.items() if option.pool.key == key and len(option.pools) == 1]
    assert priced
    assert all(after[its].cost == pytest.approx(3 * before[its].cost) for its in priced)
    assert not any(option.pool.key == key for option in steps_[1].problem.options)
    assert set(before) == set(during) == set(after)
    with pytest.raises(UsageError, match="FT2032"):
        steps_of(there, 0.0, 1000.0, 3)


@seeds(3, drawn=3, long=20)
def test_when_the_time_is_over_no_step_is_searched_and_each_has_a_placement(seed):
    instance, demands = drawn(seed)
    asked = []

    def counted(problem):
        asked.append(problem)
        return solve(problem)

    many = [tuple((1.0 + at / 100) * rate for rate in demands[at % len(demands)]) for at in range(40)]
    try:
        horizon = planned(steps(instance, many), {}, counted, lambda: len(asked) < 4)
    except InfeasibleError:
        return
    assert len(asked) <= 5, "the peak and two steps, from what runs and from nothing"
    assert horizon.copied >= 37
    assert len(horizon.schedule.parts) == 40
    if horizon.peak is not None:
        assert horizon.schedule.value <= horizon.peak.value
