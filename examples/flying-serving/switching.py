"""Replicas that merge and split: Flying Serving's evaluation (paper 003, section 6), the paper's values beside ours.

Run it: ``python examples/flying-serving/switching.py`` (a minute or two).
"""

import argparse
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from fabrictool.merging.core import MergingReplicas
from fabrictool.merging.groups import BlockPool
from fabrictool.merging.requests import MergingOptions, MergingRequest, Split, Transition
from fabrictool.merging.triggers import LoadTrigger
from fabrictool.simulator.memory import pooled_tokens
from fabrictool.simulator.merging_replicas import play_merging

PARAMETERS, LAYERS, HIDDEN, TOKEN = 70.6e9, 80, 8192, 327_680
"""Llama-3-70B; octets of a cached token."""
WEIGHTS = 2 * PARAMETERS
DEVICES, MEMORY = 8, 113.85e9
"""H200; octets of each that its two static deployments of table 2 can use."""
FLOPS, BANDWIDTH, LINK, OVERHEAD = 650e12, 3.3e12, 350e9, 4e-3
"""What an H200 reaches of its peaks, octets/s of all-reduces, seconds of a step."""
LATENCY = {1: 0.0, 2: 7e-6, 4: 10e-6, 8: 14e-6}
"""Of an all-reduce over so many devices."""
BASE = 2
"""Devices of a replica."""
REPLICAS = DEVICES // BASE
BLOCK = 16
"""Tokens of a block of one replica."""
PLACES = 64
"""Of each engine, whatever its size: four replicas have 256 together, one engine of all devices has 64."""
THRESHOLD = 256
"""Tokens of a step up to which Shift Parallelism takes tensor parallelism."""


def reduce(devices, tokens):
    """Seconds of one all-reduce."""
    return LATENCY[devices] + 2.0 * (devices - 1) / devices * tokens * HIDDEN * 2.0 / LINK if devices > 1 else 0.0


def seconds(tokens, context, tensor, sequence=1):
    """Of a step by `tensor` x `sequence` devices: weights and operations, the cache, and what they tell each other."""
    share = tokens / sequence
    computing = max(WEIGHTS / (tensor * BANDWIDTH), 2.0 * PARAMETERS * tokens / (tensor * sequence * FLOPS))
    told = 2 * LAYERS * reduce(tensor, share)
    if sequence > 1:
        told += 2 * LAYERS * (LATENCY[sequence] + share * HIDDEN * 2.0 / tensor / LINK)
    return OVERHEAD + computing + context * TOKEN / (tensor * sequence * BANDWIDTH) + told


def step_seconds(step):
    """Of a group."""
    return seconds(step.tokens, step.context, step.group.degree * BASE)


