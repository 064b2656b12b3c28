"""What one replica can do, in closed form: memory, prefill, decode, capacity, latency under load.

The planner weighs thousands of placements with these figures; `fleet` plays the few that matter event by event. Both
stand on the same step times and the same calibrations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.simulator.calibration import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.memory import Room
    from fabrictool.simulator.stepmodel import StepModel

    Floats = np.ndarray[Any, np.dtype[np.float64]]

MAX_UTILISATION = 0.9
"""No forecast promises a replica loaded beyond this: queues grow without bound near 1."""
Factors = tuple[float, float]
"""(low, high) by which a measured value may differ from a forecast."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean lengths, in tokens, and the longest context that a replica must hold."""

    rate: float
    """Requests per second over all replicas."""
    input: float
    output: float
    context: int


@dataclass(frozen=True, slots=True)
class Replica:
    """Static figures of one replica."""

    fits: bool
    weights: float
    """Octets over all its devices."""
    free: float
    """Tokens that its KV cache holds."""
    max_batch: int
    """Requests of mean length that fit at once, within the engine's own limit."""
    capacity: float
    """Requests/s at `max_batch`, before the utilisation limit."""
    prefill_s: float
    """One mean prompt, alone."""
    step_alone_s: float
    """One decode step of one request."""
    step_full_s: float
    """One decode step of a full batch."""
    request_s: float = 0.0
    """What a request spends outside the engine's steps."""
    bands: tuple[Factors, Factors, Factors] = ((0.4, 2.5), (0.4, 2.5), (0.4, 2.5))
    """Of TTFT, TPOT and E2E."""
    basis: str = ""
    """Where the figures come from."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Under load, point estimates in seconds."""

    utilisation: float
    ttft_mean: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    e2e_p95: float


def replica(step: StepModel, room: Room, demand: Demand, max_num_seqs: int, calibration: Calibration) -> Replica:
    """Figures of a replica whose steps take what `step` says and whose memory is `room`."""
    if room.kv_tokens < demand.context:
        return Replica(False, room.weights, room.kv_tokens, 0, 0.0, math.inf, math.inf, math.inf)
    tokens = demand.input + demand.output
    batch = max(1, min(max_num_seqs, int(room.kv_tokens // tokens)))
    mean_context = demand.input + demand.output / 2
    alone = decode_seconds(step, 1, mean_context)
    full = decode_seconds(step, batch, mean_context)
    prefill = prefill_seconds(step, demand.input)
    # Of a batch that decodes and reads prompts in turn, each request costs its prompt and its share of the steps.
    return Replica(
        fits=True,
        weights=room.weights,
        free=room.kv_tokens,
        max_batch=batch,
        capacity=1.0 / (prefill + demand.output * full / batch),
        prefill_s=prefill,
        step_alone_s=alone,
        step_full_s=full,
        request_s=calibration.factors.request + calibration.factors.prompt_token * demand.input,
        bands=_bands(calibration),
        basis=basis(calibration),
    )


def in_system(step: StepModel, figures: Replica, demand: Demand, loads: Sequence[float]) -> list[float]:
    """Mean number of requests in a replica, waiting or served, at each of `loads` (shares of its capacity, below 1).

    A birth-death queue: with b requests in the batch they leave at the rate b / (output × step(b) + b × prefill), up to
    the largest batch; whoever comes beyond that waits. What lies outside the engine's steps is added.
    """
    batch = np.arange(1, figures.max_batch + 1, dtype=float)
    known = np.unique(np.geomspace(1, figures.max_batch, 24).round())
    context = demand.input + demand.output / 2
    steps = np.interp(batch, known, _decode_seconds(step, known, context))
    leaving = np.log(batch / (demand.output * steps + batch * figures.prefill_s))
    found = []
    for load in loads:
        rate = load * figures.capacity
        weights = batch * math.log(rate) - np.cumsum(leaving)
        top = max(0.0, float(weights.max()))
        share = np.exp(weights - top)
        beyond = share[-1] * load / (1 - load)
        total = math.exp(-top) + share.sum() + beyond
        waiting = share[-1] * load / (1 - load) ** 2
        mean = float((batch * share).sum() + beyond * figures.max_batch + waiting) / float(total)
        found.append(mean + rate * figures.request_s)
    return found


def decode_seconds(step: StepModel, batch: int, context: float) -> float:
    """One decode step of `batch` requests that hold `context` tokens each."""
    return float(_decode_seconds(step, np.array([batch], dtype=float), context)[0])


def _decode_seconds(step: StepModel, batches: Floats, context: float) -> Floats:
    lane = np.ceil(batches / step.lanes)
    fixed = step.linear(lane) + step.logits(lane) + step.overhead(eager=False)
    return np.asarray(fixed + batches * step.reading(context) / np.minimum(step.lanes, batches))


def prefill_seconds(step: StepModel, tokens: float) -> float:
    """One prompt of `tokens`, alone."""
    one = np.array([1.0])
    linear = float(step.linear(np.array([float(tokens)]))[0] + step.logits(one)[0]) + step.overhead(eager=True)
    return linear + step.attending(tokens)


def under_load(figures: Replica, demand: Demand, rate: float) -> Latency:
    """Latency of one replica that gets `rate` requests/s.

    The batch in flight follows Little's law on the decode time; the wait is that of an M/M/1 queue for prefill slots,
    and its tail exponential, so p95 = mean × ln 20. Beyond `MAX_UTILISATION` the figures of that point are returned:
    overload has no stationary latency, and the caller reports what is not served.
    """
    utilisation = rate / figures.capacity if figures.capacity > 0 else math.inf
    rho = min(utilisation, MAX_UTILISATION)
    share = rho if figures.max_batch > 1 else 1.0
    tpot = figures.step_alone_s + (figures.step_full_s - figures.step_alone_s) * share
    interference = rho * figures.prefill_s / max(1.0, demand.output) * figures.max_batch
    service = figures.prefill_s + demand.output * figures.step_full_s / figures.max_batch
    wait = rho / (1.0 - rho) * service
    fixed = figures.prefill_s + tpot + figures.request_s
    ttft_p95 = fixed + wait * math.log(20.0)
    tpot_p95 = tpot + interference
    return Latency(
        utilisation=utilisation,
        ttft_mean=fixed + wait,
        ttft_p95=ttft_p95,
        tpot_mean=tpot + interference / 2,
        tpot_p95=tpot_p95,
        e2e_p95=ttft_p95 + demand.output * tpot_p95,
    )


def basis(calibration: Calibration) -> str:
    """Where a calibration's figures come from, in a line."""
    if not calibration.points:
        return "uncalibrated: datasheet peaks and literature constants"
    known = "/*" not in calibration.device and calibration.device != "*"
    kind = "calibrated" if known else "learned on other devices"
    return f"{kind}: {calibration.engine} on {calibration.device}, {calibration.points} measurements"


def _bands(calibration: Calibration) -> tuple[Factors, Factors, Factors]:
    """Of the percentiles that a plan forecasts: never tighter than those of means."""
    found = []
    for metric in ("ttft", "tpot", "e2e"):
        spread = calibration.spread(metric, "", inside=True) if calibration.points else UNKNOWN
        found.append((math.exp(spread.low), math.exp(spread.high)))
    return found[0], found[1], found[2]
