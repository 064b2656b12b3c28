"""Made-up workloads: one model, or many with the popularity of serverless functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.arrivals import arrivals
from fabrictool.workload.lengths import Lengths
from fabrictool.workload.trace import Trace, merge

if TYPE_CHECKING:
    from fabrictool.workload.arrivals import Process


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
    """`count` requests after `recipe`; the same seed gives the same bytes."""
    rng = np.random.default_rng(seed)
    times = arrivals(recipe.process, recipe.rate, count, rng, cv=recipe.cv, on=recipe.on, off=recipe.off)
    return Trace(
        arrival=times,
        prompt=recipe.input.draw(count, rng),
        output=recipe.output.draw(count, rng),
        models=(model,),
    )


def popular(models: tuple[str, ...], rate: float, count: int, seed: int, recipe: Recipe, skew: float = 1.0) -> Trace:
    """Many models whose shares fall as ``rank^-skew``.

    Serverless functions, whose popularity paper 004 (§8.1) borrows for models, follow such a law; 1.0 is Zipf's.
    Each model's arrivals are bursty in its own time. Raises InvalidInputError FT2202.
    """
    if not models or count < 1 or not skew >= 0:
        raise InvalidInputError.of("FT2202", "a workload needs at least one model, one request and a skew of 0 or more")
    shares = np.arange(1, len(models) + 1, dtype=float) ** -skew
    shares /= shares.sum()
    span = count / rate
    traces = {}
    for index, (name, share) in enumerate(zip(models, shares, strict=True)):
        mine = Recipe(rate * share, recipe.input, recipe.output, recipe.process, recipe.cv, recipe.on, recipe.off)
        one = generate(mine, max(1, round(count * share)), seed * 1_000_003 + index, name)
        traces[name] = one.only(one.arrival <= span) if (one.arrival <= span).any() else one.only(slice(1))
    return merge(traces)