def shift_seconds(step):
    """All devices in tensor parallelism for small steps, in sequence parallelism for large ones."""
    if step.tokens <= THRESHOLD:
        return seconds(step.tokens, step.context, DEVICES)
    return seconds(step.tokens, step.context, BASE, DEVICES // BASE)


def pool(base=BASE):
    """Each replica's cache beside its weights."""
    return BlockPool(int(pooled_tokens(base, base, MEMORY, WEIGHTS, TOKEN)) // BLOCK, BLOCK)


SYSTEMS = {
    "DP": MergingOptions(fixed=1),
    "TP": MergingOptions(fixed=REPLICAS),
    "shift": MergingOptions(fixed=REPLICAS),
    "TP, 256 places": MergingOptions(fixed=REPLICAS, places=REPLICAS * PLACES),
    "shift, 256 places": MergingOptions(fixed=REPLICAS, places=REPLICAS * PLACES),
    "flying": MergingOptions(priority_degree=REPLICAS // 2),
    "flying, finish": MergingOptions(split=Split.FINISH),
    "flying, recompute": MergingOptions(split=Split.RECOMPUTE),
    "flying, sequential": MergingOptions(load_transition=Transition.SEQUENTIAL),
}


@dataclass(frozen=True)
class Load:
    """Phases in turn, of so many seconds with rates drawn between two; and how many requests there are."""

    phases: tuple[tuple[float, float, float], ...]
    requests: int
    prompts: tuple[int, int] = (128, 2048)
    urgent: float = 0.0
    """Share of requests with priority."""


LOADS = {
    "bursts": Load(((60.0, 2.0, 5.0), (12.0, 10.0, 30.0)), 4000),
    "priority": Load(((30.0, 3.0, 5.0),), 1500, urgent=0.2),
    "8K contexts": Load(((60.0, 0.5, 1.0), (12.0, 2.0, 6.0)), 800, prompts=(7000, 7680)),
}
"""Rates are the paper's, lengths ours: its text has lost them."""


def workload(load, seed):
    """(requests, answers, ids of those that came in the last phase, a burst)."""
    rng = random.Random(seed)
    requests, answers, burst, at, phase, until = [], {}, set(), 0.0, -1, 0.0
    while len(requests) < load.requests:
        if at >= until:
            phase += 1
            length, low, high = load.phases[phase % len(load.phases)]
            at, until, rate = until, until + length, rng.uniform(low, high)
        at += rng.expovariate(rate)
        number = len(requests)
        answers[number] = rng.randint(64, 512)
        priority = 0 if rng.random() < load.urgent else 1
        requests.append(MergingRequest(number, rng.randint(*load.prompts), answers[number], at, priority))
        if phase % len(load.phases) == len(load.phases) - 1 and len(load.phases) > 1:
            burst.add(number)
    return requests, answers, burst


def play(system, load, seed):
    """One run: (outcome, ids of those that came in a burst)."""
    requests, answers, burst = workload(load, seed)
    trigger = None
    if system.startswith("flying") and not load.urgent:
        trigger = LoadTrigger(group_rate(load), 2.0 * PLACES)
    replicas = MergingReplicas(REPLICAS, pool(), SYSTEMS[system], trigger)
    return play_merging(
        replicas, requests, answers, shift_seconds if system.startswith("shift") else step_seconds
    ), burst


def group_rate(load):
    """Requests/s that one group of all takes: its places over the time of a mean request, in a full step."""
    prompt, answer = sum(load.prompts) / 2, 288
    step = seconds(PLACES + PLACES * prompt / answer, PLACES * (prompt + answer / 2), DEVICES)
    return PLACES / (answer * step)


@dataclass(frozen=True)
class Figures:
    """Of one run; seconds, tokens/s."""

    ttft_burst: float
    ttft_calm: float
    """The median; the mean is that of the few who came right after a burst."""
    tpot_calm: float
    ttft_urgent: float
    ttft: float
    tpot_urgent: float
    tpot: float
    peak: float
    prompts: float
    """Prompt tokens/s in the best ten seconds, by when their first tokens came."""


def figures(task):
    """In a process of its own."""
    system, load, seed = task
    outcome, burst = play(system, LOADS[load], seed)
    answers = outcome.answers
    calm = [a for a in answers if a.request.id not in burst]
    busy = [a for a in answers if a.request.id in burst] or answers
    urgent = [a for a in answers if not a.request.priority] or answers
    prompts = {}
    for a in answers:
        window = int((a.request.began + a.ttft) / 10)
        prompts[window] = prompts.get(window, 0) + a.request.prompt
    return Figures(
        statistics.fmean(a.ttft for a in busy),
        statistics.median(a.ttft for a in calm),
        statistics.median(a.tpot for a in calm),
        statistics.fmean(a.ttft for a in urgent),
        statistics.fmean(a.ttft for a in answers),
        statistics.fmean(a.tpot for a in urgent),
        statistics.fmean(a.tpot for a in answers),
        outcome.peak_rate(),
        max(prompts.values()) / 10,
    )


ASKED = {
    "bursts": tuple(SYSTEMS),
    "priority": ("DP", "TP", "flying"),
    "8K contexts": ("DP", "TP", "flying"),
}


def measure(seeds):
    """(load, system) → figures of each seed; progress goes to stderr."""
    tasks = [(system, load, seed) for load, systems in ASKED.items() for system in systems for seed in range(seeds)]
    runs = {}
    with ProcessPoolExecutor() as processes:
        for i, (task, result) in enumerate(zip(tasks, processes.map(figures, tasks), strict=True), 1):
            runs.setdefault((task[1], task[0]), []).append(result)
            print(f"\r{i} of {len(tasks)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def print_runs(runs):
    """Means over the seeds."""
    print(f"{'':32}{'TTFT, s':^18}{'TPOT, ms':^10}{'tokens/s':>10}{'prompt tokens/s':>17}")
    print(f"{'load':12}{'system':20}{'burst':>9}{'calm':>9}{'calm':>10}{'peak':>10}{'peak':>17}")
    for (load, system), results in runs.items():
        means = [statistics.fmean(getattr(r, name) for r in results) for name in COLUMNS]
        burst, calm, tpot, peak, prompts = means
        print(f"{load:12}{system:20}{burst:9.2f}{calm:9.3f}{1e3 * tpot:10.1f}{peak:10,.0f}{prompts:17,.0f}")


COLUMNS = ("ttft_burst", "ttft_calm", "tpot_calm", "peak", "prompts")


def compare(runs):
    """(what, the paper's, ours of each seed)."""

    def ratio(load, mine, theirs, name):
        pairs = zip(runs[load, mine], runs[load, theirs], strict=True)
        return [getattr(a, name) / getattr(b, name) for a, b in pairs]

    def times(system, name):
        return [1e3 * getattr(r, name) for r in runs["priority", system]]

    yield "TTFT in bursts, flying : DP", 4.38 / 4.23, ratio("bursts", "flying", "DP", "ttft_burst")
    yield "TTFT in bursts, shift : flying", 3.39, ratio("bursts", "shift", "flying", "ttft_burst")
    yield "TTFT in calm, flying : TP", 223 / 212, ratio("bursts", "flying", "TP", "ttft_calm")
    yield "peak tokens/s, flying : DP", 3059 / 3169, ratio("bursts", "flying", "DP", "peak")
    yield "peak tokens/s, flying : shift", 1.22, ratio("bursts", "flying", "shift", "peak")
    published = {
        "tpot_urgent": ("TPOT ms, priority", 22, 32, 24),
        "tpot": ("TPOT ms, all", 22, 32, 28),
        "ttft_urgent": ("TTFT ms, priority", 63, 166, 74),
        "ttft": ("TTFT ms, all", 2130, 166, 142),
    }
    for name, (what, *values) in published.items():
        for system, value in zip(("TP", "DP", "flying"), values, strict=True):
            yield f"{what}, {system}", value, times(system, name)
    for system, value in (("TP", 2530), ("DP", 3164), ("flying", 3040)):
        yield f"peak tokens/s, priorities, {system}", value, [r.peak for r in runs["priority", system]]
    yield "8K: prompt tokens/s, flying : DP", 1.0, ratio("8K contexts", "flying", "DP", "prompts")
    yield "8K: TTFT in calm, flying : TP", 1.05, ratio("8K contexts", "flying", "TP", "ttft_calm")
    yield "8K: TPOT in calm, flying : TP", 1.05, ratio("8K contexts", "flying", "TP", "tpot_calm")
    for base, degree, value in ((2, 1, 264e3), (4, 1, 959e3), (8, 1, 2.3e6), (4, 2, 1.9e6)):
        what = f"longest context, {degree} x {base} devices"
        yield what, value, [pool(base).longest(degree)]
    yield f"longest context, {REPLICAS} x {BASE} devices", None, [pool().longest(REPLICAS)]


def print_comparison(runs):
    """The paper's values beside ours; `differs` from a fifth on."""
    print(f"\n{'what':36}{'paper':>12}{'ours':>22}")
    for what, paper, ours in compare(runs):
        mean = statistics.fmean(ours)
        value = f"{mean:,.3g}" if mean < 1000 else f"{mean:,.0f}"
        if len(ours) > 1:
            value += f" +- {statistics.stdev(ours):,.2g}"
        if paper is None:
            print(f"{what:36}{'':>12}{value:>22}")
            continue
        verdict = "differs" if abs(mean / paper - 1) > 0.2 else ""
        print(f"{what:36}{f'{paper:,.3g}' if paper < 1000 else f'{paper:,.0f}':>12}{value:>22}  {verdict}")


def main():
    """Everything."""
    parser = argparse.ArgumentParser(description="Flying Serving's evaluation, the paper's values beside ours.")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each experiment (5)")
    asked = parser.parse_args()
    if asked.seeds < 1:
        parser.error("at least one run is needed")
    runs = measure(asked.seeds)
    print_runs(runs)
    print_comparison(runs)


if __name__ == "__main__":
    main()
