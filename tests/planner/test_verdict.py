"""One verdict on an SLO: from the replay, with the routing that the plan plans, and acted upon."""

import json
import math

import msgspec
import numpy as np
import pytest

from fabrictool.blueprint import load
from fabrictool.cli.plan_markdown import markdown
from fabrictool.cli.plan_text import complaints, render, share_text
from fabrictool.cli.source import Source
from fabrictool.domain.blueprint import Slo
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, Observed
from fabrictool.domain.plan import Placement, Replay, ReplicaPlacement, decode_plan
from fabrictool.domain.specs import AgentSpec, GatewaySpec, weight_key
from fabrictool.domain.state import State
from fabrictool.planner import chosen as choosing
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.judged import shortfall
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.played import Played
from fabrictool.planner.replay import replay
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.weights import gateway_weights, planned_rates, weighted
from fabrictool.routing.policies import RoundRobinPolicy
from fabrictool.simulator.capacity import under_load
from fabrictool.simulator.deployment import of_model
from fabrictool.simulator.slo import criteria
from fabrictool.simulator.steady import steady_state
from fabrictool.workload.arrivals import arrivals

pytestmark = pytest.mark.usefixtures("kept_calibrations")

INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}}
sites: {s: {provider: p}}
clusters:
  fast: {site: s, kind: local, partitions: {gpu: {device: h100-sxm, devices_per_node: 2, nodes: 1, price: 8 CHF/h}}}
  slow: {site: s, kind: local, partitions: {gpu: {device: a100-80g, devices_per_node: 1, nodes: 1, price: 1 CHF/h}}}
"""
BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
objective: [slo, cost]
models:
  m:
    source: hf://Qwen/Qwen3-32B
    variant: {context: 4096 tok}
    demand: {rate: RATE req/s, input: LENGTH, output: 200 tok}
    SLO
    replicas: {min: 1, max: MAX}
gateway: {cluster: fast, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}
"""
SLO = "slo: {ttft_p95: 1s, tpot_p95: 60ms}"


def fabric(folder, *, rate=12, most=8, slo=SLO, length="800 tok", inventory=INVENTORY, models=""):
    (folder / "inventory.yaml").write_text(inventory)
    text = BLUEPRINT.replace("RATE", str(rate)).replace("MAX", str(most)).replace("SLO", slo).replace("LENGTH", length)
    (folder / "blueprint.yaml").write_text(text.replace("gateway:", models + "gateway:"))
    return load(folder / "blueprint.yaml", environment={})


def solved(loaded):
    usable = list(loaded.inventory.clusters)
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
    *_, solution = ExactSolver().solve(problem, deadline_s=10, seed=0)
    return problem, solution


def nothing_runs(loaded):
    seen = {name: ClusterFacts(cluster=name, known=True) for name in loaded.inventory.clusters}
    return Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State())


def planned(loaded):
    return plan(loaded.blueprint, loaded.inventory, nothing_runs(loaded), PlanOptions(work_s=10), now=0.0)


def test_the_planned_split_reaches_plan_gateway_and_replay(tmp_path):
    loaded = fabric(tmp_path)
    made = planned(loaded)
    weights = {replica.cluster: replica.weight for replica in made.placement.replicas}
    assert weights["fast"] == 1.0
    assert weights["slow"] < 0.2, "it is planned for a small part only"
    (gateway,) = (action.spec for action in made.actions if isinstance(action.spec, GatewaySpec))
    (slow,) = (replica for replica in made.placement.replicas if replica.cluster == "slow")
    assert gateway.routing_weights == {weight_key("m", "slow", "gpu", slow.tp): slow.weight}

    problem, solution = solved(loaded)
    rates = planned_rates(problem, solution)
    even = Placement(replicas=tuple(msgspec.structs.replace(r, weight=1.0) for r in made.placement.replicas))
    found = {
        name: replay(loaded.blueprint, loaded.inventory, placement, rates, 0)["m"].figures.attainment
        for name, placement in (("planned", made.placement), ("even", even))
    }
    assert found["planned"] > 0.97, found
    assert found["even"] < 0.93, found


def test_weights_that_are_about_right_change_no_gateway(tmp_path):
    problem, solution = solved(fabric(tmp_path))
    placement = assign(problem, solution, {})
    fresh = weighted(problem, solution, placement, {})
    (key,) = gateway_weights(fresh.replicas, {})
    was = gateway_weights(fresh.replicas, {})[key]
    near, far = {key: was * 1.2, "gone@x/y:1": 0.5}, {key: 1.0}
    kept = weighted(problem, solution, placement, near)
    assert gateway_weights(kept.replicas, near) == near, "not a byte of its spec changes"
    assert weighted(problem, solution, placement, far) == fresh


