"""Factors from measurements: robust least squares around a prior, so that few points move little.

Residuals are logarithms of measured over predicted latencies, so that a millisecond and a minute count alike; their
loss is soft (outliers of a noisy cluster pull once, not squared). What the points do not determine stays at the prior,
and priors are themselves means over calibrated pairs: an unmeasured device borrows from its relatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import FabrictoolError
from fabrictool.simulator.calibration import Hull, Spread
from fabrictool.simulator.cases import estimate
from fabrictool.simulator.stepmodel import Factors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.simulator.cases import Case

    Floats = np.ndarray[Any, np.dtype[np.float64]]

NAMES = tuple(f.name for f in fields(Factors))
SPREAD = {
    "compute": 0.3,
    "narrow": 0.15,
    "bandwidth": 0.2,
    "narrow_bandwidth": 0.1,
    "expert_compute": 0.2,
    "block_scale": 0.15,
    "expert_bandwidth": 0.15,
    "expert_spread": 0.05,
    "attention_compute": 0.5,
    "attention_bandwidth": 0.4,
    "reuse": 0.5,
    "tile": 1.0,
    "link": 0.5,
    "exchange": 0.5,
    "kernel": 0.5,
    "eager_kernel": 1.0,
    "step": 0.8,
    "sequence": 0.8,
    "collective": 0.7,
    "request": 1.0,
    "stream": 1.0,
    "prompt_token": 1.0,
}
"""How far factors differ between devices and engines: standard deviations of their logarithms. With those of experts
twice as wide, what one mixture showed of a pair made forecasts of the next one worse."""
LIMIT = {
    "compute": 0.95,
    "narrow": 1.0,
    "bandwidth": 1.0,
    "narrow_bandwidth": 1.0,
    "expert_compute": 1.0,
    "block_scale": 1.0,
    "expert_bandwidth": 1.0,
    "expert_spread": 1.0,
    "attention_compute": 0.9,
    "attention_bandwidth": 1.0,
    "reuse": 1.0,
    "tile": 2048.0,
    "link": 1.0,
    "exchange": 1.0,
    "request": 0.05,
}
"""No efficiency beats the physics."""
NOISE = 0.13
"""What a prior's standard deviation is weighed against. More than the error of a good fit: rows of one model share
theirs, and 0.1 made other models worse (29 % instead of 14 % on H100 with TensorRT-LLM); 0.2 fits shapes worse."""
WEIGHT = {"ttft": 0.5, "tpot": 1.0, "e2e": 1.0}
"""TTFT scatters more than the others in every data set that we have."""
PROBE = 0.15
"""How far, in logarithms, a fit looks for where to go. A request that joins a step earlier moves others by whole steps:
forecasts jump by half a per cent, in which the effect of a small change is lost."""
RADIUS, SMALLEST = 0.7, 0.02
"""How far a step goes at most, and the size below which no step is tried."""
WORST = 3.0
"""|log| that a case counts when it cannot run at all: a refusal is a bad prediction, not a missing one."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A case and what was measured; seconds, NaN where it was not."""

    case: Case
    ttft: float = math.nan
    tpot: float = math.nan
    e2e: float = math.nan

    @property
    def in_flight(self) -> float:
        """Requests at a time: those of an open loop by Little's law."""
        case = self.case
        if case.mode != "open":
            return float(case.concurrency)
        known = (self.e2e,) if math.isfinite(self.e2e) else (self.ttft, self.tpot * (case.output_len - 1))
        return case.rate * sum(part for part in known if math.isfinite(part))

    def log_errors(self, factors: Factors) -> dict[str, float]:
        """Metric → log(measured / predicted), of the metrics that were measured."""
        measured = {name: getattr(self, name) for name in WEIGHT if math.isfinite(getattr(self, name))}
        try:
            forecast = estimate(self.case, factors)
        except FabrictoolError:
            return dict.fromkeys(measured, WORST)
        errors = {
            name: math.log(value / getattr(forecast, name)) if getattr(forecast, name) > 0 else WORST
            for name, value in measured.items()
        }
        if "e2e" not in errors and len(errors) == 2:
            steps = (forecast.e2e - forecast.ttft) / forecast.tpot if forecast.tpot > 0 else 0.0
            errors["e2e"] = math.log((self.ttft + self.tpot * steps) / forecast.e2e)
        return errors


