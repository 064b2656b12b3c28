"""Text that is longer than the terminal, through a pager, as Git does it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

from fabrictool.cli.output import data, shown, text_width

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LESS = "FRX"
"""What `less` is told where nobody says otherwise: colours, and the text stays on the screen."""
NO_PAGER = ("", "cat")
"""What PAGER says where none is wanted."""


def page(text: str) -> None:
    """Like `data`; a terminal that `text` is too long for shows it through the pager."""
    if not _wanted(os.environ) or _rows(text) < shutil.get_terminal_size((80, 24)).lines:
        data(text)
        return
    from click import echo_via_pager

    try:
        with _less_told(), _interrupts_left_to_the_pager():
            echo_via_pager(shown(text, sys.stdout), color=True)
    except ValueError:  # PAGER is no command, such as one with a quote that does not end
        data(text)


@contextlib.contextmanager
def help_paged(*, wanted: bool) -> Iterator[None]:
    """The parser prints help by itself: what is printed inside comes out at the end, as other long text."""
    if not wanted:
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        if text := printed.getvalue().rstrip("\n"):
            page(text)


def without_pager(wanted: bool) -> None:
    """For ``--no-pager``: the rest of this process prints as into a file."""
    if wanted:
        os.environ["PAGER"] = "cat"


def _wanted(environment: Mapping[str, str]) -> bool:
    """Where somebody reads, and can leave the pager again."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and environment.get("TERM") != "dumb"
    return terminal and environment.get("PAGER", "less").strip() not in NO_PAGER


def _rows(text: str) -> int:
    """Of the screen, where long lines go on in the next."""
    columns = shutil.get_terminal_size((80, 24)).columns
    return sum(max(1, -(-text_width(line) // columns)) for line in text.split("\n"))


@contextlib.contextmanager
def _less_told() -> Iterator[None]:
    given = os.environ.get("LESS")
    os.environ.setdefault("LESS", LESS)
    try:
        yield
    finally:
        if given is None:
            del os.environ["LESS"]


@contextlib.contextmanager
def _interrupts_left_to_the_pager() -> Iterator[None]:
    """Ctrl-C ends a search in `less`, or the pager; this process goes on once that has ended."""
    former = signal.signal(signal.SIGINT, lambda _number, _frame: None)  # not SIG_IGN: the pager would inherit that
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
