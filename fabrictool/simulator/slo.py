"""What an SLO asks of requests: shares of them that have to keep targets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.domain.blueprint import Slo

METRICS = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """What a request has to keep, seconds; infinity where there is no target."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf


@dataclass(frozen=True, slots=True)
class Criterion:
    """A share of the requests that has to keep a target."""

    share: float
    target: LatencyTarget
    metric: str = ""
    """Of one percentile of the SLO; "": all of its targets together."""


def criteria(slo: Slo | None) -> tuple[Criterion, ...]:
    """The SLO's percentiles one by one, and last `attain` for all targets together; none without targets.

    Of several percentiles of a metric, the loosest is what a single request is held to. Where a metric has a median
    only, no more than half of the requests can be asked to keep all.
    """
    if slo is None:
        return ()
    single: list[Criterion] = []
    loosest: dict[str, float] = {}
    wanted = float(slo.attain)
    for metric in METRICS:
        given = {percentile: getattr(slo, f"{metric}_p{percentile}") for percentile in PERCENTILES}
        targets = {percentile: float(target) for percentile, target in given.items() if target is not None}
        single += [Criterion(p / 100, LatencyTarget(**{metric: limit}), metric) for p, limit in targets.items()]
        if targets:
            loosest[metric] = max(targets.values())
            wanted = min(wanted, 0.5) if max(targets) == PERCENTILES[0] else wanted
    return (*single, Criterion(wanted, LatencyTarget(**loosest))) if single else ()


def spared(slo: Slo | None, bands: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """How many times as long as forecast each metric may take while the targets are met: as `slo.band` wants it, of the
    widest of these bands (low and high factor of each metric).
    """
    if slo is None or slo.band is None:
        return (1.0, 1.0, 1.0)
    highs = [[high for _, high in its] for its in bands]
    ttft, tpot, e2e = (
        1.0 + float(slo.band) * (max([1.0, *(high[at] for high in highs)]) - 1.0) for at in range(len(METRICS))
    )
    return ttft, tpot, e2e


def tightened(wanted: Iterable[Criterion], factors: Sequence[float]) -> tuple[Criterion, ...]:
    """What a replay has to keep so that the targets are met if everything takes so many times as long."""
    if all(factor == 1.0 for factor in factors):
        return tuple(wanted)
    return tuple(
        replace(
            criterion,
            target=LatencyTarget(*(getattr(criterion.target, m) / f for m, f in zip(METRICS, factors, strict=True))),
        )
        for criterion in wanted
    )


def target_of(slo: Slo | None) -> LatencyTarget:
    """What one request has to keep to count as good."""
    wanted = criteria(slo)
    return wanted[-1].target if wanted else LatencyTarget()
