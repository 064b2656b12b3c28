"""What a trace looks like: the figures of paper 001, section 6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fabrictool.workload.trace import Trace

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The figures of one trace."""

    requests: int
    span_s: float
    rate: float
    """Requests/s over the whole span."""
    gap_cv: float
    """Coefficient of variation of the gaps between arrivals; 1 for a Poisson process."""
    input: dict[str, float]
    """Tokens: mean and quantiles."""
    output: dict[str, float]
    peak_to_mean: float
    """Tokens of the busiest minute over those of the mean minute, of minutes with any request."""
    io_ratio: tuple[float, ...]
    """Input over output tokens in each tenth of the span; NaN where nothing arrived."""
    popularity: dict[str, float]
    """Model → share of requests, largest first."""
    top_tenth: float
    """Share of requests for the most popular tenth of the models (at least one)."""
    prefix_reuse: float
    """Share of prompt tokens in leading blocks that an earlier request had as well; 0 without prefix ids."""
    latency: dict[str, float]
    """Seconds: mean and quantiles of what the source measured; empty without it."""
    dropped: dict[str, int]


def statistics(trace: Trace) -> Statistics:
    """Figures of a trace with at least one request."""
    popularity = _popularity(trace)
    shares = list(popularity.values())
    top = max(1, len(shares) // 10)
    measured = np.zeros(0) if trace.latency is None else trace.latency[np.isfinite(trace.latency)]
    return Statistics(
        requests=len(trace),
        span_s=trace.span,
        rate=trace.rate,
        gap_cv=gap_cv(trace),
        input=_summary(trace.prompt),
        output=_summary(trace.output),
        peak_to_mean=_peak_to_mean(trace),
        io_ratio=_io_ratio(trace),
        popularity=popularity,
        top_tenth=float(sum(shares[:top])),
        prefix_reuse=_prefix_reuse(trace),
        latency=_summary(measured) if len(measured) else {},
        dropped=dict(trace.dropped),
    )


def gap_cv(trace: Trace) -> float:
    """Coefficient of variation of the gaps between arrivals; 0 where there are none.

    Where several arrivals have one stamp, the clock was coarse, and all are spread by chance over the time until the
    next possible stamp: whole seconds are the recorder's, not bursts.
    """
    stamps = np.unique(trace.arrival)
    if len(stamps) < 2:
        return 0.0
    arrival = trace.arrival
    if len(stamps) < len(arrival):
        step = float(np.diff(stamps).min())
        arrival = np.sort(arrival + step * np.random.default_rng(0).random(len(arrival)))
    gaps = np.diff(arrival)
    return float(gaps.std() / gaps.mean()) if gaps.mean() > 0 else 0.0


def _summary(values: Any) -> dict[str, float]:
    quantiles = np.quantile(values, QUANTILES)
    return {"mean": float(values.mean())} | {
        f"p{q * 100:g}": float(v) for q, v in zip(QUANTILES, quantiles, strict=True)
    }


def _popularity(trace: Trace) -> dict[str, float]:
    if trace.model is None:
        return {trace.models[0]: 1.0}
    counts = np.bincount(trace.model, minlength=len(trace.models)) / len(trace)
    order = np.argsort(-counts, kind="stable")
    return {trace.models[i]: float(counts[i]) for i in order}


def _peak_to_mean(trace: Trace) -> float:
    # Only minutes with a request: a trace may span years.
    _, minute = np.unique(trace.arrival // 60.0, return_inverse=True)
    tokens = np.bincount(minute, weights=trace.prompt + trace.output)
    return float(tokens.max() / tokens.mean())


def _io_ratio(trace: Trace) -> tuple[float, ...]:
    tenth = np.minimum(((trace.arrival - trace.arrival[0]) / max(trace.span, 1e-9) * 10).astype(np.int64), 9)
    inputs = np.bincount(tenth, weights=trace.prompt, minlength=10)
    outputs = np.bincount(tenth, weights=trace.output, minlength=10)
    with np.errstate(divide="ignore", invalid="ignore"):
        return tuple(float(x) for x in np.where(outputs > 0, inputs / outputs, np.nan))


def _prefix_reuse(trace: Trace) -> float:
    if trace.chain is None or trace.chain_start is None or not trace.block_tokens:
        return 0.0
    seen: set[int] = set()
    reused = 0
    for i in range(len(trace)):
        ids = trace.chain[trace.chain_start[i] : trace.chain_start[i + 1]].tolist()
        known = 0
        while known < len(ids) and ids[known] in seen:
            known += 1
        reused += min(known * trace.block_tokens, int(trace.prompt[i]))
        seen.update(ids)
    return reused / float(trace.prompt.sum())
