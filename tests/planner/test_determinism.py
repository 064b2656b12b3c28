"""The same files give the same bytes, in another process with other hashes too."""

import os
import subprocess
import sys

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
from fabrictool.planner.certificate import certificate
from fabrictool.planner.forecast import forecast
from fabrictool.planner.replay import replay
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.planner.weights import planned_rates, weighted

loaded = load(Path(sys.argv[1]) / "blueprint.yaml", environment={})
usable = [name for name in loaded.inventory.clusters]
problem, tables = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
for name in sys.argv[2:]:
    *_, solution = SOLVERS[name]().solve(problem, deadline_s=1, seed=0)
    whole = solution.whole(problem)
    solution = settled(whole, solution, 0)
    placement = weighted(whole, solution, assign(whole, solution, {}), {})
    replayed = replay(loaded.blueprint, loaded.inventory, placement, planned_rates(whole, solution), 0)
    parts = (
        placement,
        forecast(loaded.blueprint, whole, solution, tables, "CHF", replayed, {}),
        certificate(whole, solution, 0),
    )
    print(msgspec.json.encode(parts).decode())
"""


def test_two_processes_plan_the_same_bytes(tmp_path):
    for file, document in synthetic.documents(synthetic.parse("3x2x32"), 3, 0.6).items():
        (tmp_path / file).write_text(yaml.safe_dump(document, sort_keys=False))
    names = sorted(set(SOLVERS) - {"reschedule"})
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAN, str(tmp_path), *names],
            env=os.environ | {"PYTHONHASHSEED": hashes},
            stdout=subprocess.PIPE,
        )
        for hashes in ("1", "2")
    ]
    first, second = (process.communicate(timeout=240)[0].splitlines() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    for name, one, other in zip(names, first, second, strict=True):
        assert one == other, name
        assert len(one) > 1000
