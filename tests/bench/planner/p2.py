"""P2: prefill and decode apart on ThunderServe's 32 rented GPUs (examples/thunderserve), by tabu search.

"Within the SLO" is the share of the demand that is served and meets its targets. The bound is that of the linear
relaxation over all columns that the search made; beside it what the exact solver places with the columns of the first
seed, in 30 s of work. Seconds are the search's, with the tables of the columns that it makes, the better of two runs;
"a / b / c" are the seeds 0, 1 and 2.
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import yaml

from fabrictool.blueprint import load
from fabrictool.planner.build import build_problem
from fabrictool.planner.instances import synthetic
from fabrictool.planner.problem import Solution
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.reschedule import RescheduleSolver
from fabrictool.planner.solvers.search import TabuSearch
from fabrictool.planner.solvers.tabu import TabuSolver

EXAMPLE = Path(__file__).parents[3] / "examples" / "thunderserve" / "blueprint.yaml"
SECONDS = 60.0
EXACT_SECONDS = 30.0
"""For each stage."""
EVERYTHING = 1 - 1e-4
SEEDS = (0, 1, 2)
REPEATS = 2
COPIES = 31
CASES = (
    (None, None, 32, (12.0, 17.0)),
    (None, "24-gpus", 24, (9.0, 13.0)),
    (None, "16-gpus", 16, (6.0, 8.0)),
    ("conversation", None, 32, (8.5, 11.5)),
    ("conversation", "24-gpus", 24, (6.0, 8.5)),
    ("conversation", "16-gpus", 16, (4.0, 6.0)),
)
"""(scenario of the workload, scenario of the devices, GPUs, rates in requests/s: about three quarters of what the
relaxation can serve within the SLO, and a little more than all of it)."""


def built(workload, devices, rate=None, copies=1):
    """The problem of one scenario's requests on another one's devices, each node `copies` times."""
    loaded = load(EXAMPLE, environment={}, scenario=workload)
    there = load(EXAMPLE, environment={}, scenario=devices).inventory
    inventory = there.model_copy(
        update={
            "clusters": {
                name: cluster.model_copy(
                    update={
                        "partitions": {
                            key: partition.model_copy(update={"nodes": copies * partition.nodes})
                            for key, partition in cluster.partitions.items()
                        }
                    }
                )
                for name, cluster in there.clusters.items()
            }
        }
    )
    usable = [name for name, cluster in inventory.clusters.items() if cluster.enabled]
    problem, _ = build_problem(loaded.blueprint, inventory, usable=usable, unseen=(), current={})
    return replace(
        problem,
        needs=tuple(
            replace(need, rate=copies * (rate or need.rate), maximum=copies * need.maximum) for need in problem.needs
        ),
        links={sites: copies * octets for sites, octets in problem.links.items()},
    )


def timed(solver, make, seed, **more):
    """(problem, the last solution, seconds until the first one, seconds until the last one), of the faster run."""
    best = None
    for _ in range(REPEATS):
        problem = make()
        began = time.perf_counter()
        solutions = solver.solve(problem, deadline_s=SECONDS, seed=seed, **more)
        found = [(time.perf_counter() - began, solution) for solution in solutions]
        took = time.perf_counter() - began
        if best is None or took < best[3]:
            best = (problem, found[-1][1], found[0][0], took)
    return best


def within(problem, solution, what="objective"):
    """The share of the demand that is served within its SLO."""
    stages = {stage.name: getattr(stage, what) for stage in solution.stages}
    return 1.0 - (stages["served"] + stages.get("slo", 0.0)) / sum(need.rate for need in problem.needs)


def gap(problem, solution):
    """Of the latency, as far as all is served within the SLO; else None."""
    stages = {stage.name: stage for stage in solution.stages}
    if "latency" not in stages or within(problem, solution) < EVERYTHING:
        return None
    return stages["latency"].objective / stages["latency"].bound - 1.0


def beyond(problem, solution, other):
    """By how much the latency of one solution is above that of another; None where one of them does not serve all."""
    if gap(problem, solution) is None or gap(problem, other) is None:
        return None
    one, best = ({stage.name: stage.objective for stage in found.stages}["latency"] for found in (solution, other))
    return one / best - 1.0


def exact(problem, solution):
    """What the exact solver reaches with the columns of a solution; its latency where all is served within the SLO."""
    last = None
    for found in ExactSolver().solve(solution.whole(problem), deadline_s=EXACT_SECONDS, seed=0):
        last = found
        if found.stages[-1].name == "latency" or (
            found.stages[-1].name == "slo" and within(problem, found) < EVERYTHING
        ):
            break
    return last


def percent(values):
    return " / ".join("–" if value is None else f"{100 * value:.1f}" for value in values)


def seconds(values):
    return " / ".join(f"{value:.2f}" for value in values)


def searches():
    print("| requests | GPUs | rate | within the SLO, % | bound, % | exact, same columns, % | latency over bound, % "
          "| latency over exact's, % | columns | first, s | all, s |")  # fmt: skip
    print("|---" * 11 + "|")
    for workload, devices, gpus, rates in CASES:
        for rate in rates:
            runs = [timed(TabuSolver(), lambda w=workload, d=devices, r=rate: built(w, d, r), seed) for seed in SEEDS]
            pairs = [(problem, solution) for problem, solution, _, _ in runs]
            beside = exact(*pairs[0])
            print(
                f"| {workload or 'coding'} | {gpus} | {rate:g} | {percent(within(*pair) for pair in pairs)}"
                f" | {percent(within(*pair, 'bound') for pair in pairs)}"
                f" | {percent([within(pairs[0][0], beside)])}"
                f" | {percent(gap(*pair) for pair in pairs)} | {percent([beyond(*pairs[0], beside)])}"
                f" | {' / '.join(str(len(problem.options) + len(solution.added)) for problem, solution in pairs)}"
                f" | {seconds(run[2] for run in runs)} | {seconds(run[3] for run in runs)} |",
                flush=True,
            )


def large():
    print("\n| about 1,000 GPUs | within the SLO, % | bound, % | latency over bound, % | columns | first, s | all, s |")
    print("|---" * 7 + "|")
    cases = [
        (f"{workload or 'coding'}, {COPIES} × 32, {COPIES} × {rates[0]:g} req/s",
         lambda w=workload, r=rates[0]: built(w, None, r, COPIES))
        for workload, devices, _, rates in CASES if devices is None
    ]  # fmt: skip
    for title, make in [*cases, ("synthetic 10x5x1000, 0.7 of what it could serve", made_up)]:
        problem, solution, first, took = timed(TabuSolver(), make, 0)
        columns = len(problem.options) + len(solution.added)
        share, bound = within(problem, solution), within(problem, solution, "bound")
        print(f"| {title} | {percent([share])} | {percent([bound])} | {percent([gap(problem, solution)])} | {columns}"
              f" | {seconds([first])} | {seconds([took])} |", flush=True)  # fmt: skip


def made_up():
    with tempfile.TemporaryDirectory() as folder:
        for name, document in synthetic.documents(synthetic.parse("10x5x1000"), 7, 0.7).items():
            (Path(folder) / name).write_text(yaml.safe_dump(document, sort_keys=False))
        loaded = load(Path(folder) / "blueprint.yaml", environment={})
    usable = list(loaded.inventory.clusters)
    return build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})[0]


def lost(workload, rate, planned):
    """The problem without one instance of four A6000, and what is left of a plan: counts by option."""
    problem = built(workload, "lost", rate)
    before, solution, _, _ = planned
    options = solution.whole(before).options
    pools = {pool.key for pool in problem.pools}
    left = {
        options[i]: count for i, count in solution.counts.items() if all(pool.key in pools for pool in options[i].pools)
    }
    known = {option.key for option in problem.options}
    problem = replace(problem, options=problem.options + tuple(o for o in left if o.key not in known))
    at = {option.key: i for i, option in enumerate(problem.options)}
    return problem, {at[option.key]: count for option, count in left.items()}


def reschedules():
    print("\n| requests | rate | before, % | four A6000 lost, % | rescheduled, % | s | planned anew, % | s |")
    print("|---" * 8 + "|")
    for workload, devices, _, rates in CASES:
        for rate in rates if devices is None else ():
            planned = timed(TabuSolver(), lambda w=workload, r=rate: built(w, None, r), 0)
            problem, counts = lost(workload, rate, planned)
            need = problem.needs[0]
            worth = TabuSearch(problem, None).of_counts(counts).values[need.model]
            warm = Solution(counts, {}, (), "", optimal=False)
            _, again, _, quick = timed(
                RescheduleSolver(), lambda w=workload, r=rate, p=planned: lost(w, r, p)[0], 0, warm=warm
            )
            fresh, anew, _, slow = timed(TabuSolver(), lambda w=workload, r=rate: built(w, "lost", r), 0)
            print(
                f"| {workload or 'coding'} | {rate:g} | {percent([within(*planned[:2])])}"
                f" | {percent([1.0 - (worth.served + worth.slo) / need.rate])}"
                f" | {percent([within(problem, again)])} | {quick:.3f}"
                f" | {percent([within(fresh, anew)])} | {slow:.2f} |",
                flush=True,
            )


def main(_):
    """Prints three tables."""
    searches()
    reschedules()
    large()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
