"""What rules cost, what was not chosen, and the second-best placement."""

import itertools
from dataclasses import replace

import pytest

from fabrictool.planner.explaining import resolving, rules
from fabrictool.planner.explaining.alternatives import nearest_unused
from fabrictool.planner.explaining.rules import price_rules, rule_sentences, rules_of
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.situation import Situation, with_model
from fabrictool.planner.stages import amount, first_change, values_of, where
from tests.planner.fabrics import resolver, situation, solved, told
from tests.planner.test_exact import cheapest_load, fits, option, pool, problem, solve
from tests.planner.test_one_node import loaded

DEAR = "trust: [alpha]"


def priced(folder, text, **changes):
    now = situation(folder, text, **changes)
    built, _ = now.build()
    return now, built, solved(built)


def test_a_model_built_anew_alone_is_what_it_is_among_all(tmp_path):
    now, built, _ = priced(tmp_path, DEAR)
    changed = now.blueprint.models["m"].model_copy(update={"trust": None})
    alone = with_model(now, built, "m", changed)
    whole, _ = now.with_models({"m": {"trust": None}}).build()
    assert len(alone.options) > len(built.options)
    assert (alone.options, alone.needs, alone.pools) == (whole.options, whole.needs, whole.pools)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trust: [alpha]", "its trust allowlist"),
        ("tier: owned", "`tier: owned`"),
        ("place: {pin: [{cluster: dear, replicas: 2}]}", "its pin of 2 to dear"),
        ("place: {avoid: [cheap, spot]}", "`avoid`"),
        ("place: {prefer: [dear]}", "`prefer`"),
    ],
)
def test_a_rule_costs_what_the_plan_without_it_saves(tmp_path, text, words):
    now, built, solution = priced(tmp_path, text)
    (price,) = (p for p in price_rules(now, resolver(built, solution)) if p.rule.words == words)
    without, _ = situation(tmp_path).build()
    assert price.exact
    assert price.stage == "cost"
    saved = values_of(solution)["cost"] - values_of(solved(without))["cost"]
    assert saved > 0
    assert price.gain == pytest.approx(saved)
    assert f"m: without {words} cost would fall by {saved:.3g} CHF/h (solved again)" in list(
        rule_sentences(now, resolver(built, solution), "CHF")
    )


def test_bounds_cost_where_they_bind(tmp_path):
    now, built, solution = priced(tmp_path, "", old="min: 1, max: 40", new="min: 30, max: 40")
    (price,) = price_rules(now, resolver(built, solution))
    assert price.rule.words == "`replicas.min: 30`"
    assert price.stage == "cost"
    now, built, solution = priced(tmp_path, "", old="min: 1, max: 40", new="min: 1, max: 1")
    (price,) = (p for p in price_rules(now, resolver(built, solution)) if "max" in p.rule.words)
    assert price.stage == "served"
    assert price.gain > 0


def test_a_rule_that_binds_nothing_costs_nothing(tmp_path):
    now, built, solution = priced(tmp_path, "trust: [alpha, beta]\nplace: {spread: none}")
    assert list(rule_sentences(now, resolver(built, solution), "CHF")) == [
        "rules that cost nothing: m its trust allowlist"
    ]


def test_protection_costs_a_replica_that_nobody_asks_for(tmp_path):
    now, built, solution = priced(
        tmp_path, "protect: true", old="    replicas: {min: 1, max: 40}", new="    replicas: {min: 0, max: 40}"
    )
    assert not [rule for rule in rules_of(now.blueprint, built, solution) if rule.words == "`protect`"]
    demand = now.blueprint.models["m"].demand
    now = now.with_models({"m": {"demand": demand.model_copy(update={"rate": demand.rate * 0})}})
    built, _ = now.build()
    (price,) = price_rules(now, resolver(built, solved(built)))
    assert (price.rule.words, price.stage) == ("`protect`", "cost")


def test_large_problems_are_priced_by_the_relaxation(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "SMALL", 3)
    now, built, solution = priced(tmp_path, DEAR)
    (price,) = price_rules(now, resolver(built, solution))
    assert not price.exact
    assert price.stage == "cost"
    (sentence,) = rule_sentences(now, resolver(built, solution), "CHF")
    assert sentence.endswith("(by the relaxation)")


