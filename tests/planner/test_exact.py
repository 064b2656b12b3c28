"""The exact solver against brute force, its rules one by one, and its determinism."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from fabrictool.base.canonical import LateDigest
from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.explaining import prices
from fabrictool.planner.explaining.explain import reasons
from fabrictool.planner.explaining.prices import device_prices
from fabrictool.planner.problem import Level, ModelNeed, Option, PlacementProblem, Pool
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.stages import LATENCY_TOLERANCE
from fabrictool.simulator.capacity import ReplicaFigures
from tests.seeds import seeds, some


def pool(name, *, device="x", nodes=2, per_node=1, price=1.0, site=None, stable=True):
    return Pool(
        cluster=name, partition="p", provider=name, site=site or name, device=device, nodes=nodes,
        devices_per_node=per_node, price_per_node_hour=price, power_per_node_w=100.0, stable=stable,
    )  # fmt: skip


def figures(capacity):
    return ReplicaFigures(
        fits=True, weights=1.0, free=1.0, max_batch=4, capacity=capacity, prefill_s=0.1, step_alone_s=0.01,
        step_full_s=0.02,
    )  # fmt: skip


MOST = 0.8
"""Of a replica's capacity: the only load level of the instances below, unless they say otherwise."""


def option(model, where, *, tp=1, capacity=1.0, latency=1.0, attains=True, levels=None):
    found = levels or (Level(MOST * capacity, latency * MOST * capacity, attains),)
    return Option(model, where, tp, figures(capacity), tuple(found))


def problem(needs, options, pools, *, current=None, objective=("slo", "latency", "cost")):
    options = tuple(sorted(options, key=lambda o: o.key))
    return PlacementProblem(tuple(needs), options, tuple(pools), current or {}, tuple(objective), LateDigest(list))


def solve(instance, seed=0):
    *_, solution = ExactSolver().solve(instance, deadline_s=30, seed=seed)
    return solution


def counts(instance, solution):
    return {instance.options[i].key: k for i, k in solution.counts.items()}


# -- brute force ------------------------------------------------------------------------------------------------------


def fits(instance, counts_):
    for where in instance.pools:
        here = [(o, k) for o, k in zip(instance.options, counts_, strict=True) if o.pool == where]
        # Exact packing for powers of two: largest first into nodes.
        free = [where.devices_per_node] * where.nodes
        for size in sorted((o.tp for o, k in here for _ in range(k)), reverse=True):
            node = next((n for n, room in enumerate(free) if room >= size), None)
            if node is None:
                return False
            free[node] -= size
    for need in instance.needs:
        mine = [(o, k) for o, k in zip(instance.options, counts_, strict=True) if o.model == need.model]
        if sum(k for _, k in mine) > need.maximum or sum(k for o, k in mine if o.pool.stable) < need.minimum:
            return False
    return True


def cheapest_load(instance, counts_):
    """(unserved, requests in the system) of the best split of load for given counts.

    Queue curves are convex, so the flattest pieces of all replicas are filled first.
    """
    unserved = inside = 0.0
    for need in instance.needs:
        pieces = []
        for o, k in zip(instance.options, counts_, strict=True):
            if o.model == need.model and k:
                for low, high in itertools.pairwise([Level(0.0, 0.0, attains=True), *o.levels]):
                    width = high.rate - low.rate
                    pieces.append(((high.in_system - low.in_system) / width, k * width))
        left = need.rate
        for slope, width in sorted(pieces):
            load = min(left, width)
            left -= load
            inside += slope * load
        unserved += need.priority * max(0.0, left)
    return unserved, inside