def fit(
    observations: Sequence[Observation],
    prior: Factors,
    *,
    rounds: int = 12,
    progress: Callable[[int], None] | None = None,
) -> Factors:
    """The factors that explain `observations` best without leaving `prior` for nothing."""
    calls = 0

    def residuals(vector: Floats) -> Floats:
        nonlocal calls
        calls += 1
        if progress:
            progress(calls)
        factors = Factors.of(vector)
        return np.array(
            [
                WEIGHT[name] * error / NOISE
                for observation in observations
                for name, error in observation.log_errors(factors).items()
                if math.isfinite(getattr(observation, name))
            ]
        )

    return explain(residuals, prior, rounds=rounds)


def explain(residuals: Callable[[Floats], Floats], prior: Factors, *, rounds: int, share: float = 1.0) -> Factors:
    """The factors with the smallest residuals, which are a function of their logarithms, near `prior`.

    Each residual counts `share`. Gauss-Newton steps, each weighted anew so that outliers pull once and not squared,
    within bounds and a trust region: SciPy's own soft losses got stuck where most residuals are large, and its small
    differences drown in the jumps of an event loop.
    """
    from scipy.optimize import lsq_linear  # noqa: PLC0415 -- only calibration needs SciPy

    spread = np.array([SPREAD[name] for name in NAMES])
    lower, upper = np.full(len(NAMES), math.log(1e-9)), np.log([LIMIT.get(name, 1.0) for name in NAMES])
    start = np.minimum(prior.vector(), upper)

    def cost(error: Floats, vector: Floats) -> float:
        soft = 2.0 * (np.sqrt(1.0 + error**2) - 1.0)
        return float(share * soft.sum() + (((vector - start) / spread) ** 2).sum())

    point, radius = start, RADIUS
    error = residuals(point)
    for _ in range(rounds):
        probe = np.where(point + PROBE > upper, -PROBE, PROBE)
        slopes = np.stack(
            [(residuals(point + h * axis) - error) / h for h, axis in zip(probe, np.eye(len(NAMES)), strict=True)],
            axis=1,
        )
        weight = np.sqrt(share / np.sqrt(1.0 + error**2))
        matrix = np.concatenate([weight[:, None] * slopes, np.diag(1.0 / spread)])
        target = np.concatenate([-weight * error, (start - point) / spread])
        while radius > SMALLEST:
            bounds = (np.maximum(lower - point, -radius), np.minimum(upper - point, radius))
            trial = np.clip(point + lsq_linear(matrix, target, bounds).x, lower, upper)
            new = residuals(trial)
            if cost(new, trial) < cost(error, point):
                point, error, radius = trial, new, min(RADIUS, 1.5 * radius)
                break
            radius *= 0.4
        else:
            break
    return Factors.of(point)


def spreads(errors: Sequence[dict[str, float]]) -> dict[str, Spread]:
    """90 % bands of log errors of unseen cases, per metric, by split conformal ranks.

    Fewer than 19 errors have no such ranks. Then the band is where one more of a normal distribution would lie
    (Student's prediction interval), or half as far again as the farthest on that side, whichever is wider.
    """
    from scipy.special import stdtrit  # noqa: PLC0415 -- only calibration needs SciPy

    bands = {}
    for metric in WEIGHT:
        # A refusal is no forecast that could lie beside the measurement.
        values = np.sort([error[metric] for error in errors if metric in error and abs(error[metric]) < WORST])
        if not len(values):
            continue
        count = len(values)
        low = math.floor((count + 1) * 0.05) - 1
        high = math.ceil((count + 1) * 0.95) - 1
        margin = 0.0
        if low < 0 and count > 1:
            margin = stdtrit(count - 1, 0.95) * values.std(ddof=1) * math.sqrt(1.0 + 1.0 / count)
        bottom = values[low] if low >= 0 else min(1.5 * values[0], values.mean() - margin)
        top = values[high] if high < count else max(1.5 * values[-1], values.mean() + margin)
        bands[metric] = Spread(min(float(bottom), 0.0), max(float(top), 0.0))  # a forecast lies in its own band
    return bands


def hull(observations: Sequence[Observation]) -> Hull:
    """The range that the observations cover."""

    def span(values: list[float]) -> tuple[float, float]:
        return min(values), max(values)

    cases = [observation.case for observation in observations]
    return Hull(
        concurrency=span([observation.in_flight for observation in observations]),
        input_len=span([float(c.input_len) for c in cases]),
        output_len=span([float(c.output_len) for c in cases]),
        devices=span([float(c.devices) for c in cases]),
        models=tuple(sorted({c.model.id for c in cases})),
        accelerators=tuple(sorted({c.device.id for c in cases})),
    )
