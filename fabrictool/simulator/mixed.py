"""A pipeline over unlike devices: each stage holds the layers that it computes fastest and that fit its memory.

Layers are dealt out in proportion to the stages' speed, as far as memory permits (ThunderServe, paper 002, section 3.3
and appendix B). One pass takes the sum of the stages; the slowest one limits how many passes are under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.simulator.memory import Room
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


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """The `Steps` of a pipeline."""

    kinds: tuple[tuple[StepModel, float], ...]
    """Each kind of stage, and the share of the layers that all stages of this kind hold; shares sum to 1."""
    last: StepModel
    """Of the last stage, which has the logits."""
    hops: tuple[tuple[float, float], ...]
    """(seconds, octets/s) between each stage and the next."""
    lanes: float
    """As many passes at once as the slowest stage lets through."""

    def linear(self, tokens: Floats) -> Floats:
        """See `Steps`."""
        octets = tokens * self.last.work.hidden * 2.0
        moved = octets * sum(1.0 / bandwidth for _, bandwidth in self.hops)
        return np.asarray(moved + sum(share * stage.linear(tokens) for stage, share in self.kinds))

    def logits(self, sequences: Floats) -> Floats:
        """See `Steps`."""
        return self.last.logits(sequences)

    def reading(self, context: float) -> float:
        """See `Steps`."""
        return sum(share * stage.reading(context) for stage, share in self.kinds)

    def attending(self, tokens: float) -> float:
        """See `Steps`."""
        return sum(share * stage.attending(tokens) for stage, share in self.kinds)

    def overhead(self, *, eager: bool) -> float:
        """See `Steps`."""
        own = sum(share * stage.overhead(eager=eager) for stage, share in self.kinds)
        return own + sum(seconds for seconds, _ in self.hops)

    def times(self, max_num_seqs: int, token_budget: int, hand: float = 0.0, hand_latency: float = 0.0) -> StepTimes:
        """The tables for the event loop: of the stages, by their shares."""
        each = [(stage.times(max_num_seqs, token_budget, hand, hand_latency), share) for stage, share in self.kinds]
        mean = {f.name: sum(share * getattr(one, f.name) for one, share in each) for f in fields(StepTimes)}
        hops = sum(seconds for seconds, _ in self.hops)
        more = {"decode": mean["decode"] + hops, "mixed": mean["mixed"] + hops, "window": each[0][0].window}
        return StepTimes(**mean | more)


def pipeline(
    stands: Sequence[Stand], layers: int, hops: Sequence[tuple[float, float]], largest_context: int, request: float
) -> tuple[MixedSteps, Room] | None:
    """Step times and memory of a pipeline whose stages are `stands`, each of one stage; None where it does not fit.

    `request` is how many tokens of cache a mean request takes: memory is left for `ENOUGH` of them, or for as many as
    there can be, before layers are dealt out by speed.
    """
    weights, token = stands[0].room.weights, stands[0].kv_octets
    usable = np.array([stand.room.usable for stand in stands])
    wanted = ENOUGH * request
    while True:
        tokens = max(float(largest_context), wanted)
        most = np.floor(usable / (weights + token * tokens) * layers)
        if most.sum() >= layers and (most >= 1).all():
            break
        if tokens <= largest_context:
            return None
        wanted /= 2.0
    seconds = np.array([_seconds(stand.step, REFERENCE_BATCH, REFERENCE_CONTEXT) for stand in stands])
    dealt = _deal(1.0 / seconds, most, layers)
    shares = dealt / layers
    # The cache is cut like the layers: the fullest stage decides.
    held = int(((usable - weights * shares) / (token * shares)).min())
    if held < largest_context:
        return None
    kinds: dict[int, tuple[StepModel, float]] = {}
    for stand, share in zip(stands, shares.tolist(), strict=True):
        kinds[id(stand)] = (stand.step, kinds.get(id(stand), (stand.step, 0.0))[1] + share)
    prompts = np.array([_seconds(stand.step, REFERENCE_PROMPT, 0.0) for stand in stands])
    lanes = min(
        _lanes(seconds * shares, REFERENCE_BATCH, stands[0].step.work.hidden, hops),
        _lanes(prompts * shares, REFERENCE_PROMPT, stands[0].step.work.hidden, hops),
    )
    steps = MixedSteps(tuple(kinds.values()), stands[-1].step, tuple(hops), lanes)
    return steps, Room(weights, float(usable.sum()), held)


def _lanes(busy: Floats, tokens: float, hidden: int, hops: Sequence[tuple[float, float]]) -> float:
    """How many passes are under way: all that one takes, over what its slowest stage or wire takes."""
    wires = np.array([tokens * hidden * 2.0 / bandwidth for _, bandwidth in hops])
    return float((busy.sum() + wires.sum()) / max(busy.max(), wires.max()))


def _deal(speed: Floats, most: Floats, layers: int) -> Floats:
    """Whole layers by stage in proportion to speed, at least one and at most `most` each; `most` suffice."""
    dealt = np.ones_like(speed)
    for _ in range(layers - len(speed)):
        # The stage that would still be done first with one layer more.
        after = np.where(dealt < most, (dealt + 1) / speed, np.inf)
        dealt[int(after.argmin())] += 1
    return dealt


def _seconds(stage: StepModel, tokens: float, context: float) -> float:
    """A step of all layers on a stage's devices, each token of which reads `context` others."""
    linear = float(stage.linear(np.array([tokens]))[0])
    return linear + tokens * stage.reading(context) + stage.overhead(eager=context == 0.0)
