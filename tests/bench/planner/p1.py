"""P1: OpenTela's Table 1 (paper 001): 13B, 34B and 70B on 24 A100 and 32 GH200, four placements replayed alike.

"table 1: memp" and "table 1: ours" are the paper's own; memp is our reading of its baseline, exact our solver with the
paper's objective, the mean latency. Lengths are the experiment's clipped normal ones (E1), or all like the shortest of
them; rates are Table 1's, a tenth of them, and those scaled to 0.7 of what the devices can serve by our tables. Each
placement is planned, or appraised, on the means of what is drawn, and then played event by event: Poisson arrivals over
300 s, and on until all is answered. N is how many requests are in the system on average over the 300 s, "mean s" the
mean time to the last token over all requests, "drained" when the last one ended. Both routings see every placement:
least-loaded, and shares: at random, as the planner means to spread the load.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabrictool.blueprint import load
from fabrictool.planner.assign import assign
from fabrictool.planner.build import build_problem
from fabrictool.planner.instances import synthetic
from fabrictool.planner.solvers.appraisal import appraise
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.memp import MempSolver
from fabrictool.routing.policies import routing_policy
from fabrictool.simulator.deployment import of_model
from fabrictool.simulator.fleet import Stream, simulate
from fabrictool.workload.arrivals import arrivals
from fabrictool.workload.lengths import Lengths

BLUEPRINT = Path(__file__).parents[3] / "examples" / "opentela" / "blueprint.yaml"
SECONDS = 300.0
SEED = 1
LOAD = 0.7
SCALES = (1.0, 0.1)
"""Of Table 1's rates."""
TABLE_1 = {
    "table 1: memp": {
        ("llama-13b", "a100-80g", 1): 4,
        ("codellama-34b", "a100-80g", 2): 8,
        ("llama-70b", "a100-80g", 4): 1,
        ("llama-70b", "gh200", 4): 8,
    },
    "table 1: ours": {
        ("llama-13b", "a100-80g", 1): 6,
        ("codellama-34b", "a100-80g", 2): 5,
        ("codellama-34b", "gh200", 2): 8,
        ("llama-70b", "a100-80g", 4): 2,
        ("llama-70b", "gh200", 4): 4,
    },
}
"""Placement → (model, device, tensor parallelism) → replicas; the degrees are those of the experiment's scripts."""
E1 = {
    "llama-13b": ((599, 822), (74, 211)),
    "codellama-34b": ((1169, 1276), (532, 435)),
    "llama-70b": ((727, 777), (64, 190)),
}
"""Mean and deviation of prompts and answers, normal, clipped at 5 tokens; the scripts of the experiment."""
SHORTEST = ((599, 822), (64, 190))
"""The shortest prompts and the shortest answers of the three."""
LONGEST = 4000
MANY = 400_000
"""Draws by which a clipped distribution's mean is found."""


def e1(model, at):
    mean, sd = E1[model][at]
    return Lengths("normal", mean, sd, 5, LONGEST)


def shortest(_model, at):
    return Lengths("normal", *SHORTEST[at], 5, LONGEST)


READINGS = {"E1": e1, "shortest": shortest}


def mean_of(lengths):
    return float(lengths.draw(MANY, np.random.default_rng(0)).mean())


@dataclass
class Shares:
    """Routing at random, by weights of replicas: what the planner sends to each option, evenly over its replicas."""

    weights: list[float]
    rng: random.Random

    def pick(self, candidates, request):
        return self.rng.choices(candidates, weights=[self.weights[c.index] for c in candidates])[0]


@dataclass
class Played:
    in_system: float
    mean: float
    drained: float


def situation(reading, scale):
    """Blueprint with the rates of Table 1 times `scale` and the means of the lengths, its inventory and the problem."""
    loaded = load(BLUEPRINT, environment={}, scenario="table1")
    models = {}
    for name, wanted in loaded.blueprint.models.items():
        document = wanted.demand.model_dump()
        means = [max(1, round(mean_of(READINGS[reading](name, at)))) for at in (0, 1)]
        document |= {"rate": f"{float(wanted.demand.rate) * scale} req/s"}
        document |= {key: f"{mean} tok" for key, mean in zip(("input", "output"), means, strict=True)}
        models[name] = wanted.model_copy(update={"demand": type(wanted.demand).model_validate(document)})
    blueprint = loaded.blueprint.model_copy(update={"models": models})
    usable = list(loaded.inventory.clusters)
    problem, _ = build_problem(blueprint, loaded.inventory, usable=usable, unseen=(), current={})
    return blueprint, loaded.inventory, problem