def brute_force(instance):
    """(unserved, latency, cost): lexicographic, but for a latency that may be a little above the best."""
    found = []
    limit = {need.model: need.maximum for need in instance.needs}
    for counts_ in itertools.product(*(range(limit[o.model] + 1) for o in instance.options)):
        if not fits(instance, counts_):
            continue
        unserved, latency = cheapest_load(instance, counts_)
        cost = sum(o.cost * k for o, k in zip(instance.options, counts_, strict=True))
        found.append((round(unserved, 5), latency, cost))
    if not found:
        return None
    served = [value for value in found if value[0] == min(found)[0]]
    fastest = min(latency for _, latency, _ in served)
    return (
        served[0][0],
        fastest,
        min(cost for _, latency, cost in served if latency <= fastest * (1 + LATENCY_TOLERANCE) + 1e-9),
    )


def convex(rng, capacity, slope):
    """One to four levels on a convex curve."""
    rate = inside = 0.0
    for load in sorted(rng.sample([0.2, 0.4, 0.6, MOST], rng.randint(1, 4))):
        inside += slope * (load * capacity - rate)
        rate = load * capacity
        slope *= rng.choice([1.0, 1.3, 2.0])
        yield Level(rate, inside, attains=True)


def random_instance(rng):
    pools = [
        pool(name, nodes=rng.randint(1, 2), per_node=rng.choice([1, 2, 4]), price=rng.choice([1.0, 2.0, 5.0]))
        for name in ("a", "b")[: rng.randint(1, 2)]
    ]
    needs, options = [], []
    for model in ("m", "n")[: rng.randint(1, 2)]:
        needs.append(ModelNeed(model, rng.choice([0.0, 0.5, 2.0, 9.0]), rng.randint(0, 1), rng.randint(1, 3)))
        for where in pools:
            degrees = [tp for tp in (1, 2) if tp <= where.devices_per_node and rng.random() < 0.8]
            speeds = [(rng.choice([0.5, 1.0, 3.0]), rng.choice([1.0, 2.0, 4.0])) for _ in degrees]
            both = zip(degrees, speeds, strict=True)
            options += [option(model, where, tp=t, levels=tuple(convex(rng, c, s)), capacity=c) for t, (c, s) in both]
    return problem(needs, options, pools, objective=("latency", "cost"))


@pytest.mark.parametrize("first", some(range(0, 1000, 100), 1))
def test_equals_brute_force_on_a_thousand_tiny_instances(first):
    for seed in range(first, first + 100):
        equals_brute_force(random_instance(random.Random(seed)))


@seeds(0, drawn=20, long=1000)
def test_equals_brute_force_on_instances_that_nobody_chose(seed):
    equals_brute_force(random_instance(random.Random(seed)))


def equals_brute_force(instance):
    best = brute_force(instance)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(instance)
        return
    solution = solve(instance)
    counts_ = [solution.counts.get(i, 0) for i in range(len(instance.options))]
    assert fits(instance, counts_), "the verifier shares no code with the solver"
    unserved, latency = cheapest_load(instance, counts_)
    cost = sum(o.cost * k for o, k in zip(instance.options, counts_, strict=True))
    assert unserved == pytest.approx(best[0], abs=2e-3)
    assert best[1] - 2e-3 <= latency <= best[1] * (1 + LATENCY_TOLERANCE) + 2e-3
    assert cost == pytest.approx(best[2], abs=2e-3)
    assert solution.optimal
    for stage in solution.stages:
        assert stage.bound <= stage.objective + 1e-9


# -- rules, one by one ------------------------------------------------------------------------------------------------


def test_load_is_planned_below_capacity():
    a = pool("a", nodes=9)
    instance = problem([ModelNeed("m", 4.0, 0, 9)], [option("m", a)], [a])
    assert counts(instance, solve(instance)) == {("m", "a", "p", 1, 1, "unified"): math.ceil(4.0 / MOST)}


def test_unserved_demand_goes_to_the_lower_priority():
    a = pool("a", nodes=1)
    needs = [ModelNeed("gold", 0.8, 0, 1, priority=9.0), ModelNeed("bronze", 0.8, 0, 1)]
    instance = problem(needs, [option("gold", a), option("bronze", a)], [a])
    assert counts(instance, solve(instance)) == {("gold", "a", "p", 1, 1, "unified"): 1}


