"""Devices split among the models of a small fabric: bounds that are true, placements that reach them."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.instances import synthetic
from fabrictool.planner.problem import Level, ModelNeed, Option, ResourceLimit
from fabrictool.planner.solvers import programs, splitting
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.load_grid import Ladder, best_split, either_way, replicas, shared, side_by_side, wider
from fabrictool.planner.solvers.mirrors import MOST_MIRRORS, mirrors
from fabrictool.planner.solvers.splitting import DeviceSplits
from fabrictool.planner.solvers.steps import EngineSteps
from fabrictool.planner.stages import in_order
from fabrictool.planner.work import StepwiseWork
from tests.planner.test_exact import convex, figures, pool, problem
from tests.planner.test_phases import between
from tests.seeds import seeds

PHASES = ("unified", "prefill", "decode")


def fabric(seed, load):
    """Some models, in phases or not, on pools that are joined or not; `load`: of what they can take, about."""
    rng = random.Random(seed)
    pools = [
        pool(name, nodes=rng.randint(1, 2), per_node=rng.choice((1, 2, 4)), site=rng.choice("xy"))
        for name in "abc"[: rng.randint(1, 3)]
    ]
    options, needs, transfers = [], [], {}
    for model in "mno"[: rng.randint(1, 3)]:
        phases = PHASES if rng.random() < 0.8 else PHASES[:1]
        for where, which, tp in itertools.product(pools, phases, (1, 2)):
            if tp <= where.devices_per_node and rng.random() < 0.9:
                capacity = tp * rng.uniform(0.5, 2.0) * {"unified": 1.0, "prefill": 3.0, "decode": 1.5}[which]
                levels = tuple(convex(rng, capacity, rng.uniform(0.5, 2.0)))
                options.append(Option(model, where, tp, figures(capacity), levels, phase=which))
        for one, other in itertools.product(pools, repeat=2):
            if one.site == other.site:
                transfers |= between(model, one, other, seconds=rng.choice((0.0, 0.05)))
        mine = [option for option in options if option.model == model and option.phase != "decode"]
        if mine:
            rate = load * rng.uniform(0.5, 1.5) * max(option.levels[-1].rate for option in mine) * len(pools)
            needs.append(ModelNeed(model, rate, 0, 30, priority=rng.choice((1.0, 2.0))))
    known = {need.model for need in needs}
    options = [option for option in options if option.model in known]
    return replace(problem(needs, options, pools, objective=("latency",)), transfers=transfers)


def with_twins(instance):
    """And as many pools again in places that are like these."""

    def other(key):
        return key[0].upper(), key[1]

    pools = tuple(replace(its, cluster=its.cluster.upper(), site=its.site.upper()) for its in instance.pools)
    by_key = {its.key: its for its in pools}
    options = tuple(replace(option, pool=by_key[other(option.pool.key)]) for option in instance.options)
    transfers = {
        (model, other(sender), other(taker)): way for (model, sender, taker), way in instance.transfers.items()
    }
    return replace(
        instance,
        needs=tuple(replace(need, rate=2 * need.rate, maximum=60) for need in instance.needs),
        pools=instance.pools + pools,
        options=tuple(sorted(instance.options + options, key=lambda option: option.key)),
        transfers=instance.transfers | transfers,
    )


def optimum(instance):
    """(unserved, latency) by one program of all models."""
    whole = Formulation(instance, range(len(instance.options)), whole=True)
    values, _ = in_order(whole, ["served", "latency"], seconds=60.0, seed=0)
    return values["served"], values.get("latency", 0.0)


def judged(instance, counts):
    """(unserved, latency) of given counts."""
    values, _ = in_order(Formulation.of_counts(instance, counts), ["served", "latency"], seconds=60.0, seed=0)
    return values["served"], values.get("latency", 0.0)


def steps(left_s=None):
    return EngineSteps(StepwiseWork(10**9) if left_s is None else StepwiseWork(10**9, left_s), 0)


def loads_of(instance, counts):
    program = Formulation.of_counts(instance, counts)
    answer = program.minimise("served", seconds=60.0, seed=0)
    program.keep("served", program.value("served", answer) + 1e-6)
    return program.prices("latency", program.minimise("latency", seconds=60.0, seed=0))


def compare(seed, load, change=None):
    instance = fabric(seed, load)
    instance = change(instance) if change else instance
    splits = DeviceSplits.of(instance) if instance.needs else None
    if splits is None:
        return False
    unserved, latency = optimum(instance)
    assert splits.unserved == pytest.approx(unserved, abs=1e-4), seed
    counts = splits.placement(steps())
    assert judged(instance, counts)[0] == pytest.approx(unserved, abs=1e-4), seed
    bounds = []
    for bound, better in splits.tries(steps(), loads_of(instance, counts), splits.unserved):
        bounds.append(bound)
        counts = better or counts
        assert bound <= latency + 1e-3 * max(1.0, latency), (seed, bound, latency)
    found = judged(instance, counts)
    assert found[0] == pytest.approx(unserved, abs=1e-4), seed
    assert found[1] == pytest.approx(latency, rel=3e-3, abs=1e-3), seed
    assert bounds == sorted(bounds), seed
    if not unserved:
        assert bounds[-1] == pytest.approx(latency, rel=3e-3, abs=1e-3), seed
    # What is unserved has a price, and by some digits there may be more of it: a dear one makes bounds loose.
    return bounds[-1] >= latency * 0.98 - 0.3


@pytest.mark.parametrize("load", [0.4, 0.9, 2.0])
def test_bounds_are_true_and_the_last_placement_is_the_best(load):
    assert sum(compare(seed, load) for seed in range(40)) > 25


@seeds(0, drawn=4, long=200)
def test_the_same_of_fabrics_that_nobody_chose(seed):
    for at in range(6):
        compare(seed * 1000 + at, (0.5, 1.0, 3.0)[at % 3])


@seeds(1, drawn=1, long=60)
def test_of_areas_that_are_alike_one_is_looked_at_for_all(seed, monkeypatch):
    """What is known of the mirrored devices is as true: with it and without, it comes to the optimum."""
    for at in range(8):
        load = (0.5, 1.0)[at % 2]
        compare(seed * 1000 + at, load, with_twins)
        with monkeypatch.context() as patch:
            patch.setattr(splitting, "mirrors", lambda *_: [])
            compare(seed * 1000 + at, load, with_twins)


def alike_areas():
    """A small fabric of two areas that are alike."""
    return next(
        twins
        for seed in range(100)
        if (twins := with_twins(fabric(seed, 0.5))).transfers and len({o.pool.key for o in twins.options}) == 2
        if (splits := DeviceSplits.of(twins)) is not None and splits._mirrors
    )


def test_what_is_known_of_devices_is_known_of_as_many_in_the_other_area():
    instance = alike_areas()
    splits = DeviceSplits.of(instance)
    splits.placement(steps())
    (mirror,) = splits._mirrors
    uneven = 0
    for (at, devices), counts in splits._known.items():
        there = mirror.devices(devices)
        uneven += there != devices
        used = dict.fromkeys((pool.key for pool in instance.pools), 0)
        for i, count in splits._known[at, there].items():
            used[instance.options[i].pool.key] += count * instance.options[i].devices
        assert all(used[key] <= n for key, n in zip(splits._pools, there, strict=True))
        assert sum(splits._known[at, there].values()) == sum(counts.values())
    assert uneven


def test_of_many_areas_that_are_alike_some_pairs_are_swapped():
    """All orders of them would never be counted to their end."""
    pools = [pool(name, nodes=1) for name in "abcdefghijklmno"]
    options = [
        Option("m", its, 1, figures(1.0), (Level(1.0, 2.0, True),), phase=phase) for its in pools for phase in PHASES
    ]
    transfers = {key: way for its in pools for key, way in between("m", its, its).items()}
    instance = replace(
        problem([ModelNeed("m", 9.0, 0, 20)], options, pools, objective=("latency",)), transfers=transfers
    )
    areas = list(splitting._areas(instance))
    swaps = mirrors(instance, areas)
    assert len(areas) == len(pools)
    assert 1 < len(swaps) <= MOST_MIRRORS
    devices = tuple(range(len(pools)))
    assert all(sum(there != at for at, there in enumerate(swap.devices(devices))) == 2 for swap in swaps)


def test_what_tells_areas_apart_is_seen():
    """Each of these makes the twins unlike."""
    instance = alike_areas()
    first, last = instance.options[0], instance.options[-1]
    hand_over, way = next(iter(instance.transfers.items()))
    need = instance.needs[0]
    for change in (
        {"options": (replace(first, levels=first.levels[:-1]), *instance.options[1:])},
        {"options": instance.options[1:]},
        {"transfers": instance.transfers | {hand_over: replace(way, seconds=way.seconds + 1)}},
        {"transfers": {key: its for key, its in instance.transfers.items() if key != hand_over}},
        {"needs": (replace(need, pins={(first.pool.cluster, ""): 1}), *instance.needs[1:])},
        {"limits": (ResourceLimit("a", "cost", "cost", 9.0, frozenset({first.pool.key})),)},
        {"pools": (replace(instance.pools[0], price_per_node_hour=99.0), *instance.pools[1:])},
        {"needs": (replace(need, spread_sites=True), *instance.needs[1:])},
        {"fixed": {last.key: 1}},
        {"current": {last.key: 1}},
        {"taken": {(first.pool.key, 1): 1}},
        {"outages": (frozenset({first.pool.key}),)},
    ):
        assert not mirrors(replace(instance, **change), list(splitting._areas(instance))), change


def test_rules_that_the_split_does_not_know_make_no_bound_untrue():
    """Minima, pins and what runs only make the optimum worse; and a model's own are asked for all the same."""
    checked = 0
    for seed in range(30):
        instance = fabric(seed, 0.6)
        splits = DeviceSplits.of(instance) if instance.needs else None
        if splits is None:
            continue
        needs = (replace(instance.needs[0], minimum=2), *instance.needs[1:])
        first = instance.options[0]
        ruled = replace(instance, needs=needs, current={first.key: 1}, move_price=0.1, max_moves=6)
        whole = Formulation(ruled, range(len(ruled.options)), whole=True)
        answers = in_order(whole, ["served", "latency"], seconds=60.0, seed=0)
        if answers is None:
            continue
        splits = DeviceSplits.of(ruled)
        assert splits.unserved <= answers[0]["served"] + 1e-4
        counts = splits.placement(steps()) or {}
        for bound, _ in splits.tries(steps(), loads_of(instance, counts), answers[0]["served"]):
            assert bound <= answers[0]["latency"] * (1 + 1e-3) + 1e-3, seed
            checked += 1
    assert checked > 20


