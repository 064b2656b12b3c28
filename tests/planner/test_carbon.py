"""What electricity emits: an objective, a front, a schedule by hours, and never nothing where nobody knows."""

import msgspec
import pytest

from fabrictool.base.errors import InvalidInputError, UsageError
from fabrictool.blueprint import load
from fabrictool.cli.plan_text import render
from fabrictool.planner.horizon import planned
from fabrictool.planner.pareto import front, undominated
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.situation import situation_of
from fabrictool.planner.solvers.cp import CpSolver
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.tabu import TabuSolver
from fabrictool.planner.steps import steps_of
from tests.planner.test_exact import solve
from tests.planner.test_unchanged import nothing

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}}
sites:
  coal: {provider: p, carbon: 800 g/kWh}
  hydro: {provider: p, carbon: 20 g/kWh, carbon_hours: [HOURS]}
clusters:
  near:
    site: coal
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, power: 8 kW, price: 8 CHF/h}}
  far:
    site: hydro
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, power: 10 kW, price: 16 CHF/h}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
objective: OBJECTIVE
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {context: 4096 tok}
    demand: {rate: 20 req/s, input: 500 tok, output: 200 tok MORE}
    replicas: {min: 0, max: 8}
"""
EVEN = ", ".join(["1"] * 24)


@pytest.fixture
def written(tmp_path):
    def write(objective, *, more="", hours=EVEN, inventory=INVENTORY):
        (tmp_path / "inventory.yaml").write_text(inventory.replace("HOURS", hours))
        (tmp_path / "blueprint.yaml").write_text(BLUEPRINT.replace("OBJECTIVE", objective).replace("MORE", more))
        return load(tmp_path / "blueprint.yaml", environment={})

    return write


def planned_by(there, solver=None):
    options = PlanOptions(work_s=5.0, solver=solver or ExactSolver())
    return plan(there.blueprint, there.inventory, nothing(there), options, now=0.0)


def places(whole):
    return {replica.cluster for replica in whole.placement.replicas}


@pytest.mark.parametrize("solver", [ExactSolver, CpSolver, TabuSolver])
@pytest.mark.parametrize(
    ("objective", "where"),
    [("[slo, carbon]", "far"), ("[slo, energy]", "near"), ("[slo, cost]", "near"), ("[slo, carbon, cost]", "far")],
)
def test_each_objective_has_its_own_place(written, solver, objective, where):
    assert places(planned_by(written(objective), solver())) == {where}


def test_the_plan_says_what_is_emitted(written):
    there = written("[slo, carbon]")
    whole = planned_by(there)
    devices = sum(replica.devices for replica in whole.placement.replicas)
    # 10 kW for eight devices at 20 g for each kWh.
    assert whole.forecast.carbon_g_per_hour == pytest.approx(devices / 8 * 10 * 20)
    stage = next(stage for stage in whole.certificate.stages if stage.name == "carbon")
    assert stage.objective == pytest.approx(devices / 8 * 10 * 20)
    assert f"carbon {devices / 8 * 0.2:.3g} kg CO2e/h" in render(whole, nothing(there).observed)


def test_unknown_is_not_clean(written):
    unknown = INVENTORY.replace(", carbon: 800 g/kWh", "")
    with pytest.raises(InvalidInputError) as refused:
        written("[slo, carbon]", inventory=unknown)
    assert [(its.code, its.message) for its in refused.value.problems] == [
        ("FT1285", "objective: nothing says what electricity emits at coal")
    ]
    there = written("[slo, cost]", inventory=unknown)
    whole = planned_by(there)
    assert places(whole) == {"near"}
    assert whole.forecast.carbon_g_per_hour is msgspec.UNSET
    assert "carbon" not in render(whole, nothing(there).observed)
    problem, _ = situation_of(there.blueprint, there.inventory, nothing(there), 0.0).build()
    with pytest.raises(UsageError, match="emits at coal"):
        list(front(problem, ("cost", "carbon"), solve, 0))


def test_a_disabled_cluster_needs_no_figure(written):
    away = INVENTORY.replace(", carbon: 800 g/kWh", "").replace("site: coal", "site: coal\n    enabled: false")
    assert places(planned_by(written("[slo, carbon]", inventory=away))) == {"far"}


def test_a_front_shows_what_less_carbon_costs(written):
    there = written("[slo, cost]")
    problem, _ = situation_of(there.blueprint, there.inventory, nothing(there), 0.0).build()
    points = undominated(front(problem, ("cost", "carbon"), solve, 0))
    cost, carbon = ([point.values[name] for point in points] for name in ("cost", "carbon"))
    assert cost == sorted(cost)
    assert carbon == sorted(carbon, reverse=True)
    assert carbon[0] / carbon[-1] == pytest.approx(800 * 8 / (20 * 10))


def test_a_schedule_waits_for_clean_hours(written):
    """Dirty until noon where it is clean in the mean."""
    hours = ", ".join(["50"] * 12 + ["1"] * 12)
    there = written("[slo, carbon]", more=", wait: 24h", hours=hours)
    situation = situation_of(there.blueprint, there.inventory, nothing(there), 0.0)
    steps = steps_of(situation, 8 * 3600.0, 3600.0, 8)
    assert {step.paid_in for step in steps} == {"carbon"}
    horizon = planned(steps, {}, solve, waits={"m": 24})
    running = [part.replicas for part in horizon.schedule.parts]
    assert running[:4] == [0, 0, 0, 0]
    assert all(key[1] == "far" for part in horizon.schedule.parts for key, _ in part.placed)
    assert horizon.schedule.running < horizon.at_once.running / 4
