"""Replicas that only read prompts, or only make answers: figures and latency of either phase, in closed form.

Prefill is a queue of fixed service times (M/D/1), decode the batches of `capacity.under_load` without prompts in them.
Between them a request's cache is handed over; what that takes is up to the link between them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.simulator.capacity import MAX_UTILISATION, Latency, prefill_seconds

if TYPE_CHECKING:
    from fabrictool.simulator.capacity import MeanWorkload, ReplicaFigures
    from fabrictool.simulator.stepmodel import Steps

ENOUGH = 2048.0
"""Prompt tokens in one step from which on devices compute as fast as they can; shorter prompts share a step."""


def prefill_only(figures: ReplicaFigures, step: Steps, demand: MeanWorkload) -> ReplicaFigures:
    """The same replica when all that it does is to read prompts: its capacity is prompts/s."""
    together = max(1, int(ENOUGH // demand.input))
    whole = prefill_seconds(step, together * demand.input)
    # Prompts of one step do not attend to each other.
    apart = whole - step.attending(together * demand.input) + together * step.attending(demand.input)
    # Its one token goes to no client: the replica that answers has the delays of both front ends.
    return replace(figures, capacity=step.lanes * together / apart, first_s=0.0, stream_s=0.0)


def decode_only(figures: ReplicaFigures, demand: MeanWorkload) -> ReplicaFigures:
    """The same replica when prompts come with their cache: its capacity is answers/s, and it sends all of an answer."""
    return replace(
        figures,
        capacity=figures.max_batch / (max(1.0, demand.output - 1.0) * figures.steps_s[-1]),
        prefill_s=0.0,
        marginal_s=0.0,
        first_s=2.0 * figures.first_s,
        read_s=0.0,
        long_s=0.0,
    )


def prefill_under_load(figures: ReplicaFigures, rate: float) -> Latency:
    """Until a prompt is computed, of a replica of `prefill_only` that gets `rate` prompts/s, Poisson."""
    utilisation = rate / figures.capacity if figures.capacity > 0 else math.inf
    load = min(utilisation, MAX_UTILISATION)
    wait = load / (2.0 * (1.0 - load)) / figures.capacity
    first = figures.read_s + figures.prefill_s
    mean = first + wait
    p95 = mean + math.hypot(2.0 * wait, figures.long_s)
    return Latency(
        utilisation=utilisation,
        in_system=load * figures.capacity * mean,
        ttft_mean=mean,
        ttft_p95=p95,
        tpot_mean=0.0,
        tpot_p95=0.0,
        e2e_p95=p95,
    )
