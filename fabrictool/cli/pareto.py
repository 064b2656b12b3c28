"""``plan --pareto``: a table of placements of which none is better than another in all that is asked."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from fabrictool.cli.output import data, json_data, say, table
from fabrictool.cli.solve_watch import SearchClock
from fabrictool.planner.pareto import FrontPoint, criteria_of, front, most_points, undominated
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.stages import amount, proved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.cli.planning import SearchLimit
    from fabrictool.cli.source import Source
    from fabrictool.domain.evidence import Evidence
    from fabrictool.planner.problem import PlacementProblem, Solution

HEADINGS = {"served": "unserved", "slo": "misses SLO", "latency": "in system", "energy": "power"}
PATIENCE_S = 2.0
"""A front that takes longer tells how far it is."""


class _Searches:
    """Each has an even part of what is left of budget and work."""

    def __init__(self, limit: SearchLimit, seed: int, number: int) -> None:
        self._limit, self._seed, self._left, self._number = limit, seed, number, number
        self._began = time.monotonic()
        self.clock = SearchClock(keeps=True, budget_s=limit.budget_s)

    def solve(self, problem: PlacementProblem) -> Solution | None:
        """The last solution; None when there is no time for another search."""
        left_s = self.clock.left_s()
        if left_s <= 0.0 and self._left < self._number:
            return None
        until = time.monotonic() + left_s / self._left
        self._left -= 1
        solver = ExactSolver(lambda: min(self.clock.left_s(), until - time.monotonic()))
        work_s = self._limit.work_s / self._number
        *_, solution = solver.solve(problem, deadline_s=work_s, seed=self._seed)
        passed = time.monotonic() - self._began
        if sys.stderr.isatty() and passed > PATIENCE_S and self._left:
            done = self._number - self._left
            say(f"{passed:4.0f} s  {done} of {self._number} placements; Ctrl-C takes those so far")
        return solution


def show_front(
    criteria: str,
    source: Source,
    evidence_of: Callable[[], Evidence],
    limit: SearchLimit,
    seed: int,
    *,
    as_json: bool,
) -> int:
    """Search for the front and print it; returns the exit code. Raises UsageError FT2031, InfeasibleError FT200x."""
    from fabrictool.planner.plan import currency_of
    from fabrictool.planner.situation import situation_of

    names = criteria_of(criteria)
    evidence = evidence_of().within(source.inventory)
    problem, _ = situation_of(source.blueprint, source.inventory, evidence, time.time()).build()
    searches = _Searches(limit, seed, most_points(names))
    with searches.clock.hearing():
        points = list(front(problem, names, searches.solve, seed))
    kept = undominated(points)
    if as_json:
        json_data(document(problem, names, kept, complete=len(points) == most_points(names)))
        return 0
    data(text(kept, names, currency_of(source.inventory)))
    if len(points) < most_points(names) and searches.clock.left_s() <= 0.0:
        say("the front was cut short: a larger `--budget` may find more of it")
    say(
        "by the planner's tables, not replayed; `objective` in the blueprint, or `limits`, leads a plan to one of these"
    )
    return 0


def text(points: Sequence[FrontPoint], criteria: Sequence[str], currency: str) -> str:
    """A line for each placement, within 80 columns."""
    shown = [
        name for name in ("served", *criteria) if name != "served" or any(p.values["served"] > 1e-4 for p in points)
    ]
    rows = [
        [
            "→" if point.chosen else "",
            *(amount(name, point.values[name], currency) for name in shown),
            str(sum(point.solution.counts.values())),
            ", ".join(
                filter(None, ["blueprint" if point.chosen else "", "" if proved(point.solution) else "not proved"])
            ),
        ]
        for point in points
    ]
    return table(["", *(HEADINGS.get(name, name) for name in shown), "replicas", ""], rows)


def document(
    problem: PlacementProblem, criteria: Sequence[str], points: Sequence[FrontPoint], *, complete: bool
) -> dict[str, Any]:
    """All figures as one JSON document."""
    return {
        "format_version": "1",
        "type": "pareto",
        "criteria": list(criteria),
        "complete": complete,
        "points": [
            {
                "values": dict(point.values),
                "chosen": point.chosen,
                "proved": proved(point.solution),
                "placement": [_column(problem, i, count) for i, count in point.solution.counts.items()],
            }
            for point in points
        ],
    }


def _column(problem: PlacementProblem, i: int, count: int) -> dict[str, Any]:
    option = problem.options[i]
    cut = {"tp": option.tp, "pp": option.pp, "dp": option.dp, "phase": option.phase}
    place = {"cluster": option.pool.cluster, "partition": option.pool.partition}
    return {"model": option.model, **place, **cut, "replicas": count}
