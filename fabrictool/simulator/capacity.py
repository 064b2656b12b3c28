"""What one replica can do, in closed form: memory, prefill, decode, capacity, latency under load.

The planner weighs thousands of placements with these figures; `fleet` plays the few that matter event by event. Both
stand on the same step times and the same calibrations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.simulator.calibration import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.memory import ReplicaMemory
    from fabrictool.simulator.stepmodel import Steps

    Floats = np.ndarray[Any, np.dtype[np.float64]]

MAX_UTILISATION = 0.9
"""No forecast promises a replica loaded beyond this: queues grow without bound near 1."""
GRID = 24
"""Batch sizes at which a replica's step is computed; between them it is interpolated."""
NORMAL_P95 = 1.645
MOST_EARLY = 0.9
"""Share of the time between tokens that a late first token can hide at most."""
Factors = tuple[float, float]
"""(low, high) by which a measured value may differ from a forecast."""


@dataclass(frozen=True, slots=True)
class MeanWorkload:
    """Mean lengths, in tokens, how far they spread, and the longest context that a replica must hold."""

    rate: float
    """Requests per second over all replicas."""
    input: float
    output: float
    context: int
    input_p95: float = 0.0
    """Of 20 prompts, 19 are no longer; 0: all have the mean length, and so on."""
    output_p95: float = 0.0
    input_variation: float = 0.0
    """Standard deviation of prompts over their mean."""
    output_variation: float = 0.0

    @property
    def held(self) -> float:
        """Tokens that a request holds, seen at any time: long answers are there for longer than short ones."""
        return self.input + self.output / 2 * (1.0 + self.output_variation**2)


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
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
    marginal_s: float = 0.0
    """What one mean prompt adds to a step that decodes a full batch."""
    batches: tuple[float, ...] = (1.0,)
    """Batch sizes from 1 to `max_batch` ..."""
    steps_s: tuple[float, ...] = (0.0,)
    """... and a decode step of each."""
    first_s: float = 0.0
    """By which the first token comes later to its client; later ones make up for it ..."""
    stream_s: float = 0.0
    """... and for each other request in flight."""
    read_s: float = 0.0
    """What a request spends outside the engine's steps."""
    long_s: float = 0.0
    """What the 95th percentile of prompts takes more than a mean one, alone, and outside the engine's steps."""
    bands: tuple[Factors, Factors, Factors] = ((0.4, 2.5), (0.4, 2.5), (0.4, 2.5))
    """Of TTFT, TPOT and E2E."""
    basis: str = ""
    """Where the figures come from."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Under load, point estimates in seconds."""

    utilisation: float
    in_system: float
    """Requests in the replica, waiting or served, on average: by Little's law the rate times the mean latency."""
    ttft_mean: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    e2e_p95: float


def replica(
    step: Steps, room: ReplicaMemory, demand: MeanWorkload, max_num_seqs: int, calibration: Calibration
) -> ReplicaFigures:
    """Figures of a replica whose steps take what `step` says and whose memory is `room`."""
    if room.kv_tokens < demand.context + room.beside.tokens(demand.context):
        return ReplicaFigures(False, room.weights, room.kv_tokens, 0, 0.0, math.inf, math.inf, math.inf)
    batch = mean_batch(room, demand, max_num_seqs)
    mean_context = demand.held
    sizes, batches = _grid(batch)
    lane = np.ceil(batches / step.lanes)
    # All at once: a call takes as long as hundreds of numbers do.
    linear = step.linear(np.concatenate([lane, [lane[-1] + float(demand.input), float(demand.input)]]))
    logits = step.logits(np.append(lane, 1.0))
    steps = _decode_seconds(step, batches, linear[:-2], logits[:-1], mean_context)
    full = float(steps[-1])
    without, beside, alone = linear[-3:-2], linear[-2:-1], linear[-1:]
    marginal = _marginal_seconds(step, without, beside, demand.input, 1.0 + demand.input_variation**2)
    prefill_s = _prefill_seconds(step, alone, logits[-1:], demand.input)
    # A request costs what its prompt adds to a step, and its share of the steps that decode a full batch.
    return ReplicaFigures(
        fits=True,
        weights=room.weights,
        free=room.kv_tokens,
        max_batch=batch,
        capacity=1.0 / (marginal + demand.output * full / batch),
        prefill_s=prefill_s,
        step_alone_s=float(steps[0]),
        step_full_s=full,
        marginal_s=marginal,
        batches=sizes,
        steps_s=tuple(steps.tolist()),
        first_s=calibration.factors.request,
        stream_s=calibration.factors.stream,
        read_s=calibration.factors.prompt_token * demand.input,
        long_s=_longer(step, demand, calibration, prefill_s),
        bands=forecast_bands(calibration),
        basis=basis(calibration),
    )


