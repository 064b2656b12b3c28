"""Made-up workloads: one model, or many with the popularity of serverless functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.arrivals import arrivals
from fabrictool.workload.lengths import Lengths
from fabrictool.workload.trace import Trace, merge

if TYPE_CHECKING:
    from fabrictool.workload.arrivals import Process

STEEPEST = 10.0
"""A skew at which the second of two models gets one request in a thousand."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one model's requests."""

    rate: float
    """Requests/s."""
    input: Lengths = field(default_factory=lambda: Lengths("lognormal", 512, 512))
    output: Lengths = field(default_factory=lambda: Lengths("lognormal", 128, 128))
    process: Process = "poisson"
    cv: float = 1.0
    on: float = 10.0
    off: float = 30.0


def generate(recipe: Recipe, count: int, seed: int, model: str = "") -> Trace:
    """`count` requests after `recipe`; the same seed gives the same bytes. Raises InvalidInputError FT2202."""
    return _drawn(recipe, count, seed, model).only(slice(None))


def popular(
    models: tuple[str, ...], rate: float, count: int, seed: int, recipe: Recipe, skew: float | None = None
) -> Trace:
    """Many models, few of them popular.

    Without `skew` each model is as popular as a serverless function that is drawn from Azure's trace of 2019, as
    paper 004 (§8.1) does it; with it shares fall as ``rank^-skew`` (1.0: Zipf's law). The first is the most popular.
    Each model's arrivals are bursty in its own time. The first `count` of all requests are kept, so a model that is
    asked for seldom may have none. Raises InvalidInputError FT2202.
    """
    if not models or count < 1 or not 0 <= (skew or 0.0) <= STEEPEST:
        raise InvalidInputError.of(
            "FT2202", f"a workload needs at least one model, one request and a skew from 0 to {STEEPEST:g}"
        )
    if skew is None:
        shares = np.sort(np.random.default_rng(seed).choice(_azure_functions(), len(models)))[::-1]
    else:
        shares = np.arange(1, len(models) + 1, dtype=float) ** -skew
    shares = shares / shares.sum()
    traces = {}
    for index, (name, share) in enumerate(zip(models, shares, strict=True)):
        # More than its mean number, so that none runs dry before the common end: six standard deviations.
        enough = count * share + 6 * max(1.0, recipe.cv) * math.sqrt(count * share) + 8
        mine = replace(recipe, rate=rate * float(share))
        traces[name] = _drawn(mine, math.ceil(enough), seed * 1_000_003 + index, name)
    return merge(traces).only(slice(count))


@cache
def _azure_functions() -> Any:
    """Invocations a day of a thousand functions."""
    text = files("fabrictool.catalog").joinpath("data", "azure_functions.txt").read_text("utf-8")
    return np.array([float(n) for line in text.splitlines() if not line.startswith("#") for n in line.split()])


def _drawn(recipe: Recipe, count: int, seed: int, model: str) -> Trace:
    """Times are since the process began, so that several models' can be merged."""
    rng = np.random.default_rng(seed)
    return Trace(
        arrival=arrivals(recipe.process, recipe.rate, count, rng, cv=recipe.cv, on=recipe.on, off=recipe.off),
        prompt=recipe.input.draw(count, rng),
        output=recipe.output.draw(count, rng),
        models=(model,),
    )