def test_one_replica_more_of_a_kind_changes_no_weights(tmp_path):
    problem, solution = solved(fabric(tmp_path))
    fresh = weighted(problem, solution, assign(problem, solution, {}), {})
    one = fresh.replicas[-1]
    more = (*fresh.replicas, msgspec.structs.replace(one, replica="m/9"))
    assert gateway_weights(more, {}) == gateway_weights(fresh.replicas, {})


def test_a_last_program_at_the_final_counts_leaves_no_dust(tmp_path):
    problem, solution = solved(fabric(tmp_path, rate=11.5))
    final = {stage.name: stage for stage in settled(problem, solution, 0).stages}
    before = {stage.name: stage for stage in solution.stages}
    assert final["served"].objective == 0.0
    assert final["slo"].objective == 0.0
    assert final["latency"].objective <= before["latency"].objective + 1e-3
    assert all(stage.bound <= stage.objective for stage in final.values())


def test_a_model_without_an_slo_neither_meets_nor_misses(tmp_path):
    for rate in (1, 500):
        (line,) = planned(fabric(tmp_path, rate=rate, slo="")).forecast.models
        assert (line.slo, line.judge, line.misses, line.overruled) == ("", "", (), "")
        assert bool(line.unserved) is (rate == 500)
        assert [line.unserved] == complaints(line)[:1] if rate == 500 else complaints(line) == []


def test_attain_counts(tmp_path):
    """The same placement, and another share of requests that has to keep the target."""

    def line(slo):
        pinned = f"slo: {slo}\n    place: {{pin: [{{cluster: fast, replicas: 1}}]}}"
        return planned(
            fabric(tmp_path, rate=6, most=1, slo=pinned, length="{mean: 800 tok, sd: 600 tok}")
        ).forecast.models[0]

    target = line("{e2e_p95: 100s}").replay.e2e_p95_s * 1.05
    assert [line(f"{{e2e_p95: {target:.3f} s, attain: {attain}}}").slo for attain in ("90%", "99.9%")] == [
        "meets",
        "misses",
    ]


def test_a_median_binds_half_of_the_requests(tmp_path):
    loaded = fabric(tmp_path, slo="slo: {e2e_p50: 9s, tpot_p95: 60ms, attain: 99%}")
    assert [one.share for one in criteria(loaded.blueprint.models["m"].slo)] == [0.95, 0.5, 0.5]


def test_more_is_asked_where_attain_is_above_the_percentiles(tmp_path):
    shares = {}
    for attain in ("90%", "99%"):
        loaded = fabric(tmp_path, slo=f"slo: {{ttft_p95: 1s, attain: {attain}}}")
        shares[attain] = [one.share for one in criteria(loaded.blueprint.models["m"].slo)]
    assert shares == {"90%": [0.95, 0.9], "99%": [0.95, 0.99]}


def test_what_the_replay_misses_is_planned_otherwise(tmp_path, monkeypatch):
    """Wide lengths: the closed form thinks that one replica is enough. What may be added is added."""
    loaded = wide(tmp_path, "650ms")
    lines = {}
    for rounds in (0, choosing.ROUNDS):
        monkeypatch.setattr(choosing, "ROUNDS", rounds)
        made = planned(loaded)
        (lines[bool(rounds)],) = made.forecast.models
    assert (lines[False].slo, lines[False].overruled, lines[False].replicas) == ("misses", "meets", 1)
    assert lines[False].why.startswith("there is room in fast/gpu")
    assert (lines[True].slo, lines[True].judge, lines[True].why) == ("meets", "replay", "")
    assert lines[True].replicas > 1
    assert any("misses the SLO at 4 req/s in the replay" in reason for reason in made.reasons)