def test_only_so_many_rules_are_priced(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "MOST_RULES", 1)
    now, built, solution = priced(tmp_path, "trust: [alpha]\ntier: owned")
    assert len(list(price_rules(now, resolver(built, solution)))) == 1
    assert list(rule_sentences(now, resolver(built, solution), "CHF"))[-1].startswith("1 more rules")


# -- with `spread: node` ----------------------------------------------------------------------------------------------

SMALL = {"parallelism": {"tp": 1}, "demand": {"rate": "1 req/s", "input": "500 tok", "output": "100 tok"}}
LARGE = {
    "parallelism": {"tp": 2}, "demand": {"rate": "10000 req/s", "input": "500 tok", "output": "100 tok"},
}  # fmt: skip


def two_nodes(folder, *spread, most=4):
    """Three models of two small replicas, and one that would serve more with all that they leave of two nodes."""
    large = LARGE | {"replicas": {"min": 1, "max": most}}
    small = SMALL | {"replicas": {"min": 2, "max": 2}}
    models = {name: small | ({"place": {"spread": "node"}} if name in spread else {}) for name in "klm"}
    there = loaded(
        folder, partitions={"p": {"device": "h100-sxm", "devices_per_node": 8, "nodes": 2}}, **models, n=large
    )
    now = Situation(there.blueprint, there.inventory, ("c",), (), {}, 0.0)
    built, _ = now.build()
    return now, built, solved(built)


def price_of(now, built, solution, words, **more):
    (price,) = (p for p in price_rules(now, resolver(built, solution, **more)) if (p.rule.model, p.rule.words) == words)
    return price


MOST = "n", "`replicas.max: 4`"


def test_what_would_have_no_room_in_its_nodes_is_no_gain(tmp_path):
    """A fifth has devices, of two nodes one each."""
    now, built, solution = two_nodes(tmp_path, *"klm")
    price = price_of(now, built, solution, MOST)
    assert (price.stage, price.exact, price.at_least) == ("", True, True)
    sentences = list(rule_sentences(now, resolver(built, solution), "CHF"))
    (text,) = (text for text in sentences if "n `replicas.max: 4`" in text)
    assert text == "rules without which nothing better was seen that has room in the nodes: n `replicas.max: 4`"
    price = price_of(*two_nodes(tmp_path, *"kl"), MOST)
    assert (price.stage, price.exact, price.at_least) == ("served", True, False), "both of m are on one node then"


def test_what_has_room_is_a_gain_of_at_least_so_much(tmp_path):
    """Four have room, and five have devices: what the rows of that say is not told."""
    now, built, solution = two_nodes(tmp_path, *"klm", most=3)
    price = price_of(now, built, solution, ("n", "`replicas.max: 3`"))
    _, _, four = two_nodes(tmp_path, *"klm")
    assert (price.stage, price.exact, price.at_least) == ("served", True, True)
    assert price.gain == pytest.approx(values_of(solution)["served"] - values_of(four)["served"])
    (text,) = (text for text in rule_sentences(now, resolver(built, solution), "CHF") if text.startswith("n: "))
    assert text.startswith("n: without `replicas.max: 3` unserved demand would fall by at least ")


def test_devices_that_the_plans_search_left_free_are_there_without_a_rule(tmp_path):
    now, built, solution = two_nodes(tmp_path, "k")
    (a,) = built.pools
    price = price_of(now, replace(built, crowded={a.key: 2}), solution, MOST)
    assert price == price_of(now, built, solution, MOST)
    assert price.stage == "served"


def test_searching_again_keeps_to_the_work_that_there_is(tmp_path, monkeypatch):
    now, built, solution = two_nodes(tmp_path, *"klm")
    (rule,) = (rule for rule in rules_of(now.blueprint, built, solution) if (rule.model, rule.words) == MOST)
    monkeypatch.setattr(rules, "rules_of", lambda *_: [rule])
    asked = resolver(built, solution, work=1)
    (price,) = price_rules(now, asked)
    assert (price.exact, price.late) == (False, True)
    assert asked.work.spent == 1, "the second search had none left"