def test_slo_comes_before_cost_when_the_blueprint_says_so():
    cheap, dear = pool("cheap", price=1.0), pool("dear", price=9.0)
    options = [option("m", cheap, attains=False), option("m", dear)]
    for objective, wanted in ((("slo", "cost"), "dear"), (("cost", "slo"), "cheap")):
        instance = problem([ModelNeed("m", 0.5, 1, 1)], options, [cheap, dear], objective=objective)
        assert counts(instance, solve(instance)) == {("m", wanted, "p", 1, 1, "unified"): 1}


def test_a_wish_outweighs_cost_but_not_the_slo():
    near, far = pool("near", price=1.0), pool("far", price=9.0)
    for attains, wanted in ((True, "far"), (False, "near")):
        options = [replace(option("m", near), preference=1.0), option("m", far, attains=attains)]
        instance = problem([ModelNeed("m", 0.5, 1, 2)], options, [near, far], objective=("slo", "cost"))
        assert counts(instance, solve(instance)) == {("m", wanted, "p", 1, 1, "unified"): 1}


def test_spread_keeps_every_site_at_its_even_share():
    a, b = pool("a", nodes=4), pool("b", nodes=4)
    options = [option("m", a, latency=1.0), option("m", b, latency=9.0)]
    instance = problem([ModelNeed("m", 0.1, 2, 2, spread_sites=True)], options, [a, b])
    assert counts(instance, solve(instance)) == {
        ("m", "a", "p", 1, 1, "unified"): 1,
        ("m", "b", "p", 1, 1, "unified"): 1,
    }


def test_pins_are_exact():
    a, b = pool("a", nodes=4), pool("b", nodes=4)
    options = [option("m", a), option("m", b, latency=9.0)]
    instance = problem([ModelNeed("m", 0.1, 0, 4, pins={("b", ""): 2})], options, [a, b])
    assert counts(instance, solve(instance))["m", "b", "p", 1, 1, "unified"] == 2


def test_scavenger_capacity_never_counts_towards_the_minimum():
    spot = pool("spot", nodes=4, stable=False)
    instance = problem([ModelNeed("m", 0.1, 1, 4)], [option("m", spot)], [spot])
    with pytest.raises(InfeasibleError) as refused:
        solve(instance)
    assert refused.value.problems[0].code == "FT2003"


def test_whole_nodes_are_respected():
    a = pool("a", nodes=3, per_node=2)
    needs = [ModelNeed("big", 0.1, 2, 2), ModelNeed("small", 0.1, 2, 2)]
    instance = problem(needs, [option("big", a, tp=2), option("small", a, tp=1)], [a])
    assert counts(instance, solve(instance)) == {
        ("big", "a", "p", 2, 1, "unified"): 2,
        ("small", "a", "p", 1, 1, "unified"): 2,
    }
    with pytest.raises(InfeasibleError):
        solve(problem([ModelNeed("big", 0.1, 4, 4)], [option("big", a, tp=2)], [a]))


def test_what_runs_stays_where_it_is_when_nothing_is_lost_by_that():
    a, b = pool("a"), pool("b")
    options = [option("m", a), option("m", b)]
    for where in ("a", "b"):
        current = {("m", where, "p", 1, 1, "unified"): 1}
        instance = problem([ModelNeed("m", 0.1, 1, 1)], options, [a, b], current=current)
        assert counts(instance, solve(instance)) == current


def test_nothing_that_runs_is_moved_for_a_hair_of_latency():
    a, b = pool("a"), pool("b")
    current = {("m", "a", "p", 1, 1, "unified"): 2}
    for faster, stays in ((0.9999, True), (0.97, True), (0.5, False)):
        options = [option("m", a, capacity=9.0), option("m", b, capacity=9.0, latency=faster)]
        instance = problem([ModelNeed("m", 1.0, 2, 2)], options, [a, b], current=current)
        assert (counts(instance, solve(instance)) == current) is stays