def test_devices_on_which_a_rule_cannot_hold_are_given_to_no_model():
    """One replica would be enough for the demand; two are asked for."""
    a = pool("a", nodes=4)
    options = [Option(model, a, 1, figures(2.0), (Level(2.0, 3.0, True),)) for model in "mn"]
    needs = [ModelNeed("m", 1.0, 2, 9), ModelNeed("n", 3.0, 0, 9)]
    splits = DeviceSplits.of(problem(needs, options, [a], objective=("latency",)))
    counts = splits.placement(steps())
    for _, better in splits.tries(steps(), loads_of(splits._problem, {0: 2, 1: 2}), 0.0):
        counts = better or counts
    assert counts == {0: 2, 1: 2}


def one_phase(model, where, *, tp=1, capacity=1.0):
    return Option(model, where, tp, figures(capacity), (Level(capacity, 2.0 * capacity, True),))


def bounds_of(instance, counts):
    splits = DeviceSplits.of(instance)
    splits.placement(steps())
    return [bound for bound, _ in splits.tries(steps(), loads_of(instance, counts), splits.unserved)]


def test_what_may_be_at_most_is_not_thought_to_serve_more():
    a = pool("a", nodes=8)
    needs = [ModelNeed("m", 10.0, 0, 2), ModelNeed("n", 1.0, 0, 9)]
    instance = problem(needs, [one_phase("m", a), one_phase("n", a)], [a], objective=("latency",))
    splits = DeviceSplits.of(instance)
    assert splits.unserved == pytest.approx(8.0)
    assert splits.placement(steps()) == {0: 2, 1: 1}


