"""P3: Helix's 24 GPUs in three regions (examples/helix). Its authors' layout beside our placements, by one yardstick.

The yardstick is Helix's: a flow through nodes that hold intervals of layers, as large as nodes and wires permit. A node
may be entered at any layer that it holds, and has then done all of them. What a node can do comes from our step times,
as in `fabrictool.simulator.mixed`: passes of b requests, each with its share of prompts; b is chosen for the largest
flow. A request stays in the cache of all its nodes for as many rounds as its answer has tokens (Little's law), and a
round takes the mean of the passes and wires on its way. Each of our pipelines is a network of its own.
"""

import itertools
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from ortools.graph.python import max_flow

from fabrictool.blueprint import load
from fabrictool.catalog import model
from fabrictool.planner.build import build_problem
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.tabu import TabuSolver
from fabrictool.simulator import mixed
from fabrictool.simulator.network import hop
from fabrictool.simulator.stand import stand

EXAMPLE = Path(__file__).parents[3] / "examples" / "helix"
NAME = "llama-2-70b"
SECONDS = 60.0
UNITS = 1e6
"""Of the flow's whole numbers in one request/s."""
ROUNDS = 8
"""Of flow and time of a round: what one permits decides the other."""
ACTIVATION = 2.0
"""Octets of one element between nodes."""


@dataclass(frozen=True)
class Held:
    """A node with some layers."""

    place: tuple[str, str]
    first: int
    last: int


class Yardstick:
    """What layouts are worth; in requests/s of the blueprint's lengths."""

    def __init__(self, loaded):
        self.inventory, self.wanted = loaded.inventory, loaded.blueprint.models[NAME]
        self.architecture = model(self.wanted.architecture_id)
        self.input, self.output = float(self.wanted.demand.input.mean), float(self.wanted.demand.output.mean)
        self._stands = {}

    def stand(self, place):
        """Step times and memory of one node, as if it held all layers."""
        if place not in self._stands:
            partition = self.inventory.clusters[place[0]].partitions[place[1]]
            self._stands[place] = stand(self.wanted, self.architecture, partition, 1, part=True)
        return self._stands[place]

    def share(self, held):
        return (held.last - held.first + 1) / self.architecture.layers

    def room(self, held):
        """Requests whose cache fits; below one: the layers do not."""
        there, share = self.stand(held.place), self.share(held)
        tokens = (there.room.usable - there.room.weights * share) / (there.kv_octets * share)
        return min(there.max_num_seqs, tokens / (self.input + self.output))

    def visit(self, held, batch):
        """Seconds of a pass of `batch` requests, and of as many prompts as come with it."""
        step, one = self.stand(held.place).step, np.array([batch])
        linear, longer = step.linear(np.array([batch, batch + self.input]))
        decode = linear + batch * step.reading(self.input + self.output / 2) + step.overhead()
        prompt = float(step.launched(longer + step.attending(self.input))) - linear - step.overhead()
        last = float(step.logits(one)[0]) if held.last == self.architecture.layers - 1 else 0.0
        return self.share(held) * float(decode + batch / self.output * prompt) + last

    def octets(self, tokens):
        return tokens * self.architecture.hidden * ACTIVATION

    def throughput(self, layout):
        """The largest flow over all batches."""
        most = max(self.room(held) for held in layout)
        if min(self.room(held) for held in layout) < 1:
            return 0.0
        return max(self._flow(layout, batch) for batch in np.geomspace(1, most, 40))

    def _flow(self, layout, batch):
        passes = [self.visit(held, batch) for held in layout]
        rate = [batch / (self.output * seconds) for seconds in passes]
        wires = {(i, j): self._wire(layout[i], layout[j], batch) for i, j in _edges(layout)}
        ends = self.architecture.layers - 1
        inside = [math.inf] * len(layout)
        flow = 0.0
        for _ in range(ROUNDS):
            limits = [min(pair) for pair in zip(rate, inside, strict=True)]
            flow, through, over = _largest(layout, limits, {e: wire[1] for e, wire in wires.items()}, ends)
            if flow <= 0:
                return 0.0
            around = sum(share * seconds for share, seconds in zip(through, passes, strict=True)) / flow
            around += sum(share * wires[edge][0] for edge, share in over.items()) / flow
            inside = [self.room(held) / (self.output * around) for held in layout]
        # The last flow kept to the room of the round before; this one keeps to both.
        return min(flow, *(r / s * flow for r, s in zip(inside, through, strict=True) if s > 0))

    def _wire(self, one, other, batch):
        """(seconds of a pass, requests/s)."""
        latency, bandwidth = hop(self.inventory, one.place, other.place)
        passed = self.octets(batch * (1 + self.input / self.output))
        return latency + passed / bandwidth, bandwidth / self.octets(self.input + self.output)


def _edges(layout):
    """Where a pass may go on: a node that holds the layer after the last one."""
    for i, one in enumerate(layout):
        for j, other in enumerate(layout):
            if other.first <= one.last + 1 <= other.last:
                yield i, j


