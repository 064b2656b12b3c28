"""Fronts of placements, against all placements that there are."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from fabrictool.base.errors import InfeasibleError, UsageError
from fabrictool.cli.pareto import document, text
from fabrictool.planner.pareto import criteria_of, front, most_points, undominated
from fabrictool.planner.problem import ModelNeed
from tests.planner.test_exact import MOST, cheapest_load, fits, option, pool, problem, random_instance, solve
from tests.seeds import seeds


def front_of(instance, *criteria):
    return list(front(instance, criteria, solve, 0))


def dear_or_hungry():
    """Three kinds of device: cheap and hungry, dear and frugal, and one between."""
    pools = [
        replace(pool(name, nodes=9, price=price), power_per_node_w=power)
        for name, price, power in (("a", 1.0, 900.0), ("b", 3.0, 300.0), ("c", 5.0, 100.0))
    ]
    options = [option("m", where) for where in pools]
    return problem([ModelNeed("m", 6 * MOST, 0, 9)], options, pools, objective=("cost",))


def test_goes_from_the_cheapest_to_the_one_that_draws_least():
    points = front_of(dear_or_hungry(), "cost", "energy")
    kept = undominated(points)
    values = [(point.values["cost"], point.values["energy"]) for point in kept]
    assert values[0] == (6.0, 5400.0)
    assert values[-1] == (30.0, 600.0)
    assert values == sorted(values)
    assert len(values) >= 5
    assert [point.chosen for point in kept] == [True] + [False] * (len(kept) - 1), "the blueprint wants it cheap"
    assert len(points) <= most_points(("cost", "energy")) <= 7


def test_three_criteria_and_one_that_cannot_be_limited():
    instance = dear_or_hungry()
    points = front_of(instance, "slo", "cost", "energy")
    assert len(points) <= most_points(("slo", "cost", "energy")) <= 7
    assert set(points[0].values) == {"served", "slo", "cost", "energy"}


def test_a_search_that_ends_keeps_what_it_has():
    left = iter([True, True, False])
    points = list(front(dear_or_hungry(), ("cost", "energy"), lambda its: solve(its) if next(left) else None, 0))
    assert len(points) == 2
    assert points[0].chosen
    assert undominated(points)


def test_where_the_blueprints_own_search_ended_early_its_row_says_that_it_is_beaten():
    """It is shown all the same: it is what a plan of so little time would be."""
    points = front_of(dear_or_hungry(), "cost", "energy")
    own = replace(points[0], values=points[0].values | {"cost": 31.0, "energy": 700.0})
    kept = undominated([own, *points[1:]])
    table = text(kept, ("cost", "energy"), "CHF").splitlines()
    assert [line for line in table if "beaten by another row" in line] == [line for line in table if "→" in line]
    assert sum("→" in line for line in table) == 1
    assert "beaten" not in text(undominated(points), ("cost", "energy"), "CHF")


def test_the_table_fits_a_screen_and_the_document_has_whole_placements():
    instance = dear_or_hungry()
    kept = undominated(front_of(instance, "cost", "energy"))
    lines = text(kept, ("cost", "energy"), "CHF").splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.startswith("→") for line in lines] == [False] + [point.chosen for point in kept]
    told = msgspec.to_builtins(document(instance, ("cost", "energy"), kept, complete=True))
    for point in told["points"]:
        prices = {"a": 1.0, "b": 3.0, "c": 5.0}
        cost = sum(prices[its["cluster"]] * its["replicas"] for its in point["placement"])
        assert cost == pytest.approx(point["values"]["cost"])


@pytest.mark.parametrize("words", ["cost", "cost,cost", "cost,speed", "latency,slo", "", "cost,latency,slo"])
def test_criteria_of_which_there_is_no_front(words):
    with pytest.raises(UsageError, match="FT2031"):
        criteria_of(words)


@seeds(10, drawn=10, long=200)
def test_no_placement_at_all_is_better_than_one_of_the_front(seed):
    rng = random.Random(seed)
    instance = replace(random_instance(rng), objective=("cost",))
    powers = {where.key: rng.choice([50.0, 100.0, 400.0]) for where in instance.pools}
    pools = {where.key: replace(where, power_per_node_w=powers[where.key]) for where in instance.pools}
    options = [replace(its, pool=pools[its.pool.key]) for its in instance.options]
    instance = problem(instance.needs, options, pools.values(), objective=("cost",))
    try:
        kept = undominated(front_of(instance, "cost", "energy"))
    except InfeasibleError:
        return
    most = {need.model: need.maximum for need in instance.needs}
    every = [
        (
            round(cheapest_load(instance, counts)[0], 4),
            *(
                sum(getattr(o, name) * k for o, k in zip(instance.options, counts, strict=True))
                for name in ("cost", "power")
            ),
        )
        for counts in itertools.product(*(range(most[o.model] + 1) for o in instance.options))
        if fits(instance, counts)
    ]
    least = min(every)[0]
    able = [(cost, power) for served, cost, power in every if served <= least + 1e-4]
    for point in kept:
        cost, power = point.values["cost"], point.values["energy"]
        assert point.values["served"] == pytest.approx(least, abs=2e-3)
        if not point.chosen:
            better = [
                its
                for its in able
                if its[0] <= cost + 1e-6 and its[1] <= power + 1e-6 and its[0] + its[1] < cost + power - 0.01
            ]
            assert not better
    if kept:
        assert min(point.values["cost"] for point in kept) == pytest.approx(min(able)[0], abs=1e-3)
        assert min(point.values["energy"] for point in kept) == pytest.approx(min(p for _, p in able), abs=2e-2)
