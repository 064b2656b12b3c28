"""What a reviewer broke, and stays whole."""

import random
from datetime import datetime

import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.blueprint import load
from fabrictool.cli.main import main
from fabrictool.domain.plan import Placement, ReplicaPlacement
from fabrictool.planner.build import build_problem
from fabrictool.planner.forecast import forecast
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import exact
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.verify import violations
from tests.planner.test_exact import option, pool, problem, random_instance, solve

INVENTORY = """
apiVersion: fabrictool/v1
kind: Inventory
providers: {p: {}}
sites: {s: {provider: p}, t: {provider: p}}
clusters:
  one: {site: s, kind: local, partitions: {g: {device: h100-sxm, devices_per_node: 1, nodes: 4 ONE}}}
  two: {site: t, kind: local, partitions: {g: {device: h100-sxm, devices_per_node: 1, nodes: 4 TWO}}}
links: [{between: [s, t], bandwidth: 100 Mbit/s, latency: 1ms}]
"""
BLUEPRINT = """
apiVersion: fabrictool/v1
kind: Blueprint
fabric: test
inventory: inventory.yaml
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    variant: {context: 4096 tok}
    demand: {rate: RATE req/s, input: 2000 tok, output: 100 tok}
    replicas: {min: MIN, max: 4}
    MORE
"""


def loaded(folder, *, one="", two="", rate=1, least=1, more=""):
    (folder / "inventory.yaml").write_text(INVENTORY.replace(" ONE", one).replace(" TWO", two))
    text = BLUEPRINT.replace("RATE", str(rate)).replace("MIN", str(least)).replace("MORE", more)
    (folder / "blueprint.yaml").write_text(text)
    return load(folder / "blueprint.yaml", environment={})


def at(number, cluster):
    return ReplicaPlacement(
        replica=f"m/{number}", model="m", provider="p", site={"one": "s", "two": "t"}[cluster], cluster=cluster,
        partition="g", device="h100-sxm", tp=1,
    )  # fmt: skip


def test_large_problems_are_not_called_infeasible(monkeypatch):
    for seed in range(150):
        instance = random_instance(random.Random(seed))
        feasible = []
        for small in (1500, 0):
            monkeypatch.setattr(exact, "SMALL", small)
            try:
                solve(instance)
                feasible.append(True)
            except InfeasibleError:
                feasible.append(False)
        assert feasible[0] == feasible[1], seed


def test_spread_counts_all_sites_where_the_model_may_stand(monkeypatch):
    """Also those that are too dear to be among the options of a large problem."""
    monkeypatch.setattr(exact, "SMALL", 0)
    pools = [pool(f"{site}{n}", site=site, nodes=1, price=price) for site, price in (("a", 1), ("b", 1), ("c", 50))
             for n in range(20)]  # fmt: skip
    need = ModelNeed("m", 0.0, 5, 5, spread_sites=True, sites=3)
    instance = problem([need], [option("m", where) for where in pools], pools, objective=("cost",))
    *_, found = ExactSolver().solve(instance, deadline_s=5, seed=0)
    sites = [instance.options[i].pool.site for i, k in found.counts.items() for _ in range(k)]
    assert max(sites.count(site) for site in "abc") <= 2


def test_the_verifier_counts_sites_without_a_replica(tmp_path):
    there = loaded(tmp_path, more="place: {spread: site}")
    crowded = Placement(replicas=tuple(at(n, "one") for n in range(4)))
    assert any("spread over 2 sites" in one for one in violations(there.blueprint, there.inventory, crowded))


def test_windows_that_are_over_take_nothing_away(tmp_path):
    one = ', maintenance: [{begin: "2026-11-01T00:00Z", end: "2026-11-20T00:00Z"}]'
    two = ', maintenance: [{begin: "2026-11-01T00:00Z", end: "2026-11-30T00:00Z"}]'
    there = loaded(tmp_path, one=one, two=two, least=2)
    placed = Placement(replicas=(at(0, "one"), at(1, "one")))
    for day, broken in (("2026-11-21", False), ("2026-11-10", True)):
        now = datetime.fromisoformat(f"{day}T00:00+00:00").timestamp()
        found = violations(there.blueprint, there.inventory, placed, now=now)
        assert any("maintenance window" in one for one in found) is broken, (day, found)


def test_the_forecast_serves_what_the_certificate_serves(tmp_path):
    more = "phases: split\n    place: {pin: [{cluster: one, replicas: 2}]}"
    there = loaded(tmp_path, rate=30, more=more)
    made, tables = build_problem(there.blueprint, there.inventory, usable=["one", "two"], unseen=(), current={})
    *_, solution = ExactSolver().solve(made, deadline_s=20, seed=0)
    unserved = solution.stages[0].objective
    (line,) = forecast(there.blueprint, made, solution, tables, "", {}, {}).models
    assert line.served == pytest.approx(1 - unserved / 30, abs=1e-4)
    assert (line.served < 1) == any("of the demand can be served" in miss for miss in line.misses)


def test_a_relaxation_without_time_bounds_nothing(monkeypatch):
    from fabrictool.planner import program
    from fabrictool.planner.solvers import placing

    monkeypatch.setattr(program, "LEAST_LP_S", 0.0)
    monkeypatch.setattr(placing, "LEAST_LP_S", 0.0)
    instance = random_instance(random.Random(1))
    with pytest.raises(FabrictoolError, match="FT2902"):
        *_, _ = ExactSolver().solve(instance, deadline_s=0.0, seed=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--seed", "-5"],
        ["apply", "--seed", "-1"],
        ["plan", "--executor", "processes"],
        ["plan", "--workers", "2"],
    ],
)
def test_misuse_is_a_usage_error(arguments, tmp_path, monkeypatch, capsys):
    loaded(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(arguments) == 64
    assert "Traceback" not in capsys.readouterr().err
