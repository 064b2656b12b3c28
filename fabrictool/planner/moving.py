"""What it costs to change what runs, in the units of the objective that a change would improve.

A replica that starts holds its devices while it loads, and serves nobody; one that stops drains, and its cache is lost.
Both count as that share of `PAYBACK_S`: of the replica's price, its power, or the requests that it usually has inside.
So a plan changes what runs where that pays for itself within this time, and not for less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fabrictool.planner.problem import Option, PlacementProblem

PAYBACK_S = 3600.0
"""Shorter: more is moved for less. Plans hold for hours, but nobody knows for how many."""
DRAIN_S = 60.0
"""Of a replica that ends: about as long its last answers take, and its prompts have to be read again elsewhere."""
PRICED = ("cost", "energy", "carbon", "latency")
"""Stages that moves count in. What is not served or misses its SLO is mended whatever has to move for it."""


def move_prices(problem: PlacementProblem, option: Option, name: str) -> tuple[float, float]:
    """What a start and a stop of one replica count in a stage; nothing where nothing runs."""
    if name not in PRICED or not problem.runs:
        return 0.0, 0.0
    if name == "cost" and problem.move_price:
        return problem.move_price, problem.move_price
    match name:
        case "cost":
            usual = option.cost
        case "energy":
            usual = option.power
        case "carbon":
            usual = option.carbon
        case _:
            usual = option.levels[len(option.levels) // 2].in_system
    return usual * option.start_s / PAYBACK_S, usual * DRAIN_S / PAYBACK_S


def changed(problem: PlacementProblem, counts: Mapping[int, int]) -> Iterator[tuple[Option, int]]:
    """Options with so many replicas more, or fewer, than run; none where nothing runs."""
    running = problem.running
    for i in sorted(counts.keys() | running.keys()) if problem.runs else ():
        change = counts.get(i, 0) - running.get(i, 0)
        if change:
            yield problem.options[i], change


def moves_are_used_up(problem: PlacementProblem, counts: Mapping[int, int]) -> bool:
    """Whether no more replica may start, whatever it would be good for."""
    most = problem.max_moves
    return most is not None and problem.runs and moves_in(problem, counts, "moves") >= most


def moves_in(problem: PlacementProblem, counts: Mapping[int, int], name: str) -> float:
    """What all moves to these counts add to a stage."""
    total = 0.0
    for option, change in changed(problem, counts):
        start, stop = (1.0, 1.0) if name == "moves" else move_prices(problem, option, name)
        total += change * start if change > 0 else -change * stop
    return total