def test_fewer_replicas_are_preferred_however_many_options_there_are():
    pools = [pool(f"x{i:04}", nodes=2, price=0.0) for i in range(1100)]
    options = [option("m", where, capacity=1.0 if i < 1099 else 2.0) for i, where in enumerate(pools)]
    instance = problem([ModelNeed("m", 1.6, 0, 8)], options, pools, objective=("cost",))
    assert counts(instance, solve(instance)) == {("m", "x1099", "p", 1, 1, "unified"): 1}


@pytest.mark.parametrize(
    ("need", "code"),
    [
        (ModelNeed("m", 1.0, 3, 3), "FT2003"),
        (ModelNeed("other", 1.0, 1, 1), "FT2002"),
        (ModelNeed("m", 1.0, 0, 9, pins={("a", ""): 3}), "FT2004"),
        (ModelNeed("m", 1.0, 0, 1, pins={("a", ""): 2}), "FT2004"),
    ],
)
def test_infeasible_problems_say_why(need, code):
    a = pool("a", nodes=2)
    with pytest.raises(InfeasibleError) as refused:
        solve(problem([need], [option("m", a)] if need.model == "m" else [], [a]))
    assert [p.code for p in refused.value.problems] == [code]
    assert refused.value.problems[0].hint


def test_the_same_seed_gives_the_same_solution():
    instance = random_instance(random.Random(4))
    first = solve(instance, seed=3)
    assert all(solve(instance, seed=3) == first for _ in range(3))


@pytest.mark.parametrize(("least", "most"), [(2, 8), (3, 8), (0, 8), (4, 4)])
def test_spread_holds_whatever_the_number_is(least, most):
    a, b = pool("a", nodes=8), pool("b", nodes=8, price=1.1)
    need = ModelNeed("m", 1.0, least, most, spread_sites=True)
    instance = problem([need], [option("m", a), option("m", b)], [a, b])
    found = counts(instance, solve(instance))
    on_a, on_b = found.get(("m", "a", "p", 1, 1, "unified"), 0), found.get(("m", "b", "p", 1, 1, "unified"), 0)
    assert on_a + on_b >= max(2, least)
    assert abs(on_a - on_b) <= 1


def test_fixed_counts_serve_and_are_neither_raised_nor_lowered():
    a, far = pool("a", nodes=8), pool("far", nodes=1)
    options = [option("m", a), option("m", far, latency=9.0)]
    for need, expected in (
        (ModelNeed("m", 1.6, 0, 8), 0),
        (ModelNeed("m", 3.2, 0, 8), 2),
        (ModelNeed("m", 0.1, 0, 1), 0),
    ):
        instance = replace(
            problem([need], options, [a], objective=("cost",)), fixed={("m", "far", "p", 1, 1, "unified"): 2}
        )
        found = counts(instance, solve(instance))
        assert found.pop(("m", "far", "p", 1, 1, "unified")) == 2
        assert found.get(("m", "a", "p", 1, 1, "unified"), 0) == expected


@pytest.mark.parametrize(("unseen", "there", "elsewhere"), [(1, 2, 2), (3, 3, 1), (5, 5, 0)])
def test_spread_counts_replicas_that_cannot_be_seen(unseen, there, elsewhere):
    a, far, b = pool("a", nodes=8, site="s"), pool("far", nodes=1, site="s"), pool("b", nodes=8, price=9.0)
    need = ModelNeed("m", 0.1, 4, 8, spread_sites=True)
    options = [option("m", where) for where in (a, far, b)]
    instance = replace(
        problem([need], options, [a, b], objective=("cost",)), fixed={("m", "far", "p", 1, 1, "unified"): unseen}
    )
    found = counts(instance, solve(instance))
    assert found[("m", "far", "p", 1, 1, "unified")] == unseen
    assert found[("m", "far", "p", 1, 1, "unified")] + found.get(("m", "a", "p", 1, 1, "unified"), 0) == there
    assert found.get(("m", "b", "p", 1, 1, "unified"), 0) == elsewhere