def test_clusters_that_do_not_answer_are_for_other_searches():
    a, gone = pool("a"), pool("gone")
    options = [one_phase("m", a), one_phase("m", gone)]
    instance = problem([ModelNeed("m", 1.0, 0, 9)], options, [a], objective=("latency",))
    assert DeviceSplits.of(replace(instance, fixed={options[1].key: 1})) is None


def test_areas_that_a_model_sees_alike_may_have_more_pools_for_others():
    a, b, c = (pool(name, nodes=2) for name in "abc")
    options = [one_phase("m", a), one_phase("m", c), one_phase("n", b)]
    needs = [ModelNeed("m", 2.5, 0, 9), ModelNeed("n", 1.0, 0, 9)]
    instance = replace(problem(needs, options, [a, b, c], objective=("latency",)), transfers=between("n", a, b))
    counts = DeviceSplits.of(instance).placement(steps())
    assert judged(instance, counts)[0] == pytest.approx(0.0, abs=1e-6)


def test_devices_that_stay_free_do_so_once_and_not_for_each_model():
    a = pool("a", nodes=3, per_node=2)
    options = [one_phase("m", a), one_phase("n", a)]
    needs = [ModelNeed("m", 1.5, 2, 9, spread_nodes=True), ModelNeed("n", 1.0, 2, 9, spread_nodes=True)]
    instance = replace(problem(needs, options, [a], objective=("latency",)), crowded={a.key: 1})
    _, latency = optimum(instance)
    assert max(bounds_of(instance, {0: 2, 1: 2})) <= latency + 1e-3


