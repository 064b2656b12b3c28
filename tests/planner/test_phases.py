"""Prefill and decode apart, pipelines, outages and walltimes: what the program promises, against plain arithmetic."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from fabrictool.applier.checks import unstartable
from fabrictool.base.errors import InfeasibleError
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.specs import AgentSpec, GatewaySpec
from fabrictool.domain.state import State
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.problem import Level, ModelNeed, Option, Transfer
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.solvers.search import TabuSearch
from fabrictool.planner.solvers.tabu import TabuSolver
from tests.planner.test_exact import figures, option, pool, problem
from tests.seeds import some

SECONDS = 30.0
HEAD = "apiVersion: fabrictool/v1\n"


def phase(which, model, where, *, rate=1.0, tp=1, pp=1, in_system=1.0):
    return Option(model, where, tp, figures(rate), (Level(rate, in_system * rate, True),), pp=pp, phase=which)


def between(model, sender, receiver, *, seconds=0.1, octets=1e6, link=None):
    return {(model, sender.key, receiver.key): Transfer(seconds, octets, link)}


def last(instance, solver=None, seed=0):
    *_, solution = (solver or ExactSolver()).solve(instance, deadline_s=SECONDS, seed=seed)
    return solution


def served(instance, solution):
    return sum(need.rate for need in instance.needs) - solution.stages[0].objective


def random_pairs(seed):
    """One model on two pools with a link between them."""
    rng = random.Random(seed)
    a, b = (pool(name, nodes=rng.randint(1, 4), site=name) for name in "ab")
    options = [
        phase(which, "m", where, rate=rng.choice((0.5, 1.0, 2.5)))
        for which in ("prefill", "decode") for where in (a, b) if rng.random() < 0.8
    ]  # fmt: skip
    transfers = {}
    for one, other in itertools.product((a, b), repeat=2):
        if one == other or rng.random() < 0.8:
            link = None if one == other else ("a", "b")
            transfers |= between("m", one, other, octets=rng.choice((1e6, 5e6)), link=link)
    need = ModelNeed("m", rng.choice((1.0, 3.0, 8.0)), 0, 8)
    made = problem([need], options, [a, b], objective=("latency",))
    return replace(made, transfers=transfers, links={("a", "b"): rng.choice((1e6, 4e6, 1e9))})


def most_served(instance):
    """By trying all counts, and all ways to send what crosses the link, on a fine grid."""
    best = 0.0
    need = instance.needs[0]
    ranges = [range(o.pool.nodes + 1) for o in instance.options]
    for counts in itertools.product(*ranges):
        if sum(counts) > need.maximum or any(
            sum(k for o, k in zip(instance.options, counts, strict=True) if o.pool == where) > where.nodes
            for where in instance.pools
        ):
            continue
        room = {("prefill", w.key): 0.0 for w in instance.pools} | {("decode", w.key): 0.0 for w in instance.pools}
        for o, k in zip(instance.options, counts, strict=True):
            room[o.phase, o.pool.key] += k * o.levels[-1].rate
        best = max(best, _flow(instance, room, need.rate))
    return best


def _flow(instance, room, demand):
    """The largest flow over two senders and two receivers: what stays at home first, then what the link lets through.

    With equal rates of return what stays at home never hurts: an exchange argument, since both ends lose the same.
    """
    link, found = instance.links["a", "b"], 0.0
    left = dict(room)
    keys = [where.key for where in instance.pools]
    for key in keys:
        at_home = min(left["prefill", key], left["decode", key])
        at_home = at_home if ("m", key, key) in instance.transfers else 0.0
        left["prefill", key] -= at_home
        left["decode", key] -= at_home
        found += at_home
    ways = sorted(
        (instance.transfers[("m", a, b)].octets, a, b)
        for a, b in itertools.permutations(keys)
        if ("m", a, b) in instance.transfers
    )
    for octets, a, b in ways:  # the cheapest way over the link first
        rate = min(left["prefill", a], left["decode", b], link / octets)
        link -= rate * octets
        left["prefill", a] -= rate
        left["decode", b] -= rate
        found += rate
    return min(found, demand)


@pytest.mark.parametrize("seed", some(range(120), 40))
def test_pairs_serve_as_much_as_any_counts_can(seed):
    instance = random_pairs(seed)
    solution = last(instance)
    assert served(instance, solution) == pytest.approx(most_served(instance), abs=1e-4)
    for i, count in solution.counts.items():
        assert solution.loads.get(i, 0.0) <= count * instance.options[i].levels[-1].rate + 1e-6


@pytest.mark.parametrize("seed", some(range(300), 60))
def test_a_first_placement_has_no_phase_alone_and_needs_no_search(seed):
    """Where pools hand over only within their sites, too; and it serves what its halves can do together."""
    rng = random.Random(seed)
    pools = [pool(f"{site}{at}", nodes=rng.randint(1, 4), site=site) for site in "ab" for at in range(2)]
    options, transfers = [], {}
    for model in "mn":
        options += [
            phase(which, model, where, rate=rng.choice((0.5, 1.0, 2.5)))
            for which in ("prefill", "decode", "unified") for where in pools if rng.random() < 0.7
        ]  # fmt: skip
        for sender, receiver in itertools.product(pools, repeat=2):
            if sender.site == receiver.site:
                transfers |= between(model, sender, receiver)
    needs = [ModelNeed(model, rng.choice((1.0, 3.0, 8.0)), 0, 8) for model in "mn"]
    instance = replace(problem(needs, options, pools, objective=("latency",)), transfers=transfers)
    usage = {i: rng.choice((0.0, 0.0, 0.4, 1.0, 1.7)) for i in range(len(instance.options))}
    counts = rounded(instance, usage, {i: rng.random() for i in usage})
    answer = Formulation.of_counts(instance, counts).minimise("served", seconds=SECONDS, seed=0)
    assert answer is not None, "a rule is broken"
    unserved = 0.0
    for need in needs:
        rates = Counter()
        for i, k in counts.items():
            its = instance.options[i]
            if its.model == need.model:
                where = "" if its.phase == "unified" else its.pool.site
                rates[where, its.phase] += k * its.levels[-1].rate
        together = rates["", "unified"] + sum(min(rates[s, "prefill"], rates[s, "decode"]) for s in "ab")
        unserved += max(0.0, need.rate - together)
    assert answer.objective == pytest.approx(unserved, abs=1e-6)


def test_what_only_one_side_reaches_is_no_pair():
    """From a to b work is handed over, and not within a pool nor back: what decodes at a waits for nobody."""
    a, b = (pool(name, nodes=4, site="s") for name in "ab")
    options = [phase(which, "m", where) for which in ("prefill", "decode") for where in (a, b)]
    instance = problem([ModelNeed("m", 2.0, 0, 8)], options, [a, b], objective=("latency",))
    instance = replace(instance, transfers=between("m", a, b))
    counts = rounded(instance, dict.fromkeys(range(4), 0.5), dict.fromkeys(range(4), 0.0))
    there = {(instance.options[i].phase, instance.options[i].pool.cluster) for i, k in counts.items() if k}
    assert ("decode", "a") not in there
    assert ("prefill", "b") not in there


def test_nobody_gives_way_who_is_needed_in_an_outage():
    """Of n one replica stands where an outage is announced: the other one is the last, then."""
    a, b = pool("a", nodes=1), pool("b", nodes=1)
    options = [option("m", b), option("n", a), option("n", b)]
    instance = problem([ModelNeed("m", 0.5, 0, 4), ModelNeed("n", 0.5, 1, 4)], options, [a, b])
    at = {(o.model, o.pool.cluster): i for i, o in enumerate(instance.options)}
    running = {at["n", "a"]: 1.0, at["n", "b"]: 1.0, at["m", "b"]: 0.0}
    instance = replace(instance, current={instance.options[i].key: round(k) for i, k in running.items() if k})
    away = replace(instance, outages=(frozenset({a.key}),))
    nearest = dict.fromkeys(running, 0.0)
    assert rounded(instance, running, nearest)[at["n", "b"]] == 0, "m needs the place more"
    assert rounded(away, running, nearest)[at["n", "b"]] == 1


def test_halves_are_filled_up_in_turn():
    """Three requests/s of a model that has two of each phase to read and to answer: none is left over."""
    there = pool("a", nodes=8, site="a")
    options = [phase("prefill", "m", there, rate=1.0), phase("decode", "m", there, rate=1.0)]
    instance = replace(
        problem([ModelNeed("m", 3.0, 0, 16)], options, [there], objective=("latency",)),
        transfers=between("m", there, there),
    )
    assert sorted(rounded(instance, {0: 0.5, 1: 0.5}, {0: 0.0, 1: 0.0}).values()) == [3, 3]


def test_a_slow_link_keeps_phases_together():
    a, b = pool("a", nodes=2, site="a"), pool("b", nodes=2, site="b")
    options = [phase(which, "m", where) for which in ("prefill", "decode") for where in (a, b)]
    ways = between("m", a, a, seconds=0.0) | between("m", b, b, seconds=0.0)
    ways |= between("m", a, b, seconds=5.0) | between("m", b, a, seconds=5.0)
    instance = replace(problem([ModelNeed("m", 2.0, 0, 8)], options, [a, b], objective=("latency",)), transfers=ways)
    counts = {instance.options[i].key[1:]: k for i, k in last(instance).counts.items()}
    assert all(counts[where, "p", 1, 1, which] == 1 for where in "ab" for which in ("prefill", "decode"))


def test_one_phase_alone_is_no_replica():
    a = pool("a", nodes=4)
    instance = problem([ModelNeed("m", 0.0, 1, 4)], [phase("prefill", "m", a), phase("decode", "m", a)], [a])
    instance = replace(instance, transfers=between("m", a, a))
    found = {instance.options[i].phase: k for i, k in last(instance).counts.items()}
    assert found == {"prefill": 1, "decode": 1}, "the minimum counts replicas that answer, and they need prompts read"


def test_a_pipeline_takes_a_block_of_each_node():
    a = pool("a", nodes=3, per_node=4)
    big = Option("big", a, 4, figures(1.0), (Level(1.0, 1.0, True),), pp=2)
    needs = [ModelNeed("big", 2.0, 0, 4, priority=9.0), ModelNeed("m", 9.0, 0, 9)]
    instance = problem(needs, [big, option("m", a, tp=2)], [a])
    counts = {instance.options[i].model: k for i, k in last(instance).counts.items()}
    assert counts == {"big": 1, "m": 2}, "two stages of four devices, and what is left"
    assert big.devices == 8
    assert big.cost == pytest.approx(2 * a.price_per_node_hour)


def test_minima_hold_without_what_maintenance_takes_away():
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=9.0)
    instance = problem([ModelNeed("m", 0.1, 2, 8)], [option("m", a), option("m", b)], [a, b], objective=("cost",))
    calm = {instance.options[i].pool.cluster: k for i, k in last(instance).counts.items()}
    assert calm == {"a": 2}
    away = replace(instance, outages=(frozenset({a.key}),))
    assert {away.options[i].pool.cluster: k for i, k in last(away).counts.items()} == {"b": 2}
    with pytest.raises(InfeasibleError):
        last(replace(instance, outages=(frozenset({a.key, b.key}),)))


@pytest.mark.parametrize("seed", range(25))
def test_tabu_is_never_better_than_exact_and_keeps_the_rules(seed):
    instance = random_pairs(seed)
    exact, tabu = last(instance), last(instance, TabuSolver(), seed)
    assert tabu.stages[0].objective >= exact.stages[0].objective - 1e-4
    assert tabu.stages[0].bound <= exact.stages[0].objective + 1e-4
    for where in instance.pools:
        used = sum(k * instance.options[i].devices for i, k in tabu.counts.items() if instance.options[i].pool == where)
        assert used <= where.nodes * where.devices_per_node


def test_tabu_finds_the_optimum_of_most_small_instances():
    same = 0
    for seed in range(40):
        instance = random_pairs(seed)
        exact, tabu = last(instance), last(instance, TabuSolver(), seed)
        same += abs(tabu.stages[0].objective - exact.stages[0].objective) < 1e-4
    assert same >= 38


def test_the_search_counts_what_the_program_counts():
    """The greedy fill and the flow are the program's loads: same unserved demand, same requests in the system."""
    for seed in range(30):
        instance = random_pairs(seed)
        instance = replace(instance, links={("a", "b"): 1e12})  # a shared link is the program's alone
        solution = last(instance)
        search = TabuSearch(instance, random.Random(0))
        state = search.of_counts(solution.counts)
        worth = state.values["m"]
        values = {stage.name: stage.objective for stage in solution.stages}
        assert worth.served == pytest.approx(values["served"], abs=1e-3)
        assert worth.latency <= values["latency"] + 1e-2


