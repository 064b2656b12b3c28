"""What a device draws while its replica computes: a base, and what the work of its steps adds to it.

``watts = design power × (BASE + COMPUTE × u) + OCTET_J × octets/s``, and never more than the design power. `u` is the
share of the matrix units' peak that the work would take if small batches filled them like long prompts.

BASE, COMPUTE and OCTET_J: robust fit to the mean power of 276 runs on H100 and B200 under vLLM, 15 models with 8 to
3,072 requests at once, in chat and in reasoning: the ML.ENERGY leaderboard at revision 0cd52dab. It does not state
lengths of prompts, taken as 200 and 300 tokens; half or twice that moves no error below by more than 0.004. Mean
errors, as shares of the design power, of what a fit had not seen (in brackets: by the mean share of what it had seen):
models 0.06 (0.14), B200 by H100 0.07 (0.16), H100 by B200 0.05 (0.12). Where it is no better stands in
``docs/explanation/simulator.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS

if TYPE_CHECKING:
    from fabrictool.simulator.fleet import Accounts
    from fabrictool.simulator.operators import Attention, Matmul
    from fabrictool.simulator.stepmodel import StepModel

IDLE_SHARE = 0.1
"""Of the design power that a device draws while it waits: 60-80 W of an H100's 700 W. No datasheet states it."""
BUSY_SHARE = 0.74
"""Of the design power while it serves, where nobody knows what its steps ask of it: mean of 192 saturated H100
configurations of the same leaderboard (0.33 to 0.99); 190 of B200 average 0.72."""
BASE = 0.3
"""Of the design power while steps follow each other, whatever they compute."""
COMPUTE = 1.5
"""Of the design power for the whole peak of the matrix units: the limit is reached at half of it."""
OCTET_J = 1.08e-10
"""For each octet between memory and device: 13 pJ a bit, caches and wires on the chip included. As joules it holds on
H100 and B200 alike; as a share of the memory's peak it does not."""
ANSWER = 2.0
"""How many operations of a prompt one of an answer counts for. Fits of the runs above do not tell 1 from 2, but with 1
long prompts would reach the limit at a quarter of the peak, which Splitwise's A100 (MIT) reach at 0.35 to 0.42."""
ANSWER_EXPERT = 8.0
"""The same of experts, each of which gets few tokens and computes a whole tile for them. With 4, models that were left
out are 0.071 off, with 6 0.065, with 8 0.061, with 10 0.064."""


@dataclass(frozen=True, slots=True)
class Exertion:
    """How hard a device of a replica works: means over the seconds in which the replica does."""

    compute: float
    """Share of the matrix units' peak, with operations of answers counted `ANSWER` or `ANSWER_EXPERT` times."""
    octets: float
    """Octets/s of weights and cache that come from its memory."""

    @classmethod
    def of(cls, step: StepModel, accounts: Accounts, replica: int) -> Exertion:
        """Of what a replica did; none where it did nothing."""
        busy, steps, tokens = (float(column[replica]) for column in (accounts.busy, accounts.steps, accounts.tokens))
        if min(busy, steps, tokens) <= 0.0:
            return cls(0.0, 0.0)
        # Every token of an answer but its first was counted with the time since the one before it.
        answered = min(float(accounts.itl[replica].sum()), tokens)
        prompts = tokens - answered
        if step.drafts:
            answered *= (1 + step.drafts.tokens) / step.drafts.decoded
            tokens = prompts + answered
        work, cut = step.work, step.cut
        # A step takes each of its micro-batches through all stages, and a device reads its layers once for each.
        batches = min(float(cut.pp), max(1.0, tokens / steps))
        seconds = octets = 0.0
        for matmul in (*work.matmuls, work.head):
            groups = 1 if matmul.experts else cut.dp
            weighed = answered * (ANSWER_EXPERT if matmul.experts else ANSWER)
            weighed += prompts if matmul is not work.head else 0.0
            seconds += float(matmul.flops(np.array(weighed))) / (groups * cut.pp) / _peak(step, matmul)
            together = np.array(max(1.0, tokens / steps / batches / groups))
            weights = float(matmul.touched(together, step.factors.expert_spread))
            octets += steps * batches / cut.pp * weights * _octets_each(step, matmul)
        pairs, read = float(accounts.pairs[replica]), float(accounts.read[replica])
        read /= step.drafts.decoded if step.drafts else 1.0
        shared = cut.pp * cut.dp
        seconds += pairs * work.full.flops_pair * work.full.layers / shared / step.machine.peak("bf16")[0]
        inside = min(read, answered * work.windowed.window)
        octets += (read * _token(step, work.full) + inside * _token(step, work.windowed)) / shared
        return cls(seconds / busy, octets / busy)

    def watts(self, design: float) -> float:
        """Of one device that is designed for `design` watts."""
        return min(design, design * (BASE + COMPUTE * self.compute) + OCTET_J * self.octets)


def computing_watts(step: StepModel | None, accounts: Accounts, replica: int, devices: int, design: float) -> float:
    """Of one of a replica's `devices`, each designed for `design` watts: the mean over the time that it computes.

    Without step times of known work it is a mean share.
    """
    if step is None:
        return BUSY_SHARE * design
    # Engines that only spread layers over devices have one at work, and the others wait for their turn.
    working = min(1.0, step.cut.devices / devices)
    return working * Exertion.of(step, accounts, replica).watts(design) + (1.0 - working) * IDLE_SHARE * design


def _peak(step: StepModel, matmul: Matmul) -> float:
    """Operations/s of the unit that multiplies these weights."""
    return step.machine.peak(step.weights if matmul.precision == "weights" else matmul.precision)[0]


def _octets_each(step: StepModel, matmul: Matmul) -> float:
    """Octets of a single weight, as the engine holds it."""
    if matmul.precision != "weights":
        return OCTETS[matmul.precision]
    return step.octets or OCTETS[step.weights]


def _token(step: StepModel, attention: Attention) -> float:
    """Octets that reading one token's cache moves, in all layers of a kind."""
    return attention.kv_elements * attention.layers * KV_OCTETS[step.kv]
