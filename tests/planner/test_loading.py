"""What replicas of a schedule cannot do while they load: by hand, and against a judge that shares no code with it."""

import itertools
import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.horizon import planned
from fabrictool.planner.loading import Lead, lead_of, lost
from fabrictool.planner.problem import Level, ModelNeed, ResourceLimit
from fabrictool.planner.schedules import Judge
from fabrictool.planner.stages import in_order
from fabrictool.simulator.demanded import GroupDemand
from tests.planner.fabrics import situation
from tests.planner.plain_judge import Fabric
from tests.planner.test_exact import MOST, option, pool, problem, solve
from tests.planner.test_horizon import HOUR, LONG_AGO, steps
from tests.seeds import seeds

QUARTER = 900.0


def two(nodes, *, start_s=600.0, price=1.0, priority=1):
    """Models m and n on one pool."""
    where = pool("a", nodes=nodes, price=price)
    needs = [ModelNeed("m", 0.0, 0, nodes, priority=priority), ModelNeed("n", 0.0, 0, nodes)]
    options = [replace(option(model, where), start_s=start_s) for model in "mn"]
    return problem(needs, options, [where], objective=("slo", "cost"))


def placed(instance, **counts):
    return tuple(sorted((o.key, counts[o.model]) for o in instance.options if counts.get(o.model)))


def judged(instance, demands, placements, *, lead=LONG_AGO, seconds=HOUR, running=(), away=()):
    return Judge(steps(instance, demands, seconds=seconds, away=away), dict(running), lead=lead).schedule(placements)


def test_what_starts_on_free_devices_serves_from_the_beginning():
    instance = two(3)
    ways = [placed(instance, m=1), placed(instance, m=1, n=2)]
    schedule = judged(instance, [(MOST, 0.0), (MOST, 2 * MOST)], ways)
    assert schedule.unserved == 0.0
    (start,) = schedule.parts[1].begun
    assert (start.count, start.submit, start.begins, start.serves) == (2, -600.0, -600.0, 0.0)
    # Ten minutes of two replicas at 1 an hour before the step, beside an hour of three in it.
    assert (schedule.parts[1].running, schedule.parts[1].switching) == pytest.approx((3.0, 2 / 6))


def test_what_waits_for_devices_loses_what_one_computes_on_paper():
    """Two of m stop, two of n take their devices: after a minute, and ten of loading. 11 of 60 minutes of 2 x 0.8."""
    instance = two(3)
    ways = [placed(instance, m=3), placed(instance, m=1, n=2)]
    schedule = judged(instance, [(3 * MOST, 0.0), (MOST, 2 * MOST)], ways)
    assert schedule.parts[0].unserved == 0.0
    assert schedule.parts[1].unserved == pytest.approx(2 * MOST * 11 / 60)
    assert schedule.unserved == schedule.to_loading == pytest.approx(2 * MOST * 660)
    (start,) = schedule.parts[1].begun
    assert (start.begins, start.serves) == (60.0, 660.0)
    # They load in their own step, which is paid already: what is left are two stops of a minute.
    assert schedule.parts[1].switching == pytest.approx(2 / 60)


def test_one_device_is_free_and_one_is_not():
    instance = two(4)
    ways = [placed(instance, m=3), placed(instance, m=1, n=2)]
    schedule = judged(instance, [(3 * MOST, 0.0), (MOST, 2 * MOST)], ways)
    assert sorted((start.count, start.begins) for start in schedule.parts[1].begun) == [(1, -600.0), (1, 60.0)]
    assert schedule.parts[1].unserved == pytest.approx(MOST * 11 / 60)


