r"""What loads cost at least, as rows over counts alone: so a program needs no columns for loads.

With given counts :math:`k` the loads of a model are a linear program of its own, as long as nothing flows between its
replicas and nobody asks who serves whom. By its dual, whatever the price :math:`p` of its demand and the weights
:math:`\sigma_s \ge 0` of the stages that depend on loads, what it comes to in these, :math:`\theta_s`, keeps

.. math:: \sum_s \sigma_s \theta_s + p u + \sum_o k_o \max_l (p r_{ol} - \sum_s \sigma_s c_{ols}) \ge p \lambda

where :math:`c_{ols}` is what a replica of option o at level l adds to stage s. Such a row is a tangent: it holds for
all counts, and where prices and weights are those of a linear program at some counts it is exact there. Few of them say
what seven columns an option do, integer programs are a seventh as large, and HiGHS cuts from them far better.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fabrictool.planner.problem import Option, PlacementProblem, PoolKey

BY_LOAD = ("slo", "excess", "quality", "latency")
"""Stages that depend on how replicas are loaded."""
DUST = 1e-9
"""A price or weight below it says nothing."""
NOTHING = 1e-5
"""Up to which what a stage is kept within is none: the solvers' slack."""


@dataclass(frozen=True, slots=True)
class LoadPrices:
    """Of a linear program: what one request/s more would cost."""

    demand: Mapping[str, float]
    """By model."""
    stages: Mapping[str, float]
    """What is counted in that: each stage that depends on loads, with its weight."""
    decode: Mapping[tuple[str, PoolKey], float] = field(default_factory=dict)
    """By model and pool: what of the demand's is its decode phase's there."""

    def of(self, model: str) -> tuple[object, ...]:
        """Equal where the tangents of a model are."""
        return (model, round(self.demand[model], 9), *((name, round(w, 9)) for name, w in sorted(self.stages.items())))


def of_levels(option: Option, name: str) -> list[float]:
    """What a replica adds to a stage that depends on loads: an idle one, and at each load level."""
    levels = option.levels
    match name:
        case "slo":
            return [0.0, *(0.0 if level.attains else level.rate for level in levels)]
        case "excess":
            return [0.0, *(level.rate * level.excess for level in levels)]
        case "latency":
            return [0.0, *(level.in_system for level in levels)]
        case _:  # quality: a replica that stands by gets requests, too: it counts as one under the least load
            steps = option.steps_down if option.serves else 0
            return [steps * rate for rate in (levels[0].rate, *(level.rate for level in levels))]


def worth(option: Option, price: float, weights: Mapping[str, float]) -> float:
    """By how much a replica at most lowers what its model's demand costs, at that price of a request/s."""
    gains = [0.0, *(price * level.rate for level in option.levels)]
    for name, weight in weights.items():
        gains = [gain - weight * more for gain, more in zip(gains, of_levels(option, name), strict=True)]
    return max(gains)


def slo_prices(problem: PlacementProblem) -> Iterator[LoadPrices]:
    """All that there is to say of the stage `slo` alone: of each model, the prices at which the best load of some kind
    of replica changes.
    """
    turning: dict[str, set[float]] = {need.model: {1.0} for need in problem.needs}
    for option in problem.options:
        most = option.levels[-1].rate
        kept = max((level.rate for level in option.levels if level.attains), default=0.0)
        if kept < most and not option.levels[-1].attains:
            turning[option.model].add(most / (most - kept))
    longest = max(map(len, turning.values()))
    in_order = {model: sorted(prices) for model, prices in turning.items()}
    for at in range(longest):
        yield LoadPrices({model: prices[min(at, len(prices) - 1)] for model, prices in in_order.items()}, {"slo": 1.0})