# -- what was not chosen ----------------------------------------------------------------------------------------------


def two_places(**second):
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=3.0)
    need = ModelNeed("m", 1.6, 0, 4)
    return problem([need], [option("m", a), option("m", b, **second)], [a, b], objective=("cost",))


def test_the_nearest_unused_option_costs_its_reduced_cost():
    instance = two_places()
    solution = solve(instance)
    (unused,) = nearest_unused(resolver(instance, solution)).values()
    assert instance.options[unused.option].pool.cluster == "b"
    assert unused.stage == "cost"
    assert unused.worse == pytest.approx((3.0 - 1.0) / 0.8)  # a replica carries 0.8 req/s
    sentences = told(instance, solution)
    assert sentences[0] == (
        "m: not on b/p (tp 1): each request/s there would mean 2.5 CHF/h more cost (marginal, by the relaxation)"
    )


def test_a_model_without_demand_is_told_by_the_replica():
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=3.0)
    instance = problem([ModelNeed("m", 0.0, 1, 4)], [option("m", a), option("m", b)], [a, b], objective=("cost",))
    (unused,) = nearest_unused(resolver(instance, solve(instance))).values()
    assert (unused.stage, unused.worse) == ("cost", pytest.approx(2.0))


def test_the_same_devices_elsewhere_are_no_alternative():
    a, b = pool("a", nodes=4), pool("b", nodes=4)
    instance = problem([ModelNeed("m", 0.8, 0, 4)], [option("m", a), option("m", b)], [a, b], objective=("cost",))
    assert nearest_unused(resolver(instance, solve(instance))) == {}


def test_the_second_best_is_the_best_that_differs():
    instance = two_places()
    solution = solve(instance)
    chosen = tuple(solution.counts.get(i, 0) for i in range(2))
    best = min(
        (cheapest_load(instance, counts)[0], sum(o.cost * k for o, k in zip(instance.options, counts, strict=True)))
        for counts in itertools.product(range(5), repeat=2)
        if counts != chosen and fits(instance, counts)
    )
    last = told(instance, solution)[-1]
    assert last == f"second best: m +1 on a/p (tp 1): {best[1] - values_of(solution)['cost']:.3g} CHF/h more cost"


def test_there_is_no_second_best_where_there_is_no_choice(monkeypatch):
    a = pool("a", nodes=2)
    instance = problem([ModelNeed("m", 1.6, 2, 2)], [option("m", a)], [a])
    assert told(instance, solve(instance)) == []
    monkeypatch.setattr(resolving, "FEW", 1)
    assert not any("second best" in sentence for sentence in told(two_places(), solve(two_places())))


# -- comparing --------------------------------------------------------------------------------------------------------


def test_the_first_stage_that_differs_counts_and_dust_does_not():
    names = ["served", "latency", "cost"]
    before = {"served": 0.0, "latency": 100.0, "cost": 5.0}
    assert first_change(before, {"served": 1e-7, "latency": 101.0, "cost": 4.0}, names) == ("cost", -1.0)
    assert first_change(before, {"served": 0.0, "latency": 90.0, "cost": 9.0}, names) == ("latency", -10.0)
    assert first_change(before, before, names) is None


@pytest.mark.parametrize(
    ("stage", "value", "currency", "text"),
    [("cost", 3.14159, "CHF", "3.14 CHF/h"), ("cost", 2, "", "2"), ("energy", 12345.6, "", "12,346 W"),
     ("latency", 1e-7, "", "0"), ("served", 0.5, "CHF", "0.5 req/s"), ("moves", 1.0, "", "1 replica")],
)  # fmt: skip
def test_amounts_have_units(stage, value, currency, text):
    assert amount(stage, value, currency) == text


def test_an_option_is_named_with_all_its_stages():
    a, b = pool("a"), pool("b")
    plain = option("m", a, tp=2)
    assert where(plain) == "a/p (tp 2)"
    assert where(replace(plain, pp=2, phase="prefill")) == "a/p (tp 2, pp 2) for prefill"
    assert where(replace(plain, others=((b, 1),))) == "a/p (tp 2) + b/p (tp 1)"
