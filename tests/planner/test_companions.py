"""Models that share a replica's memory: what the planner makes of them, from the blueprint to the command line."""

import dataclasses
import re

import msgspec
import pytest

from fabrictool.agent.bodies import service_body
from fabrictool.agent.engine_address import EngineAddress
from fabrictool.agent.launching import launch_of
from fabrictool.agent.ports import PortBlock
from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.specs import decode_spec, encode_spec, updatable
from fabrictool.domain.state import State
from fabrictool.engines.adapter import adapter
from fabrictool.mesh.records import Lifecycle
from fabrictool.planner.build import build_problem
from fabrictool.planner.explaining.explain import sharing_sentences
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.verify import violations
from fabrictool.simulator.shared import DROPPED_S

HEAD = "apiVersion: fabrictool/v1\n"
ARCHITECTURE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PARTITION = "{device: cpu, nodes: 20, memory_per_node: %s, price: 1 CHF/h}"
SMALL = "{rate: 0.5 req/s, input: 200 tok, output: 50 tok}"
"""A replica takes 1.4 of these requests in a second."""


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    """Played for each load; percentiles are coarse, and nothing here hangs on them."""
    monkeypatch.setattr("fabrictool.simulator.shared.MOST", 300)


def loaded(folder, companions, demand=SMALL, *, memory="4GB", rules="slo: {ttft_p95: 4s, tpot_p95: 1s}"):
    (folder / "inventory.yaml").write_text(
        f"{HEAD}kind: Inventory\nproviders: {{p: {{}}}}\nsites: {{s: {{provider: p}}}}\nclusters:\n"
        "  c: {site: s, kind: local, partitions: {g: PARTITION}}\n".replace("PARTITION", PARTITION % memory)
    )
    for name in companions:
        (folder / f"{name}.gguf").touch()
    beside = "".join(
        f"      {name}: {{source: file://{folder}/{name}.gguf, architecture: {ARCHITECTURE}, demand: {its}}}\n"
        for name, its in companions.items()
    )
    (folder / "blueprint.yaml").write_text(
        f"{HEAD}kind: Blueprint\nfabric: f\ninventory: inventory.yaml\nobjective: [slo, cost]\nmodels:\n"
        f"  m:\n    source: file:///models/m.gguf\n    architecture: {ARCHITECTURE}\n    engine: reference\n"
        f"    variant: {{precision: q4_1, context: 2048 tok}}\n    demand: {demand}\n    {rules}\n"
        "    replicas: {min: 1, max: 20}\n"
        + (f"    companions:\n{beside}" if beside else "")
        + "gateway: {cluster: c, listen: 127.0.0.1:1, mesh: 127.0.0.1:2}\n"
    )
    return load(folder / "blueprint.yaml", environment={})


def problem_of(there):
    problem, _ = build_problem(there.blueprint, there.inventory, usable=("c",), unseen=(), current={})
    return problem


def planned(there):
    seen = {"c": ClusterFacts(cluster="c", known=True)}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())
    return plan(there.blueprint, there.inventory, evidence, PlanOptions(), now=0.0)


def agent_of(a_plan):
    (spec,) = (action.spec for action in a_plan.actions if action.address == "replica/m/0")
    return spec


def launch(spec, folder):
    paths = {"model": "/models/m.gguf", "python": "python3", "cache": folder, "compiled": folder}
    with PortBlock.take() as ports:
        return launch_of(spec, at=EngineAddress(ports.api), ports=ports, **paths)


def test_what_companions_ask_takes_replicas_that_the_model_alone_would_not_need(tmp_path):
    alone = planned(loaded(tmp_path, {}))
    assert len(alone.placement.replicas) == 1
    idle = planned(loaded(tmp_path, {"a": "{rate: 0.001 req/s, input: 200 tok, output: 50 tok}"}))
    assert len(idle.placement.replicas) == 1
    busy = planned(loaded(tmp_path, {"a": "{rate: 2 req/s, input: 200 tok, output: 50 tok}"}))
    assert len(busy.placement.replicas) > 1
    (forecast,) = busy.forecast.models
    assert (forecast.slo, forecast.judge) == ("meets", "turns")


def test_a_companion_is_planned_in_the_share_of_time_that_its_demand_costs(tmp_path):
    (option,) = {o.figures: o for o in problem_of(loaded(tmp_path, {"a": SMALL, "b": SMALL})).options}.values()
    (alone,) = problem_of(loaded(tmp_path, {"a": SMALL.replace("0.5", "0.000001")})).options
    assert option.shared.share == pytest.approx(1 / 3)
    assert option.capacity == pytest.approx(alone.capacity / 3, rel=1e-3)
    queued, free = option.levels[-1].in_system, alone.levels[-1].in_system
    assert queued < free, "it is a third of the load"
    assert 3 * queued > free, "batches are of one model each, so that steps are more"


