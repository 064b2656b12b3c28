"""How the rate of a demand differs from window to window: counted in a trace, or by the chance of a declared one."""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.domain.hours import DAY, WEEK, hour_of_week

if TYPE_CHECKING:
    from datetime import tzinfo

    Floats = np.ndarray[Any, np.dtype[np.float64]]

HOUR_S = 3600.0
SAMPLES = 1000
"""Windows of a declared demand."""


def window_rates(times: Floats, span: float, seconds: float) -> Floats:
    """Requests/s in each whole window of a trace that is so long, also where nothing came.

    Times are since the trace's first request, whichever model's it was: so its models have the same windows.
    """
    number = int(span // seconds)
    at = (times // seconds).astype(np.int64)
    return np.bincount(at[at < number], minlength=number)[:number] / seconds


def rank_of(quantile: float, number: int) -> int:
    """Which of so many windows, the quietest first, is as busy as the next one at most, with that probability.

    Of windows that come in any order with the same probability, the next is as likely to lie in each of the gaps that
    they leave, one more than there are windows. A rank above `number`: there are too few to say.
    """
    return math.ceil(quantile * (number + 1) - 1e-9)


def fewest_windows(quantile: float) -> int:
    """That say something of a quantile."""
    return math.ceil(quantile / (1.0 - quantile) - 1e-9)


def quantile_rate(rates: Floats, quantile: float) -> float:
    """Requests/s that the next window does not exceed with that probability; the rates are enough for it."""
    return float(np.sort(rates)[rank_of(quantile, len(rates)) - 1])


def gap_cv_inside(times: Floats, seconds: float) -> float:
    """Coefficient of variation of the gaps inside windows, each against its window's mean: without what differs between
    windows; 0 where no window has two gaps.
    """
    at = (times // seconds).astype(np.int64)
    gaps = np.diff(times)
    inside = at[1:] == at[:-1]
    window, gaps = at[1:][inside], gaps[inside]
    if not len(window):
        return 0.0
    _, window = np.unique(window, return_inverse=True)
    counts, sums = np.bincount(window), np.bincount(window, weights=gaps)
    good = (counts[window] > 1) & (sums[window] > 0)
    if not good.any():
        return 0.0
    ratios = gaps[good] * counts[window][good] / sums[window][good]
    # Each window's mean was estimated from its own gaps, which takes away a part of their variance.
    lost = 1.0 - np.mean(1.0 / counts[window][good])
    return float(math.sqrt(np.mean((ratios - 1.0) ** 2) / lost))


def declared_rates(rate: float, cv: float, seconds: float, name: str) -> Floats:
    """Requests/s in `SAMPLES` windows of a renewal process with gamma gaps, as even as its distribution, in an order by
    `name`: no chance is in them but that of the process.
    """
    shares = (np.arange(SAMPLES) + 0.5) / SAMPLES
    rates = np.array([declared_quantile(rate, cv, seconds, float(share)) for share in shares])
    return np.random.default_rng(zlib.crc32(name.encode())).permutation(rates)


def declared_quantile(rate: float, cv: float, seconds: float, quantile: float) -> float:
    """Requests/s that a window of a renewal process with gamma gaps does not exceed with that probability.

    No more than n requests come in it where the gap to the next one after them ends behind it, and n + 1 gaps together
    have a gamma distribution; its quantile is Wilson and Hilferty's.
    """
    if rate <= 0.0:
        return 0.0
    shape, z = 1.0 / cv**2, NormalDist().inv_cdf(1.0 - quantile)

    def ends(number: int) -> float:
        a = (number + 1) * shape
        return float(max(0.0, 1.0 - 1.0 / (9.0 * a) + z / (3.0 * math.sqrt(a)))) ** 3 * a / (shape * rate)

    low, high = 0, 1
    while ends(high) < seconds:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if ends(middle) >= seconds else (middle + 1, high)
    # That was from a request on; of a window that begins anywhere the mean is the rate's.
    return max(0.0, low - (cv**2 - 1.0) / 2.0) / seconds


def hour_factors(times: Floats, span: float, begins: float, zone: tzinfo) -> tuple[float, ...]:
    """Of the mean, for each hour of a week, where the trace is a day long at least, else none.

    Hours that were seen several times count with their mean; those of a trace of less than a week are every day's.
    """
    rates = window_rates(times, span, HOUR_S)
    if len(rates) < DAY:
        return ()
    period = WEEK if len(rates) >= WEEK else DAY
    # From the middle of each, which lies in the hour that has most of it.
    hours = [hour_of_week(begins + (i + 0.5) * HOUR_S, zone) % period for i in range(len(rates))]
    sums = np.bincount(hours, weights=rates, minlength=period)
    means = sums / np.maximum(np.bincount(hours, minlength=period), 1)
    return tuple((np.tile(means, WEEK // period) / means.mean()).tolist()) if means.any() else ()
