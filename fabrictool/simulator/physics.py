"""What no server can beat: weights are read once a step, and each product takes its arithmetic.

Only what a datasheet states goes in, with nothing for launches, scheduling or collectives, so a measurement below these
floors is not of the case that it claims to be: fewer bits, a prompt whose beginning was cached, several tokens a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.simulator.operators import work
from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS, Machine

if TYPE_CHECKING:
    from fabrictool.simulator.capacity import MeanWorkload, ReplicaFigures
    from fabrictool.simulator.cases import Case
    from fabrictool.simulator.fitting import Observation
    from fabrictool.simulator.operators import Parallelism
    from fabrictool.simulator.stepmodel import StepModel

IMPOSSIBLE = "FT2154"
"""Code of a measurement that is faster than it can have been."""
TOLERANCE = 0.97
"""Share of a floor at which a measurement is believed: clocks and memories run a little above their datasheets."""
MEAN_LENGTH = {"agg": 0.9, "disagg": 0.9}
"""Mode → mean length of its prompts, as a share of the given one; see `cases`."""


@dataclass(frozen=True, slots=True)
class Floors:
    """The shortest times that the datasheet of a case's device allows, in seconds."""

    tpot: float
    """Reading, at the memory's peak, what one token needs of the weights, and the cache of its prompt."""
    ttft: float
    """The products of one prompt of mean length, at the units' peak."""
    e2e: float
    """Both, for all tokens of an answer."""


@dataclass(frozen=True, slots=True)
class PeakUse:
    """How near a replica's figures come to what the datasheet of its devices states; no measurement."""

    flops: float
    """Operations/s of a device at its peak: of each product in the precision that it is computed in."""
    computing: float
    """Share of that while one mean prompt is read alone (MFU)."""
    bandwidth: float
    """Octets/s of a device's memory at its peak."""
    octets: float
    """That a device has to read in a decode step of a full batch: weights and caches."""
    reading: float
    """Share of the memory's peak in such a step (MBU)."""


def peak_use(step: StepModel, figures: ReplicaFigures, demand: MeanWorkload) -> PeakUse:
    """Of a replica that fits and is no pipeline."""
    shape, machine = step.work, step.machine
    prompt, batch = np.full(1, demand.input), np.full(1, float(figures.max_batch))
    done = [(float(m.flops(prompt)[0]), machine.peak(step.precision_of(m))[0]) for m in shape.matmuls]
    pairs = sum(kind.flops_pair * kind.layers * kind.pairs(demand.input) for kind in (shape.full, shape.windowed))
    done.append((pairs, machine.peak("bf16")[0]))
    operations = sum(flops for flops, _ in done)
    seconds = sum(flops / peak for flops, peak in done)
    octets = sum(
        float(m.touched(batch, step.factors.expert_spread)[0]) * step.width_of(m) for m in (*shape.matmuls, shape.head)
    )
    octets += (
        figures.max_batch
        * KV_OCTETS[step.kv]
        * sum(
            kind.kv_elements * kind.layers * min(demand.held, kind.window or demand.held)
            for kind in (shape.full, shape.windowed)
        )
    )
    return PeakUse(
        operations / seconds,
        seconds / figures.prefill_s,
        machine.bandwidth,
        octets,
        octets / machine.bandwidth / figures.step_full_s,
    )


def floors(case: Case) -> Floors:
    """The floors of a case whose cuts and precisions are known to be possible."""
    prefill, decode = case.cut, case.cut
    if case.mode == "disagg" and case.prefill and case.decode:
        prefill, decode = case.prefill.cut, case.decode.cut
    prompt = max(1, int(case.input_len * MEAN_LENGTH.get(case.mode, 1.0)))
    # Chunks of one prompt may be in all stages of a pipeline at the same time.
    tpot, ttft = _reading(case, decode, prompt), _computing(case, prefill, prompt) / prefill.pp
    later = int(case.output_len * MEAN_LENGTH.get(case.mode, 1.0)) - 1
    return Floors(tpot, ttft, ttft + tpot * max(0, later))


def forbidden(observation: Observation) -> str:
    """Why nothing can have been as fast as this (the reason for FT2154); empty where something can."""
    case = observation.case
    least = floors(case)
    causes = {
        "tpot": "fewer bits than the row says, or several tokens a step",
        "ttft": "a prefix cache that knew the prompts, or fewer bits than the row says",
        "e2e": "fewer bits than the row says, or shorter answers",
    }
    for metric, cause in causes.items():
        measured, floor = getattr(observation, metric), getattr(least, metric)
        if measured < TOLERANCE * floor:
            told = f"{metric.upper()} of {1e3 * measured:.4g} ms is impossible"
            return f"{told}: {case.device.id} takes {1e3 * floor:.4g} ms at its peaks ({cause})"
    return ""


def _reading(case: Case, cut: Parallelism, context: int) -> float:
    shape, machine = work(case.model, cut), Machine.of(case.device)
    token = np.ones(1)
    weights = sum(
        float(m.touched(token)[0]) * OCTETS[case.precision]  # some engines narrow the logits' weights, too
        for m in (*shape.matmuls, shape.head)
    )
    full, windowed = shape.full, shape.windowed
    tokens = full.kv_elements * full.layers * context + windowed.kv_elements * windowed.layers * min(
        context, windowed.window
    )
    return (weights + tokens * KV_OCTETS[case.kv_precision]) / machine.bandwidth


def _computing(case: Case, cut: Parallelism, tokens: int) -> float:
    shape, machine = work(case.model, cut), Machine.of(case.device)
    prompt = np.array([float(tokens)])
    total = 0.0
    for m in shape.matmuls:
        peak, _ = machine.peak(case.precision if m.precision == "weights" else m.precision)
        total += float(m.flops(prompt)[0]) / peak
    pairs = shape.full.flops_pair * shape.full.layers * tokens * tokens / 2
    # The scores of one prompt may be computed in the narrowest format that the device has.
    return total + pairs / max(machine.flops.values())
