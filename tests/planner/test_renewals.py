"""Jobs that end within a horizon: by hand, and against a course of them that shares no code with the planner."""

import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.horizon import planned
from fabrictool.planner.limits import HOURS_A_MONTH
from fabrictool.planner.loading import Lead
from fabrictool.planner.problem import ModelNeed, ResourceLimit
from fabrictool.planner.quotas import quotas_of, without_quotas
from fabrictool.planner.renewals import AHEAD_S, JobEnds
from fabrictool.planner.schedules import Judge
from fabrictool.planner.steps import steps_of
from tests.planner.fabrics import situation
from tests.planner.plain_course import SLACK, Course
from tests.planner.test_exact import MOST, option, pool, problem, solve
from tests.planner.test_horizon import HOUR, LONG_AGO, steps
from tests.planner.test_loading import drawn, judged, placed, two, ways_of
from tests.seeds import seeds

POOL = ("a", "p")


def running(instance, count):
    return {placed(instance, m=1)[0][0]: count}


def ending(instance, *ends, walltime=86400.0, now=-86400.0, wait=0.0, unasked=()):
    """m runs as often as there are ends."""
    key = placed(instance, m=1)[0][0]
    known = {key: tuple(end for end in ends if end is not None)}
    return Lead(now, {POOL: wait}, JobEnds({POOL: walltime}, known, frozenset(unasked)))


def test_where_a_device_is_free_the_next_job_serves_before_the_former_ends():
    instance = two(2)
    lead = ending(instance, 5400.0)
    schedule = judged(instance, [(MOST, 0.0)] * 2, [placed(instance, m=1)] * 2, lead=lead, running=running(instance, 1))
    assert schedule.unserved == 0.0
    (renewal,) = schedule.parts[1].renewals
    assert not renewal.late
    assert (renewal.ends, renewal.serves) == (1800.0, 1800.0 - AHEAD_S)
    assert (renewal.begins, renewal.until) == (1200.0 - AHEAD_S, 1800.0 - AHEAD_S + 60.0)
    # For eleven minutes two hold a device, of 1 an hour.
    assert [part.switching for part in schedule.parts] == pytest.approx([0.0, 11 / 60])


def test_where_none_is_free_its_model_lacks_it_until_the_next_job_has_loaded():
    instance = two(1)
    lead = ending(instance, 5400.0)
    schedule = judged(instance, [(MOST, 0.0)] * 2, [placed(instance, m=1)] * 2, lead=lead, running=running(instance, 1))
    (renewal,) = schedule.parts[1].renewals
    assert (renewal.begins, renewal.serves, renewal.doubled_s) == (1800.0, 2400.0, 0.0)
    assert schedule.unserved == schedule.to_loading == pytest.approx(600 * MOST)
    assert schedule.switching == 0.0


def test_what_waits_longer_in_the_queue_than_it_could_be_asked_for_is_missed_as_long():
    """Asked for two thirds of three hours before the end, it waits for two and a half."""
    instance = two(2)
    lead = ending(instance, 5400.0, walltime=3 * HOUR, wait=2.5 * HOUR, now=-86400.0)
    ways = [placed(instance, m=1)] * 3
    schedule = judged(instance, [(MOST, 0.0)] * 3, ways, lead=lead, running=running(instance, 1))
    (renewal,) = schedule.parts[1].renewals
    assert (renewal.submit, renewal.begins, renewal.serves) == (1800.0 - 2 * HOUR, 3600.0, 4200.0)
    assert [part.unserved for part in schedule.parts] == pytest.approx([0.0, MOST / 2, MOST / 6])


def test_two_that_end_together_share_the_one_free_device_one_after_the_other():
    instance = two(3)
    lead = ending(instance, 1800.0, 1800.0)
    schedule = judged(instance, [(2 * MOST, 0.0)], [placed(instance, m=2)], lead=lead, running=running(instance, 2))
    first, second = schedule.parts[0].renewals
    assert (first.late, second.late) == (False, True)
    assert second.begins == first.until
    assert schedule.unserved == pytest.approx(MOST * (second.serves - 1800.0))


def test_where_nobody_asks_before_the_end_it_starts_after_it():
    instance = two(2)
    lead = ending(instance, 1800.0, unasked=[POOL])
    schedule = judged(instance, [(MOST, 0.0)], [placed(instance, m=1)], lead=lead, running=running(instance, 1))
    assert schedule.unserved == pytest.approx(600 * MOST)


def test_what_stops_is_what_ends_first_and_needs_no_other():
    instance = two(2)
    lead = ending(instance, 5400.0, 9000.0)
    ways = [placed(instance, m=2), placed(instance, m=1), placed(instance, m=1)]
    schedule = judged(instance, [(MOST, 0.0)] * 3, ways, lead=lead, running=running(instance, 2))
    assert [[its.ends for its in part.renewals] for part in schedule.parts] == [[], [], [1800.0]]


