"""P4: which GPUs to rent, Mélange's problem: our program beside Mélange's own, on its example and on made-up ones.

"Theirs" is Mélange's integer program as its paper and code have it, written anew: one binary variable for each slice
and GPU type, solved by CBC through PuLP. "Ours" lets any share of a bucket go to any GPU type. The slice factors are 8,
and those of the paper's kind, up to a time limit; "?" marks what CBC did not prove within it.
Throughputs of made-up problems fall with input and output size and grow with the price, unevenly, as measured ones do.
"""

import json
import random
import time
from dataclasses import dataclass, replace

import pulp

from fabrictool.planner.instances.melange import GpuType, Instance, read, solve

SECONDS = 60.0
EXAMPLE = {
    "gpu_info": {
        "A10G": {"cost": 1.01, "tputs": [[2, 1], [5, 2]]},
        "A100-80GB": {"cost": 3.67, "tputs": [[20, 20], [40, 20]]},
    },
    "workload_distribution": [[0.2, 0.1], [0.5, 0.2]],
    "total_request_rate": 30.0,
    "slice_factor": 1,
}
"""The numbers of the example that comes with Mélange."""
PRICES = (0.7, 1.01, 1.2, 1.9, 2.5, 3.67, 5.1, 7.5)
GRID = ((3, 4, 30, 4), (4, 6, 60, 8), (4, 8, 200, 8), (6, 8, 200, 8), (8, 10, 500, 8), (8, 16, 2000, 4))
"""(GPU types, buckets along each side, requests/s, slice factor)."""


@dataclass
class Rented:
    """What CBC answers."""

    cost: float
    proved: bool


def theirs(instance, seconds):
    """Mélange's program on CBC; None when it finds nothing in time."""
    program = pulp.LpProblem("melange", pulp.LpMinimize)
    counts = [program.add_variable(f"n{j}", 0, cat="Integer") for j in range(len(instance.gpus))]
    loads = [[] for _ in instance.gpus]
    program += pulp.lpSum(g.cost * n for g, n in zip(instance.gpus, counts, strict=True))
    for b, rate in enumerate(instance.rates):
        for s in range(instance.slices if rate else 0):
            serving = [j for j, g in enumerate(instance.gpus) if g.throughputs[b]]
            chosen = {j: program.add_variable(f"x{b}_{s}_{j}", 0, 1, cat="Integer") for j in serving}
            program += pulp.lpSum(chosen.values()) == 1
            for j, x in chosen.items():
                loads[j].append(x * (rate / instance.slices / instance.gpus[j].throughputs[b]))
    for load, count in zip(loads, counts, strict=True):
        program += pulp.lpSum(load) <= count
    began = time.perf_counter()
    status = program.solve(pulp.PULP_CBC_CMD(msg=0, timeLimit=seconds))
    if status != pulp.LpStatusOptimal:
        return None
    cost = sum(g.cost * round(n.value() or 0) for g, n in zip(instance.gpus, counts, strict=True))
    return Rented(cost, program.sol_status == pulp.LpSolutionOptimal and time.perf_counter() - began < seconds)


def made_up(types, side, rate, slices, seed=1):
    """A histogram with a few popular sizes, and GPUs whose speed is not quite their price."""
    rng = random.Random(f"melange {types} {side} {seed}")
    shares = [rng.paretovariate(1.2) for _ in range(side * side)]
    gpus = []
    for j in range(types):
        strength, taste = PRICES[j] * rng.uniform(0.8, 1.3), rng.uniform(-0.6, 0.6)
        throughputs = [
            12 * strength * (1 + i) ** (-0.8 - taste / 2) * (1 + o) ** (-0.9 + taste / 2) * rng.uniform(0.9, 1.1)
            for i in range(side) for o in range(side)
        ]  # fmt: skip
        gpus.append(GpuType(f"g{j}", PRICES[j], tuple(throughputs)))
    return Instance(tuple(gpus), tuple(rate * share / sum(shares) for share in shares), slices)


def main(_):
    """Prints the table."""
    example = read(json.dumps(EXAMPLE), "example")
    cases = [("example", replace(example, slices=slices)) for slices in (1, 2, 4, 8)]
    cases += [(f"{t} types, {s}×{s}, {r}/s", made_up(t, s, r, f)) for t, s, r, f in GRID]
    print("| problem | slices | theirs: cost | s | ours: cost | bound | s | saved |")
    print("|---|---|---|---|---|---|---|---|")
    for name, instance in cases:
        began = time.perf_counter()
        ours = solve(instance, "exact", seconds=SECONDS, seed=0)
        between = time.perf_counter()
        found = theirs(instance, SECONDS)
        took = time.perf_counter() - between
        cost = "–" if found is None else f"{found.cost:.2f}{'' if found.proved else '?'}"
        saved = "–" if found is None else f"{1 - ours.cost / found.cost:.2%}"
        print(
            f"| {name} | {instance.slices} | {cost} | {took:.2f} | {ours.cost:.2f} | {ours.bound:.2f}"
            f" | {between - began:.3f} | {saved} |",
            flush=True,
        )
        if found is not None and ours.cost > found.cost + 1e-6:
            print("DEARER THAN MÉLANGE", flush=True)
            return 1
    return 0