def test_what_the_replay_cannot_tell_is_undecided_and_planned_otherwise(tmp_path, monkeypatch):
    """As wide, and a target at the edge: 10,000 requests do not show on which side it is."""
    loaded = wide(tmp_path, "700ms")
    plans = {}
    for rounds in (0, choosing.ROUNDS):
        monkeypatch.setattr(choosing, "ROUNDS", rounds)
        plans[bool(rounds)] = planned(loaded)
    (line,) = plans[False].forecast.models
    assert (line.slo, line.judge, line.misses, line.overruled) == ("undecided", "replay", (), "")
    assert line.replay.low < 0.95 < line.replay.high
    low, high = math.floor(line.replay.low * 1000) / 10, math.ceil(line.replay.high * 1000) / 10
    said = f"TTFT within 700ms: between {low:g}% and {high:g}% of requests, 95% are wanted"
    assert line.undecided == (said,)
    text = render(plans[False], Observed(clusters={}))
    assert "undecided (94%)" in text
    assert f"▲ m: undecided: {said}" in text
    assert "▲ m: because there is room in fast/gpu" in text
    assert "undecided" in markdown(plans[False])
    assert decode_plan(msgspec.json.encode(plans[False])) == plans[False]
    (line,) = plans[True].forecast.models
    assert (line.slo, line.undecided) == ("meets", ())
    assert any("is not shown to meet the SLO at 4 req/s in the replay" in reason for reason in plans[True].reasons)


def test_the_verdict_is_of_requests_that_come_as_unevenly_as_the_demand_says(tmp_path):
    """Bursts are in no table: the closed form sees no difference, the replay does, and its figures are the forecast."""
    lines = {}
    for uneven in ("", ", cv: 4"):
        pinned = "slo: {ttft_p95: 800ms}\n    place: {pin: [{cluster: fast, replicas: 1}]}"
        loaded = fabric(tmp_path, rate=6, most=1, slo=pinned, length=f"800 tok{uneven}")
        lines[uneven] = planned(loaded).forecast.models[0]
    calm, bursty = lines.values()
    assert (calm.slo, bursty.slo, bursty.overruled) == ("meets", "misses", "meets")
    assert bursty.ttft_p95_s.value == bursty.replay.ttft_p95_s > 2 * calm.ttft_p95_s.high
    assert bursty.ttft_p95_s.low < bursty.ttft_p95_s.value < bursty.ttft_p95_s.high


def test_a_part_of_a_fleet_is_played_with_its_part_of_the_bursts(tmp_path, monkeypatch):
    seen = []

    def watched(simulation, *arguments, **options):
        seen.append((simulation.rate, simulation.cv))
        return steady_state(simulation, *arguments, **options)

    monkeypatch.setattr("fabrictool.planner.replay.steady_state", watched)
    loaded = fabric(tmp_path, rate=32, length="800 tok, cv: 3")
    many = [msgspec.structs.replace(assigned("fast", 2), replica=f"m/{at}") for at in range(16)]
    for replicas in (many[:8], many):
        replay(loaded.blueprint, loaded.inventory, Placement(replicas=tuple(replicas)), {}, 0)
    assert seen == [(32.0, 3.0), (16.0, pytest.approx(math.sqrt(5.0)))]


def test_a_plan_says_what_of_a_trace_it_knows(tmp_path):
    times = arrivals("gamma", 4.0, 2000, np.random.default_rng(0), cv=3.0)
    text = "\n".join(json.dumps({"t": float(t), "in": 500, "out": 100}) for t in times)
    (tmp_path / "t.jsonl").write_text(text + "\n")
    fabric(tmp_path)
    written = (tmp_path / "blueprint.yaml").read_text()
    demand = "demand: {rate: 12 req/s, input: 800 tok, output: 200 tok}"
    assert demand in written
    (tmp_path / "blueprint.yaml").write_text(written.replace(demand, "demand: {trace: t.jsonl}"))
    made = planned(Source(tmp_path / "blueprint.yaml").loaded)
    said = (
        "m: of demand.trace its mean rate, its lengths and its bursts (cv 3.1) are planned for, not its busiest hours"
    )
    assert said in made.warnings


def test_what_is_missed_counts_before_what_is_undecided(tmp_path):
    problem, _ = solved(fabric(tmp_path))
    figures = Replay(requests=1, attainment=0.9, in_system=1.0, ttft_p95_s=1.0, tpot_p95_s=1.0, e2e_p95_s=1.0)
    kind = problem.options[0].key
    missed = {"m": Played(figures, {}, True, ("x",), (), {kind: 0.01})}
    undecided = {"m": Played(figures, {}, True, (), ("x",), {kind: 0.5})}
    filling = {"m": Played(figures, {}, False, (), ("x",), {})}
    assert shortfall(problem, filling) == (0.0, 0.0) < shortfall(problem, undecided) < shortfall(problem, missed)


