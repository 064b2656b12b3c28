"""Conflicts of rules against brute force: irreducible sets, and relaxations that are enough and no more."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from fabrictool.planner.explaining import conflict as conflict_module
from fabrictool.planner.explaining.conflict import Constraint, Constraints, conflict_of, possible
from fabrictool.planner.explaining.relaxations import explain_conflict, relaxations
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import ModelNeed
from tests.planner.fabrics import situation
from tests.planner.test_exact import option, pool, problem, solve

MOST = 7
"""Counts that brute force tries: more than any sum of minima and pins below."""

NOWHERE = ("", "")


def packs(where, sizes):
    free = [where.devices_per_node] * where.nodes
    for size in sorted(sizes, reverse=True):
        node = next((n for n, room in enumerate(free) if room >= size), None)
        if node is None:
            return False
        free[node] -= size
    return True


def keeps(instance, barred, active, counts):
    """Whether counts keep the rules in `active`, by code that shares nothing with formulation or rules."""
    named = {(rule.kind, rule.subject) for rule in active}
    placed = list(zip(instance.options, counts, strict=True))
    for i, (o, k) in enumerate(placed):
        if k and barred.get(i, frozenset()) & active:
            return False
        if o.key in instance.fixed and k != (instance.fixed[o.key] if ("unseen", o.model) in named else 0):
            return False
    for where in instance.pools:
        sizes = [o.tp for o, k in placed if o.pool.key == where.key for _ in range(k)]
        if ("devices", "/".join(where.key)) in named and not packs(where, sizes):
            return False
    return all(keeps_counts(need, placed, barred, active) for need in instance.needs)


def keeps_counts(need, placed, barred, active):
    named = {(rule.kind, rule.where) for rule in active if rule.subject == need.model}
    mine = [(i, o, k) for i, (o, k) in enumerate(placed) if o.model == need.model]
    total = sum(k for _, _, k in mine)
    if ("min", NOWHERE) in named and sum(k for _, o, k in mine if o.pool.stable) < need.minimum:
        return False
    stuck = sum(k for _, o, k in mine if o.pool.cluster == "far")
    if ("max", NOWHERE) in named and total > max(need.maximum, stuck):
        return False
    pins = {place: sum(k for _, o, k in mine if o.pool.within(*place)) for place in need.pins}
    if any(("pin", place) in named and there != need.pins[place] for place, there in pins.items()):
        return False
    sites = {o.pool.site for i, o, _ in mine if not barred.get(i, frozenset()) & active}
    here = [sum(k for _, o, k in mine if o.pool.site == site) for site in sites]
    spread = ("spread", NOWHERE) in named and len(sites) > 1
    return not spread or max(here) <= math.ceil(total / len(sites))


def exists(instance, barred, active):
    every = itertools.product(range(MOST + 1), repeat=len(instance.options))
    return any(keeps(instance, barred, frozenset(active), counts) for counts in every)


def random_instance(rng):
    pools = [
        pool(name, nodes=rng.randint(1, 2), per_node=rng.choice([1, 2]), stable=rng.random() < 0.7)
        for name in ("a", "b")[: rng.randint(1, 2)]
    ]
    far = pool("far")
    needs, options, fixed = [], [], {}
    for model in ("m", "n")[: rng.randint(1, 2)]:
        pins = {(rng.choice("ab"), rng.choice(["", "p"])): rng.randint(0, 3)} if rng.random() < 0.4 else {}
        most = rng.randint(1, 3)
        spread = rng.random() < 0.3
        needs.append(ModelNeed(model, 1.0, rng.randint(0, most), most, spread_sites=spread, pins=pins))
        for where in pools:
            if len(options) < 3 and rng.random() < 0.8:
                options.append(option(model, where, tp=rng.choice([1, where.devices_per_node])))
        if not spread and len(options) < 3 and rng.random() < 0.2:
            options.append(option(model, far))
            fixed[options[-1].key] = rng.randint(1, 2)
    instance = replace(problem(needs, options, pools), fixed=fixed)
    barred = {}
    for i, o in enumerate(instance.options):
        rules = [Constraint("trust", o.model, words="trust"), Constraint("tier", o.model, words="tier")]
        found = frozenset(rule for rule in rules if rng.random() < 0.2)
        if found and o.key not in fixed:
            barred[i] = found
    return instance, barred


def infeasible_instances(first, count):
    for seed in range(first, first + count):
        instance, barred = random_instance(random.Random(seed))
        rules = Constraints(instance, barred)
        if not exists(instance, barred, rules.all):
            yield seed, instance, barred, rules


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_conflicts_are_irreducible_and_relaxations_enough(first):
    seen = 0
    for seed, instance, barred, rules in infeasible_instances(first, 60):
        seen += 1
        conflict = conflict_of(rules)
        assert conflict, seed
        assert not exists(instance, barred, conflict), f"{seed}: {conflict} do not conflict"
        for rule in conflict:
            rest = [other for other in conflict if other != rule]
            assert exists(instance, barred, rest), f"{seed}: {rule} is not needed"
        for one in relaxations(rules, conflict):
            changed = Constraints(one.problem)
            assert exists(one.problem, {}, changed.all), f"{seed}: {one.words} is not enough"
            for less in a_little_less(one):
                assert not exists(less, {}, Constraints(less).all), f"{seed}: {one.words} is more than enough"
    assert seen > 10


def a_little_less(one):
    """The relaxed problem with its one number a step nearer to what it was."""
    (rule, *more) = one.rules
    if more or rule.kind not in ("min", "max", "devices"):
        return
    relaxed = one.problem
    if rule.kind == "devices":
        pools = [
            replace(where, nodes=where.nodes - 1) if "/".join(where.key) == rule.subject else where
            for where in relaxed.pools
        ]
        yield replace(relaxed, pools=tuple(pools))
        return
    step = {"min": {"minimum": 1}, "max": {"maximum": -1}}[rule.kind]
    ((name, by),) = step.items()
    needs = [
        replace(need, **{name: getattr(need, name) + by}) if need.model == rule.subject else need
        for need in relaxed.needs
    ]
    yield replace(relaxed, needs=tuple(needs))


def test_what_is_possible_is_what_brute_force_finds():
    both = {True: 0, False: 0}
    for seed in range(150):
        instance, barred = random_instance(random.Random(seed))
        rules = Constraints(instance, barred)
        found = possible(rules.with_only(rules.all))
        assert found == exists(instance, barred, rules.all), seed
        both[found] += 1
    assert min(both.values()) > 20


def test_rules_that_hold_have_no_conflict():
    a = pool("a", nodes=2)
    assert conflict_of(Constraints(problem([ModelNeed("m", 1.0, 2, 2)], [option("m", a)], [a]))) == []


def test_a_clock_ends_what_looks_for_a_conflict_and_for_what_would_be_enough():
    """However early, what is left conflicts; and nobody is told that each rule of it is needed."""
    sizes = set()
    for seed, instance, barred, rules in infeasible_instances(0, 24):
        whole = conflict_of(rules)
        for asked in range(0, 40, 8):
            clock = itertools.chain(itertools.repeat(1.0, asked), itertools.repeat(0.0))
            early = conflict_of(rules, lambda clock=clock: next(clock))
            assert not early or not exists(instance, barred, early), f"{seed}: {early} do not conflict"
            assert not early or set(early) <= set(rules.all)
            sizes.add(len(early) - len(whole))
        assert relaxations(rules, whole, lambda: 0.0) == []
    assert max(sizes) > 0


def test_two_conflicts_are_resolved_by_lowering_two_minima():
    a, b = pool("a", nodes=1), pool("b", nodes=2)
    needs = [ModelNeed("m", 1.0, 3, 9), ModelNeed("n", 1.0, 3, 9)]
    rules = Constraints(problem(needs, [option("m", a), option("n", b)], [a, b]))
    conflict = conflict_of(rules)
    assert len({rule.subject for rule in conflict if rule.kind == "min"}) == 1
    (together,) = relaxations(rules, conflict)
    assert together.words == "at least 1 instead of 3 replicas of m and 2 instead of 3 replicas of n"
    assert [need.minimum for need in together.problem.needs] == [1, 2]


def test_a_wider_replica_that_is_alone_on_its_node_counts_where_narrow_ones_may_be_together():
    """Of two on nodes that nobody keeps apart only wide ones are known to be on two."""
    a = replace(pool("a", nodes=2, per_node=8), keeps_apart=False)
    need = replace(ModelNeed("m", 0.1, 2, 4), spread_nodes=True)
    instance = problem([need], [option("m", a, tp=1), option("m", a, tp=8, capacity=8.0)], [a])
    assert solve(instance).counts == {1: 2}
    assert possible(instance)
    assert conflict_of(Constraints(instance)) == []


def test_maintenance_is_a_rule():
    a, b = pool("a", nodes=2), pool("b", nodes=2)
    instance = problem([ModelNeed("m", 1.0, 3, 9)], [option("m", a), option("m", b)], [a, b])
    rules = Constraints(replace(instance, outages=(frozenset({b.key}),)))
    conflict = conflict_of(rules)
    assert {rule.kind for rule in conflict} == {"min", "outage", "devices"}
    assert {one.rules[0].kind: one.words for one in relaxations(rules, conflict)} == {
        "min": "at least 2 instead of 3 replicas of m",
        "devices": "1 more x in a/p",
    }


# -- from blueprint and inventory -------------------------------------------------------------------------------------


def test_what_the_clock_left_no_time_for_is_said(tmp_path, monkeypatch):
    asked = situation(tmp_path, "trust: [alpha]\ntier: owned", old="min: 1, max: 40", new="min: 17, max: 40")
    assert explain_conflict(asked, lambda: 0.0) == []
    answered = []
    monkeypatch.setattr(conflict_module, "possible", lambda *which: answered.append(possible(*which)) or answered[-1])
    (conflict,) = explain_conflict(asked, lambda: 0.0 if answered else 9.0)
    assert conflict.code == "FT2006"
    assert conflict.message.endswith("(there was no time to leave out what is not needed for that)")
    assert CONFLICT.partition(": ")[2].split("; ")[1] in conflict.message


def test_of_many_models_those_are_named_that_take_most():
    here = pool("a", nodes=8)
    names = [f"m{number}" for number in range(9)]
    needs = [ModelNeed(name, 1.0, 1 + 5 * (name == "m7"), 9) for name in names]
    instance = problem(needs, [option(name, here) for name in names], [here])
    (complaint,) = explain_infeasible(instance).problems
    assert complaint.message == "the minimum replicas of m7, m0, m1, m2, m3, m4 and 3 more do not fit together"


def explained(folder, text, **changes):
    return [
        (one.code, one.place.thing, one.message, one.hint)
        for one in explain_conflict(situation(folder, text, **changes))
    ]


CONFLICT = (
    "these cannot hold together: m on alpha alone; at least 17 replicas of m on owned capacity; 16 h100-sxm in dear/gpu"
)
LOWER = "enough would be: at least 16 instead of 17 replicas of m"


def test_a_conflict_is_told_with_places_and_hints(tmp_path):
    told = explained(tmp_path, "trust: [alpha]\ntier: owned", old="min: 1, max: 40", new="min: 17, max: 40")
    assert told == [
        (
            "FT2006",
            "models.m.trust",
            CONFLICT,
            "relax any one of these",
        ),
        ("FT2007", "models.m.trust", "enough would be: m on any provider", "remove `trust`, or name more providers"),
        ("FT2007", "models.m.replicas.min", LOWER, "replicas: {min: 16}"),
        ("FT2007", "dear/gpu", "enough would be: 8 more h100-sxm in dear/gpu", "nodes: 3"),
    ]  # fmt: skip


def test_a_pin_is_lowered_no_further_than_needed(tmp_path):
    pinned = "place: {pin: [{cluster: dear, replicas: %s}]}"
    told = explained(tmp_path, pinned % 14, other=pinned % 4)
    pins = [one for one in told if one[1] == "models.m.place.pin"]
    assert pins[-1][2:] == ("enough would be: 12 instead of 14 replicas of m pinned to dear", "pin: {replicas: 12}")


def test_no_conflict_no_words(tmp_path):
    assert explained(tmp_path, "trust: [alpha]") == []
