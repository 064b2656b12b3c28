"""How another placement compares with the plan, in words: better, as good, or worse, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.stages import NOUNS, amount, number, residual, tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.problem import PlacementProblem

UNITS = {"latency": "requests", "excess": "req/s"}
"""Of stages whose noun alone does not tell what is counted."""
COUNTED = ("latency", "moves", "replicas")
"""Stages whose noun says what is counted: it stands behind the number."""
WHOLE = 1000.0
"""From here on there are no digits behind the point."""
AS_GOOD = "as good"


def told(name: str, value: float, currency: str) -> str:
    """A stage's value with its unit, for every stage, such as ``12 requests``."""
    text = amount(name, value, currency)
    unit = UNITS.get(name, "")
    return f"{text} {'request' if (text, unit) == ('1', 'requests') else unit}".rstrip()


def valued(name: str, value: float, currency: str) -> str:
    """A stage with its value, to the digits that a search still gains: ``cost 470.5 CHF/h``, ``6,641 requests in the
    system``.
    """
    text, noun = told(name, value, currency), NOUNS.get(name, name).rstrip(",")
    digits = f"{value:,.6g}" if abs(value) < WHOLE else f"{value:,.0f}"
    if name != FAIRNESS:
        text = f"{digits} {text.partition(' ')[2]}".rstrip()
    if name in COUNTED:
        return f"{digits if name == 'latency' else text} {noun}"
    return f"{noun} {text}"


def differs(problem: PlacementProblem, name: str, was: float, now: float) -> bool:
    """Whether two values of a stage are different ones: not by the slack that both may have used, nor by dust."""
    return abs(now - was) > max(2 * tolerance(name, was), residual(problem, name, was))


def first_difference(
    problem: PlacementProblem, before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str]
) -> tuple[str, float] | None:
    """The first of the stages that differs, and by how much it is larger after; None when all are the same."""
    for name in names:
        was, now = before.get(name, 0.0), after.get(name, 0.0)
        if differs(problem, name, was, now):
            return name, now - was
    return None


def more(name: str, change: float, currency: str) -> str:
    """Such as ``2 CHF/h more cost``, ``0.4 more requests in the system``."""
    which = "more" if change > 0 else "less"
    # What is counted by its own noun needs no unit before it.
    shown = number(abs(change)) if name == "latency" else told(name, abs(change), currency)
    if name == "latency" and change < 0:
        which = "fewer"
    return f"{shown} {which} {NOUNS[name].rstrip(',')}"


def compared(change: tuple[str, float] | None, currency: str) -> str:
    """Another placement against the plan, by the first stage that differs."""
    if change is None:
        return AS_GOOD
    difference = more(*change, currency)
    if change[1] > 0:
        return difference
    return f"better than what the search ended with: {difference}; a larger `--budget` or `--work` may find it"