def _largest(layout, limits, wires, last_layer):
    """(flow, flow through each node, flow over each wire) in requests/s."""
    solver = max_flow.SimpleMaxFlow()
    count = len(layout)
    source, sink = 2 * count, 2 * count + 1
    whole = [int(limit * UNITS) for limit in limits]
    nodes = [solver.add_arc_with_capacity(i, count + i, units) for i, units in enumerate(whole)]
    arcs = {(i, j): solver.add_arc_with_capacity(count + i, j, int(w * UNITS)) for (i, j), w in wires.items()}
    for i, held in enumerate(layout):
        if held.first == 0:
            solver.add_arc_with_capacity(source, i, whole[i])
        if held.last == last_layer:
            solver.add_arc_with_capacity(count + i, sink, whole[i])
    if solver.solve(source, sink) != solver.OPTIMAL:
        return 0.0, [0.0] * count, {}
    over = {edge: solver.flow(arc) / UNITS for edge, arc in arcs.items()}
    return solver.optimal_flow() / UNITS, [solver.flow(arc) / UNITS for arc in nodes], over


def pipelines(problem, solution, yardstick):
    """The layouts behind a placement's replicas."""
    for i, count in solution.counts.items():
        option = problem.options[i]
        places = [pool.key for pool, _ in option.stages]
        for _ in range(count):
            yield dealt(places, yardstick)


def dealt(places, yardstick):
    """Layers in proportion to speed as far as memory permits, by `fabrictool.simulator.mixed`."""
    parts = [mixed.Part.of(yardstick.stand(place)) for place in places]
    longest = int(yardstick.wanted.variant.context)
    found = mixed.deal(parts, yardstick.architecture.layers, longest, yardstick.input + yardstick.output)
    ends = np.cumsum(found).astype(int).tolist()
    return [Held(place, begin, end - 1) for place, begin, end in zip(places, [0, *ends], ends, strict=False)]


def longer(problem, *, across):
    """Columns of pipelines as long as they need to be: inside each region, or over all of them."""
    by_site = {}
    for pool in problem.pools:
        by_site.setdefault(pool.site, []).append(pool)
    for pools in [problem.pools] if across else by_site.values():
        for counts in itertools.product(*(range(pool.nodes + 1) for pool in pools)):
            stages = [(pool, 1) for pool, count in zip(pools, counts, strict=True) for _ in range(count)]
            option = problem.columns[NAME].mixed(stages, "unified") if len(stages) > 1 else None
            if option is not None:
                yield option


def extended(problem, found):
    known = {option.key for option in problem.options}
    fresh = {option.key: option for option in found if option.key not in known}
    return replace(problem, options=(*problem.options, *(fresh[key] for key in sorted(fresh))))


def main(_):
    """Prints the table."""
    loaded = load(EXAMPLE / "blueprint.yaml", environment={})
    yardstick = Yardstick(loaded)
    layers = yaml.safe_load((EXAMPLE / "layers.yaml").read_text(encoding="utf-8"))
    theirs = [Held((name, "gpu"), first, last) for name, held in layers.items() for first, last in held]
    print("| placement | pipelines | nodes | planner: req/s | flow: req/s | flow: decoded tokens/s | s |")
    print("|---|---|---|---|---|---|---|")
    _row("Helix's layout (its MILP)", ["one network"], len(theirs), None, yardstick.throughput(theirs), yardstick, "–")
    problem, _ = build_problem(
        loaded.blueprint, loaded.inventory, usable=list(loaded.inventory.clusters), unseen=(), current={}
    )
    wide = (("exact, longer pipelines inside a region", False), ("exact, longer pipelines over regions", True))
    for title, make in (
        ("exact, its own columns", lambda: (problem, ExactSolver())),
        ("tabu", lambda: (problem, TabuSolver())),
        *(
            (title, lambda a=across: (extended(problem, longer(problem, across=a)), ExactSolver()))
            for title, across in wide
        ),
    ):
        began = time.perf_counter()
        given, solver = make()
        *_, solution = solver.solve(given, deadline_s=SECONDS, seed=0)
        took = time.perf_counter() - began
        given = solution.whole(given)
        each = list(pipelines(given, solution, yardstick))
        shapes = [_shape(given.options[i], count) for i, count in solution.counts.items()]
        capacity = sum(given.options[i].capacity * count for i, count in solution.counts.items())
        flow = sum(yardstick.throughput(one) for one in each)
        _row(title, shapes, sum(map(len, each)), capacity, flow, yardstick, f"{took:.1f}")
    return 0


def _shape(option, count):
    counts = Counter(pool.cluster for pool, _ in option.stages)
    return f"{f'{count} × ' if count > 1 else ''}({' + '.join(f'{k} {name}' for name, k in counts.items())})"


def _row(title, shapes, nodes, capacity, flow, yardstick, took):
    own = "–" if capacity is None else f"{capacity:.2f}"
    tokens = flow * yardstick.output
    print(f"| {title} | {'; '.join(shapes)} | {nodes} | {own} | {flow:.2f} | {tokens:.0f} | {took} |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