def test_whole_nodes_are_taken_whole():
    shared = pool("shared", nodes=3, per_node=4)
    for where, most in ((shared, 12), (replace(shared, whole_nodes=True), 3)):
        instance = problem([ModelNeed("m", 99.0, 0, 99)], [option("m", where)], [where], objective=("cost",))
        solution = last(instance)
        assert sum(solution.counts.values()) == most
        assert {stage.name: stage.objective for stage in solution.stages}["cost"] == pytest.approx(3 * 1.0)


@pytest.mark.parametrize(
    ("handover", "held", "refused"),
    [("bf16", msgspec.UNSET, ""), ("fp8", "fp8", ""), ("int4", "int4", "holds none in int4")],
)
def test_a_precision_on_the_way_is_that_of_both_caches_or_is_refused(tmp_path, handover, held, refused):
    inventory = (
        f"{HEAD}kind: Inventory\nproviders: {{p: {{}}}}\nsites: {{s: {{provider: p}}}}\n"
        "clusters: {c: {site: s, kind: local, partitions: {g: {device: h100-sxm, devices_per_node: 4, nodes: 1}}}}\n"
    )
    model = "source: hf://meta-llama/Llama-3.1-8B-Instruct, phases: split, replicas: {min: 1, max: 2}"
    demand = "demand: {rate: 1 req/s, input: 500 tok, output: 100 tok}"
    (tmp_path / "inventory.yaml").write_text(inventory)
    (tmp_path / "blueprint.yaml").write_text(
        f"{HEAD}kind: Blueprint\nfabric: f\ninventory: inventory.yaml\n"
        f"models: {{m: {{{model}, {demand}, handover: {handover}}}}}\n"
        "gateway: {cluster: c, listen: 127.0.0.1:1, mesh: 127.0.0.1:2}\n"
    )
    loaded = load(tmp_path / "blueprint.yaml", environment={})
    seen = {"c": ClusterFacts(cluster="c", known=True)}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    made = plan(loaded.blueprint, loaded.inventory, evidence, PlanOptions(), now=0.0)
    agents = [action.spec for action in made.changes if isinstance(action.spec, AgentSpec)]
    assert {(spec.phase, spec.kv_precision) for spec in agents} == {("prefill", held), ("decode", held)}
    (gateway,) = [action.spec for action in made.changes if isinstance(action.spec, GatewaySpec)]
    elements = 2 * 32 * 8 * 128  # keys and values, layers, heads and their width of Llama 3.1 8B
    assert gateway.octets_of_caches == {"m": elements * {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}[handover]}
    problem = unstartable(made)
    assert refused in ("" if problem is None else problem.message)
    assert (problem is None) == (not refused)