def test_jobs_that_the_schedule_starts_end_too_and_not_all_at_once():
    instance = two(3)
    lead = Lead(-86400.0, {}, JobEnds({POOL: 4 * HOUR}))
    schedule = judged(instance, [(2 * MOST, 0.0)] * 6, [placed(instance, m=2)] * 6, lead=lead)
    ends = [at * HOUR + its.ends for at, part in enumerate(schedule.parts) for its in part.renewals]
    assert ends == pytest.approx([4 * HOUR * 0.8875 - 600.0, 4 * HOUR * 0.9625 - 600.0])
    assert schedule.unserved == 0.0


def test_a_limit_counts_what_is_held_twice():
    instance = two(2)
    limit = ResourceLimit("few", "devices", "devices", 1, frozenset({POOL}), unit="devices")
    instance = replace(instance, limits=(limit,))
    lead = ending(instance, 1800.0)
    schedule = judged(instance, [(MOST, 0.0)], [placed(instance, m=1)], lead=lead, running=running(instance, 1))
    assert schedule.unserved == pytest.approx(600 * MOST)


def test_what_starts_for_the_next_step_loads_on_the_device_that_a_renewal_has_left():
    """Within the same hour m's next job has loaded and the former one is gone before n has to begin."""
    instance = two(2)
    lead = ending(instance, 5400.0)
    horizon = planned(steps(instance, [(MOST, 0.0), (MOST, 0.0), (MOST, MOST)]), running(instance, 1), solve, lead=lead)
    assert horizon.schedule.unserved == 0.0


def test_a_schedule_has_room_elsewhere_while_a_job_is_renewed():
    """m fills a, which is cheap; another one on b, which is dear, for the hour in which it would be missed."""
    pools = [pool("a", nodes=1, price=1.0), pool("b", nodes=1, price=5.0)]
    options = [replace(option("m", where), start_s=900.0) for where in pools]
    instance = problem([ModelNeed("m", 0.0, 0, 2)], options, pools, objective=("slo", "cost"))
    lead = Lead(-86400.0, {}, JobEnds({POOL: 86400.0}, {options[0].key: (5400.0,)}))
    horizon = planned(steps(instance, [(MOST,)] * 3), {options[0].key: 1}, solve, lead=lead)
    assert horizon.greedy.unserved == pytest.approx(900 * MOST)
    assert horizon.schedule.unserved == 0.0
    assert [dict(part.placed).get(options[1].key, 0) for part in horizon.schedule.parts] == [0, 1, 0]


def test_what_a_renewal_holds_twice_counts_towards_the_limit_of_a_month():
    instance = two(2)
    lead = ending(instance, 5400.0)
    limit = ResourceLimit(
        "grant", "devices", "devices", 1.0, frozenset({POOL}), unit="device hours/month", scale=HOURS_A_MONTH
    )
    instance = replace(instance, limits=(limit,))
    every = steps(instance, [(MOST, 0.0)] * 2)
    judge = Judge(without_quotas(every), running(instance, 1), lead=lead, quotas=quotas_of(every))
    assert judge.schedule([placed(instance, m=1)] * 2).used == pytest.approx((2.0 + 11 / 60,))


def test_a_walltime_is_a_share_of_the_time_in_a_plan_and_counted_when_it_ends_in_a_schedule(tmp_path):
    there = situation(tmp_path)
    cluster = there.inventory.clusters["dear"]
    partition = cluster.partitions["gpu"].model_copy(update={"walltime": 2 * HOUR})
    partitions = {**cluster.partitions, "gpu": partition}
    clusters = {**there.inventory.clusters, "dear": cluster.model_copy(update={"partitions": partitions})}
    limited = replace(there, inventory=there.inventory.model_copy(update={"clusters": clusters}))
    key = next(o.key for o in limited.build()[0].options if o.key[:2] == ("m", "dear"))

    def rate(instance):
        return next(o.levels[-1].rate for o in instance.options if o.key == key)

    endless, every = steps_of(there, 0.0, HOUR, 6), steps_of(limited, 0.0, HOUR, 6)
    start_s = next(o.start_s for o in every[0].problem.options if o.key == key)
    assert rate(limited.build()[0]) == pytest.approx((1.0 - start_s / (2 * HOUR)) * rate(endless[0].problem))
    assert rate(every[0].problem) == rate(endless[0].problem)
    # A walltime that goes by half in starting is none to be used, here as there.
    short = partition.model_copy(update={"walltime": 1.5 * start_s})
    clusters["dear"] = cluster.model_copy(update={"partitions": {"gpu": short}})
    hopeless = replace(there, inventory=there.inventory.model_copy(update={"clusters": clusters}))
    assert not any(o.key == key for o in steps_of(hopeless, 0.0, HOUR, 1)[0].problem.options)


# -- against a course of its own ---------------------------------------------------------------------------------------


def with_ends(seed, instance, lead, *, current, seconds, number):
    """Walltimes of at least two loads, and ends of what runs."""
    rng = random.Random(seed + 1)
    most = max(o.start_s for o in instance.options)
    lengths = {
        where.key: rng.choice([2.0, 2.7, 5.0]) * max(most, 600.0) for where in instance.pools if rng.random() < 0.8
    }
    first = max(0.0, lead.now)
    known = {}
    for key, count in current:
        ends = [round(rng.uniform(first, number * seconds * 1.2)) for _ in range(rng.randint(0, count))]
        if ends:
            known[key] = tuple(sorted(ends))
    unasked = frozenset(where.key for where in instance.pools if rng.random() < 0.1)
    return replace(lead, ends=JobEnds(lengths, known, unasked))


