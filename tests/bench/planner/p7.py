"""P7: how soon how good, on fabrics and loads that are drawn anew at each run (`--seed` repeats one).

Each row is one `fabrictool plan` of a synthetic fabric on which nothing runs, in a process of its own, with the "must"
of the row for its budget: seconds by the wall and of processors, all included, and the gap of every stage to its bound.
"First" is when its terminal shows a first whole placement, where a search is long enough to show any.
Python's compiled files are kept from one to the next, as they are of an installed package; one plan comes before all.
"yes" where seconds and the gaps of the stages that users feel are within the column. With 200 to 10,000 devices
overload must be within 3 %; what is aimed at is the same for it. The last row plans a fabric of 10,000 again after its
demand grew by 3 %, from the placement before: a search alone.
"""

import argparse
import json
import os
import pty
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import yaml

from fabrictool.blueprint import load
from fabrictool.planner.build import build_problem
from fabrictool.planner.instances import synthetic
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.stages import TOLERANCE_OF_WHAT_RUNS

LOADS = (0.4, 0.85, 1.1)
OVERLOAD_GAP, OVERLOADED = 0.03, ("200", "200-slo", "1000", "1000-slo", "10000")
"""What overload must be within, in these rows."""
ROWS = {
    "32": ("3x2x32", "phases", (2, 0.02), (0.5, 0.01)),
    "200": ("12x4x200", "", (10, 0.01), (3, 0.0)),
    "200-slo": ("12x4x200", "slo", (10, 0.01), (3, 0.0)),
    "1000": ("20x6x1000", "", (15, 0.01), (5, 0.005)),
    "1000-slo": ("20x6x1000", "slo", (15, 0.01), (5, 0.005)),
    "10000": ("142x12x10000", "", (60, 0.01), (30, 0.003)),
    "20000": ("300x12x20000", "", (120, 0.015), (60, 0.005)),
}
"""Devices → (size, what is asked, (seconds, gap) that must be, and that are aimed at).

Asked is the least latency; with ``phases`` replicas may be split into them; with ``slo`` the default objective: models
have an SLO, and it comes before the cost, and that before the power.
"""
FIRST = {"10000": (3, 1)}
"""Seconds after which a first placement must be shown, and that are aimed at."""
TIDYING = ("moves", "replicas", "tie-break")
SLO = {"ttft_p95": "1 s", "tpot_p95": "60 ms"}
PRICES = {"l4": 0.5, "l40s": 1, "a100-40g": 1.5, "a100-80g": 2, "gh200": 4, "h100-sxm": 5, "b200": 9}
AGAIN = ("10000", (5, TOLERANCE_OF_WHAT_RUNS["latency"]), (1, 0.01))
"""What runs may be off by so much, so that less of it moves; none of the demand, of course, for that alone."""


