"""Models that may be served in several ways: which is chosen, how replicas are told apart, what contradicts itself."""

import itertools
import math
import random
from dataclasses import replace

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint import load
from fabrictool.cli.plan_text import render
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.plan import Placement, decode_plan, inputs_digest
from fabrictool.domain.specs import AgentSpec, GatewaySpec, weight_key
from fabrictool.domain.state import Applied, Placed, State
from fabrictool.planner.build import build_problem
from fabrictool.planner.placements import running_replicas
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.situation import situation_of
from fabrictool.planner.solvers.cp import CpSolver
from fabrictool.planner.solvers.tabu import TabuSolver
from fabrictool.planner.stages import LATENCY_TOLERANCE, values_of
from fabrictool.planner.units import wanted_units
from fabrictool.planner.verify import violations
from fabrictool.state.planfile import encode_file
from tests.planner.fabrics import applied, solved
from tests.planner.test_exact import MOST, convex, fits, option, pool, problem, solve
from tests.seeds import seeds

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  both:
    site: a
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 1, price: 32 CHF/h}}
    software: {engines: {vllm: {}, sglang: {}}}
  one:
    site: b
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 4, nodes: 1, price: 4 CHF/h}}
    software: {engines: {sglang: {}}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
OBJECTIVE
models:
  m:
    source: hf://Qwen/Qwen3-32B
    VARIANTS
    demand: {rate: RATE req/s, input: 500 tok, output: 200 tok}
    replicas: {min: 1, max: 40}
gateway: {cluster: both, listen: 127.0.0.1:8011, mesh: 10.0.0.1:8012}
"""
TWO = "variants: [{precision: bf16}, {precision: fp8, source: hf://Qwen/Qwen3-32B-FP8}]"


def loaded(folder, variants=TWO, rate=20, objective=""):
    text = BLUEPRINT.replace("VARIANTS", variants).replace("RATE", str(rate)).replace("OBJECTIVE", objective)
    (folder / "inventory.yaml").write_text(INVENTORY)
    (folder / "blueprint.yaml").write_text(text)
    return load(folder / "blueprint.yaml", environment={})


def evidence_of(there, *, state=None, away=()):
    clusters = {name: ClusterFacts(cluster=name, known=name not in away) for name in there.inventory.clusters}
    state = state or State(fabric="f", lineage="l")
    return Evidence(fabric="f", lineage="l", at=0.0, clusters=clusters, specs={}, state=state)


def planned(there, **more):
    return plan(there.blueprint, there.inventory, evidence_of(there, **more), PlanOptions(work_s=20.0), now=0.0)


def placed(there):
    """Replicas by variant."""
    replicas = planned(there).placement.replicas
    return {name: sum(r.variant == name for r in replicas) for name in {r.variant for r in replicas}}


# -- which is chosen -----------------------------------------------------------------------------------------------


def a_variant(model, where, name, down, **more):
    return replace(option(model, where, **more), variant=name, steps_down=down)


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [(("slo", "cost"), {"good": 2}), (("slo", "cost", "quality"), {"small": 1}), (("quality", "cost"), {"good": 2})],
)
def test_the_order_is_a_wish_that_yields_to_what_comes_before_it(objective, wanted):
    here = pool("a", nodes=4)
    options = [a_variant("m", here, "good", 0), a_variant("m", here, "small", 1, capacity=2.0)]
    instance = problem([ModelNeed("m", 1.5 * MOST, 0, 9)], options, [here], objective=objective)
    assert {instance.options[i].variant: k for i, k in solve(instance).counts.items()} == wanted


def test_what_would_be_unserved_is_served_by_a_lesser_variant_and_no_more_than_that():
    here = pool("a", nodes=3)
    options = [a_variant("m", here, "good", 0), a_variant("m", here, "small", 1, capacity=2.0)]
    instance = problem([ModelNeed("m", 4 * MOST, 0, 9)], options, [here], objective=("slo", "cost"))
    solution = solve(instance)
    assert {instance.options[i].variant: k for i, k in solution.counts.items()} == {"good": 2, "small": 1}
    assert values_of(solution)["quality"] == pytest.approx(2 * MOST)


def test_a_replica_that_stands_by_is_of_the_first_variant_too():
    here = pool("a", nodes=3, per_node=2)
    options = [a_variant("m", here, "good", 0, tp=2), a_variant("m", here, "small", 1)]
    instance = problem([ModelNeed("m", 0.0, 1, 9)], options, [here], objective=("slo", "cost"))
    assert [instance.options[i].variant for i in solve(instance).counts] == ["good"]


def brute_force(instance):
    """(unserved, load behind the first variant, latency at most, cost): by trying all counts and all splits."""
    outcomes = []
    for counts in itertools.product(*(range(5) for _ in instance.options)):
        if not fits(instance, counts):
            continue
        unserved = quality = inside = 0.0
        for need in instance.needs:
            pieces, idle = [], 0.0
            for o, k in zip(instance.options, counts, strict=True):
                if o.model != need.model or not k:
                    continue
                idle += k * o.steps_down * o.levels[0].rate
                rate = latency = worse = 0.0
                for level in o.levels:
                    width = level.rate - rate
                    # What stands by counts as one under the least load: only more than that is worse.
                    more = max(0.0, o.steps_down * (level.rate - o.levels[0].rate)) - worse
                    worse += more
                    pieces.append((more / width, (level.in_system - latency) / width, k * width))
                    rate, latency = level.rate, level.in_system
            left = need.rate
            quality += idle
            for worse, slope, width in sorted(pieces):
                load = min(left, width)
                left -= load
                quality += worse * load
                inside += slope * load
            unserved += need.priority * max(0.0, left)
        cost = sum(o.cost * k for o, k in zip(instance.options, counts, strict=True))
        outcomes.append((round(unserved, 5), round(quality, 5), inside, cost))
    if not outcomes:
        return None
    first = min(outcome[:2] for outcome in outcomes)
    alike = [outcome for outcome in outcomes if outcome[:2] == first]
    fastest = min(inside for _, _, inside, _ in alike)
    return (*first, min(c for _, _, inside, c in alike if inside <= fastest * (1 + LATENCY_TOLERANCE) + 1e-9))


@seeds(15, drawn=15, long=300)
def test_it_is_as_good_as_the_best_of_all(seed):
    rng = random.Random(seed)
    pools = [pool(name, nodes=rng.randint(1, 2), per_node=2, price=rng.choice([1.0, 3.0])) for name in "ab"]
    options = [
        a_variant("m", where, name, down, tp=rng.choice([1, 2]), levels=tuple(convex(rng, rng.choice([1.0, 2.5]), 1.0)))
        for where in pools
        for down, name in enumerate(("good", "small"))
        if rng.random() < 0.9
    ]
    need = ModelNeed("m", rng.choice([0.0, 0.5, 2.0, 4.0]), rng.randint(0, 1), 8)
    instance = problem([need], options, pools, objective=("latency", "cost"))
    best = brute_force(instance)
    if best is None or not options:
        return
    values = values_of(solve(instance))
    assert values["served"] == pytest.approx(best[0], abs=1e-4)
    assert values.get("quality", 0.0) == pytest.approx(best[1], abs=1e-3)


def test_constraint_programming_agrees_and_the_tabu_search_says_that_it_cannot():
    here = pool("a", nodes=3)
    options = [a_variant("m", here, "good", 0), a_variant("m", here, "small", 1, capacity=2.0)]
    instance = problem([ModelNeed("m", 4 * MOST, 0, 9)], options, [here], objective=("slo", "cost"))
    *_, solution = CpSolver().solve(instance, deadline_s=20, seed=0)
    assert {instance.options[i].variant: k for i, k in solution.counts.items()} == {"good": 2, "small": 1}
    with pytest.raises(FabrictoolError, match="does not choose among variants"):
        next(TabuSolver().solve(instance, deadline_s=1, seed=0))


# -- from a blueprint ----------------------------------------------------------------------------------------------


def test_each_variant_is_a_column_of_its_own_where_its_engine_is(tmp_path):
    three = "variants: [{engine: vllm, options: {seed: 1}}, {engine: sglang}, {precision: fp8, engine: vllm}]"
    there = loaded(tmp_path, three)
    instance, _ = build_problem(there.blueprint, there.inventory, usable=["both", "one"], unseen=(), current={})
    columns = {(o.pool.cluster, o.variant) for o in instance.options}
    assert columns == {
        ("both", "vllm bf16"), ("both", "sglang bf16"), ("both", "vllm fp8"), ("one", "sglang bf16"),
    }  # fmt: skip
    assert {o.variant: o.steps_down for o in instance.options} == {"vllm bf16": 0, "sglang bf16": 0, "vllm fp8": 1}
    assert len({o.key for o in instance.options}) == len(instance.options)
    model = there.blueprint.models["m"]
    assert model.in_variant("vllm bf16").options == {"seed": 1}
    assert model.in_variant("sglang bf16").options == {}


def test_flags_of_one_engine_are_none_of_anothers(tmp_path):
    model = loaded(tmp_path, "options: {seed: 1}\n    variants: [{}, {engine: sglang}]").blueprint.models["m"]
    assert [its.options for its in model.each_variant.values()] == [{"seed": 1}, {}]


def test_the_plan_tells_which_and_a_replica_gets_the_files_of_its_own(tmp_path):
    there = loaded(tmp_path, rate=80)
    whole = planned(there)
    (forecast,) = whole.forecast.models
    of_each = {its.variant: its.replicas for its in forecast.variants}
    assert set(of_each) == {"vllm bf16", "vllm fp8"}
    assert math.fsum(its.share for its in forecast.variants) == pytest.approx(1.0)
    specs = [a.spec for a in whole.actions if isinstance(a.spec, AgentSpec)]
    assert {(s.precision, s.source.rpartition("-")[2]) for s in specs} == {("bf16", "32B"), ("fp8", "FP8")}
    shown = render(whole, evidence_of(there).observed)
    assert f"m: {of_each['vllm bf16']} as vllm bf16" in shown
    (gateway,) = [a.spec for a in whole.actions if isinstance(a.spec, GatewaySpec)]
    assert all(key.rpartition(" ")[2] in ("bf16", "fp8") for key in gateway.routing_weights)
    assert decode_plan(encode_file(whole)).placement == whole.placement


def test_what_runs_keeps_its_name_and_its_variant(tmp_path):
    there = loaded(tmp_path, rate=80)
    evidence = evidence_of(there)
    whole = planned(there)
    specs = {str(a.address): a.spec for a in whole.actions if isinstance(a.spec, AgentSpec)}
    situation = situation_of(there.blueprint, there.inventory, evidence, 0.0)
    keys = {r.replica: r.variant for r in whole.placement.replicas}
    model = there.blueprint.models["m"]
    assert {s.replica: model.variant_of(s.engine, s.precision, s.context) for s in specs.values()} == keys
    # Of a cluster that does not answer, the last approved plan says it.
    units = {name: Placed.of(spec, spec.cluster, name) for name, spec in specs.items()}
    applied = {name: Applied(cluster=spec.cluster, spec=spec) for name, spec in specs.items()}
    state = State(fabric="f", lineage="l", units=units, applied_units=applied)
    away = situation_of(there.blueprint, there.inventory, evidence_of(there, state=state, away=("both",)), 0.0)
    unseen = [r for r in whole.placement.replicas if r.cluster == "both"]
    assert {r.replica: r.variant for r in away.unseen} == {r.replica: r.variant for r in unseen}
    instance, _ = away.build()
    assert sum(instance.fixed.values()) == len(unseen)
    assert not situation.unseen


def test_a_model_that_gets_variants_later_keeps_its_replicas(tmp_path):
    """They are one of them, by what they run."""
    single = loaded(tmp_path, "engine: vllm")
    specs = [a.spec for a in planned(single).actions if isinstance(a.spec, AgentSpec)]
    model = loaded(tmp_path).blueprint.models["m"]
    assert {model.variant_of(s.engine, s.precision, s.context) for s in specs} == {"vllm bf16"}
    assert model.variant_of("sglang", "int4", 4096) == "sglang int4", "one that is none any more"


def test_without_variants_nothing_speaks_of_them(tmp_path):
    there = loaded(tmp_path, "engine: vllm")
    text = encode_file(planned(there)).decode()
    assert "variants" not in text
    assert '"variant"' not in text
    before = inputs_digest(there.blueprint, there.inventory)
    assert before != inputs_digest(loaded(tmp_path).blueprint, there.inventory)


def test_the_verifier_knows_the_variants(tmp_path):
    there = loaded(tmp_path)
    good = planned(there).placement
    assert violations(there.blueprint, there.inventory, good) == []
    wrong = Placement(replicas=(msgspec.structs.replace(good.replicas[0], variant="vllm int4"), *good.replicas[1:]))
    assert any("none of its variants" in text for text in violations(there.blueprint, there.inventory, wrong))
    nameless = Placement(replicas=(msgspec.structs.replace(good.replicas[0], variant=""), *good.replicas[1:]))
    assert any("none of its variants" in text for text in violations(there.blueprint, there.inventory, nameless))


@pytest.mark.parametrize(
    ("variants", "code"),
    [
        ("variants: [{}, {precision: bf16}]", "FT1295"),
        ("variants: [{}, {precision: fp8}]\n    phases: split", "FT1296"),
        ("variants: [{}, {precision: q4_1}]", "FT1213"),
        ("variants: [{}, {engine: vlm}]", "FT1206"),
        ("variants: [{}, {precision: fp8, context: 9000000 tok}]", "FT1224"),
        ("variants: [{}, {precision: fp8, source: 'weights://nowhere'}]", "FT1270"),
    ],
)
def test_contradictions_are_told_with_their_place(tmp_path, variants, code):
    with pytest.raises(FabrictoolError) as caught:
        loaded(tmp_path, variants)
    problems = [p for p in caught.value.problems if p.code == code]
    assert problems, [str(p) for p in caught.value.problems]
    assert problems[0].place.line, "where in the file"


def test_weights_of_variants_are_told_apart(tmp_path):
    assert weight_key("m", "c", "p", 1, variant="vllm fp8") != weight_key("m", "c", "p", 1) == "m@c/p:1"
    there = loaded(tmp_path, rate=80)
    whole = planned(there)
    units = wanted_units(there.blueprint, there.inventory, whole.placement, evidence_of(there), set())
    assert {u.summary.rpartition(", ")[2] for a, u in units.items() if a.startswith("replica/")} == {"bf16", "fp8"}
    by_kind = {(r.cluster, r.tp, r.variant): r.weight for r in whole.placement.replicas}
    assert max(by_kind.values()) == 1.0


@pytest.mark.parametrize("rate", [20, 80])
def test_the_simulator_plays_each_replica_as_its_variant(tmp_path, rate):
    from fabrictool.simulator.deployment import of_model

    there = loaded(tmp_path, rate=rate)
    replicas = planned(there).placement.replicas
    simulation = of_model("m", there.blueprint, there.inventory, replicas, [])
    slots = {r.variant: spec.kv_tokens / r.tp for r, spec in zip(replicas, simulation.specs, strict=True)}
    if len(slots) == 2:
        assert slots["vllm fp8"] > slots["vllm bf16"], "smaller weights leave more room"
    assert simulation.specs


def test_the_solver_and_the_forecast_speak_of_the_same(tmp_path):
    there = loaded(tmp_path, rate=80)
    instance, _ = build_problem(there.blueprint, there.inventory, usable=["both", "one"], unseen=(), current={})
    values = values_of(solved(instance))
    (forecast,) = planned(there).forecast.models
    lesser = math.fsum(its.share for its in forecast.variants if its.variant == "vllm fp8")
    assert values["quality"] >= lesser * (80 - values["served"]) * (1 - 1e-3) - 1e-6


# -- on a running fabric -------------------------------------------------------------------------------------------


def again(there, evidence):
    """Kinds of the actions of a further plan, by replica."""
    whole = plan(there.blueprint, there.inventory, evidence, PlanOptions(work_s=20.0), now=0.0)
    return {a.address: a.kind for a in whole.actions if a.address.startswith("replica/")}


def test_a_fabric_that_runs_as_planned_is_left_alone_whatever_joins_the_list(tmp_path):
    there = loaded(tmp_path, rate=80)
    evidence = applied(there, planned(there))
    assert set(again(there, evidence).values()) == {"keep"}
    more = loaded(tmp_path, TWO.replace("]", ", {precision: int4}]"), rate=80)
    assert set(again(more, evidence).values()) == {"keep"}


def test_a_model_that_gets_variants_keeps_what_runs_and_one_that_loses_one_keeps_the_others(tmp_path):
    single = loaded(tmp_path, "engine: vllm", rate=20)
    there = loaded(tmp_path, rate=20)
    assert set(again(there, applied(single, planned(single))).values()) == {"keep"}
    both = loaded(tmp_path, rate=80)
    whole = planned(both)
    precise = {f"replica/{r.replica}" for r in whole.placement.replicas if r.variant == "vllm bf16"}
    rest = loaded(tmp_path, "variants: [{precision: bf16}]", rate=80)
    kinds = again(rest, applied(both, whole))
    assert {kinds[address] for address in precise} == {"keep"}
    others = {f"replica/{r.replica}" for r in whole.placement.replicas} - precise
    assert others
    assert {kinds[address] for address in others} == {"delete"}


def test_what_a_status_shows_is_simulated_as_what_it_is(tmp_path):
    there = loaded(tmp_path)
    units = [
        {"address": f"replica/m/{n}", "cluster": cluster, "state": "running"}
        for n, cluster in ((0, "both"), (1, "one"))
    ]
    services = [
        {"replica": f"replica/m/{n}", "model": "m", "engine": "vllm", "precision": precision, "context": 4096, "tp": 2}
        for n, precision in ((0, "fp8"), (1, "bf16"))
    ]
    status = {"units": units, "gateway": {"nodes": [{"device": "h100-sxm", "services": services}]}}
    replicas = running_replicas(status, there.inventory, there.blueprint.models)
    assert {replica.replica: replica.variant for replica in replicas} == {"m/0": "vllm fp8", "m/1": "vllm bf16"}
    single = loaded(tmp_path, "engine: vllm")
    replicas = running_replicas(status, single.inventory, single.blueprint.models)
    assert {replica.variant for replica in replicas} == {""}