@lru_cache(maxsize=4096)
def _grid(most: int) -> tuple[tuple[float, ...], Floats]:
    """Batches at which a replica's step is computed: the same for all replicas that hold as many requests."""
    batches: Floats = np.unique(np.geomspace(1, most, GRID).round())
    batches.flags.writeable = False
    return tuple(batches.tolist()), batches


def mean_batch(room: ReplicaMemory, demand: MeanWorkload, max_num_seqs: int) -> int:
    """Requests of mean length that `room` holds at once, within the engine's own limit; at least 1."""
    tokens = demand.input + demand.output
    taken = max(tokens, demand.held) + room.beside.tokens(tokens)
    return max(1, min(max_num_seqs, int(room.kv_tokens // taken)))


def _longer(step: Steps, demand: MeanWorkload, calibration: Calibration, prefill_s: float) -> float:
    more = max(0.0, demand.input_p95 - demand.input)
    if not more:
        return 0.0
    alone = prefill_seconds(step, demand.input_p95) - prefill_s
    return alone + calibration.factors.prompt_token * more


def decode_seconds(step: Steps, batch: int, context: float) -> float:
    """One decode step of `batch` requests that hold `context` tokens each."""
    batches = np.array([batch], dtype=float)
    lane = np.ceil(batches / step.lanes)
    return float(_decode_seconds(step, batches, step.linear(lane), step.logits(lane), context)[0])


def _decode_seconds(step: Steps, batches: Floats, linear: Floats, logits: Floats, context: float) -> Floats:
    """`linear`, `logits`: what `step` says of those requests of each batch that are in one lane."""
    fixed = linear + logits + step.overhead()
    return np.asarray(fixed + batches * step.reading(context) / np.minimum(step.lanes, batches))


def _marginal_seconds(step: Steps, without: Floats, beside: Floats, tokens: float, uneven: float) -> float:
    """What a prompt adds to a step that decodes a batch; prompts share the lanes as requests do.

    `without`, `beside`: what `step.linear` says of the batch, and of both. `uneven`: mean square of their lengths over
    the square of the mean, as attention takes it.
    """
    longer = step.launched(beside + uneven * step.attending(tokens)) - without - step.overhead()
    return float(longer[0]) / step.lanes


def prefill_seconds(step: Steps, tokens: float) -> float:
    """One prompt of `tokens`, alone."""
    return _prefill_seconds(step, step.linear(np.array([float(tokens)])), step.logits(np.array([1.0])), tokens)


def _prefill_seconds(step: Steps, linear: Floats, logits: Floats, tokens: float) -> float:
    """`linear`: what `step` says of the prompt; `logits`: of one answer."""
    computed = step.launched(linear + step.attending(tokens)) + logits
    return float(computed[0])


def under_load(figures: ReplicaFigures, demand: MeanWorkload, rate: float) -> Latency:
    """Latency of one replica that gets `rate` requests/s; see `under_loads`."""
    (latency,) = under_loads(figures, demand, [rate])
    return latency


def under_loads(figures: ReplicaFigures, demand: MeanWorkload, rates: Sequence[float]) -> list[Latency]:
    """Latency of one replica under each of these `rates`, requests/s, Poisson.

    A birth-death queue: with b requests in the batch, steps of t(b) seconds to which each arriving prompt adds p, they
    leave at the rate b / (output × t(b) + b × p), up to the largest batch; whoever comes beyond that waits. A request's
    own time per token is an average over its stay, in which the batch changes: so it varies by 1/√2 of what the batch
    does, and with how many prompts it meets. A prompt waits for the end of the step under way, and for prompts before
    it. Beyond `MAX_UTILISATION` the
    figures of that point are returned: overload has no stationary latency, and the caller reports what is not served.
    """
    utilisations = [rate / figures.capacity if figures.capacity > 0 else math.inf for rate in rates]
    loads = [min(utilisation, MAX_UTILISATION) for utilisation in utilisations]
    stays = _stays(figures, demand, loads)
    means = [stay.batch for stay in stays]
    large = [stay.batch + NORMAL_P95 * stay.spread / math.sqrt(2.0) for stay in stays]
    seconds = np.interp([*means, *large], figures.batches, figures.steps_s).tolist()
    typical, crowded = seconds[: len(stays)], seconds[len(stays) :]
    return [
        _latency(figures, demand, *at)
        for at in zip(utilisations, [load * figures.capacity for load in loads], stays, typical, crowded, strict=True)
    ]


# Wide: a replica, its work, and one load.
def _latency(
    figures: ReplicaFigures,
    demand: MeanWorkload,
    utilisation: float,
    rate: float,
    stay: _Stay,
    typical: float,
    crowded: float,
) -> Latency:
    """`typical` and `crowded`: seconds of a decode step with the mean batch, and with one that is seldom exceeded."""
    slower = 1.0 / (1.0 - min(rate * figures.marginal_s, MAX_UTILISATION))
    # A prompt that comes with its cache has its first token with it.
    own = max(figures.prefill_s, typical + figures.marginal_s) if figures.prefill_s else 0.0
    behind = stay.busy * typical * slower
    prompts = rate * figures.marginal_s
    uneven = 1.0 + demand.input_variation**2  # Pollaczek and Khinchine
    queue = uneven * prompts * figures.marginal_s / (2.0 * (1.0 - min(prompts, MAX_UTILISATION)))
    late = figures.first_s + figures.stream_s * stay.batch
    outside = late + figures.read_s
    ttft_mean = outside + own + behind / 2 + queue + stay.wait_mean
    others = _poisson_p95(1.5 * rate * typical * slower) * figures.marginal_s * math.sqrt(uneven)
    ttft_p95 = max(ttft_mean, outside + own + behind + max(3.0 * queue, others) + stay.wait_p95)
    ttft_p95 = ttft_mean + math.hypot(ttft_p95 - ttft_mean, figures.long_s)
    decode = max(0.0, demand.output - 1.0)
    early = min(late / max(1.0, decode), MOST_EARLY * stay.step * slower)
    tpot_mean = stay.step * slower - early
    prompts_met = (
        NORMAL_P95 * math.sqrt(rate * decode * stay.step * slower) * figures.marginal_s * slower / max(1.0, decode)
    )
    # Short answers meet few prompts: those are long, or none.
    prompts_met *= math.sqrt(uneven) * (1.0 + demand.output_variation**2) ** 0.375
    tpot_p95 = max(stay.step * slower, crowded * slower) + prompts_met - early
    e2e_mean, e2e_p95 = ttft_mean + decode * tpot_mean, (ttft_mean + ttft_p95) / 2 + decode * tpot_p95
    longer = max(0.0, demand.output_p95 - demand.output) * tpot_mean
    return Latency(
        utilisation=utilisation,
        in_system=rate * e2e_mean,
        ttft_mean=ttft_mean,
        ttft_p95=ttft_p95,
        tpot_mean=tpot_mean,
        tpot_p95=tpot_p95,
        e2e_p95=e2e_mean + math.hypot(e2e_p95 - e2e_mean, longer) if longer else e2e_p95,
    )


@dataclass(frozen=True, slots=True)
class _Stay:
    """Means over the stationary queue."""

    batch: float
    spread: float
    """Standard deviation of the batch."""
    step: float
    """Seconds of a decode step as requests see it: larger batches count by their size."""
    busy: float
    """Share of time with a request in it."""
    wait_mean: float
    """Seconds for a place in the batch."""
    wait_p95: float


def _stays(figures: ReplicaFigures, demand: MeanWorkload, loads: Sequence[float]) -> list[_Stay]:
    """Of each of these shares of the replica's capacity."""
    batch = np.arange(1, figures.max_batch + 1, dtype=float)
    steps = np.interp(batch, figures.batches, figures.steps_s)
    leaving = np.cumsum(np.log(batch / (demand.output * steps + batch * figures.marginal_s)))
    idle = _Stay(0.0, 0.0, float(steps[0]), 0.0, 0.0, 0.0)
    busy = [load for load in loads if load * figures.capacity > 0]
    if not busy:
        return [idle] * len(loads)
    # A row for each load, up to a factor that keeps it from overflowing.
    weights = batch * np.array([math.log(load * figures.capacity) for load in busy])[:, np.newaxis] - leaving
    tops = np.maximum(0.0, weights.max(axis=1))
    shares = np.exp(weights - tops[:, np.newaxis])
    lasts, sums, empty = shares[:, -1].tolist(), shares.sum(axis=1).tolist(), [math.exp(-top) for top in tops.tolist()]
    totals = [
        none + some + last * load / (1.0 - load)
        for none, some, last, load in zip(empty, sums, lasts, busy, strict=True)
    ]
    full = [last / total / (1.0 - load) for last, total, load in zip(lasts, totals, busy, strict=True)]
    shares /= np.array(totals)[:, np.newaxis]
    shares[:, -1] = full  # whatever waits beyond, the batch is full
    often = batch * shares
    means, squares = often.sum(axis=1).tolist(), (batch**2 * shares).sum(axis=1).tolist()
    seconds = (often * steps).sum(axis=1).tolist()
    stays = iter(
        _Stay(
            batch=mean,
            spread=math.sqrt(max(0.0, square - mean**2)),
            step=second / max(mean, 1e-300),
            busy=1.0 - none / total,
            wait_mean=filled * load / (figures.capacity * (1.0 - load)),
            wait_p95=math.log(max(1.0, filled / 0.05)) / (figures.capacity * (1.0 - load)),
        )
        for mean, square, second, none, total, filled, load in zip(
            means, squares, seconds, empty, totals, full, busy, strict=True
        )
    )
    return [next(stays) if load * figures.capacity > 0 else idle for load in loads]


def _poisson_p95(mean: float) -> int:
    """The number that is not exceeded in 95 of 100 cases."""
    chance = below = math.exp(-mean)
    number = 0
    while below < 0.95 and number < 1000:
        number += 1
        chance *= mean / number
        below += chance
    return number


def basis(calibration: Calibration) -> str:
    """Where a calibration's figures come from, in a line."""
    if not calibration.points:
        return "uncalibrated: datasheet peaks and literature constants"
    known = "/*" not in calibration.device and calibration.device != "*"
    kind = "calibrated" if known else "learned on other devices"
    return f"{kind}: {calibration.engine} on {calibration.device}, {calibration.points} measurements"


def forecast_bands(calibration: Calibration) -> tuple[Factors, Factors, Factors]:
    """Of the percentiles that a plan forecasts: never tighter than those of means."""
    bands = []
    for metric in ("ttft", "tpot", "e2e"):
        spread = calibration.spread(metric, "", inside=True) if calibration.points else UNKNOWN
        bands.append((math.exp(spread.low), math.exp(spread.high)))
    return bands[0], bands[1], bands[2]
