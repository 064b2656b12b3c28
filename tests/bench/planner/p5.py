"""P5: MuxServe's 16 models on 32 A100 (examples/muxserve): its spatial placement, as measured and replayed, and ours.

"measured" are its authors' own numbers for devices of its own for each model; "spatial" is that placement in our
simulator; exact, cp and memp are placed here for the same demand. All are played alike: as many requests as were
measured, Poisson over the time that the example's README derives, least-loaded, and on until all is answered. "N" is
how many requests are in the system on average while they come, "last" when the slowest model's last answer ends.
Time to the first token and time per token are means over all requests, weighted as they came.
"""

import csv
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabrictool.blueprint import load
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.solvers.appraisal import appraise
from fabrictool.planner.solvers.registry import SOLVERS
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.deployment import of_model
from fabrictool.simulator.fleet import Stream, simulate

EXAMPLE = Path(__file__).parents[3] / "examples" / "muxserve"
LOADS = {"1200": None, "2000": "denser"}
"""As the measurements call them → scenario of the blueprint."""
PLACED = ("exact", "cp", "memp")
SECONDS = 20.0
SEED = 1


@dataclass
class Played:
    """One model's requests."""

    requests: int
    ttft: float
    tpot: float
    last: float
    in_system: float


def measured(load_name):
    """Model → the authors' row."""
    with (EXAMPLE / "spatial.csv").open(encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file) if row["load"] == load_name}


def play(loaded, problem, solution, rows):
    """Model → what became of its requests."""
    placement = assign(problem, solution, {})
    found = {}
    for number, (name, row) in enumerate(sorted(rows.items())):
        simulation = of_model(name, loaded.blueprint, loaded.inventory, placement.replicas, [])
        rng, count = np.random.default_rng((SEED, number)), int(row["requests"])
        span = count / simulation.rate
        times = np.sort(rng.uniform(0, span, count))  # Poisson arrivals, given their number
        stream = Stream(
            times,
            simulation.input.draw(count, rng),
            simulation.output.draw(count, rng),
            models=(simulation.specs[0].model,),
        )
        outcome = simulate(simulation.specs, stream, routing_policy("least-loaded", random.Random(SEED)))
        inside = float((np.minimum(outcome.finish, span) - outcome.arrival).clip(0).sum()) / span
        found[name] = Played(
            count, float(outcome.ttft.mean()), float(np.nanmean(outcome.tpot)), float(outcome.end), inside
        )
    return found


def line(load_name, name, played):
    """A row of the table."""
    requests = sum(one.requests for one in played.values())
    ttft, tpot = (sum(getattr(one, x) * one.requests for one in played.values()) / requests for x in ("ttft", "tpot"))
    inside = sum(one.in_system for one in played.values())
    last = max(one.last for one in played.values())
    shown = "–" if np.isnan(inside) else f"{inside:.0f}"
    print(f"| {load_name} | {name} | {ttft:.2f} | {1000 * tpot:.0f} | {shown} | {last:.0f} |", flush=True)


def main(_):
    """Prints the tables."""
    compared = []
    print("| load | placement | TTFT s | ms per token | N | last s |")
    print("|---|---|---|---|---|---|")
    for load_name, scenario in LOADS.items():
        rows = measured(load_name)
        loaded = load(EXAMPLE / "blueprint.yaml", environment={}, scenario=scenario)
        usable = list(loaded.inventory.clusters)
        problem, _ = build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})
        theirs = {
            name: Played(
                int(row["requests"]),
                float(row["ttft_mean_s"]),
                float(row["tpot_mean_s"]),
                int(row["requests"]) / float(row["requests_per_s"]),
                np.nan,
            )
            for name, row in rows.items()
        }
        line(load_name, "spatial, measured", theirs)
        counts = defaultdict(int)
        for i, option in enumerate(problem.options):
            plain = option.phase == "unified" and option.pp == 1
            counts[i] = int(plain and option.tp == int(rows[option.model]["devices"]))
        spatial = play(loaded, problem, appraise(problem, dict(counts), "spatial", SECONDS, 0), rows)
        line(load_name, "spatial", spatial)
        for name in PLACED:
            *_, solution = SOLVERS[name]().solve(problem, deadline_s=SECONDS, seed=0)
            line(load_name, name, play(loaded, problem, solution, rows))
        for model, row in rows.items():
            compared.append((load_name, model, row, theirs[model], spatial[model]))
    print(
        "\n| load | model | devices | TTFT s: measured, ours | ms per token: measured, ours | last s: measured, ours |"
    )
    print("|---|---|---|---|---|---|")
    for load_name, model, row, real, ours in compared:
        print(
            f"| {load_name} | {model} {row['size']} | {row['devices']} | {real.ttft:.2f}, {ours.ttft:.2f}"
            f" | {1000 * real.tpot:.0f}, {1000 * ours.tpot:.0f} | {real.last:.0f}, {ours.last:.0f} |"
        )
    return 0
