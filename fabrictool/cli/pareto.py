"""``plan --pareto``: a table of placements of which none is better than another in all that is asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fabrictool.cli.forecast_answers import FrontRow, Pareto
from fabrictool.cli.output import data, json_data, say, table
from fabrictool.cli.searches import Searches, placement_row
from fabrictool.planner.pareto import FrontPoint, criteria_of, front, is_beaten, most_points, undominated
from fabrictool.planner.stages import amount, proved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.cli.planning import SearchLimit
    from fabrictool.cli.source import Source
    from fabrictool.domain.evidence import Evidence
    from fabrictool.planner.problem import PlacementProblem, Solution

HEADINGS = {"served": "unserved", "slo": "misses SLO", "latency": "open requests", "energy": "power"}


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
    from fabrictool.planner.at_once import planned_at_once
    from fabrictool.planner.plan import currency_of
    from fabrictool.planner.situation import situation_of

    names = criteria_of(criteria)
    evidence = evidence_of().within(source.inventory)
    problem, _ = planned_at_once(situation_of(source.blueprint, source.inventory, evidence, time.time())).build()
    searches = Searches(limit, seed, most_points(names), keeps=True)

    def solve(asked: PlacementProblem) -> Solution | None:
        return searches.solve(asked) if searches.more() or not searches.complete else None

    with searches.clock.hearing():
        points = list(front(problem, names, solve, seed))
    kept = undominated(points)
    if as_json:
        json_data(document(problem, names, kept, complete=len(points) == most_points(names)))
        return 0
    data(text(kept, names, currency_of(source.inventory)))
    if len(points) < most_points(names) and not searches.more():
        say("the front was cut short: a larger `--budget` may find more of it")
    if any(is_beaten(point, kept) for point in kept):
        say("the search for the blueprint's own row ended too early: `plan`, or a larger `--budget`, finds better")
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
            ", ".join(_remarks(point, points)),
        ]
        for point in points
    ]
    return table(["", *(HEADINGS.get(name, name) for name in shown), "replicas", ""], rows)


def _remarks(point: FrontPoint, points: Sequence[FrontPoint]) -> list[str]:
    beaten = [] if not is_beaten(point, points) else ["beaten by another row"]
    return [*(["blueprint"] if point.chosen else []), *beaten, *([] if proved(point.solution) else ["not proved"])]


def document(
    problem: PlacementProblem, criteria: Sequence[str], points: Sequence[FrontPoint], *, complete: bool
) -> Pareto:
    """All figures as one JSON document."""
    rows = [
        FrontRow(
            values=dict(point.values),
            chosen=point.chosen,
            proved=proved(point.solution),
            placement=[placement_row(problem.options[i], count) for i, count in point.solution.counts.items()],
        )
        for point in points
    ]
    return Pareto(criteria=list(criteria), complete=complete, points=rows)