def test_what_runs_too_much_is_stopped():
    a, b = pool("a", nodes=3), pool("b", nodes=3)
    current = {("m", "a", "p", 1, 1, "unified"): 2, ("m", "b", "p", 1, 1, "unified"): 1}
    instance = problem([ModelNeed("m", 0.5, 1, 1)], [option("m", a), option("m", b)], [a, b], current=current)
    found = solve(instance)
    assert sum(found.counts.values()) == 1
    moves = next(stage for stage in found.stages if stage.name == "moves")
    assert moves.objective == moves.bound == pytest.approx(2.0)


# -- shadow prices: what binds has one, what is left over has none ----------------------------------------------------


def overloaded(nodes):
    a, b = pool("a", nodes=nodes), pool("b", nodes=5)
    need = ModelNeed("m", 10.0, 0, 50)
    return problem([need], [option("m", a, capacity=2.0)], [a, b])


def test_a_price_is_what_one_device_more_serves():
    short, more = overloaded(2), overloaded(3)
    found = device_prices(short, solve(short))
    assert found is not None
    assert found.stage == "served"
    gained = solve(short).stages[0].bound - solve(more).stages[0].bound
    assert found.devices == {("a", "p"): pytest.approx(gained, rel=1e-6)}


def test_prices_that_take_no_time_do_not_hang_on_the_clock(monkeypatch):
    """So a plan that a clock ended is found again by its work; those of large fabrics are said to be late."""
    short = overloaded(2)
    solution = solve(short)
    over = reasons(short, solution, "CHF", left_s=lambda: 0.0)
    assert over == reasons(short, solution, "CHF")
    assert any("one x more" in sentence for sentence in over)
    monkeypatch.setattr(prices, "COLUMNS_PER_UNIT", 1)
    late = reasons(short, solution, "CHF", left_s=lambda: 0.0)[-1]
    assert late.startswith("what one device more would be worth was not")


def test_what_is_left_over_has_no_price():
    plenty = replace(overloaded(40), objective=("cost",))
    assert device_prices(plenty, solve(plenty)) is None


def test_cheaper_devices_are_priced_by_what_they_save():
    cheap, dear = pool("cheap", nodes=1, price=1.0), pool("dear", nodes=9, price=3.0)
    options = [option("m", where, capacity=1.0) for where in (cheap, dear)]
    instance = problem([ModelNeed("m", 2.0, 0, 9)], options, [cheap, dear], objective=("cost",))
    found = device_prices(instance, solve(instance))
    assert found is not None
    assert (found.stage, found.devices) == ("cost", {("cheap", "p"): pytest.approx(2.0)})


def test_a_move_must_save_its_price():
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=0.7)
    options = [option("m", a), option("m", b)]
    now = {("m", "a", "p", 1, 1, "unified"): 2}
    instance = problem([ModelNeed("m", 1.5, 2, 2)], options, [a, b], current=now, objective=("cost",))
    assert counts(instance, solve(instance)) == {("m", "b", "p", 1, 1, "unified"): 2}, "0.3 cheaper an hour"
    for price, where in ((0.1, "b"), (0.2, "a")):  # two moves each: one starts, one stops
        priced = replace(instance, move_price=price)
        assert counts(priced, solve(priced)) == {("m", where, "p", 1, 1, "unified"): 2}, price


def test_moves_come_before_cost_when_the_blueprint_says_so():
    a, b = pool("a", nodes=4, price=9.0), pool("b", nodes=4, price=0.1)
    now = {("m", "a", "p", 1, 1, "unified"): 1}
    needs, options = [ModelNeed("m", 0.5, 1, 1)], [option("m", a), option("m", b)]
    for objective, where in ((("cost", "moves"), "b"), (("moves", "cost"), "a")):
        instance = problem(needs, options, [a, b], current=now, objective=objective)
        assert counts(instance, solve(instance)) == {("m", where, "p", 1, 1, "unified"): 1}, objective