def test_a_load_of_an_hour_and_a_half_on_devices_that_are_freed_an_hour_before_is_half_an_hour_late():
    instance = two(2, start_s=5400.0)
    ways = [placed(instance, m=2), placed(instance, m=1), placed(instance, m=1, n=1), placed(instance, m=1, n=1)]
    schedule = judged(instance, [(2 * MOST, 0.0), (MOST, 0.0), (MOST, MOST), (MOST, MOST)], ways)
    (start,) = schedule.parts[2].begun
    # Its devices are free from a minute after the second hour's beginning on.
    assert (start.begins, start.serves) == (60.0 - HOUR, 1860.0)
    assert [part.unserved for part in schedule.parts] == pytest.approx([0.0, 0.0, MOST * 31 / 60, 0.0])
    assert schedule.parts[2].switching == pytest.approx(59 / 60)


def test_whole_steps_are_lost_to_a_load_that_takes_longer():
    instance = two(1, start_s=1800.0)
    ways = [placed(instance, m=1), *[placed(instance, n=1)] * 4]
    schedule = judged(instance, [(MOST, 0.0), *[(0.0, MOST)] * 4], ways, seconds=QUARTER)
    assert [part.unserved for part in schedule.parts] == pytest.approx([0.0, MOST, MOST, MOST * 60 / 900, 0.0])


def test_nothing_is_submitted_before_now_and_queues_take_their_time():
    instance = two(2)
    ways = [placed(instance, m=1), placed(instance, m=2)]
    demands = [(MOST, 0.0), (2 * MOST, 0.0)]
    lead = Lead(now=0.0, waits={("a", "p"): 1200.0})
    schedule = judged(instance, demands, ways, lead=lead)
    first, second = (part.begun[0] for part in schedule.parts)
    assert (first.submit, first.begins, first.serves) == (0.0, 1200.0, 1800.0)
    assert (second.submit, second.begins, second.serves) == (-1800.0, -600.0, 0.0)
    assert [part.unserved for part in schedule.parts] == pytest.approx([MOST / 2, 0.0])
    # At twenty to, ten minutes of the step are past: nothing that starts now changes them.
    late = judged(instance, demands, ways, lead=replace(lead, now=600.0))
    assert late.parts[0].unserved == pytest.approx(MOST / 2)
    assert late.parts[0].begun[0].serves == 2400.0


def test_two_that_want_the_same_free_device_and_the_one_with_the_higher_priority_has_it():
    instance = two(3, priority=5)
    ways = [placed(instance, m=1, n=1), placed(instance, n=2, m=1)]
    assert judged(instance, [(MOST, MOST), (MOST, 2 * MOST)], ways).unserved == 0.0
    third = two(4, priority=5)
    where = third.pools[0]
    options = [*third.options, option("x", where)]
    more = problem([*third.needs, ModelNeed("x", 0.0, 0, 4)], options, [where], objective=("slo", "cost"))
    ways = [placed(more, x=3), placed(more, x=1, m=1, n=1)]
    schedule = judged(more, [(0.0, 0.0, 3 * MOST), (MOST, MOST, MOST)], ways)
    assert {start.key[0]: start.late for start in schedule.parts[1].begun} == {"m": False, "n": True}


def test_nothing_loads_on_a_pool_before_it_comes_back():
    instance = two(2)
    key = ("a", "p")
    ways = [placed(instance, m=1), (), placed(instance, m=1)]
    schedule = judged(instance, [(MOST, 0.0), (0.0, 0.0), (MOST, 0.0)], ways, away=[(), (key,), ()])
    (start,) = schedule.parts[2].begun
    assert (start.begins, start.serves) == (60.0, 660.0)


def test_a_limit_on_devices_counts_what_loads():
    instance = two(4)
    limit = ResourceLimit("few", "devices", "devices", 3, frozenset({("a", "p")}), unit="devices")
    instance = replace(instance, limits=(limit,))
    ways = [placed(instance, m=3), placed(instance, m=2, n=1)]
    schedule = judged(instance, [(3 * MOST, 0.0), (2 * MOST, MOST)], ways)
    assert schedule.parts[1].begun[0].begins == 60.0