def course_of(instance, seconds, number, away, lead, most=float("inf")):
    wait = {cluster: s for (cluster, _), s in lead.waits.items()}
    fabric = Course.of(instance, seconds, number, away=away, now=lead.now, wait=wait, most=most)
    fabric.walltimes = {cluster: s for (cluster, _), s in lead.ends.lengths.items()}
    fabric.known = dict(lead.ends.known)
    fabric.unasked = {cluster for cluster, _ in lead.ends.unasked}
    return fabric


def agrees(fabric, schedule, demands, current):
    ways = [dict(part.placed) for part in schedule.parts]
    rates = [dict(zip("mn", its, strict=True)) for its in demands]
    fabric.run(ways, dict(current))
    for part, renewed in zip(schedule.parts, fabric.renewals, strict=True):
        ours = sorted((its.key, its.ends, its.begins, its.serves) for its in part.renewals)
        assert [its[0] for its in ours] == [its[0] for its in sorted(renewed)]
        assert [its[1:] for its in ours] == [pytest.approx(its[1:], abs=1e-3) for its in sorted(renewed)]
    lacks, cost, unserved = fabric.judged(ways, rates, dict(current))
    assert [part.unserved for part in schedule.parts] == pytest.approx(unserved, abs=2e-3)
    assert schedule.value[0] == pytest.approx(lacks, abs=2e-3 * fabric.seconds * len(ways))
    assert schedule.running + schedule.switching == pytest.approx(cost, abs=1e-4)


def test_the_slack_is_the_one_of_the_planner():
    assert SLACK == AHEAD_S


@seeds(20, drawn=40, long=3000)
def test_any_placements_come_to_what_moment_by_moment_they_do(seed):
    instance, demands, seconds, away, lead = drawn(seed)
    wait = {cluster: s for (cluster, _), s in lead.waits.items()}
    fabric = Course.of(instance, seconds, len(demands), away=away, now=lead.now, wait=wait)
    if random.Random(seed).random() < 0.3:
        fabric.most = random.Random(seed).randint(2, 8)
        limit = ResourceLimit("few", "devices", "devices", fabric.most, frozenset(p.key for p in instance.pools))
        instance = replace(instance, limits=(limit,))
    current, *ways = ways_of(seed, instance, fabric, len(demands))
    lead = with_ends(seed, instance, lead, current=current, seconds=seconds, number=len(demands))
    fabric = course_of(instance, seconds, len(demands), away, lead, fabric.most)
    schedule = judged(instance, demands, ways, lead=lead, seconds=seconds, running=current, away=away)
    agrees(fabric, schedule, demands, current)


@seeds(3, drawn=5, long=100)
def test_what_is_planned_is_never_worse_than_step_by_step_and_comes_to_what_is_said(seed):
    instance, demands, seconds, away, lead = drawn(seed)
    fabric = Course.of(instance, seconds, len(demands), away=away)
    current, *_ = ways_of(seed, instance, fabric, len(demands))
    lead = with_ends(seed, instance, lead, current=current, seconds=seconds, number=len(demands))
    try:
        horizon = planned(steps(instance, demands, seconds=seconds, away=away), dict(current), solve, lead=lead)
    except InfeasibleError:
        return
    for way in (horizon.schedule, horizon.greedy, horizon.peak):
        if way is not None:
            assert horizon.schedule.rank <= way.rank
            agrees(course_of(instance, seconds, len(demands), away, lead), way, demands, current)


@seeds(3, drawn=5, long=100)
def test_walltimes_beyond_the_horizon_change_nothing(seed):
    instance, demands, seconds, away, lead = drawn(seed)
    every = steps(instance, demands, seconds=seconds, away=away)
    lengths = {where.key: 3.0 * (len(demands) * seconds + 86400.0) for where in instance.pools}
    later = {o.key: (2.0 * len(demands) * seconds,) for o in instance.options}
    try:
        plain = planned(every, {}, solve, lead=lead).schedule
    except InfeasibleError:
        return
    assert planned(every, {}, solve, lead=replace(lead, ends=JobEnds(lengths, later))).schedule == plain


@seeds(2, drawn=3, long=50)
def test_what_can_wait_is_never_served_worse_for_it_where_jobs_end(seed):
    instance, demands, seconds, away, lead = drawn(seed)
    lead = with_ends(seed, instance, lead, current=(), seconds=seconds, number=len(demands))
    try:
        horizon = planned(steps(instance, demands, seconds=seconds, away=away), {}, solve, waits={"m": 2}, lead=lead)
    except InfeasibleError:
        return
    assert horizon.at_once is None or horizon.schedule.rank <= horizon.at_once.rank


def test_a_judge_without_ends_remembers_no_jobs():
    instance = two(2)
    judge = Judge(steps(instance, [(MOST, 0.0)]), running(instance, 1), lead=LONG_AGO)
    assert judge.first.jobs == ()
