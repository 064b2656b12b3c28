"""Rates at which all models hold at once in so many windows of their demand, for the least that they cost together.

Each model by itself needs but the quantile of its own windows (`planner.uncertain`). That all hold in the same window
is a chance constraint over samples: some windows may be left out, and each model is planned for the busiest of those
that stay. Which ones are left out is an integer program, or settled one after the other where there are many; a
request/s of a model is worth what it costs where it is cheapest. Source: Campi and Garatti, "A sampling-and-discarding
approach to chance-constrained optimization" (2011).
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.base.units import Rate
from fabrictool.planner.program import Program
from fabrictool.planner.survival import SIDES, after_loss
from fabrictool.planner.uncertain import EXACT, windows_at_once
from fabrictool.workload.windows import rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.planner.problem import Option, PlacementProblem
    from fabrictool.planner.situation import Situation

    Floats = np.ndarray[Any, np.dtype[np.float64]]

NODES, GAP, SECONDS = 200, 1e-3, 60.0
"""Of the integer program; it begins with what leaving out one window after the other comes to."""
MOST_STEPS, MOST_WINDOWS = 50, 2_000
"""Rates that a model may be planned for; and windows up to which there is an integer program: it saves little."""


def planned_at_once(situation: Situation) -> Situation:
    """With the rates that the blueprint's `together` asks for, where it states that; where there is no placement at all
    the search says why.
    """
    share = situation.blueprint.together
    demands = {name: model.demand for name, model in sorted(situation.blueprint.models.items())
               if model.demand is not None and model.demand.windows}  # fmt: skip
    if share is None or len(demands) < 2:
        return situation
    try:
        problem, _ = situation.build()
    except InfeasibleError:
        return situation
    least = np.array([float(demand.rate or 0.0) for demand in demands.values()])
    windows, drawn = windows_at_once(demands, random.Random("at once"))
    price = _prices(problem, list(demands))
    keeps = min(len(windows), math.ceil(float(share) * len(windows)) if drawn else rank_of(float(share), len(windows)))
    rates = cheapest_rates(windows, least, price, len(windows) - keeps)
    changes = {
        name: {"demand": demand.raised(Rate(rate))}
        for (name, demand), rate in zip(demands.items(), rates.tolist(), strict=True)
        if rate > float(demand.rate or 0.0) * (1 + EXACT)
    }
    return situation.with_models(changes) if changes else situation


def cheapest_rates(windows: Floats, least: Floats, price: Floats, left_out: int) -> Floats:
    """Of each model, in requests/s: none below its `least`, and no window but at most `left_out` of them asks for more
    of any model; the sum of rates at these prices is the least that was found.

    Shapes: windows × models, and models.
    """
    steps = [_steps(windows[:, at], float(least[at]), left_out) for at in range(len(least))]
    start = _one_after_another(windows, steps, price, left_out)
    best = np.array([its[level] for its, level in zip(steps, start, strict=True)])
    if len(windows) > MOST_WINDOWS:
        return best
    with suppress(FabrictoolError):  # nothing better in that many nodes
        rates = _searched(windows, steps, price, left_out, start)
        if rates is not None and float(rates @ price) < float(best @ price):
            best = rates
    return best


def _prices(problem: PlacementProblem, models: Sequence[str]) -> Floats:
    """Of a request/s of each where it is cheapest: in money where each of them costs some, else in devices."""
    money = [_cheapest(problem, model, lambda option: option.cost) for model in models]
    if min(money) > 0.0:
        return np.array(money)
    return np.array([_cheapest(problem, model, lambda option: float(option.devices)) for model in models])


def _cheapest(problem: PlacementProblem, model: str, price: Callable[[Option], float]) -> float:
    """By replicas that do all, or by pairs of the cheapest halves."""
    least = dict.fromkeys(("unified", *SIDES), math.inf)
    for option in (problem.options[i] for i in problem.of(model)):
        taken = after_loss(option) or option.levels[-1].rate  # within the SLO, where it keeps that at all
        least[option.phase] = min(least[option.phase], price(option) / taken)
    cheapest = min(least["unified"], sum(least[side] for side in SIDES))
    return cheapest if cheapest < math.inf else 0.0


def _steps(rates: Floats, least: float, left_out: int) -> list[float]:
    """What a model may be planned for, the most first: the busiest window, and what is left without some of them."""
    ordered = np.sort(rates)[::-1]
    places = np.unique(np.linspace(0, left_out, min(left_out, MOST_STEPS) + 1).round().astype(np.int64))
    return list(dict.fromkeys(max(rate, least) for rate in ordered[places].tolist()))


def _one_after_another(windows: Floats, steps: Sequence[Sequence[float]], price: Floats, left_out: int) -> list[int]:
    """Places in `steps`: whatever saves most for a window less comes first."""
    level = [0] * len(steps)
    kept = np.ones(len(windows), dtype=bool)
    while True:
        room = left_out - int((~kept).sum())
        choices = []
        for at, its in enumerate(steps):
            further = np.array(its[level[at] + 1 :])
            rates = np.sort(windows[kept, at])
            gone = len(rates) - np.searchsorted(rates, further, side="right")
            saved = float(price[at]) * (its[level[at]] - further) / np.maximum(0.5, gone)
            possible = np.flatnonzero(gone <= room)
            if len(possible):
                best = possible[int(np.argmax(saved[possible]))]
                choices.append((float(saved[best]), -at, level[at] + 1 + int(best)))
        if not choices or max(choices)[0] <= 0.0:
            return level
        _, negative, place = max(choices)
        level[-negative] = place
        kept &= windows[:, -negative] <= steps[-negative][place]


def _searched(
    windows: Floats, steps: Sequence[Sequence[float]], price: Floats, left_out: int, start: Sequence[int]
) -> Floats | None:
    """By an integer program: one column for each step down of a model, one for each window that may be left out."""
    program = Program(whole=True)
    down = [[program.column(0, 1, whole=True) for _ in its[1:]] for its in steps]
    hints = [1.0 if place < level else 0.0 for its, level in zip(down, start, strict=True) for place in range(len(its))]
    terms = []
    lost: dict[int, int] = {}
    for at, (its, mine) in enumerate(zip(steps, down, strict=True)):
        for before, after in pairwise(mine):
            program.row(-1, 0, [(after, 1.0), (before, -1.0)])
        for column, (more, less) in zip(mine, pairwise(its), strict=True):
            terms.append((column, -float(price[at]) * (more - less)))
            for window in np.flatnonzero((windows[:, at] > less) & (windows[:, at] <= more)).tolist():
                if window not in lost:
                    lost[window] = program.column(0, 1)
                program.row(-1, 0, [(column, 1.0), (lost[window], -1.0)])
    if not terms:
        return None
    program.row(0, left_out, [(column, 1.0) for column in lost.values()])
    answer = program.minimise(terms, seconds=SECONDS, seed=0, gap=GAP, nodes=NODES, start=np.array(hints))
    if answer is None:
        return None
    levels = [sum(round(float(answer.values[column])) for column in mine) for mine in down]
    return np.array([its[level] for its, level in zip(steps, levels, strict=True)])
