"""The examples of placement: they load, they hold what their sources say, and the commands in their pages work."""

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from fabrictool.blueprint import load
from fabrictool.cli.main import main
from fabrictool.planner.build import build_problem

EXAMPLES = Path(__file__).parents[2] / "examples"


def problem_of(example, scenario=None):
    loaded = load(EXAMPLES / example / "blueprint.yaml", environment={}, scenario=scenario)
    usable = list(loaded.inventory.clusters)
    return loaded, build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})[0]


def test_melanges_problem_is_solved_and_slices_are_never_cheaper(tmp_path, capsys):
    made = subprocess.run(
        [sys.executable, str(EXAMPLES / "melange" / "problem.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    problem = json.loads(made.stdout) | {"slice_factor": 1}  # finer slices take half a minute to prove
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    costs = []
    for solver in ("exact", "sliced"):
        arguments = ["instance", str(tmp_path / "problem.json"), "--solver", solver, "--budget", "200s", "--json"]
        assert main(arguments) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["optimal"]
        costs.append(found["cost_per_hour"])
    assert 0 < costs[0] <= costs[1] + 1e-6


def test_muxserves_spatial_placement_uses_its_32_devices_and_is_among_our_options():
    with (EXAMPLES / "muxserve" / "spatial.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for scenario, load_name, requests in ((None, "1200", 4089), ("denser", "2000", 4089)):
        mine = {row["model"]: row for row in rows if row["load"] == load_name}
        loaded, problem = problem_of("muxserve", scenario)
        assert set(mine) == set(loaded.blueprint.models)
        assert sum(int(row["devices"]) for row in mine.values()) == 32
        assert sum(int(row["requests"]) for row in mine.values()) == requests
        there = {(option.model, option.tp) for option in problem.options}
        assert {(name, int(row["devices"])) for name, row in mine.items()} <= there


def test_table_1_is_among_the_options_of_its_scenario():
    _, problem = problem_of("opentela", "table1")
    assert {need.model: need.rate for need in problem.needs} == {
        "llama-13b": 110.0, "codellama-34b": 185.5, "llama-70b": 221.0,
    }  # fmt: skip
    assert Counter((pool.device, pool.nodes * pool.devices_per_node) for pool in problem.pools) == {
        ("a100-80g", 24): 1, ("gh200", 32): 1,
    }  # fmt: skip
    there = {(option.model, option.pool.device, option.tp) for option in problem.options}
    assert {
        ("llama-13b", "a100-80g", 1), ("codellama-34b", "a100-80g", 2), ("codellama-34b", "gh200", 2),
        ("llama-70b", "a100-80g", 4), ("llama-70b", "gh200", 4),
    } <= there  # fmt: skip
