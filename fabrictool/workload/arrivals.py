"""When requests arrive: renewal processes with a rate and a coefficient of variation, and bursts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    Floats = np.ndarray[Any, np.dtype[np.float64]]

Process = Literal["poisson", "gamma", "weibull", "constant", "bursts"]
PROCESSES: tuple[Process, ...] = ("poisson", "gamma", "weibull", "constant", "bursts")
RATES = (1e-9, 1e9)
"""Requests/s that make sense; far beyond them arrival times are no longer finite numbers."""
CVS = (0.03, 100.0)
"""Coefficients of variation that gamma and Weibull gaps reproduce in double precision."""
WINDOWS = (1e-6, 1e9)
"""Seconds of a burst, or between two."""


# Wide: the parameters of five processes, each with its default.
def arrivals(
    process: Process,
    rate: float,
    count: int,
    rng: np.random.Generator,
    *,
    cv: float = 1.0,
    on: float = 10.0,
    off: float = 30.0,
) -> Floats:
    """`count` arrival times, seconds, ascending.

    `rate` is the long-run mean in requests/s; `cv` the coefficient of variation of the gaps (gamma, weibull: above 1
    is bursty). `bursts` sends all in windows of `on` seconds, `off` seconds apart, with Poisson arrivals inside.
    Raises InvalidInputError FT2202.
    """
    _within("rate", rate, RATES)
    _within("cv", cv, CVS)
    if process == "bursts":
        _within("on", on, WINDOWS)
        _within("off", off, (0.0, WINDOWS[1]))
    if count < 0:
        raise InvalidInputError.of("FT2202", f"{count} requests cannot be made")
    mean = 1.0 / rate
    match process:
        case "poisson":
            gaps = rng.exponential(mean, count)
        case "constant":
            gaps = np.full(count, mean)
        case "gamma":
            shape = 1.0 / cv**2
            gaps = rng.gamma(shape, mean / shape, count)
        case "weibull":
            shape = weibull_shape(cv)
            gaps = rng.weibull(shape, count) * (mean / math.gamma(1.0 + 1.0 / shape))
        case "bursts":
            inside = np.cumsum(rng.exponential(mean * on / (on + off), count))
            return np.asarray(inside + np.floor(inside / on) * off)
    return np.cumsum(gaps)


def cv_of_part(cv: float, share: float) -> float:
    """The coefficient of variation of the gaps that are left when each request of a renewal process stays with the
    probability `share`: a part of a bursty stream is less bursty.
    """
    return math.sqrt(1.0 + share * (cv**2 - 1.0))


def _within(name: str, value: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if not low <= value <= high:  # NaN is not either
        raise InvalidInputError.of("FT2202", f"{name} is {value:g}, not a number from {low:g} to {high:g}")


def weibull_shape(cv: float) -> float:
    """The shape whose coefficient of variation is `cv`, by bisection; cv falls as the shape grows."""
    low, high = 0.1, 50.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        first, second = math.lgamma(1 + 1 / middle), math.lgamma(1 + 2 / middle)
        if math.sqrt(max(0.0, math.exp(second - 2 * first) - 1)) > cv:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
