"""A demand that is divided by consumer group, against a flow of our own between groups and providers."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.units import Share
from fabrictool.blueprint import load
from fabrictool.cli.plan_text import group_lines
from fabrictool.domain.blueprint import Gateway
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.plan import inputs_digest
from fabrictool.domain.specs import GatewaySpec, weight_key
from fabrictool.domain.state import State
from fabrictool.planner.assign import assign
from fabrictool.planner.chosen import SearchOptions, best
from fabrictool.planner.forecast import forecast
from fabrictool.planner.group_flows import divided_demands, group_flows
from fabrictool.planner.group_service import services
from fabrictool.planner.problem import ModelNeed, Transfer
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.planner.solvers.symmetry import merged
from fabrictool.planner.stages import values_of
from fabrictool.planner.survival import worst_loss
from fabrictool.planner.units import wanted_units
from fabrictool.planner.weights import LEAST, gateway_group_weights, weighted
from fabrictool.simulator.demanded import GroupDemand
from tests.planner.fabrics import situation, solved, write_fabric
from tests.planner.test_exact import MOST, fits, option, pool, problem, solve
from tests.seeds import seeds


def part(name, share, *allowed):
    return GroupDemand(name, share, frozenset(allowed))


def rest(share):
    return GroupDemand("", share)


def placed(instance):
    return {instance.options[i].pool.cluster: k for i, k in solve(instance).counts.items()}


def served_of(instance, solution):
    (need,) = instance.needs
    return {service.flow.group.group: service.flow.served for service in services(instance, need, solution)}


def test_a_group_brings_replicas_to_where_it_may_go():
    cheap, dear = pool("cheap", nodes=9, price=1.0), pool("dear", nodes=9, price=5.0)
    options = [option("m", cheap), option("m", dear)]
    need = ModelNeed("m", 4 * MOST, 0, 9)
    assert placed(problem([need], options, [cheap, dear], objective=("cost",))) == {"cheap": 4}
    need = replace(need, parts=(part("g", 0.5, "dear"), rest(0.5)))
    assert placed(problem([need], options, [cheap, dear], objective=("cost",))) == {"cheap": 2, "dear": 2}


def test_capacity_where_a_group_may_not_go_leaves_it_unserved():
    here, there = pool("here", nodes=9), pool("there", nodes=1)
    need = ModelNeed("m", 4 * MOST, 0, 9, parts=(part("g", 0.5, "there"), rest(0.5)))
    instance = problem([need], [option("m", here), option("m", there)], [here, there])
    solution = solve(instance)
    assert values_of(solution)["served"] == pytest.approx(MOST, abs=1e-4)
    assert served_of(instance, solution) == {"g": pytest.approx(0.5, abs=1e-4), "": 1.0}


def test_partitions_of_two_providers_are_not_one_for_groups():
    a, b = pool("a"), pool("b")
    need = ModelNeed("m", 1.0, 0, 9)
    divided = replace(need, parts=(part("g", 0.5, "a"), rest(0.5)))
    for needs, pools in (([need], 1), ([divided], 2)):
        instance = problem(needs, [option("m", a), option("m", b)], [a, b], objective=("cost",))
        assert len(merged(instance).problem.pools) == pools


def test_how_many_may_answer_a_group_and_how_many_after_a_loss():
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=2, per_node=2, price=2.0)
    parts = (part("both", 0.4, "a", "b"), part("b-only", 0.4, "b"), part("nobody", 0.1, "z"), rest(0.1))
    need = ModelNeed("m", 4 * MOST, 0, 9, parts=parts, survive="node")
    instance = problem([need], [option("m", a), option("m", b)], [a, b], objective=("cost",))
    solution = solve(instance)
    counts = {instance.options[i].pool.cluster: k for i, k in solution.counts.items()}
    told = {its.flow.group.group: (its.replicas, its.left) for its in services(instance, need, solution)}
    every = counts["a"] + counts["b"]
    assert told == {
        "both": (every, every - min(2, counts["b"])),
        "b-only": (counts["b"], counts["b"] - min(2, counts["b"])),
        "nobody": (0, 0),
        "": (every, every - min(2, counts["b"])),
    }
    assert counts["b"] == 4, "two are left when two of them go with their node"


def test_what_a_loss_leaves_has_to_be_where_each_group_may_go():
    a, b, c = (pool(name, nodes=9, price=price) for name, price in zip("abc", (1.0, 2.0, 8.0), strict=True))
    options = [option("m", where) for where in (a, b, c)]
    need = ModelNeed("m", 4 * MOST, 0, 30, survive="provider")
    instance = problem([need], options, [a, b, c], objective=("cost",))
    assert placed(instance) == {"a": 4, "b": 4}
    instance = replace(instance, needs=(replace(need, parts=(part("g", 0.5, "b", "c"), rest(0.5))),))
    solution = solve(instance)
    assert {instance.options[i].pool.cluster: k for i, k in solution.counts.items()} == {"a": 2, "b": 2, "c": 2}
    assert worst_loss(instance, instance.needs[0], solution.counts) == (None, 0.0)


def test_a_pair_is_seen_by_both_its_providers():
    a, b = pool("a"), pool("b")
    halves = [replace(option("m", a), phase="prefill"), replace(option("m", b), phase="decode")]
    way = {("m", a.key, b.key): Transfer(0.1, 1.0)}
    for allowed, served in ((("a", "b"), 1.0), (("a",), 0.0), (("b",), 0.0)):
        need = ModelNeed("m", 0.5, 0, 9, parts=(part("g", 1.0, *allowed),))
        instance = replace(problem([need], halves, [a, b]), transfers=way)
        solution = solve(instance)
        assert values_of(solution)["served"] == pytest.approx(0.5 * (1 - served), abs=1e-5)
        assert served_of(instance, solution) == {"g": pytest.approx(served, abs=1e-5)}


# -- from blueprint to plan ----------------------------------------------------------------------------------------

GROUPS = "trust: {groups: {lab-a: {allow: [alpha]}, lab-b: {allow: [beta]}}}\nmodels:"


def groups_in(folder, shares, rules="survive: node"):
    """The situation of the small fabric with a demand that is divided."""
    other = situation(folder, rules, old="models:", new=GROUPS)
    demand = other.blueprint.models["m"].demand.model_copy(update={"groups": shares})
    return other.with_models({"m": {"demand": demand}})


def test_the_plan_says_what_each_group_gets(tmp_path):
    divided = groups_in(tmp_path, {"lab-a": Share(0.5)})
    instance, tables = divided.build()
    assert instance.needs[0].parts == (part("lab-a", 0.5, "alpha"), rest(0.5))
    assert divided.with_models({"m": {"demand": None}}).build()[0].needs[0].parts == ()
    solution = solved(instance)
    expected = forecast(divided.blueprint, instance, solution, tables, "CHF", {}, {})
    m, other = expected.models
    assert other.groups is msgspec.UNSET
    there = {
        where: sum(
            k
            for i, k in solution.counts.items()
            if (o := instance.options[i]).model == "m" and o.pool.provider == where
        )
        for where in ("alpha", "beta")
    }
    assert [(its.group, its.share, its.served, its.replicas) for its in m.groups] == [
        ("lab-a", 0.5, 1.0, there["alpha"]), ("", 0.5, 1.0, there["alpha"] + there["beta"]),
    ]  # fmt: skip
    assert there["alpha"], "it is the dear provider: nothing else brings a replica there"
    first, second = group_lines(m)
    assert first.startswith("m for group lab-a (50%): all served, by alpha; ")
    assert f"{there['alpha']} of {m.replicas} replicas may answer, {m.groups[0].left} after any node is lost" in first
    assert m.groups[0].sent == {"alpha": 1.0}
    theirs = m.groups[1].sent
    assert second.startswith(
        f"m for everybody else (50%): all served, {theirs['alpha'] * 100:.3g}% by alpha, {theirs['beta'] * 100:.3g}% by"
    )
    lacking = msgspec.structs.replace(m.groups[0], served=0.999, left=None)
    (line,) = group_lines(msgspec.structs.replace(m, groups=(lacking,)))
    assert line.startswith("▲ m for group lab-a (50%): only 99% of that served, by alpha; ")
    assert group_lines(msgspec.structs.replace(m, groups=(lacking, *m.groups)), lacking=True) == [
        line.removeprefix("▲ ")
    ]


def test_a_plan_without_parts_says_nothing_of_groups(tmp_path):
    plain = situation(tmp_path, old="models:", new=GROUPS)
    before = inputs_digest(plain.blueprint, plain.inventory)
    divided = groups_in(tmp_path, {"lab-a": Share(0.5)}, "")
    assert b"groups" not in msgspec.json.encode(
        plain.blueprint.models["m"].demand.model_dump(mode="json", exclude={"groups"})
    )
    assert inputs_digest(divided.blueprint, divided.inventory) != before


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            "demand: {RATE, groups: {lab-a: 60%, lab-b: 50%}}",
            "FT1282 models.n.demand: the groups ask for 110% of the demand",
        ),
        ("demand: {RATE, groups: {lab-c: 60%}}", "FT1208 models.n.demand.groups.lab-c: there is no group `lab-c`"),
        (
            "demand: {RATE, groups: {lab-a: 60%}}\n    groups: [lab-b]",
            "FT1282 models.n.demand.groups.lab-a: lab-a may not",
        ),
        ("demand: {RATE, groups: {lab-a: 0.6}}", "FT1110"),
        ("demand: {RATE, groups: {}}", "FT1"),
    ],
)
def test_shares_that_cannot_be(tmp_path, rules, words):
    file = write_fabric(tmp_path)
    text = rules.replace("RATE", "rate: 2 req/s, input: 500 tok, output: 100 tok")
    file.write_text(file.read_text().replace("models:", f"{GROUPS}\n  n:\n    source: hf://Qwen/Qwen3-32B\n    {text}"))
    with pytest.raises(InvalidInputError) as raised:
        load(file, environment={})
    assert any(f"{its.code} {its.message}".startswith(words) for its in raised.value.problems), raised.value.problems


def applied_groups(folder, shares, **more):
    """What a whole plan says, and the spec of its gateway."""
    there = groups_in(folder, shares, "")
    blueprint = there.blueprint.model_copy(update={"gateway": Gateway.model_validate(GATEWAY)})
    there = replace(there, blueprint=blueprint, **more)
    chosen = best(there, SearchOptions(work_s=5.0))
    evidence = Evidence(fabric="f", lineage="l", at=0.0, clusters={}, specs={}, state=State(fabric="f", lineage="l"))
    units = wanted_units(blueprint, there.inventory, chosen.placement, evidence, ())
    (gateway,) = (unit.spec for unit in units.values() if isinstance(unit.spec, GatewaySpec))
    return chosen, gateway


GATEWAY = {"cluster": "dear", "listen": "127.0.0.1:8001", "mesh": "127.0.0.1:8002"}


def test_the_plans_flows_are_the_weights_of_its_gateway(tmp_path):
    chosen, gateway = applied_groups(tmp_path, {"lab-a": Share(0.3), "lab-b": Share(0.3)})
    assert chosen.played["m"].figures.requests > 0
    seen = {}
    for its in chosen.placement.replicas:
        assert bool(its.group_weights) is (its.model == "m")
        if its.group_weights:
            key = weight_key(its.model, its.cluster, its.partition, its.tp)
            assert gateway.weights_by_group[key] == its.group_weights
            seen[its.provider] = its.group_weights.keys()
    assert seen == {"alpha": {"lab-a", ""}, "beta": {"lab-b", ""}}, "nothing is said of whom a group may not use"
    written = msgspec.json.decode(msgspec.json.encode(chosen.placement))
    assert {tuple(its.get("group_weights", ())) for its in written["replicas"] if its["model"] == "other"} == {()}
    again = msgspec.convert(written, type=type(chosen.placement))
    assert again == chosen.placement


def test_weights_of_groups_that_are_about_right_change_no_gateway(tmp_path):
    shares = {"lab-a": Share(0.3), "lab-b": Share(0.3)}
    chosen, gateway = applied_groups(tmp_path, shares)
    divided = divided_demands(chosen.problem, chosen.solution)
    near = {
        key: {group: weight * 0.9 if weight < 1 else 1.0 for group, weight in its.items()}
        for key, its in gateway.weights_by_group.items()
    }
    assert any(weight < 1 for its in near.values() for weight in its.values())
    kept = weighted(chosen.problem, chosen.solution, chosen.placement, {}, near, divided)
    assert gateway_group_weights(kept.replicas, near) == near
    for change in (lambda weight: 0.0, lambda weight: 3.0 * weight):
        off = {
            key: {group: change(weight) if weight < 1 else 1.0 for group, weight in its.items()}
            for key, its in gateway.weights_by_group.items()
        }
        mended = weighted(chosen.problem, chosen.solution, chosen.placement, {}, off, divided)
        assert gateway_group_weights(mended.replicas, off) == gateway.weights_by_group


def test_nobody_is_dealt_out_to_a_replica_that_is_full_of_others():
    """The most equal flow that fits: whom nobody keeps out goes where everybody else goes, in proportion."""
    a, b, c = (pool(name, nodes=9, price=1.0) for name in "abc")
    parts = (part("a-only", 0.5, "a"), part("a-or-b", 0.25, "a", "b"), rest(0.25))
    need = ModelNeed("m", 8 * MOST, 0, 30, parts=parts)
    instance = problem([need], [option("m", where) for where in (a, b, c)], [a, b, c])
    load = 8 * MOST
    loads = {0: 0.5 * load, 1: 0.3 * load, 2: 0.2 * load}
    solution = replace(solve(instance), counts=dict.fromkeys(loads, 9), loads=loads)
    flows = {flow.group.group: flow.into for flow in group_flows(instance, need, solution)}
    assert flows["a-only"] == {0: pytest.approx(0.5 * load, rel=1e-4)}
    assert flows["a-or-b"] == {1: pytest.approx(0.25 * load, rel=1e-4)}
    assert flows[""] == {1: pytest.approx(0.05 * load, rel=1e-3), 2: pytest.approx(0.2 * load, rel=1e-4)}
    free = replace(solution, loads={0: 0.6 * load, 1: 0.2 * load, 2: 0.2 * load})
    flows = {flow.group.group: flow.into for flow in group_flows(instance, need, free)}
    # C can be filled by the rest alone, which leaves 0.05 of it: as it would like, three quarters of that with a.
    assert flows[""] == {n: pytest.approx(share * load, rel=1e-3) for n, share in enumerate((0.0375, 0.0125, 0.2))}
    assert flows["a-or-b"] == {n: pytest.approx(share * load, rel=1e-3) for n, share in enumerate((0.0625, 0.1875))}


@pytest.mark.parametrize(
    ("prompts", "answers", "expected"),
    [
        ((10.0, 0.0), (0.0, 10.0), (1.0, 1.0)),
        ((10.0, 0.0), (7.5, 2.5), (1.0, 0.333)),
        ((7.5, 2.5), (10.0, 0.0), (1.0, 0.333)),
        ((10.0, 0.0), (10.0, 0.0), (1.0, LEAST)),
    ],
)
def test_a_weight_serves_both_phases_of_a_kind(prompts, answers, expected):
    """Gateways know one weight for replicas that are alike but for the phase."""
    pools = [pool(name, nodes=4, per_node=8) for name in "ab"]
    need = ModelNeed("m", 10.0, 0, 9, parts=(part("g", 1.0, "a", "b"),))
    options = [replace(option("m", where), phase=phase) for phase in ("prefill", "decode") for where in pools]
    ways = {("m", p.key, q.key): Transfer(0.1, 1.0) for p in pools for q in pools}
    instance = replace(problem([need], options, pools), transfers=ways)
    planned = {"prefill": dict(zip("ab", prompts, strict=True)), "decode": dict(zip("ab", answers, strict=True))}
    loads = {i: planned[its.phase][its.pool.cluster] for i, its in enumerate(instance.options)}
    solution = replace(solve(instance), counts=dict.fromkeys(loads, 1), loads=loads)
    placement = assign(instance, solution, {})
    dealt = weighted(instance, solution, placement, {}, {}, divided_demands(instance, solution)).replicas
    for at, its in enumerate("ab"):
        here = [replica for replica in dealt if replica.cluster == its]
        weight = pytest.approx(expected[at], abs=0.005)
        assert [replica.weight for replica in here] == [weight] * 2
        assert [replica.group_weights for replica in here] == [{"g": weight}] * 2


@seeds(30, drawn=30, long=600)
def test_flows_fit_the_planned_loads_and_serve_what_is_served(seed):
    """On all kinds of pairs and replicas, allowlists and loads."""
    rng = random.Random(seed)
    pools = [pool(name, nodes=4, per_node=4) for name in "abcd"[: rng.randint(2, 4)]]
    phases = ("prefill", "decode") if rng.random() < 0.4 else ()
    options = [replace(option("m", where), phase=phase) for where in pools for phase in ("unified", *phases)]
    options.sort(key=lambda its: its.key)
    names = [where.provider for where in pools]
    shares = [rng.choice([0.1, 0.2, 0.3]) for _ in range(rng.randint(1, 3))]
    parts = [part(f"g{n}", share, *rng.sample(names, rng.randint(1, len(names)))) for n, share in enumerate(shares)]
    need = ModelNeed("m", rng.choice([0.01, 2.0, 500.0]), 0, 9, parts=(*parts, rest(1.0 - sum(shares))))
    ways = {("m", p.key, q.key): Transfer(0.1, 1.0) for p in pools for q in pools} if phases else {}
    instance = replace(problem([need], options, pools), transfers=ways)
    loads = {i: need.rate * rng.choice([0.0, rng.random()]) for i in range(len(options))}
    solution = replace(solve(instance), counts={i: rng.randint(1, 4) for i in loads}, loads=loads)
    flows = group_flows(instance, need, solution)
    assert [flow.group for flow in flows] == list(need.parts)
    near = 1e-4 * need.rate
    for i, its in enumerate(instance.options):
        assert sum(flow.into.get(i, 0.0) for flow in flows) <= loads[i] + near
        for flow in flows:
            allowed = flow.group.allowed
            assert allowed is None or not flow.into.get(i) or its.pool.provider in allowed
    for flow in flows:
        first = sum(rate for i, rate in flow.into.items() if instance.options[i].phase != "decode")
        pairs = {
            phase: sum(rate for i, rate in flow.into.items() if instance.options[i].phase == phase)
            for phase in ("prefill", "decode")
        }
        assert pairs["prefill"] == pytest.approx(pairs["decode"], abs=near)
        assert first == pytest.approx(flow.served * flow.group.share * need.rate, abs=near)
        assert sum(flow.places.values()) == pytest.approx(first, abs=near)
        assert sum(flow.sent.values()) == pytest.approx(1.0 if flow.places else 0.0)
    if not phases:
        room = dict.fromkeys(names, 0.0)
        for i, load in loads.items():
            room[instance.options[i].pool.provider] += load
        allowed = [room if its.allowed is None else its.allowed for its in need.parts]
        most = most_served([its.share * need.rate for its in need.parts], allowed, room)
        assert sum(sum(flow.places.values()) for flow in flows) == pytest.approx(most, abs=near)


# -- against trying all --------------------------------------------------------------------------------------------


def most_served(rates, allowed, room):
    """The largest flow from groups to providers: a flow has no more than its least cut lets through."""
    groups = range(len(rates))
    cuts = []
    for size in range(len(rates) + 1):
        for inside in itertools.combinations(groups, size):
            reached = {place for g in inside for place in allowed[g]}
            cuts.append(sum(rates[g] for g in groups if g not in inside) + sum(room[place] for place in reached))
    return min(cuts)


def random_instance(rng):
    pools = [
        pool(name, nodes=rng.randint(1, 2), per_node=rng.choice([1, 2]), price=rng.choice([1.0, 2.0, 5.0]))
        for name in ("a", "b", "c")[: rng.randint(2, 3)]
    ]
    options = [option("m", where, capacity=rng.choice([0.5, 1.0, 3.0])) for where in pools]
    names = [where.provider for where in pools]
    shares = [rng.choice([0.2, 0.3]) for _ in range(rng.randint(1, 3))]
    parts = [part(f"g{n}", share, *rng.sample(names, rng.randint(1, len(names)))) for n, share in enumerate(shares)]
    need = ModelNeed("m", rng.choice([0.5, 2.0, 5.0]), 0, 4, parts=(*parts, rest(1.0 - sum(shares))))
    return problem([need], options, pools, objective=("cost",))


def served_at_most(instance, counts, without=""):
    (need,) = instance.needs
    room = {where.provider: 0.0 for where in instance.pools}
    for column, k in zip(instance.options, counts, strict=True):
        room[column.pool.provider] += k * column.levels[-1].rate * (column.pool.provider != without)
    allowed = [room if group.allowed is None else group.allowed for group in need.parts]
    return most_served([group.share * need.rate for group in need.parts], allowed, room)


@seeds(20, drawn=20, long=600)
def test_serves_as_much_as_the_best_of_all_placements_and_flows(seed):
    instance = random_instance(random.Random(seed))
    (need,) = instance.needs
    tried = [
        (
            round(need.rate - served_at_most(instance, counts), 5),
            sum(o.cost * k for o, k in zip(instance.options, counts, strict=True)),
        )
        for counts in itertools.product(range(need.maximum + 1), repeat=len(instance.options))
        if fits(instance, counts)
    ]
    best = min(tried)
    solution = solve(instance)
    values = values_of(solution)
    assert (values["served"], values["cost"]) == pytest.approx(best, abs=2e-3)
    told = services(instance, need, solution)
    unserved = sum(its.flow.group.share * need.rate * (1 - its.flow.served) for its in told)
    assert unserved == pytest.approx(values["served"], abs=2e-3), "the forecast agrees with the program"


@seeds(20, drawn=20, long=600)
def test_what_the_worst_loss_leaves_is_the_largest_flow_without_it(seed):
    rng = random.Random(seed)
    instance = random_instance(rng)
    need = replace(instance.needs[0], survive="provider")
    instance = replace(instance, needs=(need,))
    counts = [rng.randint(0, 3) for _ in instance.options]
    _, unserved = worst_loss(instance, need, dict(enumerate(counts)))
    left = min(served_at_most(instance, counts, where.provider) for where in instance.pools)
    # Whom nobody may serve in any case loses nothing: of theirs, nothing is asked for.
    placed_with = {o.pool.provider for o, k in zip(instance.options, counts, strict=True) if k}
    lost = [its for its in need.parts if its.allowed is not None and not its.allowed & placed_with]
    if not lost and any(counts):
        assert unserved == pytest.approx(max(0.0, need.rate - left), abs=1e-6)


@pytest.mark.parametrize("name", ["exact", "cp", "cp-uniform"])
@seeds(4, drawn=2, long=40)
def test_the_forecast_agrees_with_each_solver_that_takes_groups(name, seed):
    instance = random_instance(random.Random(seed))
    (need,) = instance.needs
    *_, solution = SOLVERS[name]().solve(instance, deadline_s=1, seed=0)
    unserved = sum(
        its.flow.group.share * need.rate * (1 - its.flow.served) for its in services(instance, need, solution)
    )
    assert unserved == pytest.approx(values_of(solution)["served"], abs=5e-3)


@pytest.mark.parametrize("name", ["tabu", "reschedule"])
def test_a_solver_that_does_not_know_groups_says_so(name):
    a = pool("a")
    need = ModelNeed("m", 1.0, 0, 9, parts=(part("g", 0.5, "a"), rest(0.5)))
    with pytest.raises(FabrictoolError, match=r"FT2030.*consumer groups"):
        list(SOLVERS[name]().solve(problem([need], [option("m", a)], [a]), deadline_s=1, seed=0))
