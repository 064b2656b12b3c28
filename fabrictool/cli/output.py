"""Printing: data on stdout, talk on stderr, colour only where somebody looks.

What is printed may come from a plan, a node or an engine: it is made `visible` here, at the only door. Colours are
marks until then, characters that Unicode keeps for such use, so that nobody else's escape becomes one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabrictool.base.text import escaped_json, visible
from fabrictool.cli.hyperlinks import linked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.base.errors import Problem
    from fabrictool.cli.answers import JsonDocument, JsonLine
    from fabrictool.cli.fabric_answers import StepLine

_COLOURS = {"error": "31", "warning": "33", "good": "32", "dim": "2", "bold": "1"}
_MARKS = {kind: chr(0xFDD0 + index) for index, kind in enumerate(_COLOURS)}
_PLAIN = "\ufdef"
_MARK = re.compile("[\ufdd0-\ufdef]")
_SEQUENCES = {mark: f"\x1b[{_COLOURS[kind]}m" for kind, mark in _MARKS.items()} | {_PLAIN: "\x1b[0m"}
_GAP = "  "
_NARROWEST = 12
"""Columns; text is not folded into fewer."""
_FIGURE = re.compile(
    r"[–?]|[<>]?\d[\d.,]*(/\d+)?"
    r"( ?(%|ns|us|ms|s|m|h|d|W|kW|[kMGT]i?B|tok|req/s|\(n=\d+\)|\([\d.e+]+–[\d.e+]+\)))*"
)
"""A number with its units, and with what it is of or between."""


def colours(stream: Any) -> bool:
    """Whether to colour `stream`: a terminal, and NO_COLOR unset (no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, kind: str) -> str:
    """`text` in a colour of ours, where it is printed to something that shows colours."""
    return f"{_MARKS[kind]}{text}{_PLAIN}"


def shown(text: str, stream: Any) -> str:
    """What `stream` gets for `text`: nothing that a terminal obeys but our own colours, and these only on one."""
    colour = colours(stream)
    return _MARK.sub(lambda mark: _SEQUENCES.get(mark[0], "") if colour else "", visible(text))


def say(text: str) -> None:
    print(shown(text, sys.stderr), file=sys.stderr, flush=True)


def data(text: str, *, end: str = "\n") -> None:
    print(shown(text, sys.stdout), end=end, flush=True)


def json_data(answer: JsonDocument) -> None:
    """One document for a program."""
    json_text(json_document(answer))


def json_document(answer: JsonDocument) -> str:
    import msgspec

    return json.dumps(msgspec.to_builtins(answer), indent=1, ensure_ascii=False)


def json_line(line: JsonDocument | JsonLine | StepLine) -> None:
    """One object of a stream."""
    import msgspec

    json_text(json.dumps(msgspec.to_builtins(line), ensure_ascii=False))


def json_text(text: str) -> None:
    """A document that is JSON already."""
    print(escaped_json(text), flush=True)


def print_problems(problems: Iterable[Problem], *, as_json: bool = False) -> None:
    """Complaints on stderr, each once; as JSON, one envelope on stdout, in a line: it may be the last of a stream."""
    listed = list(dict.fromkeys(problems))
    if as_json:
        from fabrictool.cli.answers import ProblemRow, Problems

        json_line(Problems(problems=[ProblemRow.of(problem) for problem in listed]))
        return
    for problem in listed:
        head, newline, rest = problem.render().partition("\n")
        text = shown(paint(head, problem.severity) + newline + rest, sys.stderr)
        if problem.place.file is not None and colours(sys.stderr):
            text = linked(text, shown(str(problem.place), sys.stderr), Path(problem.place.file))
        print(text, file=sys.stderr, flush=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, columns: int | None = None) -> str:
    """Columns two spaces apart, figures to the right.

    No wider than `columns` (default: the terminal; a file has no limit) where words allow: the widest text is folded,
    between words.
    """
    every = [list(headings), *[list(row) for row in rows]]
    widths = [max(text_width(row[column]) for row in every) for column in range(len(headings))]
    figures = [all(_FIGURE.fullmatch(row[column] or "–") for row in every[1:]) for column in range(len(headings))]
    figures = [figure and len(every) > 1 for figure in figures]
    _narrow(widths, figures, every, columns if columns is not None else terminal_columns())
    return "\n".join(line for row in every for line in _lines(row, widths, figures))


def terminal_columns() -> int | None:
    """Of the terminal that stdout is; None for a file or a pipe."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def _narrow(widths: list[int], figures: list[bool], rows: list[list[str]], limit: int | None) -> None:
    """Take from the widest text columns what does not fit, a column at a time."""
    texts = sorted((i for i, figure in enumerate(figures) if not figure), key=lambda i: -widths[i])
    for column in texts:
        over = sum(widths) + len(_GAP) * (len(widths) - 1) - limit if limit is not None else 0
        if over <= 0:
            return
        longest = max((text_width(word) for row in rows for word in row[column].split()), default=0)
        widths[column] = max(widths[column] - over, longest, min(_NARROWEST, widths[column]))


def _lines(row: list[str], widths: list[int], figures: list[bool]) -> list[str]:
    folded = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(len(parts) for parts in folded)):
        cells = [parts[number] if number < len(parts) else "" for parts in folded]
        padded = [
            " " * (width - text_width(cell)) + cell if figure else cell + " " * (width - text_width(cell))
            for cell, width, figure in zip(cells, widths, figures, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _folded(cell: str, width: int) -> list[str]:
    if text_width(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]


def text_width(cell: str) -> int:
    """Columns that it takes, without the marks of colours."""
    return len(_MARK.sub("", cell))


def seconds_text(seconds: float | None) -> str:
    """``640 ms`` or ``1.2 s``; a dash for nothing."""
    if seconds is None:
        return "–"
    return (
        f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
    )


def octets_text(octets: int) -> str:
    """In the unit in which it has up to four figures."""
    amount, units = float(octets), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if amount >= 10 or units[0] == "B" else f"{amount:.1f} {units[0]}"
