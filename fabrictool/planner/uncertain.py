"""What a placement does when more or less is demanded than it was planned for: window by window of the demand.

Of each model by itself, what its replicas take within the SLO is one number, by the same tables that the solver has. So
a window is served or not by comparing two rates, and planning for the k-th busiest window is the exact answer to "hold
in all but k windows" of one model. Several models have their busy windows together or not: each holds in its share, and
all at once in at least one minus the sum of what the shares leave; how often they really do is counted.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.canonical import tidy
from fabrictool.domain.hours import DAY
from fabrictool.domain.plan import DemandForecast
from fabrictool.planner.survival import SIDES, after_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint, Demand
    from fabrictool.planner.problem import Option, PlacementProblem, Solution

    Floats = np.ndarray[Any, np.dtype[np.float64]]

SAMPLES = 1000
"""Windows that are drawn for all models together."""
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
NINE_OF_TEN = 1.645
"""Standard deviations to each side of a normal distribution's mean that hold so much of it."""
EXACT = 1e-6
"""Relative: rates that differ by less are the same."""


def windows_of(
    problem: PlacementProblem, solution: Solution, model: str, demand: Demand | None
) -> DemandForecast | None:
    """In how many windows of its demand a model is served, and within the SLO; None: it is planned by its mean."""
    if demand is None or demand.quantile is None or not demand.windows or demand.rate is None:
        return None
    within, most = room_of(problem, solution, model, after_loss), room_of(problem, solution, model, most_of)
    rates, number = demand.windows, len(demand.windows)
    planned, counted = float(demand.rate), demand.trace is not None
    low, high = _interval(rates, float(demand.quantile)) if counted else (planned, planned)
    return DemandForecast(
        quantile=float(demand.quantile),
        window_s=demand.window_s,
        windows=number,
        counted=counted,
        mean=tidy(demand.mean),
        planned=tidy(planned),
        low=tidy(low),
        high=tidy(high),
        served=tidy(sum(rate <= most * (1 + EXACT) for rate in rates) / number),
        held=tidy(sum(rate <= within * (1 + EXACT) for rate in rates) / number),
        unserved=tidy(math.fsum(max(0.0, rate - most) for rate in rates) / number),
    )


def together(blueprint: Blueprint, problem: PlacementProblem, solution: Solution, seed: int) -> float | None:
    """Share of windows in which every model is served within its SLO; of one trace, those that were at the same time,
    as far as the models' windows are equally long.

    None where fewer than two models are planned by a quantile.
    """
    demands = {need.model: demand for need in problem.needs
               if (demand := blueprint.models[need.model].demand) is not None and demand.windows}  # fmt: skip
    if len(demands) < 2:
        return None
    windows, _ = windows_at_once(demands, random.Random(f"together {seed}"))
    room = np.array([room_of(problem, solution, model, after_loss) for model in demands])
    return float((windows <= room * (1 + EXACT)).all(axis=1).mean())


def windows_at_once(demands: Mapping[str, Demand], rng: random.Random) -> tuple[Floats, bool]:
    """Windows × models, requests/s; and whether they were drawn: of one trace they are those that were at once.

    Of several sources `SAMPLES` are drawn, and models of the same one have the same window.
    """
    sources: dict[object, list[int]] = defaultdict(list)
    for at, (name, demand) in enumerate(demands.items()):
        sources[demand.trace or name, len(demand.windows), demand.window_s].append(at)
    every = [np.array(demand.windows) for demand in demands.values()]
    if len(sources) == 1:
        return np.stack(every, axis=1), False
    windows = np.zeros((SAMPLES, len(every)))
    for members in sources.values():
        rows = [rng.randrange(len(every[members[0]])) for _ in range(SAMPLES)]
        for at in members:
            windows[:, at] = every[at][rows]
    return windows, True


def room_of(problem: PlacementProblem, solution: Solution, model: str, of_each: Callable[[Option], float]) -> float:
    """Requests/s that the placed replicas of a model take; both halves of pairs have to."""
    mine = [(problem.options[i], k) for i, k in solution.counts.items() if problem.options[i].model == model]
    return min(
        math.fsum(of_each(option) * count for option, count in mine if option.phase in ("unified", side))
        for side in SIDES
    )


def most_of(option: Option) -> float:
    """Requests/s that a replica is planned for at most."""
    return option.levels[-1].rate


def busiest_hours(blueprint: Blueprint, problem: PlacementProblem, solution: Solution) -> Iterator[str]:
    """Of models whose demand differs by hour: what their replicas cannot do in the hour that asks for most."""
    for need in problem.needs:
        demand = blueprint.models[need.model].demand
        if demand is None or not demand.factors:
            continue
        mean = demand.mean if demand.windows else need.rate
        factor = max(demand.factors)
        at, rate = demand.factors.index(factor), mean * factor
        if rate <= need.rate * (1 + EXACT):
            continue
        within = room_of(problem, solution, need.model, after_loss)
        most = room_of(problem, solution, need.model, most_of)
        lost, late = max(0.0, rate - most), max(0.0, min(rate, most) - within)
        lacks = [f"{lost:.3g} cannot be served"] * (lost > EXACT) + [f"{late:.3g} miss the SLO"] * (late > EXACT)
        hour = f"{DAYS[at // DAY]} {at % DAY:02}:00"
        if lacks:
            asked = f"{rate:.3g} req/s are asked for, of which {' and '.join(lacks)}"
            yield f"{need.model}: in its busiest hour ({hour}) {asked}"


def _interval(rates: Sequence[float], quantile: float) -> tuple[float, float]:
    """Nine of ten intervals that are made so have the true quantile in them, where windows do not hang together: the
    number of windows below it is binomial.
    """
    ordered, number = sorted(rates), len(rates)
    spread = NINE_OF_TEN * math.sqrt(number * quantile * (1.0 - quantile))
    low, high = math.floor(quantile * number - spread), math.ceil(quantile * number + spread) + 1
    return ordered[max(low, 1) - 1], ordered[min(high, number) - 1]