def solutions(problem):
    """Name → solution of each placement."""
    *_, ours = ExactSolver().solve(problem, deadline_s=60, seed=0)
    *_, memp = MempSolver().solve(problem, deadline_s=60, seed=0)
    found = {"memp": memp, "exact": ours}
    for name, table in TABLE_1.items():
        counts = {}
        for i, option in enumerate(problem.options):
            plain = option.phase == "unified" and option.pp == 1
            counts[i] = table.get((option.model, option.pool.device, option.tp), 0) if plain else 0
        assert sum(counts.values()) == sum(table.values())
        found[name] = appraise(problem, counts, name, 60, 0)
    return dict(sorted(found.items(), key=lambda item: item[0] == "exact"))


def play(blueprint, inventory, problem, solution, reading, routing):
    """All models, one after the other: they share no device."""
    placement = assign(problem, solution, {})
    inside = waits = requests = drained = 0.0
    for number, (name, wanted) in enumerate(sorted(blueprint.models.items())):
        rng = np.random.default_rng((SEED, number))
        rate = float(wanted.demand.rate)
        times = arrivals("poisson", rate, int(rate * SECONDS * 1.2) + 100, rng)
        times = times[times < SECONDS]
        prompts, answers = (READINGS[reading](name, at).draw(len(times), rng) for at in (0, 1))
        simulation = of_model(name, blueprint, inventory, placement.replicas, [])
        stream = Stream(times, prompts, answers, models=(simulation.specs[0].model,))
        pick = routing_policy("least-loaded", random.Random(SEED))
        if routing == "shares":
            pick = Shares(weights(problem, solution, placement, simulation.replicas), random.Random(SEED))
        outcome = simulate(simulation.specs, stream, pick)
        assert len(outcome.refused) == len(outcome.lost) == 0
        inside += float((np.minimum(outcome.finish, SECONDS) - outcome.arrival).clip(0).sum()) / SECONDS
        waits += float(outcome.e2e.sum())
        requests += len(times)
        drained = max(drained, outcome.end)
    return Played(inside, waits / requests, drained)


def weights(problem, solution, placement, names):
    """Requests/s of each replica of a model."""
    each = {}
    for i, count in solution.counts.items():
        option = problem.options[i]
        each[option.model, option.pool.key, option.tp] = solution.loads.get(i, 0.0) / count
    there = {one.replica: one for one in placement.replicas}
    found = [there[name] for name in names]
    return [each[one.model, (one.cluster, one.partition), one.tp] for one in found]


def shape(problem, solution):
    """Such as 13b: 6×A100/1; replicas×device/devices of each."""
    parts = {}
    for i, count in sorted(solution.counts.items()):
        option = problem.options[i]
        device = option.pool.device.partition("-")[0]
        parts.setdefault(option.model.rpartition("-")[2], []).append(f"{count}×{device}/{option.tp}")
    return "; ".join(f"{model} {' '.join(cuts)}" for model, cuts in parts.items())


def main(_):
    """Prints the table."""
    print("| lengths | req/s | placement | unserved by plan | N | mean s | drained s | N | mean s | drained s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    shapes = []
    for reading in READINGS:
        *_, problem = situation(reading, 1.0)
        for scale in (*SCALES, LOAD * synthetic.most_load(problem)):
            blueprint, inventory, problem = situation(reading, scale)
            rates = sum(need.rate for need in problem.needs)
            for name, solution in solutions(problem).items():
                plays = [
                    play(blueprint, inventory, problem, solution, reading, routing)
                    for routing in ("least-loaded", "shares")
                ]
                cells = " | ".join(f"{p.in_system:.0f} | {p.mean:.1f} | {p.drained:.0f}" for p in plays)
                lost = solution.stages[0].objective / rates
                print(f"| {reading} | {rates:.1f} | {name} | {lost:.1%} | {cells} |", flush=True)
                shapes.append(f"{reading}, {rates:.1f} req/s, {name}: {shape(problem, solution)}")
    print("\nleft: least-loaded routing, right: shares. Replicas×device/devices of each:")
    print("\n".join(shapes))
    return 0
