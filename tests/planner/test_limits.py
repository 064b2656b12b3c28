"""Limits on devices, hours, power and money: what the program obeys, and what the verifier counts by itself."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from fabrictool.base.errors import InfeasibleError, InvalidInputError
from fabrictool.base.units import Power, Spending
from fabrictool.blueprint import load
from fabrictool.cli.plan_text import limit_lines
from fabrictool.domain.limits import Limit
from fabrictool.domain.plan import ReplicaPlacement, inputs_digest
from fabrictool.planner.assign import assign
from fabrictool.planner.explaining.relaxations import explain_conflict
from fabrictool.planner.explaining.rules import rule_sentences
from fabrictool.planner.forecast import forecast
from fabrictool.planner.judged import with_reasons
from fabrictool.planner.problem import ModelNeed, ResourceLimit
from fabrictool.planner.solvers import effort, parties, programs
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.planner.solvers.symmetry import merged
from fabrictool.planner.stages import values_of
from fabrictool.planner.verify import violations
from fabrictool.simulator.demanded import GroupDemand
from tests.planner.fabrics import INVENTORY, resolver, situation, solved, write_fabric
from tests.planner.test_exact import MOST, cheapest_load, fits, option, pool, problem, solve
from tests.planner.test_exact import random_instance as random_models
from tests.seeds import seeds


def limited(instance, resource, most, *clusters, name="quota"):
    pools = frozenset(where.key for where in instance.pools if not clusters or where.cluster in clusters)
    return replace(instance, limits=(*instance.limits, ResourceLimit(name, resource, resource, most, pools, unit="u")))


def placed(instance):
    return {instance.options[i].pool.cluster: k for i, k in solve(instance).counts.items()}


# -- in the program ------------------------------------------------------------------------------------------------


def two_places():
    near, far = pool("near", nodes=9, price=1.0), pool("far", nodes=9, price=5.0)
    options = [option("m", near), option("m", far)]
    return problem([ModelNeed("m", 4 * MOST, 0, 9)], options, [near, far], objective=("cost",))


@pytest.mark.parametrize(
    ("resource", "most", "where", "wanted"),
    [
        ("devices", 9.0, ["near"], {"near": 4}),
        ("devices", 3.0, ["near"], {"near": 3, "far": 1}),
        ("devices", 2.6, ["near"], {"near": 2, "far": 2}),
        ("devices", 0.0, ["near"], {"far": 4}),
        ("devices", 3.0, [], {"near": 3}),
        ("cost", 4.0, [], {"near": 4}),
        ("cost", 10.0, ["far"], {"near": 4}),
        ("power", 250.0, ["near"], {"near": 2, "far": 2}),
    ],
)
def test_no_more_is_used_than_a_limit_lets(resource, most, where, wanted):
    assert placed(limited(two_places(), resource, most, *where)) == wanted


def test_whole_nodes_count_with_all_their_devices():
    wide = replace(pool("wide", nodes=9, per_node=4), whole_nodes=True)
    instance = problem([ModelNeed("m", 4 * MOST, 0, 9)], [option("m", wide)], [wide], objective=("cost",))
    assert placed(limited(instance, "devices", 11)) == {"wide": 2}


def test_what_cannot_be_seen_may_be_more_and_gets_no_company():
    instance = two_places()
    key = next(o.key for o in instance.options if o.pool.cluster == "near")
    instance = replace(limited(instance, "devices", 2), fixed={key: 3}, current={key: 3})
    assert placed(instance) == {"near": 3}


def test_places_that_limits_tell_apart_are_not_one():
    a, b = pool("a"), pool("b")
    instance = problem([ModelNeed("m", 1.0, 0, 9)], [option("m", a), option("m", b)], [a, b])
    assert len(merged(instance).problem.pools) == 1
    assert len(merged(limited(instance, "devices", 9)).problem.pools) == 1, "it is of both"
    assert len(merged(limited(instance, "devices", 1, "a")).problem.pools) == 2


# -- against trying all --------------------------------------------------------------------------------------------


def use_of(instance, limit, counts):
    """Counted once more, by what pools are."""
    total = 0.0
    for column, count in zip(instance.options, counts, strict=True):
        where = column.pool
        each = {"devices": 1.0, "cost": where.price_per_node_hour, "power": where.power_per_node_w}[limit.resource]
        share = column.tp if limit.resource == "devices" else column.tp / where.devices_per_node
        total += count * share * each if where.key in limit.pools else 0.0
    return total


def random_instance(rng):
    instance = random_models(rng)
    for number in range(rng.randint(1, 2)):
        resource = rng.choice(["devices", "cost", "power"])
        most = {"devices": [1, 2, 4], "cost": [1.0, 2.5, 6.0], "power": [60.0, 150.0]}[resource]
        where = rng.sample([p.cluster for p in instance.pools], rng.randint(0, len(instance.pools)))
        instance = limited(instance, resource, float(rng.choice(most)), *where, name=f"l{number}")
    return replace(instance, objective=("cost",))


def best_of_all(instance):
    values = []
    most = {need.model: need.maximum for need in instance.needs}
    for counts in itertools.product(*(range(most[o.model] + 1) for o in instance.options)):
        if fits(instance, counts) and all(use_of(instance, its, counts) <= its.most + 1e-9 for its in instance.limits):
            cost = sum(o.cost * k for o, k in zip(instance.options, counts, strict=True))
            values.append((round(cheapest_load(instance, counts)[0], 5), cost))
    return min(values, default=None)


def keeps(instance):
    """Compares a solution with the best of all placements."""
    best = best_of_all(instance)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(instance)
        return
    solution = solve(instance)
    counts = [solution.counts.get(i, 0) for i in range(len(instance.options))]
    assert all(use_of(instance, its, counts) <= its.most + 1e-9 for its in instance.limits)
    values = values_of(solution)
    assert (values["served"], values.get("cost", 0.0)) == pytest.approx(best, abs=2e-3)


@seeds(30, drawn=30, long=1000)
def test_is_the_best_of_all_placements_within_the_limits(seed):
    keeps(random_instance(random.Random(seed)))


@seeds(10, drawn=10, long=300)
def test_a_search_in_parts_leaves_each_what_the_others_do_not_use(seed, monkeypatch):
    for module, name in ((programs, "TINY"), (programs, "FEW"), (effort, "AT_ONCE"), (effort, "AT_ONCE_BY_CAPACITY")):
        monkeypatch.setattr(module, name, 0)
    monkeypatch.setattr(parties, "TOGETHER", 1)
    monkeypatch.setattr(parties, "TOGETHER_BY_CAPACITY", 1)
    instance = random_instance(random.Random(seed))
    if best_of_all(instance) is None:
        return
    solution = solve(instance)
    counts = [solution.counts.get(i, 0) for i in range(len(instance.options))]
    assert fits(instance, counts)
    assert all(use_of(instance, its, counts) <= its.most + 1e-9 for its in instance.limits)


@pytest.mark.parametrize("name", ["cp", "cp-uniform", "tabu"])
@seeds(6, drawn=4, long=60)
def test_every_solver_keeps_within_them(name, seed):
    instance = random_instance(random.Random(seed))
    if best_of_all(instance) is None:
        return
    try:
        *_, solution = SOLVERS[name]().solve(instance, deadline_s=1, seed=0)
    except InfeasibleError:
        assert name == "cp-uniform", "its own rule may leave nothing"
        return
    counts = [solution.counts.get(i, 0) for i in range(len(solution.whole(instance).options))]
    whole = solution.whole(instance)
    assert all(use_of(whole, its, counts) <= its.most + 1e-9 for its in instance.limits)


# -- from documents to plan ----------------------------------------------------------------------------------------


def within(folder, rules="", *, blueprint=None, inventory=None):
    """The situation of the small fabric with limits."""
    plain = situation(folder, rules)
    return replace(
        plain,
        blueprint=plain.blueprint.model_copy(update={"limits": blueprint or {}}),
        inventory=plain.inventory.model_copy(update={"limits": inventory or {}}),
    )


EACH = [
    (Limit(provider="beta", devices=2), "devices", 2.0),
    (Limit(site="b", device_hours_per_month=2000), "devices", 2000 / 730),
    (Limit(cluster="spot", power=Power(1400)), "power", 1400.0),
    (Limit(cost=Spending(1825.0, "CHF", "month")), "cost", 2.5),
]


@pytest.mark.parametrize(("limit", "resource", "most"), EACH)
def test_a_limit_holds_as_it_is_written(tmp_path, limit, resource, most):
    fabric = within(tmp_path, inventory={"quota": limit})
    instance, tables = fabric.build()
    (its,) = instance.limits
    assert (its.resource, its.most) == (resource, pytest.approx(most))
    solution = solved(instance)
    placement = assign(instance, solution, {})
    assert violations(fabric.blueprint, fabric.inventory, placement) == []
    expected = forecast(fabric.blueprint, instance, solution, tables, "CHF", {}, {})
    assert expected.limits[0].used <= expected.limits[0].most
    assert expected.limits[0].most == pytest.approx(float(most) * its.scale)
    (line,) = limit_lines(expected)
    assert line.startswith("limit quota: ")
    free, _ = within(tmp_path).build()
    without = assign(free, solved(free), {})
    (broken,) = violations(fabric.blueprint, fabric.inventory, without)
    assert broken.startswith("limit quota: "), "without it more is used, or this shows nothing"


def test_an_account_is_that_of_its_jobs(tmp_path):
    file = write_fabric(tmp_path)
    inventory = file.parent / "inventory.yaml"
    text = inventory.read_text()
    for name, kind in (("dear", "account"), ("cheap", "A")):
        head, _, tail = text.partition(f"  {name}:\n")
        text = f"{head}  {name}:\n{tail.replace('CHF/h}', f'CHF/h, job: {{options: {{{kind}: proj7}}}}}}', 1)}"
    inventory.write_text(text + "limits: {quota: {account: proj7, devices: 3}}\n")
    loaded = load(file, environment={})
    plain = situation(tmp_path / "other") if (tmp_path / "other").mkdir() is None else None
    fabric = replace(plain, blueprint=loaded.blueprint, inventory=loaded.inventory)
    (limit,) = fabric.build()[0].limits
    assert limit.pools == {("cheap", "gpu"), ("dear", "gpu")}
    assert limit.words == "3 devices of account proj7"


def test_a_limit_that_minima_exceed_is_named_with_what_would_be_enough(tmp_path):
    fabric = within(
        tmp_path,
        "place: {pin: [{cluster: cheap, replicas: 4}]}",
        blueprint={"quota": Limit(provider="beta", devices=2)},
    )
    instance, _ = fabric.build()
    with pytest.raises(InfeasibleError, match=r"FT2001.*quota"):
        solved(instance)
    conflict, *enough = explain_conflict(fabric)
    assert conflict.code == "FT2006"
    assert "at most 2 devices of provider beta (limits.quota.devices)" in conflict.message
    assert "just 4 replicas of m on cheap" in conflict.message
    raised = next(its for its in enough if its.place.thing == "limits.quota.devices")
    assert raised.message == "enough would be: 4 devices of provider beta instead of 2 devices"
    assert raised.hint == "devices: 4"
    again = within(
        tmp_path,
        "place: {pin: [{cluster: cheap, replicas: 4}]}",
        blueprint={"quota": Limit(provider="beta", devices=4)},
    )
    assert solved(again.build()[0]).counts


def test_what_a_limit_costs_is_said(tmp_path):
    fabric = within(tmp_path, blueprint={"quota": Limit(provider="beta", devices=2), "wide": Limit(devices=1000)})
    instance, _ = fabric.build()
    sentences = list(rule_sentences(fabric, resolver(instance, solved(instance)), "CHF"))
    (price,) = [text for text in sentences if "quota" in text]
    assert price.startswith("without limit quota (2 devices of provider beta) cost would fall by ")
    assert not any("wide" in text for text in sentences), "it stands in nobody's way"


def test_demand_that_a_limit_leaves_unserved_says_why(tmp_path):
    fabric = within(tmp_path, blueprint={"quota": Limit(cost=Spending(2.5, "CHF", "h"))})
    instance, tables = fabric.build()
    solution = solved(instance)
    expected = with_reasons(
        forecast(fabric.blueprint, instance, solution, tables, "CHF", {}, {}), instance, solution, ""
    )
    model = next(its for its in expected.models if its.served < 1.0)
    assert model.why == "devices are free, but no more may be used of limit quota (2.5 CHF/h of the whole fabric)"


@pytest.mark.parametrize(
    ("allowed", "most", "why"),
    [
        ("alpha", 1, "devices are free, but no more may be used of limit quota (1 device of provider alpha)"),
        ("gamma", 99, "no partition that may hold a replica is with a provider that its unserved groups allow"),
    ],
)
def test_a_group_that_lacks_a_provider_says_why(tmp_path, allowed, most, why):
    fabric = within(tmp_path, blueprint={"quota": Limit(provider="alpha", devices=most)})
    instance, tables = fabric.build()
    need = next(its for its in instance.needs if its.model == "m")
    parts = (GroupDemand("g", 0.5, frozenset({allowed})), GroupDemand("", 0.5))
    instance = replace(instance, needs=(replace(need, parts=parts), *(n for n in instance.needs if n != need)))
    solution = solved(instance)
    expected = with_reasons(
        forecast(fabric.blueprint, instance, solution, tables, "CHF", {}, {}), instance, solution, ""
    )
    assert next(its for its in expected.models if its.model == "m").why == why


def test_what_has_no_limits_says_nothing_of_them(tmp_path):
    plain, tight = within(tmp_path), within(tmp_path, blueprint={"quota": Limit(devices=5)})
    assert inputs_digest(plain.blueprint, plain.inventory) != inputs_digest(tight.blueprint, tight.inventory)
    instance, tables = plain.build()
    expected = forecast(plain.blueprint, instance, solved(instance), tables, "CHF", {}, {})
    assert "limits" not in msgspec.to_builtins(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{provider: beta, site: b, devices: 1}", "FT1283 limits.q: a limit is of one part of the fabric, not of"),
        ("{provider: beta}", "FT1283 limits.q: this limits nothing"),
        ("{provider: gamma, devices: 1}", "FT1201 limits.q.provider: there is no provider `gamma`"),
        ("{site: c, devices: 1}", "FT1202 limits.q.site: there is no site `c`"),
        ("{cluster: c, devices: 1}", "FT1203 limits.q.cluster: there is no cluster `c`"),
        ("{account: p, devices: 1}", "FT1283 limits.q.account: there is no account `p`"),
        ("{cost: 3 EUR/h}", "FT1283 limits.q.cost: EUR, and prices are in CHF"),
        ("{cost: 3 CHF/year}", "FT1111"),
        ("{cost: 3}", "FT1110"),
        ("{devices: -1}", "FT1"),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_meant(tmp_path, text, words):
    for document in ("blueprint", "inventory"):
        file = write_fabric(tmp_path)
        into = file if document == "blueprint" else file.parent / "inventory.yaml"
        into.write_text(f"{into.read_text()}\nlimits:\n  q: {text}\n")
        with pytest.raises(InvalidInputError) as raised:
            load(file, environment={})
        told = [f"{its.code} {its.message}" for its in raised.value.problems]
        assert any(line.startswith(words) for line in told), told


@pytest.mark.parametrize("document", ["blueprint", "inventory"])
def test_what_has_no_price_is_told_beside_a_limit_on_money(tmp_path, document):
    for limit, told in (
        ("{cost: 9 CHF/h}", ["limits.q.cost: spot/gpu: without a price, so nothing of it counts"]),
        ("{provider: alpha, cost: 9 CHF/h}", []),
        ("{devices: 9}", []),
    ):
        file = write_fabric(tmp_path, inventory=INVENTORY.replace(", price: 4 CHF/h", ""))
        into = file if document == "blueprint" else file.parent / "inventory.yaml"
        into.write_text(f"{into.read_text()}\nlimits: {{q: {limit}}}\n")
        warnings = load(file, environment={}).warnings
        assert [its.message for its in warnings if its.code == "FT1284"] == told


def test_one_name_is_one_limit(tmp_path):
    file = write_fabric(tmp_path)
    for into in (file, file.parent / "inventory.yaml"):
        into.write_text(f"{into.read_text()}\nlimits: {{q: {{devices: 3}}}}\n")
    with pytest.raises(InvalidInputError, match="the inventory has a limit of this name"):
        load(file, environment={})


def test_what_stands_out_of_sight_of_a_model_that_is_gone_counts(tmp_path):
    stray = ReplicaPlacement(
        replica="gone/0", model="gone", provider="alpha", site="a", cluster="dear", partition="gpu",
        device="h100-sxm", tp=4,
    )  # fmt: skip
    there = within(tmp_path, blueprint={"whole": Limit(devices=6)})
    hidden = replace(there, usable=("cheap", "spot"), unseen=(stray,))
    built, _ = hidden.build()
    (limit,) = built.limits
    assert limit.taken == 4.0
    found = solved(built)
    assert limit.used(built.options, found.counts) == 6.0
    assert sum(built.options[i].devices * count for i, count in found.counts.items()) == 2
    placement = assign(built, found, {}, hidden.unseen)
    assert not violations(hidden.blueprint, hidden.inventory, placement, {"dear"}, 0.0)
