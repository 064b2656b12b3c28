"""P6: the planner on made-up fabrics of growing size, at 0.7 of what each could serve: how good, how soon, how sure.

Rows: models × device types × devices. "first" is the first placement that serves everything; "best" the last one of
the latency stage. Gaps are to the linear relaxation over all options; memp is the papers' rule on the same tables.
"""

import tempfile
import time
from pathlib import Path

import yaml

from fabrictool.blueprint import load
from fabrictool.planner.build import build_problem
from fabrictool.planner.instances import synthetic
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.memp import MempSolver

SIZES = ("3x2x56", "10x5x500", "50x8x5000", "142x12x10000")
SECONDS = 50.0


def main(_):
    """Prints the table."""
    print("| fabric | options | tables s | first s | its gap | best s | its gap | memp: unserved | memp: in system |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        problem, tables = _problem(size)
        began = time.perf_counter()
        marks = []
        for solution in ExactSolver().solve(problem, deadline_s=SECONDS, seed=0):
            stages = {stage.name: stage for stage in solution.stages}
            if len(stages) > 2:  # what follows are fewer moves and replicas
                break
            if "latency" in stages:
                marks.append((time.perf_counter() - began, _gap(stages["latency"]), stages["latency"].objective))
            elif not marks:
                served = time.perf_counter() - began
        first, best = marks[0], marks[-1]
        baseline = {s.name: s for s in next(MempSolver().solve(problem, deadline_s=SECONDS, seed=0)).stages}
        unserved = baseline["served"].objective / sum(need.rate for need in problem.needs)
        ratio = baseline["latency"].objective / best[2]
        print(
            f"| {size} | {len(problem.options)} | {tables:.1f} | {served:.2f} | {first[1]:.1%} | {best[0]:.1f}"
            f" | {best[1]:.2%} | {unserved:.1%} | {ratio:.2f} × |",
            flush=True,
        )
    return 0


def _problem(size):
    with tempfile.TemporaryDirectory() as folder:
        for name, document in synthetic.documents(synthetic.parse(size), 7, 0.7).items():
            (Path(folder) / name).write_text(yaml.safe_dump(document, sort_keys=False))
        loaded = load(Path(folder) / "blueprint.yaml", environment={})
    began = time.perf_counter()
    usable = list(loaded.inventory.clusters)
    problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
    return problem, time.perf_counter() - began


def _gap(stage):
    return (stage.objective - stage.bound) / stage.objective if stage.objective > 0 else 0.0
