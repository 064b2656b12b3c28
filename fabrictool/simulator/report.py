"""From an outcome to the figures that people ask for: latencies, goodput, utilisation, cost and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.simulator import kernel
from fabrictool.simulator.capacity import basis
from fabrictool.simulator.power import IDLE_SHARE, computing_watts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.fleet import Accounts, Floats, Outcome, ReplicaSpec
    from fabrictool.simulator.slo import LatencyTarget

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the replicas of a simulation stand on."""

    devices: tuple[int, ...]
    """Of each replica."""
    tdp_w: tuple[float, ...]
    """Of one device of each replica."""
    price: tuple[float, ...]
    """Of each replica for an hour."""


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one simulated model. Latencies in seconds: metric → mean, p50, p90, p95, p99."""

    requests: int
    finished: int
    refused: int
    lost: int
    retried: int
    complete: bool
    span_s: float
    rate: float
    """Requests/s that arrived."""
    latency: Mapping[str, Mapping[str, float]]
    """ttft, tpot, itl, e2e."""
    bands: Mapping[str, tuple[float, float]]
    """Metric → factors of its 90 % band."""
    attainment: float
    """Share of all requests that met every target; of those that were over, when it was stopped early."""
    goodput: float
    """Requests/s that met every target."""
    output_tokens_per_s: float
    input_tokens_per_s: float
    utilisation: tuple[float, ...]
    """Busy share of each replica."""
    kv_use: tuple[float, ...]
    """Mean share of the cache in use, of each replica, while busy."""
    preemptions: int
    prefix_hits: float
    """Share of prompt tokens found in the prefix cache."""
    cost: float
    """Of the devices for as long as replicas held them in the simulated span."""
    energy_j: float
    joules_per_token: float
    """Energy over output tokens."""
    cost_per_million_tokens: float
    """Cost over output tokens."""
    basis: str

    def to_json(self) -> dict[str, Any]:
        """With plain types; what is not a number is null."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


def report(
    outcome: Outcome,
    specs: Sequence[ReplicaSpec],
    hardware: Hardware,
    target: LatencyTarget,
    calibrations: Sequence[Calibration],
    model: str,
) -> Report:
    """The figures of an outcome; `calibrations` are the ones behind the replicas' step times."""
    finished = np.isfinite(outcome.finish)
    count = int(finished.sum())
    ttft, tpot, e2e = outcome.ttft[finished], outcome.tpot[finished], outcome.e2e[finished]
    over = len(outcome.arrival) if outcome.complete else count + len(outcome.refused) + len(outcome.lost)
    good = (ttft <= target.ttft) & (e2e <= target.e2e) & ~(tpot > target.tpot)
    first = float(outcome.arrival[0]) if len(outcome.arrival) else 0.0
    span = max(outcome.end - first, 1e-9)
    arrived = outcome.arrival[np.isfinite(outcome.arrival)]
    arriving = float(arrived[-1] - first) if len(arrived) > 1 else span
    busy = np.minimum(outcome.accounts.busy / max(outcome.end, 1e-9), 1.0)
    blocks = np.array([max(1, spec.kv_tokens // 16) for spec in specs])
    with np.errstate(invalid="ignore", divide="ignore"):
        kv = np.nan_to_num(outcome.accounts.cache_time / outcome.accounts.busy / blocks)
    # A replica holds its devices until it is gone, also while it starts.
    held = np.clip(np.array([min(spec.down, outcome.end) for spec in specs]) - first, 0.0, span)
    cost = float((np.array(hardware.price) * held).sum()) / 3600.0
    energy = _energy(outcome.accounts, specs, hardware, held)
    tokens = float(outcome.output[finished].sum())
    latency = {"ttft": _summary(ttft), "tpot": _summary(tpot[np.isfinite(tpot)]), "e2e": _summary(e2e)}
    itl = inter_token_latencies(outcome.accounts, list(QUANTILES.values()))
    latency["itl"] = {"mean": inter_token_mean(outcome.accounts)} | dict(zip(QUANTILES, map(float, itl), strict=True))
    return Report(
        requests=len(outcome.arrival),
        finished=count,
        refused=len(outcome.refused),
        lost=len(outcome.lost),
        retried=outcome.retried,
        complete=outcome.complete,
        span_s=span,
        rate=(len(arrived) - 1) / arriving if len(arrived) > 1 and arriving > 0 else 0.0,
        latency=latency,
        bands=_bands(calibrations, model),
        attainment=float(good.sum()) / max(1, over),
        goodput=float(good.sum()) / span,
        output_tokens_per_s=tokens / span,
        input_tokens_per_s=float(outcome.prompt[finished].sum()) / span,
        utilisation=tuple(float(x) for x in busy),
        kv_use=tuple(float(x) for x in kv),
        preemptions=int(outcome.preempted.sum()),
        prefix_hits=float(outcome.cached.sum()) / max(1.0, float(outcome.prompt.sum())),
        cost=cost,
        energy_j=energy,
        joules_per_token=energy / tokens if tokens else math.nan,
        cost_per_million_tokens=1e6 * cost / tokens if tokens else math.nan,
        basis="; ".join(dict.fromkeys(f"{basis(calibration)} ({calibration.source})" for calibration in calibrations)),
    )


def _energy(accounts: Accounts, specs: Sequence[ReplicaSpec], hardware: Hardware, held: Floats) -> float:
    """Joules of all devices for the seconds for which replicas `held` them, computing or waiting."""
    devices, design = np.array(hardware.devices), np.array(hardware.tdp_w)
    steps = [spec.step for spec in specs]
    work = zip(steps, hardware.devices, hardware.tdp_w, strict=True)
    computing = np.array([computing_watts(step, accounts, r, count, tdp) for r, (step, count, tdp) in enumerate(work)])
    busy = np.minimum(accounts.busy, held)
    return float((devices * (computing * busy + IDLE_SHARE * design * (held - busy))).sum())


def inter_token_mean(accounts: Accounts) -> float:
    """Mean time between two tokens over all replicas, seconds, to 1 %: long answers count by their tokens."""
    counts = accounts.itl.sum(axis=0)
    middle = kernel.ITL_LOW * kernel.ITL_RATIO ** (np.arange(len(counts)) + 0.5)
    return float((counts * middle).sum() / counts.sum()) if counts.sum() else math.nan


def inter_token_latencies(accounts: Accounts, quantiles: Sequence[float]) -> Floats:
    """Quantiles of the time between two tokens over all replicas, seconds, to 1 %; NaN without any."""
    counts = accounts.itl.sum(axis=0)
    total = counts.sum()
    if total == 0:
        return np.full(len(quantiles), np.nan)
    slots = np.searchsorted(np.cumsum(counts), np.asarray(quantiles) * total)
    return np.asarray(kernel.ITL_LOW * kernel.ITL_RATIO ** (slots + 0.5))


def _summary(values: Any) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(("mean", *QUANTILES), math.nan)
    quantiles = np.quantile(values, list(QUANTILES.values()))
    return {"mean": float(values.mean())} | {k: float(v) for k, v in zip(QUANTILES, quantiles, strict=True)}


def _bands(calibrations: Sequence[Calibration], model: str) -> dict[str, tuple[float, float]]:
    """The widest of the replicas' bands."""
    bands = {}
    for metric in ("ttft", "tpot", "e2e"):
        spreads = [calibration.spread(metric, model, inside=True) for calibration in calibrations]
        bands[metric] = (math.exp(min(s.low for s in spreads)), math.exp(max(s.high for s in spreads)))
    return bands


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