def test_pools_that_can_be_filled_in_very_many_ways_are_for_other_searches():
    a = pool("a", nodes=3, per_node=8)
    options = [one_phase("m", a, tp=1 + at % 4, capacity=1.0 + at) for at in range(12)]
    assert DeviceSplits.of(problem([ModelNeed("m", 1.0, 0, 9)], options, [a], objective=("latency",))) is None


def test_no_bound_at_any_prices_is_above_the_optimum():
    rng = random.Random(7)
    for seed in range(12):
        instance = fabric(seed, 0.8)
        if not instance.needs:
            continue
        _, latency = optimum(instance)
        for _ in range(4):
            splits = DeviceSplits.of(instance)
            counts = splits.placement(steps())
            prices = loads_of(instance, counts)
            drawn = {model: rng.uniform(0.0, 9.0) for model in prices.demand}
            decode = {key: rng.uniform(0.0, 5.0) for key in prices.decode}
            bound, _ = next(splits.tries(steps(), replace(prices, demand=drawn, decode=decode), splits.unserved))
            assert bound <= latency + 1e-3 * max(1.0, latency), seed


def test_a_search_with_phases_is_proved_by_splits(monkeypatch):
    monkeypatch.setattr(programs, "TINY", 0)
    for seed in (1, 2, 3, 5, 8):
        instance = fabric(seed, 0.9)
        unserved, latency = optimum(instance)
        *_, last = ExactSolver().solve(instance, deadline_s=20.0, seed=0)
        stages = {stage.name: stage for stage in last.stages}
        assert stages["served"].objective == pytest.approx(unserved, abs=1e-4)
        assert stages["latency"].objective <= latency * 1.0051 + 1e-3
        assert stages["latency"].bound <= latency + 1e-3 * max(1.0, latency)
        assert stages["latency"].bound >= latency * 0.994 - 0.05


def test_no_table_is_asked_where_time_is_over():
    instance = next(fabric(seed, 0.9) for seed in range(9) if fabric(seed, 0.9).needs)
    splits, over = DeviceSplits.of(instance), steps(lambda: 0.0)
    assert splits.placement(over) is None
    assert over.work.ended
    prices = loads_of(instance, DeviceSplits.of(instance).placement(steps()))
    assert list(splits.tries(steps(lambda: 0.0), prices, 0.0)) == []


def test_large_fabrics_and_pipelines_over_pools_are_for_other_searches():
    large = pool("large", nodes=4000, per_node=8)
    many = Option("m", large, 1, figures(1.0), (Level(1.0, 1.0, True),))
    needs = [ModelNeed("m", 1.0, 1, 9)]
    assert DeviceSplits.of(problem(needs, [many], [large])) is None
    a, b = pool("a"), pool("b")
    mixed = Option("m", a, 1, figures(1.0), (Level(1.0, 1.0, True),), others=((b, 1),))
    assert DeviceSplits.of(problem(needs, [mixed], [a, b])) is None


# -- tables -----------------------------------------------------------------------------------------------------------

STEP, CELLS = 0.5, 12


def ladders(rng):
    drawn = []
    for devices in (1, 2, 4)[: rng.randint(1, 3)]:
        levels = list(convex(rng, devices * rng.uniform(0.5, 1.5), 1.0))
        drawn.append(Ladder.of(devices, [0.0, *(x.rate for x in levels)], [0.0, *(x.in_system for x in levels)]))
    return drawn


