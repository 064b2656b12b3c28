"""The same files give the same bytes, in another process with other hashes too."""

import os
import subprocess
import sys

import pytest
import yaml

from fabrictool.planner.instances import synthetic
from fabrictool.planner.solvers.registry import SOLVERS

PLAN = """\
import sys
from pathlib import Path

import msgspec

from fabrictool.blueprint import load
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.forecast import certificate, forecast
from fabrictool.planner.replay import replay
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.planner.weights import planned_rates, weighted

loaded = load(Path(sys.argv[1]) / "blueprint.yaml", environment={})
usable = [name for name in loaded.inventory.clusters]
problem, tables = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
*_, solution = SOLVERS[sys.argv[2]]().solve(problem, deadline_s=2, seed=0)
problem = solution.whole(problem)
solution = settled(problem, solution, 0)
placement = weighted(problem, solution, assign(problem, solution, {}), {})
replayed = replay(loaded.blueprint, loaded.inventory, placement, planned_rates(problem, solution), 0)
parts = (
    placement,
    forecast(loaded.blueprint, problem, solution, tables, "CHF", replayed),
    certificate(problem, solution, 0),
)
print(msgspec.json.encode(parts).decode())
"""


def planned(folder, name, hashes):
    environment = os.environ | {"PYTHONHASHSEED": hashes}
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(folder), name], env=environment, capture_output=True, check=True, timeout=120
    )
    return done.stdout


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"reschedule"}))
def test_two_processes_plan_the_same_bytes(tmp_path, name):
    for file, document in synthetic.documents(synthetic.parse("3x2x32"), 3, 0.6).items():
        (tmp_path / file).write_text(yaml.safe_dump(document, sort_keys=False))
    first, second = (planned(tmp_path, name, hashes) for hashes in ("1", "2"))
    assert first == second
    assert len(first) > 1000
