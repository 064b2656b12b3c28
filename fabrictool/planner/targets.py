"""A latency in closed form against the targets of an SLO: which are missed, and by how much."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from fabrictool.base.units import Duration
from fabrictool.simulator.slo import METRICS, Criterion, LatencyTarget, criteria

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.domain.blueprint import Slo
    from fabrictool.simulator.capacity import Latency


AS_FORECAST = (1.0, 1.0, 1.0)


def slo_misses(slo: Slo | None, latency: Latency, factors: Sequence[float] = AS_FORECAST) -> list[str]:
    """The targets that a latency does not meet if it is so many times as long (`slo.spared`), in words."""
    times = dict(zip(METRICS, factors, strict=True))
    return [
        f"{metric.upper()} p{share * 100:g} {value:.3g} s{in_words(times[metric])} is over the target of"
        f" {Duration(target)}"
        for metric, share, target, value in _targets(slo, latency)
        if value * times[metric] > target
    ]


def in_words(factor: float) -> str:
    """Of a forecast that is not taken as it is."""
    return "" if factor == 1.0 else f" if {factor:.3g} times as long"


# Wide: an SLO, and what is known of what is held against it.
def slo_excess(
    slo: Slo | None,
    latency: Latency,
    metrics: Sequence[str] = METRICS,
    more: float = 0.0,
    factors: Sequence[float] = AS_FORECAST,
) -> float:
    """By how much of itself the target that is missed most is exceeded; 0 where all are met.

    `more`: seconds of another replica and of the way to or from it, which TTFT and E2E have on top. `factors`: see
    `slo.spared`.
    """
    times = dict(zip(METRICS, factors, strict=True))
    over = [value * times[metric] / target - 1.0 for metric, _, target, value in _targets(slo, latency, metrics, more)]
    return max([0.0, *over])


def _targets(
    slo: Slo | None, latency: Latency, metrics: Sequence[str] = METRICS, more: float = 0.0
) -> Iterator[tuple[str, float, float, float]]:
    """(metric, share of requests, seconds that they may take, seconds that they take)."""
    for metric, share, target in _wanted(slo):
        if metric in metrics:
            yield metric, share, target, _quantile(latency, metric, share) + (0.0 if metric == "tpot" else more)


@cache
def _wanted(slo: Slo | None) -> tuple[tuple[str, float, float], ...]:
    """(metric, share of requests, seconds that they may take)."""
    *single, together = criteria(slo) or (Criterion(0.0, LatencyTarget()),)
    shares = [(wanted.metric, wanted.share, getattr(wanted.target, wanted.metric)) for wanted in single]
    for metric in METRICS:
        # `attain` asks more of a metric than its percentiles do, where these are lower.
        if max([share for name, share, _ in shares if name == metric], default=1.0) < together.share:
            shares.append((metric, together.share, getattr(together.target, metric)))
    return tuple(shares)


def _quantile(latency: Latency, metric: str, share: float) -> float:
    """Read off mean and p95: a constant part and an exponential tail, so that only the tail grows with the quantile."""
    p95 = getattr(latency, f"{metric}_p95")
    if metric == "e2e":
        mean = latency.ttft_mean + (latency.e2e_p95 - latency.ttft_p95) * _ratio(latency.tpot_mean, latency.tpot_p95)
    else:
        mean = getattr(latency, f"{metric}_mean")
    tail = max(0.0, p95 - mean) / (math.log(20.0) - 1.0)
    return float(p95 + tail * (math.log(1.0 / (1.0 - share)) - math.log(20.0)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0