def test_a_schedule_keeps_devices_free_for_what_comes_where_that_loses_less():
    """n on b costs five times as much, and is ready in time; on a it would lose a quarter of an hour."""
    pools = [pool("a", nodes=2, price=1.0), pool("b", nodes=2, price=5.0)]
    options = [replace(option(model, where), start_s=900.0) for model in "mn" for where in pools]
    needs = [ModelNeed("m", 0.0, 0, 2), ModelNeed("n", 0.0, 0, 2)]
    instance = problem(needs, options, pools, objective=("slo", "cost"))
    demands = [(2 * MOST, 0.0), (0.0, 2 * MOST)]
    schedule = planned(steps(instance, demands), {}, solve, lead=LONG_AGO).schedule
    assert schedule.unserved == 0.0
    assert {key[1] for key, _ in schedule.parts[1].placed} == {"b"} or {
        key[1] for key, _ in schedule.parts[0].placed
    } == {"b"}


# -- against a judge of its own ----------------------------------------------------------------------------------------


def drawn(seed, *, most=3, number=4):
    """A fabric with one device a node or four, blocks of one to four, and what a start has to reckon with."""
    rng = random.Random(seed)
    seconds = rng.choice([HOUR, QUARTER])
    pools = [
        pool(name, nodes=rng.randint(1, most), per_node=rng.choice([1, 4]), price=rng.choice([1.0, 2.0, 5.0]))
        for name in "ab"
    ]
    options = []
    for model, where in itertools.product("mn", pools):
        degrees = [tp for tp in (1, 2, 4) if tp <= where.devices_per_node]
        for tp in rng.sample(degrees, rng.randint(1, len(degrees))):
            start_s = rng.choice([0.0, 60.0, 840.0, 900.0, 1500.0, 5400.0])
            options.append(replace(option(model, where, tp=tp, capacity=tp * rng.choice([1.0, 1.5])), start_s=start_s))
    needs = [ModelNeed(model, 0.0, 0, 8, priority=rng.choice([1, 3])) for model in "mn"]
    instance = problem(needs, options, pools, objective=("slo", "cost"))
    demands = [tuple(round(rng.uniform(0.0, 3.0), 2) for _ in needs) for _ in range(number)]
    away = [rng.sample([where.key for where in pools], rng.choice([0, 0, 1])) for _ in range(number)]
    lead = Lead(rng.choice([-7200.0, -600.0, 0.0, 300.0]), {("a", "p"): rng.choice([0.0, 120.0, 1200.0])})
    return instance, demands, seconds, away, lead


def ways_of(seed, instance, fabric, number):
    """A placement for each step that fits, and what runs before."""
    rng = random.Random(seed)
    keys = [o.key for o in instance.options]
    for at in range(-1, number):
        counts = dict.fromkeys(keys, 0)
        for _ in range(rng.randint(0, 8)):
            key = rng.choice(keys)
            if fabric.fits({k: n + (k == key) for k, n in counts.items() if n or k == key}, at):
                counts[key] += 1
        yield tuple(sorted((key, n) for key, n in counts.items() if n))


@seeds(20, drawn=40, long=3000)
def test_any_placements_come_to_what_minute_by_minute_they_do(seed):
    instance, demands, seconds, away, lead = drawn(seed)
    wait = {cluster: s for (cluster, _), s in lead.waits.items()}
    fabric = Fabric.of(instance, seconds, len(demands), away=away, now=lead.now, wait=wait)
    if random.Random(seed).random() < 0.3:
        fabric.most = random.Random(seed).randint(2, 8)
        limit = ResourceLimit("few", "devices", "devices", fabric.most, frozenset(p.key for p in instance.pools))
        instance = replace(instance, limits=(limit,))
    running, *ways = ways_of(seed, instance, fabric, len(demands))
    schedule = judged(instance, demands, ways, lead=lead, seconds=seconds, running=running, away=away)
    assert fabric.broken(list(map(dict, ways)), dict(running)) == ""
    agrees(fabric, schedule, demands, running)