def main(argv):
    """Prints the table; 1 when a row is not as it must be."""
    parser = argparse.ArgumentParser(prog="p7", description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", help=f"of {', '.join(ROWS)}, again; default: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args(argv)
    sizes = options.sizes or [*ROWS, "again"]
    print(f"seed {options.seed}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} as it begins\n")
    print(
        "| devices | load | first s | wall s | processor s | work | gap of each stage | must | kept | aim | reached |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    rng, failed = random.Random(options.seed), False
    _planned("32", 0.4, rng.randrange(10**6))
    for size in sizes:
        if size != "again":
            for load_ in LOADS:
                failed |= _row(size, load_, rng.randrange(10**6))
    if "again" in sizes:
        failed |= _again(rng.randrange(10**6))
    return int(failed)


def _row(devices, load_, seed):
    code, plan, first, seconds, used = _planned(devices, load_, seed)
    *_, must, aim = ROWS[devices]
    if code:
        print(f"| {devices} | {load_} | – | {seconds:.1f} | {used:.1f} | – | exit {code} | | **no** | | |")
        return True
    certificate = json.loads(plan)["certificate"]
    gaps = {stage["name"]: stage["gap"] for stage in certificate["stages"]}
    if load_ > 1 and devices in OVERLOADED:
        must = must[0], OVERLOAD_GAP
    times, limits = (first, seconds, used), (must, aim)
    return _print(f"{devices} | {load_}", times, certificate["work"], gaps, limits, FIRST.get(devices))


def _planned(devices, load_, seed):
    """The exit code, the plan, when a first placement was shown, if ever, the seconds, and those of processors."""
    size, asked, must, _ = ROWS[devices]
    kept = Path(tempfile.gettempdir(), "fabrictool-p7")
    places = {"FABRICTOOL_CACHE_DIR": str(kept), "PYTHONPYCACHEPREFIX": str(kept / "compiled")}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "plan.json").open("w+") as answer:
        _write(folder, size, seed, load_, asked=asked)
        began, used = time.monotonic(), _processor_s()
        ours, terminal = pty.openpty()
        plan = subprocess.Popen(
            [
                *(sys.executable, "-m", "fabrictool.cli.main", "plan", "-b", f"{folder}/blueprint.yaml"),
                *("--assume-empty", "--json", "--budget", f"{must[0]}s"),
            ],
            stdout=answer,
            stderr=terminal,
            env=os.environ | places | {"FABRICTOOL_STATE_DIR": f"{folder}/state", "PYTHONDONTWRITEBYTECODE": ""},
        )
        os.close(terminal)
        first = _first_shown(ours)
        code = plan.wait()
        seconds = time.monotonic() - began
        answer.seek(0)
        return code, answer.read(), first and first - began, seconds, _processor_s() - used


def _first_shown(terminal):
    """When a line told of a placement, if one did; returns when nobody writes any more."""
    shown, text = None, b""
    with os.fdopen(terminal, "rb", buffering=0) as lines:
        while True:
            try:
                piece = lines.read(4096)
            except OSError:  # so a terminal ends
                return shown
            text += piece
            if not piece:
                return shown
            if shown is None and b"best so far" in text:
                shown = time.monotonic()


def _again(seed):
    devices, must, aim = AGAIN
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, ROWS[devices][0], seed, 0.85, asked="")
        loaded = load(Path(folder) / "blueprint.yaml", environment={})
    problem, _ = build_problem(
        loaded.blueprint, loaded.inventory, usable=list(loaded.inventory.clusters), unseen=(), current={}
    )
    *_, first = ExactSolver().solve(problem, deadline_s=30.0, seed=0)
    grown = replace(
        problem,
        needs=tuple(replace(need, rate=1.03 * need.rate) for need in problem.needs),
        current={problem.options[i].key: count for i, count in first.counts.items()},
    )
    began, used = time.monotonic(), _processor_s() + time.process_time()
    *_, last = ExactSolver(lambda: began + must[0] - time.monotonic()).solve(grown, deadline_s=1e6, seed=0)
    seconds, used = time.monotonic() - began, _processor_s() + time.process_time() - used
    gaps = {s.name: (s.searched - s.bound) / s.searched if s.searched - s.bound > 1e-3 else 0.0 for s in last.stages}
    moves = next(stage.objective for stage in last.stages if stage.name == "moves")
    title = f"{devices}, {sum(first.counts.values())} run, +3 %: {moves:.0f} moves | 0.85"
    return _print(title, (None, seconds, used), round(100 * last.work), gaps, (must, aim))


def _write(folder, size, seed, load_, *, asked):
    for name, document in synthetic.documents(synthetic.parse(size), seed, load_).items():
        if name == "blueprint.yaml":
            for model in document["models"].values():
                model.update({"phases": {"phases": "any"}, "slo": {"slo": dict(SLO)}}.get(asked, {}))
            document["objective"] = ["slo", "cost", "energy"] if asked == "slo" else document["objective"]
        elif asked == "slo":
            for cluster in document["clusters"].values():
                for partition in cluster["partitions"].values():
                    price = PRICES.get(partition["device"], 3) * partition["devices_per_node"]
                    partition["price"] = f"{price} CHF/h"
        (Path(folder) / name).write_text(yaml.safe_dump(document, sort_keys=False))


def _processor_s():
    """Of all processes that this one has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


# Wide: a row of the table.
def _print(title, times, work, gaps, limits, first_limits=None):
    shown = ", ".join(f"{name} {gap:.2%}" for name, gap in gaps.items())
    first, seconds, used = times
    cells = []
    for (most_s, within), most_first in zip(limits, first_limits or (None, None), strict=True):
        kept = seconds <= most_s and all(gap <= within for name, gap in gaps.items() if name not in TIDYING)
        kept &= most_first is None or (first is not None and first <= most_first)
        begins = "" if most_first is None else f"{most_first} s, "
        cells += [f"{begins}{most_s} s, {within:.1%}", "yes" if kept else "**no**"]
    begun = "–" if first is None else f"{first:.1f}"
    print(f"| {title} | {begun} | {seconds:.1f} | {used:.1f} | {work} | {shown} | {' | '.join(cells)} |", flush=True)
    return cells[1] != "yes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