def test_requests_that_nobody_could_begin_count_as_missed_and_are_named(tmp_path):
    there = loaded(tmp_path, {"long": "{rate: 0.05 req/s, input: 1900 tok, output: 20 tok}"})
    its = problem_of(there).options[0].shared
    latency = its.under_load(0.1)
    assert its.at(0.1).dropped[1] == 1.0, "reading such a prompt takes longer than the target"
    assert latency.ttft_p95 == DROPPED_S
    result = planned(there)
    assert result.forecast.models[0].slo == "misses"
    problem = problem_of(there)
    *_, solution = ExactSolver().solve(problem, deadline_s=30, seed=0)
    (sentence,) = sharing_sentences(problem, solution)
    assert "100% of the requests for long are dropped" in sentence
    assert "1 other model, too" in sentence


def test_models_that_do_not_all_fit_take_turns_in_memory_and_wait_for_loads(tmp_path):
    companions = {name: SMALL.replace("0.5", "0.05") for name in "abcd"}
    roomy = problem_of(loaded(tmp_path, companions, memory="8GB")).options[0].shared
    tight = problem_of(loaded(tmp_path, companions, memory="2GB")).options[0].shared
    assert roomy.held <= roomy.memory
    assert tight.held > tight.memory
    assert tight.under_load(0.3).ttft_mean > roomy.under_load(0.3).ttft_mean


def test_a_companion_that_fits_nowhere_by_itself_is_refused_in_words(tmp_path):
    there = loaded(tmp_path, {"big": SMALL})
    blueprint = there.blueprint
    model = blueprint.models["m"]
    large = model.companions["big"].model_copy(update={"architecture": "meta-llama/Llama-3.1-8B-Instruct"})
    model = model.model_copy(update={"companions": {"big": large}})
    blueprint = blueprint.model_copy(update={"models": {"m": model}})
    problem, _ = build_problem(blueprint, there.inventory, usable=("c",), unseen=(), current={})
    assert not problem.options
    assert "of one of big" in problem.columns["m"].refusals()[0]
    placement = planned(loaded(tmp_path, {"big": SMALL})).placement
    said = list(violations(blueprint, there.inventory, placement))
    assert any(text.startswith("m/0: big:") for text in said), said


def test_from_the_plan_to_the_command_line(tmp_path):
    spec = agent_of(planned(loaded(tmp_path, {"a": SMALL})))
    assert decode_spec(encode_spec(spec)) == spec
    assert spec.served_names == ("m", "a")
    assert spec.shared.ttft_s == 4.0
    body = service_body(spec, "f", bytes(16), bytes(16), Lifecycle.SERVING, "m")
    assert body.adapters == ("a",)
    argv = list(adapter("reference").command(launch(spec, tmp_path)).argv)
    pairs = [argv[at + 1] for at, word in enumerate(argv) if word in ("--model", "--served-name")]
    assert pairs == ["/models/m.gguf", "m", f"{tmp_path}/a.gguf", "a"]
    assert argv[argv.index("--ttft") + 1] == "4s"
    memory = re.fullmatch(r"([0-9]+)MiB", argv[argv.index("--memory") + 1])
    assert 3e9 < int(memory[1]) * 2**20 < 4e9


def test_a_replica_without_companions_is_what_it_was_and_one_that_gets_some_is_another(tmp_path):
    alone, shared_one = (agent_of(planned(loaded(tmp_path, its))) for its in ({}, {"a": SMALL}))
    assert b"shared" not in encode_spec(alone)
    assert not updatable(alone, shared_one)


@pytest.mark.parametrize(("companions", "measures"), [({}, True), ({"a": SMALL}, False)])
def test_models_that_have_turns_are_not_measured_for_routing(tmp_path, companions, measures):
    there = loaded(tmp_path, companions)
    routing = there.blueprint.routing.model_copy(update={"policy": "slo-headroom"})
    there = dataclasses.replace(there, blueprint=there.blueprint.model_copy(update={"routing": routing}))
    spec = agent_of(planned(there))
    assert (spec.measure_s is not msgspec.UNSET, spec.priorities is True) == (measures, measures)


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "sglang"])
def test_other_engines_refuse_companions(tmp_path, engine):
    spec = msgspec.structs.replace(agent_of(planned(loaded(tmp_path, {"a": SMALL}))), engine=engine, precision="")
    with pytest.raises(InvalidInputError) as caught:
        adapter(engine).command(launch(spec, tmp_path))
    assert any("several models out of one memory" in problem.message for problem in caught.value.problems)
