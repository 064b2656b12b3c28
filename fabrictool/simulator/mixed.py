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
    stands: Sequence[Stand], layers: int, hops: Sequence[tuple[float, float]], largest_context: int
) -> tuple[MixedSteps, Room] | None:
    """Step times and memory of a pipeline whose stages are `stands`, each of one stage; None where it does not fit."""
    weights = stands[0].room.weights
    usable = np.array([stand.room.usable for stand in stands])
    token = stands[0].kv_octets
    need = weights + token * largest_context
    most = np.floor(usable / need * layers)
    if most.sum() < layers or (most < 1).any():
        return None
    seconds = np.array([_reference_seconds(stand.step) for stand in stands])
    dealt = _deal(1.0 / seconds, most, layers)
    shares = dealt / layers
    # The cache is cut like the layers: the fullest stage decides.
    tokens = int(((usable - weights * shares) / (token * shares)).min())
    if tokens < largest_context:
        return None
    kinds: dict[int, tuple[StepModel, float]] = {}
    for stand, share in zip(stands, shares.tolist(), strict=True):
        kinds[id(stand)] = (stand.step, kinds.get(id(stand), (stand.step, 0.0))[1] + share)
    busy = seconds * shares
    lanes = float(busy.sum() / busy.max())
    steps = MixedSteps(tuple(kinds.values()), stands[-1].step, tuple(hops), lanes)
    return steps, Room(weights, float(usable.sum()), tokens)


def _deal(speed: Floats, most: Floats, layers: int) -> Floats:
    """Whole layers by stage in proportion to speed, at least one and at most `most` each; `most` suffice."""
    dealt = np.ones_like(speed)
    for _ in range(layers - len(speed)):
        # The stage that would still be done first with one layer more.
        after = np.where(dealt < most, (dealt + 1) / speed, np.inf)
        dealt[int(after.argmin())] += 1
    return dealt


def _reference_seconds(stage: StepModel) -> float:
    """A decode step of all layers on a stage's devices."""
    one = np.array([REFERENCE_BATCH])
    read = REFERENCE_BATCH * stage.reading(REFERENCE_CONTEXT)
    return float(stage.linear(one)[0]) + read + stage.overhead(eager=False)
