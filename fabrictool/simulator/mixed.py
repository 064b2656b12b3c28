"""A pipeline over unlike devices: each stage holds the layers that it computes fastest and that fit its memory.

Layers are dealt out in proportion to the stages' speed, as far as memory permits (ThunderServe, paper 002, section 3.3
and appendix B). One pass takes the sum of the stages; the slowest one limits how many passes are under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.simulator.memory import ReplicaMemory
from fabrictool.simulator.steptimes import StepTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.simulator.stand import Stand
    from fabrictool.simulator.stepmodel import StepModel

    Floats = np.ndarray[Any, np.dtype[np.float64]]

REFERENCE_BATCH, REFERENCE_CONTEXT = 32.0, 1024.0
"""A decode step by which stages are compared."""
REFERENCE_PROMPT = 1024.0
"""Tokens of a prompt by which wires between stages are weighed: prompts need far more of them than decode steps."""
ENOUGH = 64
"""Requests with which a decode step is about as efficient as it gets."""


GRID = np.unique(np.concatenate([np.arange(0.0, 65.0), np.geomspace(64.0, 2.0**20, 120).round()]))
"""Tokens at which stages are tabulated; between them they are interpolated."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stage that any number of pipelines may have: how long all layers would take on its devices."""

    stand: Stand
    linear: Floats
    """Over `GRID`, seconds."""
    decode_s: float
    """A reference decode step ..."""
    prompt_s: float
    """... and a reference prompt."""

    @classmethod
    def of(cls, stand: Stand) -> Part:
        step = stand.step
        linear = step.linear(GRID)
        batch, prompt = np.interp([REFERENCE_BATCH, REFERENCE_PROMPT], GRID, linear)
        decode = float(batch) + REFERENCE_BATCH * step.reading(REFERENCE_CONTEXT) + step.overhead()
        return cls(stand, linear, decode, float(step.launched(np.asarray(prompt))))


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """The `Steps` of a pipeline."""

    kinds: tuple[tuple[StepModel, float], ...]
    """Each kind of stage, and the share of the layers that all stages of this kind hold; shares sum to 1."""
    table: Floats
    """Over `GRID`: seconds of all stages, each with its own layers, and of the octets on the wires between them."""
    last: StepModel
    """Of the last stage, which has the logits."""
    wait: float
    """Seconds on wires, whatever is sent."""
    lanes: float
    """As many passes at once as the slowest stage or wire lets through."""

    def linear(self, tokens: Floats) -> Floats:
        return np.interp(tokens, GRID, self.table)

    def logits(self, sequences: Floats) -> Floats:
        return self.last.logits(sequences)

    def reading(self, context: float) -> float:
        return sum(share * stage.reading(context) for stage, share in self.kinds)

    def attending(self, tokens: float) -> float:
        return sum(share * stage.attending(tokens) for stage, share in self.kinds)

    def overhead(self) -> float:
        return self.wait + sum(share * stage.overhead() for stage, share in self.kinds)

    def launched(self, seconds: Floats) -> Floats:
        return np.asarray(self.wait + sum(share * stage.launched(seconds) for stage, share in self.kinds))

    def times(self, max_num_seqs: int, token_budget: int, hand: float = 0.0, hand_latency: float = 0.0) -> StepTimes:
        """The tables for the event loop: of the stages, by their shares."""
        tables = [(stage.times(max_num_seqs, token_budget, hand, hand_latency), share) for stage, share in self.kinds]
        mean = {f.name: sum(share * getattr(times, f.name) for times, share in tables) for f in fields(StepTimes)}
        same = {name: getattr(tables[0][0], name) for name in ("window", "groups", "queries", "decoded")}
        return StepTimes(**mean | same | {name: mean[name] + self.wait for name in ("decode", "mixed")})


def pipeline(
    parts: Sequence[Part], layers: int, hops: Sequence[tuple[float, float]], largest_context: int, request: float
) -> tuple[MixedSteps, ReplicaMemory] | None:
    """Step times and memory of a pipeline whose stages are `parts`; None where it does not fit.

    `hops` are (seconds, octets/s) between each stage and the next; `request` is how many tokens of cache a mean request
    takes.
    """
    first = parts[0].stand
    weights, token, hidden = first.room.weights, first.kv_octets, first.step.work.hidden
    dealt = deal(parts, layers, largest_context, request)
    if dealt is None:
        return None
    shares = dealt / layers
    usable = np.array([part.stand.room.usable for part in parts])
    decode = np.array([part.decode_s for part in parts])
    # The cache is cut like the layers: the fullest stage decides.
    held = int(((usable - weights * shares) / (token * shares)).min())
    if held < largest_context:
        return None
    kinds: dict[int, tuple[StepModel, float]] = {}
    for part, share in zip(parts, shares.tolist(), strict=True):
        kinds[id(part)] = (part.stand.step, kinds.get(id(part), (part.stand.step, 0.0))[1] + share)
    wires = np.array([hidden * 2.0 / bandwidth for _, bandwidth in hops])
    prompt = np.array([part.prompt_s for part in parts])
    steps = MixedSteps(
        kinds=tuple(kinds.values()),
        table=shares @ np.array([part.linear for part in parts]) + GRID * wires.sum(),
        last=parts[-1].stand.step,
        wait=sum(seconds for seconds, _ in hops),
        lanes=min(_lanes(decode * shares, REFERENCE_BATCH * wires), _lanes(prompt * shares, REFERENCE_PROMPT * wires)),
    )
    return steps, ReplicaMemory(weights, float(usable.sum()), held, first.room.beside)


def deal(parts: Sequence[Part], layers: int, largest_context: int, request: float) -> Floats | None:
    """Layers of each stage; None where they do not fit.

    Memory is left for `ENOUGH` requests, or for as many as there can be, before layers are dealt out by speed.
    """
    first = parts[0].stand
    usable = np.array([part.stand.room.usable for part in parts])
    wanted = ENOUGH * request
    while True:
        tokens = max(float(largest_context), wanted)
        most = np.floor(usable / (first.room.weights + first.kv_octets * tokens) * layers)
        if most.sum() >= layers and (most >= 1).all():
            return _deal(1.0 / np.array([part.decode_s for part in parts]), most, layers)
        if tokens <= largest_context:
            return None
        wanted /= 2.0


def _lanes(stages: Floats, wires: Floats) -> float:
    """How many passes are under way: all seconds that one takes, over those on its slowest stage or wire."""
    return float((stages.sum() + wires.sum()) / max(stages.max(), wires.max()))


def _deal(speed: Floats, most: Floats, layers: int) -> Floats:
    """Whole layers by stage in proportion to speed, at least one and at most `most` each; `most` suffice."""
    limits, speeds = most.tolist(), speed.tolist()
    dealt = [1.0] * len(speeds)
    # Each layer goes to the stage that would still be done first with it.
    next_done = [(2.0 / s, i) for i, s in enumerate(speeds) if limits[i] > 1]
    heapify(next_done)
    for _ in range(layers - len(speeds)):
        _, i = heappop(next_done)
        dealt[i] += 1
        if dealt[i] < limits[i]:
            heappush(next_done, ((dealt[i] + 1) / speeds[i], i))
    return np.array(dealt)
