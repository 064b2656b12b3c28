"""Printing: data on stdout, talk on stderr, colour only where somebody looks."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.base.errors import Problem

_COLOURS = {"error": "31", "warning": "33", "good": "32", "dim": "2", "bold": "1"}


def colours(stream: Any) -> bool:
    """Whether to colour `stream`: a terminal, and NO_COLOR unset (no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, kind: str, stream: Any = None) -> str:
    """`text` in a colour of ours, if `stream` (stdout) shows colours."""
    return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if colours(stream or sys.stdout) else text


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def data(text: str) -> None:
    print(text, flush=True)


def json_data(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False), flush=True)


def json_line(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_problems(problems: Iterable[Problem], *, as_json: bool = False) -> None:
    """Complaints on stderr; as JSON, one envelope on stdout."""
    listed = list(problems)
    if as_json:
        json_data({"format_version": "1", "type": "problems", "problems": [problem.to_json() for problem in listed]})
        return
    for problem in listed:
        text = problem.render()
        head, newline, rest = text.partition("\n")
        say(paint(head, problem.severity, sys.stderr) + newline + rest)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    every = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in every) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every
    )


def seconds_text(seconds: float | None) -> str:
    """``640 ms`` or ``1.2 s``; a dash for nothing."""
    if seconds is None:
        return "–"
    return (
        f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
    )
