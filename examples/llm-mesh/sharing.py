"""Many models on few nodes: LLM-Mesh's evaluation (paper 004, section 8), the paper's values beside ours.

Run it: ``python examples/llm-mesh/sharing.py`` (minutes on all cores); ``--help`` lists what may be asked for alone.
"""

import argparse
import csv
import gzip
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fabrictool.sharing.core import NodeSharing
from fabrictool.sharing.ledger import MemoryLedger
from fabrictool.sharing.placement import SharingOptions
from fabrictool.sharing.quantified import IterationTable
from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedRequest
from fabrictool.simulator.shared_nodes import ExclusiveNodes, SharedNodeLoop

HERE = Path(__file__).parent
LONGEST, LARGEST = 4096, 256
NODES = {"cpu": (4, 192e9), "gpu": (4, 72e9)}
"""Number, and octets that replicas may use."""


@dataclass(frozen=True)
class Kind:
    """A device as the paper's own measurements show it; operations/s, octets/s, seconds."""

    flops: float
    bandwidth: float
    overhead: float


KINDS = {"cpu": Kind(17e12, 200e9, 2e-3), "gpu": Kind(170e12, 1.5e12, 5e-3)}
"""A 32-core Xeon 6462C with AMX, an A100."""


@dataclass(frozen=True)
class Size:
    """A model of the paper."""

    parameters: float
    layers: int
    hidden: int
    token: int
    """Octets of one cached token."""
    places: dict[str, int]
    """Requests of one replica at most, in the systems that LLM-Mesh is compared with."""


SIZES = {
    "3B": Size(3.2e9, 28, 3072, 114_688, {"cpu": 59, "gpu": 160}),
    "7B": Size(6.74e9, 32, 4096, 524_288, {"cpu": 15, "gpu": 32}),
    "13B": Size(13.0e9, 40, 5120, 819_200, {"cpu": 6, "gpu": 16}),
}
SYSTEMS = {
    "mesh": SharingOptions(),
    "sllm+cpu": SharingOptions(),
    "sllm": SharingOptions(kinds=("gpu",)),
    "no sharing": SharingOptions(most_replicas=1),
    "no CPU": SharingOptions(kinds=("gpu",)),
    "no defrag": SharingOptions(victims=0),
    "w = 0": SharingOptions(watermark=0.0),
    "w = 0.5": SharingOptions(watermark=0.5),
}
EXCLUSIVE = ("sllm+cpu", "sllm")


def table(size, kind):
    """Of iterations: operations or octets, whichever takes longer."""
    device = KINDS[kind]
    weights = 2.0 * size.parameters

    def prefill(tokens):
        operations = 2.0 * size.parameters * tokens + 2.0 * size.layers * size.hidden * tokens**2
        return device.overhead + max(operations / device.flops, weights / device.bandwidth)

    def decode(batch, length):
        octets = weights + batch * length * size.token
        return device.overhead + max(2.0 * size.parameters * batch / device.flops, octets / device.bandwidth)

    return IterationTable.sampled(prefill, decode, LONGEST, LARGEST)


TABLES = {(name, kind): table(size, kind) for name, size in SIZES.items() for kind in KINDS}


