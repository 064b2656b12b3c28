"""One fact and its judgement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.errors import Problem


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer."""

    name: str
    good: bool
    text: str
    hint: str = ""
    warning: bool = False
    """Good enough to go on, and worth a word."""


def guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """What a check says, or its coded errors as lines that failed."""
    try:
        return check()
    except FabrictoolError as error:
        return [failed(name, problem) for problem in error.problems]


def failed(name: str, problem: Problem) -> Check:
    where = str(problem.place)
    return Check(
        name, False, f"{problem.code} {problem.message}" + (f" ({where})" if where else ""), problem.hint or ""
    )
