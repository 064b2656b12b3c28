"""A recorded run played again: the same arrivals and lengths, each request's latencies beside what it really had.

That is how a running service calibrates its own forecasts, without a benchmark. What is compared is the latency of each
request; what errors are told of is the mean over stretches of the run, as reports forecast means and not requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog import engines
from fabrictool.routing.policies import RoundRobinPolicy
from fabrictool.simulator.calibration import METRICS, Hull
from fabrictool.simulator.fitting import NOISE, WEIGHT, WORST, explain
from fabrictool.simulator.fleet import ReplicaSpec, Stream, simulate
from fabrictool.simulator.kernel import BLOCK
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stepmodel import Factors, Machine, StepModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.simulator.cases import Case
    from fabrictool.simulator.memory import ReplicaMemory
    from fabrictool.workload.trace import Trace

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Bools = np.ndarray[Any, np.dtype[np.bool_]]

INDEPENDENT = 200
"""Requests that a fit counts as so many measurements at most: those of one run share their errors, and must not
outweigh the prior by their mere number."""
WINDOW_REQUESTS = 50
WINDOW_TTFTS = 100
"""A window to judge overload by has at least so many requests, and lasts at least so many short TTFTs (a tenth are
shorter): by Little's law one request in twenty waits then for its first token where TTFTs are five times as long on
average."""
WAITING_SHARE = 0.1
WAITING = 5
"""Share of a window's requests, or number, that may wait for their first token where it begins and ends."""
STRETCH = 25
STRETCHES = (4, 40)
"""Requests of a stretch whose mean errors are told; and how many stretches there are."""
SOONEST, LATEST = 1e-6, 86_400.0
"""Seconds that no first token comes before, and that no answer takes: clocks and units are wrong beyond."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What one replica was sent and how long it took; arrays over requests, in order of arrival."""

    case: Case
    """Device, model, engine, precision and cut; its lengths and load do not count."""
    max_num_seqs: int
    token_budget: int
    stream: Stream
    prefix_tokens: int
    measured: Mapping[str, Floats]
    """ttft, tpot, e2e in seconds; NaN where there is none to compare with."""
    usable: Bools
    """Has both a TTFT and an E2E to compare with."""
    absurd: Bools
    """Has both, and they cannot be true."""
    kept_up: Bools
    """Came while the service kept up."""

    @property
    def room(self) -> ReplicaMemory:
        """Memory of the replica. Raises InvalidInputError FT2111 when the model does not fit."""
        case = self.case
        room = case.room(case.cut)
        if not room.fits:
            raise InvalidInputError.of(
                "FT2111", f"{case.model.id} at {case.precision} does not fit on {case.cut.devices} × {case.device.id}"
            )
        return room

    @property
    def refused(self) -> Ints:
        """Indices of the requests that are longer than the cache. Raises InvalidInputError FT2111."""
        tokens, beside = self.stream.prompt + self.stream.output, self.room.beside
        blocks = -(-tokens // BLOCK) + np.ceil(
            (beside.fixed + beside.windowed * np.minimum(tokens, beside.window)) / BLOCK
        )
        return np.flatnonzero(blocks > self.room.kv_tokens // BLOCK)

    @property
    def compared(self) -> Ints:
        """Indices of the requests that are compared."""
        return np.flatnonzero(self.usable & self.kept_up)

    def stretches(self) -> list[Ints]:
        """The compared requests in so many parts, one after the other in time."""
        count = min(max(len(self.compared) // STRETCH, STRETCHES[0]), STRETCHES[1])
        return np.array_split(self.compared, count)

    def play(self, factors: Factors) -> Mapping[str, Floats]:
        """The same metrics as forecast; NaN for requests that fit no replica. Raises InvalidInputError FT2111."""
        case = self.case
        cut = Parallelism(pp=1) if engines()[case.engine].layer_split else case.cut
        step = StepModel.of(
            case.model, Machine.of(case.device), cut, factors, weights=case.precision, kv=case.kv_precision
        )
        spec = ReplicaSpec(
            times=step.times(self.max_num_seqs, self.token_budget),
            max_num_seqs=self.max_num_seqs,
            token_budget=self.token_budget,
            kv_tokens=self.room.kv_tokens,
            beside=self.room.beside,
            lanes=step.lanes,
            prefill_first=engines()[case.engine].prefill_first,
            balance_steps=engines()[case.engine].balance_steps,
            spared=engines()[case.engine].cache_spared,
            prefix_tokens=self.prefix_tokens,
            frontend=factors.request,
            frontend_stream=factors.stream,
            frontend_token=factors.prompt_token,
        )
        outcome = simulate([spec], self.stream, RoundRobinPolicy())
        return {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2e": outcome.e2e}

    def mean_errors(self, factors: Factors, stretches: Sequence[Ints]) -> list[dict[str, float]]:
        """Metric → log of the mean measured over the mean forecast, of each stretch; a refused request counts as 0."""
        played = self.play(factors)
        errors = []
        for chosen in stretches:
            log_errors = {}
            for metric in METRICS:
                known = chosen[np.isfinite(self.measured[metric][chosen])]
                if len(known):
                    forecast = float(np.nan_to_num(played[metric][known]).mean())
                    error = math.log(self.measured[metric][known].mean() / forecast) if forecast > 0 else WORST
                    log_errors[metric] = min(error, WORST)
            errors.append(log_errors)
        return errors

    def hull(self) -> Hull:
        """Where nine tenths of the compared requests lie."""
        chosen = self.compared
        arrival = self.stream.arrival
        finish = np.sort((arrival + self.measured["e2e"])[np.isfinite(self.measured["e2e"])])
        flying = np.arange(1, len(arrival) + 1) - np.searchsorted(finish, arrival)

        def span(values: Any) -> tuple[float, float]:
            low, high = np.quantile(values[chosen], (0.05, 0.95))
            return float(low), float(high)

        devices = float(self.case.devices)
        return Hull(
            concurrency=span(np.maximum(flying, 1)),
            input_len=span(self.stream.prompt),
            output_len=span(self.stream.output),
            devices=(devices, devices),
            models=(self.case.model.id,),
        )


def recorded(case: Case, trace: Trace, max_num_seqs: int | None = None, token_budget: int | None = None) -> RecordedRun:
    """A run from the records of one replica, with the engine's own limits unless others are given.

    A request whose latencies are not known is load all the same.
    """
    count = len(trace)
    unknown = np.full(count, np.nan)
    ttft = unknown if trace.ttft is None else trace.ttft
    e2e = unknown if trace.latency is None else trace.latency
    with np.errstate(invalid="ignore", divide="ignore"):
        usable = (ttft > 0) & (e2e >= ttft)
        usable &= np.isfinite(e2e)
        absurd = usable & ((ttft < SOONEST) | (e2e > LATEST))
        usable &= ~absurd
        tpot = np.where(usable & (trace.output > 1) & (e2e > ttft), (e2e - ttft) / (trace.output - 1), np.nan)
    engine = engines()[case.engine]
    caches = engine.caches_prefixes and trace.block_tokens and not trace.block_tokens % BLOCK
    return RecordedRun(
        case=case,
        max_num_seqs=max_num_seqs or engine.default_max_num_seqs,
        token_budget=token_budget or engine.token_budget,
        stream=Stream(
            trace.arrival,
            np.maximum(trace.prompt, 1),
            np.maximum(trace.output, 1),
            chain_start=trace.chain_start if caches else None,
            chain=trace.chain if caches else None,
        ),
        prefix_tokens=trace.block_tokens if caches else 0,
        measured={"ttft": np.where(usable, ttft, np.nan), "tpot": tpot, "e2e": np.where(usable, e2e, np.nan)},
        usable=usable,
        absurd=absurd,
        kept_up=keeping_up(trace.arrival, np.where(usable, ttft, np.nan)),
    )


def keeping_up(arrival: Floats, ttft: Floats) -> Bools:
    """Which requests came while the service gave first tokens as fast as requests arrived.

    Time is cut into windows. Where many wait for their first token when a window begins or ends, a queue grows or is
    still there: its length says more of the load than of the service, and a small error of speed becomes a large one.
    """
    known = np.isfinite(ttft)
    if not known.any():
        return np.zeros(len(arrival), dtype=bool)
    span = max(float(arrival[-1] - arrival[0]), 1e-9)
    long_enough = max(WINDOW_REQUESTS * span / len(arrival), WINDOW_TTFTS * float(np.quantile(ttft[known], 0.1)))
    edges = np.linspace(arrival[0], arrival[-1], max(1, int(span / long_enough)) + 1)
    begun, answered = arrival[known], np.sort(arrival[known] + ttft[known])
    waiting = np.searchsorted(begun, edges) - np.searchsorted(answered, edges)
    window = np.clip(np.searchsorted(edges, arrival, side="right") - 1, 0, len(edges) - 2)
    allowed = np.maximum(WAITING, WAITING_SHARE * np.bincount(window, minlength=len(edges) - 1))
    calm = (waiting[:-1] <= allowed) & (waiting[1:] <= allowed)
    return np.asarray(calm[window])


def fit(
    run: RecordedRun, chosen: Ints, prior: Factors, rounds: int = 12, *, progress: Callable[[], None] | None = None
) -> Factors:
    """The factors that explain the latencies of the `chosen` requests best without leaving `prior` for nothing.

    `progress` is called before each play and may raise what ends the fit.
    """

    def residuals(vector: Floats) -> Floats:
        if progress:
            progress()
        played = run.play(Factors.of(vector))
        parts = []
        for metric in METRICS:
            measured = run.measured[metric][chosen]
            known = np.isfinite(measured)
            with np.errstate(invalid="ignore", divide="ignore"):
                error = np.log(measured[known] / played[metric][chosen][known])
            parts.append(WEIGHT[metric] / NOISE * np.where(np.isfinite(error), error, WORST))
        return np.concatenate(parts)

    return explain(residuals, prior, rounds=rounds, share=min(1.0, INDEPENDENT / max(1, len(chosen))))
