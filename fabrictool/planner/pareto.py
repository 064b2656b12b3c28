"""What one aim costs in terms of another: whole placements of which none is better than another in all that is asked.

By the epsilon-constraint method: one criterion is minimised while the others are held under limits, which go from the
least that each can be to what it is where the first one is at its best. Cost, energy and carbon can be limited
(`limits`), so of latency and misses of the SLO one at most takes part, as the criterion that is minimised. As much is
served everywhere as can be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import InfeasibleError, UsageError
from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.moving import moves_in
from fabrictool.planner.problem import ResourceLimit
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.stages import clean, tolerance, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Literal

    from fabrictool.planner.problem import PlacementProblem, Solution

LIMITED: Mapping[str, Literal["cost", "power", "carbon"]] = {"cost": "cost", "energy": "power", "carbon": "carbon"}
CRITERIA = (*LIMITED, "latency", "slo")
BETWEEN = {1: (0.1, 0.25, 0.5, 0.75), 2: (0.15, 0.4, 0.7)}
"""Where limits stand between the ends, by how many criteria are limited."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A whole placement and what it comes to."""

    values: Mapping[str, float]
    """Unserved demand and each criterion."""
    solution: Solution
    chosen: bool = False
    """By the blueprint's objective."""


def criteria_of(text: str) -> tuple[str, ...]:
    """The criteria that a list names. Raises UsageError FT2031."""
    names = tuple(name.strip() for name in text.split(","))
    hint = "such as cost,carbon or cost,slo; of latency and slo one at most"
    unknown = [name for name in names if name not in CRITERIA]
    if unknown:
        message = f"{text!r}: {unknown[0]!r} is no criterion"
        raise UsageError.of("FT2031", message, hint=f"two or three of {', '.join(CRITERIA)}: {hint}")
    if len(set(names)) < len(names) or len(names) < 2 or {"latency", "slo"} <= set(names):
        raise UsageError.of("FT2031", f"{text!r} is no front", hint=f"two or three different ones, {hint}")
    return names


def most_points(criteria: Sequence[str]) -> int:
    """The blueprint's own, the best in each criterion, and those between."""
    return 1 + len(criteria) + len(BETWEEN[len(criteria) - 1])


def front(
    problem: PlacementProblem, criteria: Sequence[str], solve: Callable[[PlacementProblem], Solution | None], seed: int
) -> Iterator[FrontPoint]:
    """The points as they are found, the blueprint's first; `solve` gives None when there is to be no other.

    Raises InfeasibleError where there is no placement at all, UsageError FT2031 where a criterion has no figures.
    """
    if "cost" in criteria and not any(pool.price_per_node_hour for pool in problem.pools):
        raise UsageError.of("FT2031", "no partition has a price", hint="write `price` for them in the inventory")
    unknown = sorted({pool.site for pool in problem.pools if pool.carbon_per_kwh is None})
    if "carbon" in criteria and unknown:
        message = f"nothing says what electricity emits at {', '.join(unknown)}"
        raise UsageError.of("FT2031", message, hint="write `carbon` for these sites in the inventory")
    least = next((name for name in criteria if name not in LIMITED), criteria[-1])
    limited = [name for name in criteria if name != least]
    own = _point(problem, (*problem.objective, *criteria), criteria, solve, seed)
    if own is None:
        return
    yield replace(own, chosen=True)
    # The others are placements that could be, whatever it takes to come there.
    problem = replace(problem, current={}, runs_elsewhere=False, move_price=0.0)
    ends: dict[str, FrontPoint] = {}
    for first in (least, *limited):
        end = _point(problem, (first, *(name for name in criteria if name != first)), criteria, solve, seed)
        if end is None:
            return
        ends[first] = end
        yield end
    for share in BETWEEN[len(limited)]:
        most = {}
        for name in limited:
            low, high = ends[name].values[name], ends[least].values[name]
            most[name] = low + share * (high - low)
        try:
            point = _point(_within(problem, most), (least, *limited), criteria, solve, seed)
        except InfeasibleError:  # both at once are too little for the minima
            continue
        if point is None:
            return
        yield point


def undominated(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Each once, the cheapest first: those that serve as much as any and that no other is better than in all, and the
    blueprint's own in any case.
    """
    every = list(points)
    served = min((point.values["served"] for point in every), default=0.0)
    able = [point for point in every if not _more(point, "served", served)]
    kept: list[FrontPoint] = [point for point in every if point.chosen]
    for point in able:
        others = [other for other in able if other is not point]
        worse = any(_dominates(other, point) for other in others)
        if not worse and not any(_same(other, point) for other in kept):
            kept.append(point)
    names = [name for name in CRITERIA if every and name in every[0].values]
    return sorted(kept, key=lambda point: [point.values[name] for name in names])


def is_beaten(point: FrontPoint, points: Iterable[FrontPoint]) -> bool:
    """Whether another one is better in all, or serves more: a search that ended early may leave the blueprint's so."""
    return any(
        _more(point, "served", other.values["served"]) or _dominates(other, point)
        for other in points
        if other is not point
    )


def _more(point: FrontPoint, name: str, value: float) -> bool:
    return point.values[name] > value + 2 * tolerance(name, value)


def _dominates(better: FrontPoint, point: FrontPoint) -> bool:
    names = list(point.values)
    return any(_more(point, name, better.values[name]) for name in names) and not any(
        _more(better, name, point.values[name]) for name in names
    )


def _same(first: FrontPoint, second: FrontPoint) -> bool:
    return not any(
        _more(first, name, second.values[name]) or _more(second, name, first.values[name]) for name in first.values
    )


def _within(problem: PlacementProblem, most: Mapping[str, float]) -> PlacementProblem:
    everywhere = frozenset(pool.key for option in problem.options for pool in option.pools)
    limits = tuple(
        ResourceLimit("front", name, LIMITED[name], value * (1 + 1e-9), everywhere) for name, value in most.items()
    )
    return replace(problem, limits=(*problem.limits, *limits))


def _point(
    problem: PlacementProblem,
    objective: Sequence[str],
    criteria: Sequence[str],
    solve: Callable[[PlacementProblem], Solution | None],
    seed: int,
) -> FrontPoint | None:
    fair = [FAIRNESS] if FAIRNESS in problem.objective else []
    asked = replace(problem, objective=tuple(dict.fromkeys([*fair, *objective, "latency"])))
    solution = solve(asked)
    if solution is None:
        return None
    whole = solution.whole(asked)
    solution = settled(whole, solution, seed)
    placed = [(whole.options[i], count) for i, count in solution.counts.items()]
    known = values_of(solution)
    values = {n: clean(known.get(n, 0.0) - moves_in(whole, solution.counts, n)) for n in ("served", *criteria)}
    # Without what moving costs: that is of today, and not of the placement.
    totals = {
        "cost": sum(option.cost * count for option, count in placed),
        "energy": sum(option.power * count for option, count in placed),
        "carbon": sum(option.carbon * count for option, count in placed),
    }
    values |= {name: clean(total) for name, total in totals.items() if name in values}
    return FrontPoint(values, solution)