def wide(folder, ttft):
    """Lengths spread widely, and room for more replicas than the closed form thinks that it takes."""
    spare = INVENTORY.replace("devices_per_node: 2, nodes: 1", "devices_per_node: 2, nodes: 4")
    slo = f"slo: {{ttft_p95: {ttft}}}"
    return fabric(folder, rate=4, slo=slo, length="{mean: 2000 tok, sd: 1500 tok}", inventory=spare)


def test_a_model_that_misses_says_why_nothing_more_was_done(tmp_path):
    (line,) = planned(fabric(tmp_path, rate=12, most=1)).forecast.models
    assert line.slo == "misses"
    assert line.why == "replicas.max is 1, and so many are placed"
    (line,) = planned(fabric(tmp_path, rate=1, slo="slo: {tpot_p95: 1ms}")).forecast.models
    assert line.why == "no cut on any partition that it may use meets the SLO, however small its load"


def test_a_target_missed_by_little_is_not_given_up(tmp_path):
    """Nothing meets it: what comes nearest is planned, and not what is cheapest."""
    made = planned(fabric(tmp_path, rate=0.5, most=1, slo="slo: {tpot_p95: 5ms}"))
    (line,) = made.forecast.models
    assert line.slo == "misses"
    assert [(replica.cluster, replica.tp) for replica in made.placement.replicas] == [("fast", 2)]


@pytest.mark.parametrize(("share", "text"), [(0.99999, "99%"), (1.0, "100%"), (0.29, "29%")])
def test_shares_are_rounded_down(share, text):
    assert share_text(share) == text


def test_one_context_for_planner_and_engine(tmp_path):
    """The default is written into the command line: the model's own 128k tokens would not fit where it was planned."""
    for context, length, wanted in (
        ("", "800 tok", 4096),
        ("variant: {context: 2048 tok}", "800 tok", 2048),
        ("", "9000 tok", 9216),
        ("", "{mean: 2000 tok, sd: 1000 tok, max: 6000 tok}", 7168),
    ):
        fabric(tmp_path, rate=1)
        text = (tmp_path / "blueprint.yaml").read_text().replace("variant: {context: 4096 tok}", context)
        (tmp_path / "blueprint.yaml").write_text(text.replace("800 tok", length))
        loaded = load(tmp_path / "blueprint.yaml", environment={})
        _, tables = build_problem(loaded.blueprint, loaded.inventory, usable=["fast"], unseen=(), current={})
        made = planned(loaded)
        (spec,) = {action.spec.context for action in made.actions if isinstance(action.spec, AgentSpec)}
        assert spec == tables.demands["m"].context == wanted


def test_the_spread_of_lengths_is_in_the_tables(tmp_path):
    """Half of capacity, lengths as wide as their mean: the closed form is near the event loop, which draws them."""
    for load_at, spread in ((0.4, 0), (0.4, 800), (0.55, 800)):
        given = f"{{mean: 800 tok, sd: {spread} tok}}, output: {{mean: 200 tok, sd: {spread // 4} tok}}"
        loaded = fabric(tmp_path, rate=1, slo="")
        text = (tmp_path / "blueprint.yaml").read_text().replace("800 tok, output: 200 tok", given)

        def at(rate, text=text):
            (tmp_path / "blueprint.yaml").write_text(text.replace("rate: 1 ", f"rate: {rate} "))
            loaded = load(tmp_path / "blueprint.yaml", environment={})
            return loaded, *build_problem(loaded.blueprint, loaded.inventory, usable=["fast"], unseen=(), current={})

        _, problem, _ = at(1)
        (option,) = (option for option in problem.options if option.tp == 2)
        rate = load_at * option.capacity
        loaded, _, tables = at(f"{rate:.4f}")
        formula = under_load(option.figures, tables.demands["m"], rate)
        simulation = of_model("m", loaded.blueprint, loaded.inventory, [assigned("fast", 2)], [])
        near = criteria(Slo(e2e_p95=f"{formula.e2e_p95:.3f} s"))  # hard to tell, so that it plays all
        played = steady_state(simulation, near, RoundRobinPolicy, most=5400, seed=0)
        assert formula.e2e_p95 == pytest.approx(played.p95["e2e"].value, rel=0.1), (load_at, spread)
        assert formula.tpot_p95 == pytest.approx(played.p95["tpot"].value, rel=0.1), (load_at, spread)
        assert formula.ttft_p95 == pytest.approx(played.p95["ttft"].value, rel=0.35), (load_at, spread)


def assigned(cluster, tp):
    return ReplicaPlacement(
        replica="m/0", model="m", provider="p", site="s", cluster=cluster, partition="gpu", device="h100-sxm", tp=tp
    )