def agrees(fabric, schedule, demands, running):
    ways = [dict(part.placed) for part in schedule.parts]
    rates = [dict(zip("mn", its, strict=True)) for its in demands]
    begun = [
        sorted(
            (start.key, at * fabric.seconds + start.begins, at * fabric.seconds + start.serves)
            for start in part.begun
            for _ in range(start.count)
        )
        for at, part in enumerate(schedule.parts)
    ]
    assert begun == [sorted(its) for its in fabric.starts(ways, dict(running))]
    lacks, cost, unserved = fabric.judged(ways, rates, dict(running))
    assert [part.unserved for part in schedule.parts] == pytest.approx(unserved, abs=2e-3)
    assert schedule.value[0] == pytest.approx(lacks, abs=2e-3 * fabric.seconds * len(ways))
    assert schedule.running + schedule.switching == pytest.approx(cost, abs=1e-5)
    for part in schedule.parts:
        for start in part.begun:
            assert start.submit == start.begins - fabric.wait.get(start.key[1], 0.0)


@seeds(2, drawn=3, long=100)
def test_what_is_planned_fits_minute_by_minute_and_comes_to_what_is_said(seed):
    instance, demands, seconds, away, lead = drawn(seed)
    wait = {cluster: s for (cluster, _), s in lead.waits.items()}
    fabric = Fabric.of(instance, seconds, len(demands), away=away, now=lead.now, wait=wait)
    horizon = planned(steps(instance, demands, seconds=seconds, away=away), {}, solve, lead=lead)
    for way in (horizon.schedule, horizon.greedy, horizon.peak):
        if way is not None:
            assert horizon.schedule.rank <= way.rank
            assert fabric.broken([dict(part.placed) for part in way.parts], {}) == ""
            agrees(fabric, way, demands, {})


@seeds(2, drawn=0, long=100, known=(84994840,))
def test_close_to_the_best_of_all_placements_by_that_judge(seed):
    rng = random.Random(seed)
    pools = [pool(name, nodes=nodes, price=rng.choice([1.0, 2.0])) for name, nodes in (("a", 2), ("b", 1))]
    options = [replace(option(m, where), start_s=rng.choice([300.0, 1500.0])) for m in "mn" for where in pools]
    instance = problem([ModelNeed(m, 0.0, 0, 4) for m in "mn"], options, pools, objective=("slo", "cost"))
    demands = [tuple(round(rng.uniform(0.0, 2.0), 2) for _ in "mn") for _ in range(3)]
    fabric = Fabric.of(instance, HOUR, 3)
    ours = planned(steps(instance, demands), {}, solve).schedule
    keys = [o.key for o in instance.options]
    every = [
        {key: n for key, n in zip(keys, counts, strict=True) if n}
        for counts in itertools.product(range(3), repeat=len(keys))
    ]
    every = [counts for counts in every if fabric.fits(counts, 0)]
    rates = [dict(zip("mn", its, strict=True)) for its in demands]
    least = best_of(fabric, every, rates)
    value = fabric.judged([dict(part.placed) for part in ours.parts], rates, {})[:2]
    assert value[0] >= least[0] - 1e-6, "nothing is better than all"
    assert value[0] <= least[0] + 0.1 * HOUR * sum(map(sum, demands)) + 1e-6


def best_of(fabric, every, rates):
    """Of all ways through three steps: what is lost in the first ones bounds what is looked at."""
    least = (float("inf"), float("inf"))
    for first in every:
        if fabric.judged([first], rates[:1], {})[0] > least[0]:
            continue
        for second in every:
            if fabric.judged([first, second], rates[:2], {})[0] > least[0]:
                continue
            for third in every:
                lacks, cost, _ = fabric.judged([first, second, third], rates, {})
                least = min(least, (round(lacks, 3), cost))
    return least


# -- its parts ---------------------------------------------------------------------------------------------------------