def counts(models, cut, seconds):
    """Per model, calls in each minute: of functions at even distances in the order of their calls, busiest first."""
    with gzip.open(HERE / "functions.csv.gz", "rt") as lines:
        functions = [[int(cell) for cell in row] for row in csv.reader(lines)]
    functions.sort(key=lambda minutes: -sum(minutes))
    functions = functions[cut:]
    chosen = [functions[round(i * (len(functions) - 1) / (models - 1))] for i in range(models)]
    return [minutes[: seconds // 60] for minutes in chosen]


def lengths():
    """(prompt, answer) of the conversations."""
    with gzip.open(HERE / "lengths.csv.gz", "rt") as lines:
        return [(int(prompt), int(answer)) for prompt, answer in csv.reader(lines)]


def workload(sizes, cut, seconds, seed):
    """Models, requests and their answers."""
    rng = random.Random(seed)
    pairs = lengths()
    mean = statistics.fmean(answer for _, answer in pairs)
    models, arrivals = [], []
    for i, minutes in enumerate(counts(len(sizes), cut, seconds)):
        size = SIZES[sizes[i]]
        tables = {kind: TABLES[sizes[i], kind] for kind in KINDS}
        models.append(SharedModel(f"{sizes[i]}-{i}", int(2 * size.parameters), size.token, LONGEST, tables, mean))
        arrivals += [(60 * m + rng.uniform(0, 60), i) for m, n in enumerate(minutes) for _ in range(n)]
    requests, answers = [], {}
    for number, (at, i) in enumerate(sorted(arrivals)):
        prompt, answers[number] = rng.choice(pairs)
        requests.append(SharedRequest(number, models[i].name, prompt, at, max(2.0, prompt / 512), 0.25))
    return models, requests, answers


def play(system, sizes, cut, seconds, seed):
    """One run."""
    models, requests, answers = workload(sizes, cut, seconds, seed)
    options = SYSTEMS[system]
    nodes = []
    for kind in options.kinds:
        number, memory = NODES[kind]
        nodes += [SharedNode(len(nodes) + n, kind, MemoryLedger(int(memory))) for n in range(number)]
    if system in EXCLUSIVE:
        places = {(kind, m.name): SIZES[m.name.split("-")[0]].places[kind] for kind in KINDS for m in models}
        scheduler = ExclusiveNodes(nodes, models, places, options)
    else:
        scheduler = NodeSharing(nodes, models, options)
    return SharedNodeLoop(scheduler, answers).run(requests)


@dataclass(frozen=True)
class Cell:
    """Runs of one system with one set of models, one for each seed."""

    attainment: list[float]
    nodes: dict[str, list[float]]
    decoded: dict[str, list[float]]
    """Tokens a second and node in use."""

    @property
    def in_time(self):
        return statistics.fmean(self.attainment)

    def used(self, kind):
        """Nodes."""
        return statistics.fmean(self.nodes[kind])

    def rate(self, kind):
        """Tokens a second of a node in use."""
        return statistics.fmean(self.decoded[kind])


def spread(values):
    """Of a mean: the standard deviation over the seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mix(*parts):
    """64 models of three sizes, in these proportions, spread over the functions."""
    turns = [name for name, part in zip(SIZES, parts, strict=True) for _ in range(part)]
    return tuple(turns[i % len(turns)] for i in range(64))


NUMBERS = (32, 64, 128)
BUSIEST_LEFT_OUT = 10
"""Of 1,000 functions: one of them may carry most of all calls. The paper does not say which it drew. Chosen after both
outcomes had been seen, so both are shown."""
MIXES = {"4:1:1": mix(4, 1, 1), "1:1:4": mix(1, 1, 4)}


def experiments():
    """(what, system, sizes, functions left out) of all cells."""
    for size in SIZES:
        for number in NUMBERS:
            for system in ("mesh", "sllm+cpu", "sllm"):
                yield f"{number} x {size}", system, (size,) * number, BUSIEST_LEFT_OUT
    for system in ("no sharing", "no CPU", "no defrag"):
        yield "64 x 7B", system, ("7B",) * 64, BUSIEST_LEFT_OUT
    for name, sizes in MIXES.items():
        for system in ("mesh", "sllm+cpu"):
            yield name, system, sizes, BUSIEST_LEFT_OUT
    for system in ("w = 0", "w = 0.5"):
        yield "128 x 7B", system, ("7B",) * 128, BUSIEST_LEFT_OUT
    for size in SIZES:
        for system in ("mesh", "sllm+cpu", "sllm"):
            yield f"128 x {size}, busiest too", system, (size,) * 128, 0


def run(task):
    """In a process of its own."""
    (what, system, sizes, cut), seconds, seed = task
    outcome = play(system, sizes, cut, seconds, seed)
    rates = {kind: outcome.tokens.get(kind, 0) / max(1e-9, used * outcome.until) for kind, used in outcome.used.items()}
    return (what, system), outcome.attainment, outcome.used, rates


def measure(seconds, seeds):
    """(what, system) → its cell; progress goes to stderr."""
    tasks = [(experiment, seconds, seed) for experiment in experiments() for seed in range(seeds)]
    cells = {}
    with ProcessPoolExecutor() as pool:
        for i, (key, attainment, used, rates) in enumerate(pool.map(run, tasks), 1):
            cell = cells.setdefault(key, Cell([], {kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}))
            cell.attainment.append(attainment)
            for kind in KINDS:
                cell.nodes[kind].append(used.get(kind, 0.0))
                cell.decoded[kind].append(rates.get(kind, 0.0))
            print(f"\r{i} of {len(tasks)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return cells


def print_cells(cells):
    """Everything that was run."""
    print(f"{'models':24} {'system':10} {'in time':>14} {'GPU nodes':>12} {'CPU nodes':>12}")
    for (what, system), cell in cells.items():
        share = f"{100 * cell.in_time:.1f} +- {100 * spread(cell.attainment):.1f} %"
        nodes = [f"{cell.used(kind):.1f} +- {spread(cell.nodes[kind]):.1f}" for kind in ("gpu", "cpu")]
        print(f"{what:24} {system:10} {share:>14} {nodes[0]:>12} {nodes[1]:>12}")


def compare(cells):
    """(what, the paper's lowest and highest, unit, ours of each seed)."""

    def more(what, other):
        pairs = zip(cells[what, "mesh"].attainment, cells[what, other].attainment, strict=True)
        return [100 * (mine / theirs - 1) for mine, theirs in pairs]

    def nodes(what, system, kind):
        return cells[what, system].nodes[kind]

    def between(system):
        pairs = zip(nodes("1:1:4", system, "gpu"), nodes("4:1:1", system, "gpu"), strict=True)
        return [large - small for large, small in pairs]

    for other, low, high in (("sllm", 91, 159), ("sllm+cpu", 44, 63)):
        for functions in ("", ", busiest too"):
            for size in SIZES:
                what = f"128 x {size}{functions}"
                yield f"{what}: in time, more than {other}", low, high, "%", more(what, other)
    yield "32 x 3B: CPU nodes, mesh", 3.0, 3.0, "", nodes("32 x 3B", "mesh", "cpu")
    yield "32 x 3B: GPU nodes, mesh", 0.0, 0.0, "", nodes("32 x 3B", "mesh", "gpu")
    yield "32 x 3B: GPU nodes, sllm", 3.2, 3.2, "", nodes("32 x 3B", "sllm", "gpu")
    for system, paper in (("sllm", 3.9), ("sllm+cpu", 3.5), ("mesh", 2.5)):
        yield f"64 x 7B: GPU nodes, {system}", paper, paper, "", nodes("64 x 7B", system, "gpu")
    yield "64 x 7B: in time, no sharing", 89, 89, "%", [100 * a for a in cells["64 x 7B", "no sharing"].attainment]
    full = nodes("64 x 7B", "mesh", "gpu")
    for system in ("no sharing", "no CPU", "no defrag"):
        pairs = zip(nodes("64 x 7B", system, "gpu"), full, strict=True)
        yield f"64 x 7B: more GPU nodes, {system}", 0.05, 4.0, "", [theirs - mine for theirs, mine in pairs]
    for system, paper in (("mesh", 1.2), ("sllm+cpu", 0.7)):
        yield f"GPU nodes, 1:1:4 less 4:1:1, {system}", paper, paper, "", between(system)
    yield from compare_rates(cells)
    for system in ("mesh", "sllm+cpu", "sllm"):
        yield f"128 x 13B: GPU nodes, {system}", 4.0, 4.0, "", nodes("128 x 13B", system, "gpu")


def compare_rates(cells):
    """The same, of what nodes decode."""

    def faster(what, kind):
        pairs = zip(cells[what, "mesh"].decoded[kind], cells[what, "sllm+cpu"].decoded[kind], strict=True)
        return [100 * (mine / theirs - 1) if theirs else 0.0 for mine, theirs in pairs]

    for what in ("32 x 3B", "64 x 7B", "128 x 13B"):
        yield f"{what}: tokens/s of a CPU node, more", 6, 52, "%", faster(what, "cpu")
        yield f"{what}: tokens/s of a GPU node, more", -6, 86, "%", faster(what, "gpu")


def print_comparison(cells):
    """The paper's values, ours, and whether they agree: within its range, or a tenth of its value."""
    print(f"\n{'what':52} {'paper':>10} {'ours':>16}")
    for what, low, high, unit, ours in compare(cells):
        mean = statistics.fmean(ours)
        slack = 0.1 * max(abs(high), 1.0) if low == high else 0.0
        agrees = low - slack <= mean <= high + slack
        paper = f"{low:g}{unit}" if low == high else f"{low:g} to {high:g}{unit}"
        value = f"{mean:.1f} +- {spread(ours):.1f}{unit}"
        print(f"{what:52} {paper:>10} {value:>16} {'' if agrees else 'differs'}")


def main():
    """Everything, or what is asked for."""
    parser = argparse.ArgumentParser(description="LLM-Mesh's evaluation, the paper's values beside ours.")
    parser.add_argument("--seconds", type=int, default=600, help="of the trace, at most 1800 (600)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each experiment (5)")
    asked = parser.parse_args()
    if not 60 <= asked.seconds <= 1800 or asked.seeds < 1:
        parser.error("the trace has whole minutes, 30 of them, and at least one run is needed")
    cells = measure(asked.seconds, asked.seeds)
    print_cells(cells)
    print_comparison(cells)


if __name__ == "__main__":
    main()
