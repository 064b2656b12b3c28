"""Replicas that serve on whatever is lost: against every loss there is, and every place that a scheduler may choose."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from fabrictool.planner.explaining.explain import reasons
from fabrictool.planner.problem import Level, ModelNeed
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.stages import values_of
from fabrictool.planner.survival import losses, worst_loss
from tests.planner.test_exact import MOST, cheapest_load, fits, option, pool, problem, solve
from tests.seeds import seeds


def a_need(rate, maximum, kind, **more):
    return ModelNeed("m", rate, 0, maximum, survive=kind, **more)


def placed(instance):
    """Replicas by place."""
    return {instance.options[i].pool.cluster: k for i, k in solve(instance).counts.items()}


# -- what is kept in reserve ---------------------------------------------------------------------------------------


def test_one_replica_more_where_each_stands_on_a_node_of_its_own():
    a = pool("a", nodes=9)
    options = [option("m", a)]
    assert placed(problem([a_need(3 * MOST, 9, None)], options, [a], objective=("cost",))) == {"a": 3}
    assert placed(problem([a_need(3 * MOST, 9, "node")], options, [a], objective=("cost",))) == {"a": 4}


def test_as_many_more_as_a_node_holds_or_another_place_where_that_is_cheaper():
    full = pool("full", nodes=9, per_node=4, price=4.0)
    alone = problem([a_need(2 * MOST, 99, "node")], [option("m", full)], [full], objective=("cost",))
    assert placed(alone) == {"full": 6}, "four of them may stand on the node that goes"
    other = pool("other", nodes=9, price=1.5)
    options = [option("m", full), option("m", other)]
    both = problem([a_need(2 * MOST, 99, "node")], options, [full, other], objective=("cost",))
    assert placed(both) == {"full": 1, "other": 2}, "two are left, whichever node goes"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("partition", {"a": 1, "b": 1}),
        ("site", {"a": 1, "c": 1}),
        ("provider", {"a": 1, "d": 1}),
    ],
)
def test_the_loss_decides_where_the_other_replica_stands(kind, wanted):
    a, b, c, d = (pool(name, nodes=4, price=price) for name, price in zip("abcd", (1.0, 2.0, 4.0, 8.0), strict=True))
    b = replace(b, site="a", provider="p")
    a, c = replace(a, provider="p"), replace(c, provider="p")
    options = [option("m", where) for where in (a, b, c, d)]
    instance = problem([a_need(MOST, 9, kind)], options, [a, b, c, d], objective=("cost",))
    assert placed(instance) == wanted


def test_what_is_left_has_to_keep_the_slo():
    a = pool("a", nodes=9)
    levels = (Level(0.4, 0.4, attains=True), Level(0.8, 1.6, attains=False, excess=0.5))
    instance = problem([a_need(0.8, 9, "node")], [option("m", a, levels=levels)], [a], objective=("cost",))
    assert placed(instance) == {"a": 3}, "two are left, which keep it at 0.4 each"


def test_a_group_that_only_some_may_serve_has_a_replica_left():
    a, b, c = (pool(name, nodes=4, price=price) for name, price in zip("abc", (1.0, 2.0, 3.0), strict=True))
    options = [option("m", where) for where in (a, b, c)]
    need = a_need(MOST, 9, "partition")
    assert placed(problem([need], options, [a, b, c], objective=("cost",))) == {"a": 1, "b": 1}
    need = replace(need, groups=(frozenset({"a", "b", "c"}), frozenset({"b", "c"})))
    assert placed(problem([need], options, [a, b, c], objective=("cost",))) == {"b": 1, "c": 1}
    nobody = replace(need, groups=(frozenset({"z"}),))
    assert placed(problem([nobody], options, [a, b, c], objective=("cost",))) == {"a": 1, "b": 1}


def test_a_model_without_a_demand_keeps_a_replica():
    a = pool("a", nodes=4, per_node=2)
    instance = problem([a_need(0.0, 9, "node")], [option("m", a)], [a], objective=("cost",))
    assert placed(instance) == {"a": 3}


def test_what_cannot_survive_survives_as_much_as_can_and_says_what_is_worst():
    a, b = pool("a", nodes=2), pool("b", nodes=1)
    instance = problem([a_need(2.5 * MOST, 9, "partition")], [option("m", a), option("m", b)], [a, b])
    solution = solve(instance)
    assert values_of(solution)["served"] == pytest.approx(0.0, abs=1e-6)
    loss, unserved = worst_loss(instance, instance.needs[0], solution.counts)
    assert loss.words == "partition a/p"
    assert unserved == pytest.approx(1.5 * MOST)
    assert values_of(solution)["survived"] == pytest.approx((1.5 + 0.5) * MOST, abs=1e-5), "of either loss"


def test_widths_that_nobody_uses_cost_no_reserve():
    a = pool("a", nodes=4, per_node=4)
    wide, narrow = option("m", a, tp=4, capacity=1.25), option("m", a, tp=1, capacity=1.0)
    for options in ([wide], [wide, narrow]):
        instance = problem([a_need(MOST, 2, "node")], options, [a], objective=("cost",))
        solution = solve(instance)
        assert {instance.options[i].tp: k for i, k in solution.counts.items()} == {4: 2}
        assert worst_loss(instance, instance.needs[0], solution.counts) == (None, 0.0)


def test_replicas_that_keep_the_slo_under_no_load_are_no_reserve():
    good, bad = pool("good", nodes=4, price=5.0), pool("bad", nodes=9)
    options = [option("m", good), option("m", bad, attains=False)]
    instance = problem([a_need(MOST, 9, "node")], options, [good, bad], objective=("slo", "cost"))
    assert placed(instance) == {"good": 2}


def test_what_a_group_loses_in_any_case_does_not_void_the_reserve_of_others():
    p, q = pool("p", nodes=4, price=1.0), pool("q", nodes=4, price=2.0)
    options = [option("m", p), option("m", q)]
    need = a_need(MOST, 9, "provider", groups=(frozenset({"p", "q"}), frozenset({"q"})))
    instance = problem([need], options, [p, q], objective=("cost",))
    assert placed(instance) == {"p": 1, "q": 1}
    loss, unserved = worst_loss(instance, need, solve(instance).counts)
    assert loss.words == "provider q, for those whom only q may serve,"
    assert unserved == MOST


# -- against brute force -------------------------------------------------------------------------------------------


def hit_hardest(instance, need, counts):
    """Requests/s that each loss leaves unserved at worst: of a node with every choice of replicas that fit it; without
    losses that nothing could survive.
    """
    options = dict(enumerate(instance.options))
    gives = {i: max((v.rate for v in o.levels if v.attains), default=o.levels[-1].rate) for i, o in options.items()}
    every = sum(gives[i] * counts.get(i, 0) for i in options)
    worst = [0.0]
    for loss in losses(need.survive, instance.pools):
        if not loss.node and all(o.pool.key in loss.pools for o in options.values()):
            continue
        worst.append(0.0)
        here = [i for i in options if options[i].pool.key in loss.pools and counts.get(i)]
        room = next(p.devices_per_node for p in instance.pools if p.key in loss.pools)
        for gone in itertools.product(*(range(counts[i] + 1) for i in here)):
            if loss.node and sum(options[i].tp * k for i, k in zip(here, gone, strict=True)) > room:
                continue
            left = every - sum(gives[i] * k for i, k in zip(here, gone, strict=True))
            worst[-1] = max(worst[-1], need.rate - left)
    return worst


def _widths(rng, where, *, one_width):
    widths = [tp for tp in (1, 2) if tp <= where.devices_per_node]
    return [rng.choice(widths)] if one_width else widths


def random_instance(rng, *, one_width):
    pools = [
        pool(name, nodes=rng.randint(1, 3), per_node=rng.choice([1, 2, 4]), price=rng.choice([1.0, 2.0, 5.0]))
        for name in ("a", "b", "c")[: rng.randint(1, 3)]
    ]
    options = [
        option("m", where, tp=tp, capacity=rng.choice([0.5, 1.0, 3.0]))
        for where in pools
        for tp in _widths(rng, where, one_width=one_width)
    ]
    kind = rng.choice(["node", "partition", "site", "provider"])
    need = a_need(rng.choice([0.4, 1.0, 2.5]), rng.randint(1, 4), kind)
    return problem([need], options, pools, objective=("cost",))


@seeds(10, drawn=10, long=500)
def test_the_cheapest_that_survives_is_what_trying_all_finds(seed):
    instance = random_instance(random.Random(seed), one_width=True)
    (need,) = instance.needs
    tried = []
    for counts in itertools.product(range(need.maximum + 1), repeat=len(instance.options)):
        if fits(instance, counts):
            unserved, _ = cheapest_load(instance, counts)
            lost = sum(hit_hardest(instance, need, dict(enumerate(counts))))
            cost = sum(o.cost * k for o, k in zip(instance.options, counts, strict=True))
            tried.append((round(unserved, 5), round(lost, 5), cost))
    best = min(tried)
    values = values_of(solve(instance))
    assert (values["served"], values.get("survived", 0.0)) == pytest.approx(best[:2], abs=2e-3)
    assert values["cost"] == pytest.approx(best[2], abs=2e-3)


@seeds(10, drawn=10, long=500)
def test_what_a_plan_promises_no_choice_of_the_scheduler_breaks(seed):
    instance = random_instance(random.Random(seed), one_width=False)
    (need,) = instance.needs
    for solution in ExactSolver().solve(instance, deadline_s=30, seed=0):
        _, promised = worst_loss(instance, need, solution.counts)
        hits = hit_hardest(instance, need, solution.counts)
        assert max(hits) <= promised + 1e-6
        known = values_of(solution)
        assert sum(hits) <= known.get("survived", math.inf) + 2e-3, "it is no worse than the program thinks"


def test_a_price_of_devices_says_what_more_of_them_would_keep_after_losses():
    a, b = pool("a", nodes=2), pool("b", nodes=1)
    instance = problem([a_need(2.5 * MOST, 9, "partition")], [option("m", a), option("m", b)], [a, b])
    sentences = reasons(instance, solve(instance), "")
    assert any("one x more in a/p" in text and "req/s more served after losses" in text for text in sentences), (
        sentences
    )


def test_where_nothing_keeps_replicas_apart_a_node_is_as_much_as_all_of_them():
    """As of jobs without accelerators, which a scheduler puts beside each other."""
    a, b = replace(pool("a", nodes=9), shares_nodes=True), pool("b", nodes=9, price=3.0)
    options = [option("m", a), option("m", b)]
    instance = problem([a_need(2 * MOST, 9, "node")], [option("m", a)], [a], objective=("cost",))
    loss, unserved = worst_loss(instance, instance.needs[0], {0: 9})
    assert (loss.words, unserved) == ("a node of a/p", pytest.approx(2 * MOST))
    assert placed(problem([a_need(MOST, 9, "node")], options, [a, b], objective=("cost",))) == {"a": 1, "b": 1}