@seeds(20, drawn=30, long=1000)
def test_what_is_lost_is_what_the_program_says(seed):
    rng = random.Random(seed)
    where = pool("a", nodes=20)
    options = []
    for at in range(rng.randint(1, 3)):
        rates = sorted(rng.sample([0.2, 0.5, 0.8, 1.3, 2.0], rng.randint(1, 3)))
        good = rng.randint(0, len(rates))
        levels = [Level(rate, rate, i < good) for i, rate in enumerate(rates)]
        options.append(replace(option("m", where, levels=levels), variant=f"v{at}"))
    need = ModelNeed("m", round(rng.uniform(0.0, 8.0), 2), 0, 20)
    instance = problem([need], options, [where], objective=("slo",))
    counts = [rng.choice([0, 1, 2, 2.5]) for _ in instance.options]
    loads = Formulation(instance, range(len(counts)), whole=False, given=dict(enumerate(counts)))
    values, answer = in_order(loads, ["served", "slo"], seconds=60.0, seed=0)
    unserved, misses = lost(need.rate, [(o.levels, n) for o, n in zip(instance.options, counts, strict=True)])
    assert unserved == pytest.approx(need.rate - loads.rate("m", answer), abs=1e-5)
    assert misses == pytest.approx(values.get("slo", 0.0), abs=1e-4)


@seeds(3, drawn=4, long=100)
def test_a_demand_that_is_divided_by_who_asks_is_judged_by_a_program(seed):
    """Of one group that all may serve it comes to the same; of two, each has what its providers have left."""
    rng = random.Random(seed)
    instance = two(4, start_s=600.0)
    demands = [(3 * MOST, 0.0), (round(rng.uniform(0.0, 3.0), 2), round(rng.uniform(0.0, 3.0), 2))]
    ways = [placed(instance, m=3), placed(instance, m=rng.randint(0, 2), n=2)]
    plain = judged(instance, demands, ways)
    anybody = (GroupDemand("all", 1.0),)
    grouped = replace(instance, needs=tuple(replace(need, parts=anybody) for need in instance.needs))
    same = judged(grouped, demands, ways)
    assert [part.unserved for part in same.parts] == pytest.approx([part.unserved for part in plain.parts], abs=1e-3)
    nobody = (GroupDemand("all", 0.5), GroupDemand("others", 0.5, frozenset({"elsewhere"})))
    halved = replace(instance, needs=tuple(replace(need, parts=nobody) for need in instance.needs))
    half = judged(halved, demands, ways)
    least = [sum(rates) / 2 for rates in demands]
    assert all(part.unserved >= lost - 1e-3 for part, lost in zip(half.parts, least, strict=True))
    assert half.parts[1].to_loading <= plain.parts[1].to_loading + 1e-3


def test_waits_are_what_is_stated_else_what_was_measured(tmp_path):
    inventory = situation(tmp_path).inventory
    cluster = inventory.clusters["dear"]
    stated = {"gpu": cluster.partitions["gpu"].model_copy(update={"queue_wait": 300.0})}
    none = {"gpu": inventory.clusters["spot"].partitions["gpu"].model_copy(update={"queue_wait": 0.0})}
    clusters = {
        **inventory.clusters,
        "dear": cluster.model_copy(update={"partitions": stated}),
        "spot": inventory.clusters["spot"].model_copy(update={"partitions": none}),
    }
    inventory = inventory.model_copy(update={"clusters": clusters})
    measured = {f"{name}/gpu": list(range(1, 101)) for name in ("dear", "cheap", "spot")}
    lead = lead_of(inventory, measured, 7.0)
    assert lead == Lead(7.0, {("dear", "gpu"): 300.0, ("cheap", "gpu"): 95.0})


def test_a_step_without_any_placement_is_still_infeasible():
    instance = two(2)
    pinned = replace(instance, needs=tuple(replace(need, minimum=2) for need in instance.needs))
    with pytest.raises(InfeasibleError):
        planned(steps(pinned, [(MOST, MOST)]), {}, solve)