def cost(ladder, load):
    return float(np.interp(load, *zip(*ladder.steps, strict=True)))


def test_a_cell_is_below_all_that_replicas_do_in_it():
    rng = random.Random(3)
    for _ in range(40):
        kinds, price = ladders(rng), rng.uniform(0.0, 4.0)
        table = replicas(kinds, 5, price, STEP, CELLS)
        for _ in range(60):
            chosen = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
            devices = sum(kind.devices for kind in chosen)
            loads = [rng.uniform(0.0, kind.capacity) for kind in chosen]
            cell = int(sum(loads) / STEP)
            if devices <= 5 and cell < CELLS:
                paid = sum(map(cost, chosen, loads)) - price * sum(loads)
                assert table[devices, cell] <= paid + 1e-9


def test_tables_together_are_below_all_that_their_parts_do_together():
    rng = np.random.default_rng(4)
    for _ in range(30):
        first, second = (rng.uniform(0.0, 9.0, (3, 4, CELLS)) for _ in range(2))
        for table in (first, second):  # more devices are never worse
            table[:] = np.minimum.accumulate(np.minimum.accumulate(table, axis=0), axis=1)
        aside, turns, ways = side_by_side(first, second), shared(first, second), either_way(first, second)
        for _ in range(50):
            a, b, c, d = (int(rng.integers(0, n)) for n in (3, 4, 3, 4))
            i, j = (int(rng.integers(0, CELLS)) for _ in range(2))
            for both in (i + j, i + j + 1):
                if both < CELLS:
                    assert aside[a, b, c, d, both] <= first[a, b, i] + second[c, d, j] + 1e-12
                    if a + c < 3 and b + d < 4:
                        assert ways[a + c, b + d, both] <= first[a, b, i] + second[c, d, j] + 1e-12
            if a + c < 3 and b + d < 4:
                assert turns[a + c, b + d, i] <= first[a, b, i] + second[c, d, i] + 1e-12
        assert np.all(wider(first, 3)[..., 1] == first[..., 3:6].min(axis=-1))


def test_a_split_is_the_best_of_all_splits():
    rng = np.random.default_rng(5)
    for models in (1, 2, 3):
        values = [rng.uniform(0.0, 9.0, (4, 3)) for _ in range(models)]  # more devices may cost more
        least, shares = best_split(values, (3, 2))
        ways = itertools.product(np.ndindex(4, 3), repeat=models)
        every = [
            way
            for way in ways
            if all(sum(part) <= most for part, most in zip(zip(*way, strict=True), (3, 2), strict=True))
        ]
        assert least == pytest.approx(min(sum(v[g] for v, g in zip(values, way, strict=True)) for way in every))
        assert sum(v[g] for v, g in zip(values, shares, strict=True)) == pytest.approx(least)


def test_the_setting_of_thunderserve_is_small_enough():
    for seed in range(20):
        documents = synthetic.documents(synthetic.parse("3x2x32"), seed, 0.85)
        clusters = documents["inventory.yaml"]["clusters"].values()
        partitions = [partition for cluster in clusters for partition in cluster["partitions"].values()]
        devices = [partition["nodes"] * partition["devices_per_node"] for partition in partitions]
        assert np.prod([n + 1 for n in devices]) <= splitting.MOST_SPLITS


@pytest.mark.parametrize(("seed", "load"), [(11, 1.0), (17, 0.6), (21, 1.0)])
def test_a_search_that_a_clock_ends_is_found_again_by_its_work(seed, load, monkeypatch):
    """With its bounds: what a placement said of them belongs to its step."""
    monkeypatch.setattr(programs, "TINY", 0)
    instance = with_twins(fabric(seed, load))
    ended = 0
    for calls in range(1, 60):
        clock = itertools.chain(itertools.repeat(9.0, calls), itertools.repeat(0.0))
        *_, hurried = ExactSolver(lambda clock=clock: next(clock)).solve(instance, deadline_s=60, seed=0)
        *_, again = ExactSolver().solve(instance, deadline_s=hurried.work, seed=0)
        assert again.stages == hurried.stages, calls
        assert again == hurried, calls
        ended += hurried.ended
        if not hurried.ended:
            break
    assert ended
