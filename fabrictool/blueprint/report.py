"""Problems as GitHub annotations, and as JSON objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.base.errors import Problem


def to_github(problems: Iterable[Problem]) -> str:
    """Workflow commands, one line each: they show beside the changed lines of a pull request."""
    return "\n".join(_annotation(problem) for problem in problems)


def to_json(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    return [problem.to_json() for problem in problems]


def _annotation(problem: Problem) -> str:
    place = problem.place
    fields = {
        "file": place.file,
        "line": place.line,
        "col": place.column,
        "endColumn": None if place.column is None else place.column + place.width,
        "title": problem.code,
    }
    written = ",".join(f"{name}={_property(str(value))}" for name, value in fields.items() if value is not None)
    text = problem.message if problem.hint is None else f"{problem.message}\nhint: {problem.hint}"
    text += "".join(f"\nsee also {also}" for also in problem.also)
    return f"::{problem.severity} {written}::{_escaped(text)}"


def _escaped(text: str) -> str:
    """GitHub decodes these three in a command's text."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """And two more in its properties."""
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
