"""Screens that are text: a row in full, a log, the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, RichLog, Static

from fabrictool.base.text import visible
from fabrictool.tui.rows import matches

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

MOST_LINES = 10_000
"""That a log's screen keeps."""
BACK = Binding("escape", "app.return", "back", id="top.back")


class TextScreen(Screen[None]):
    """Lines that are drawn again with each view."""

    BINDINGS: ClassVar[list[BindingType]] = [BACK, Binding("question_mark,enter", "app.return", show=False)]

    def __init__(self, title: str, lines: list[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        yield Static(self._title, id="headline", markup=False)
        with VerticalScroll():
            yield Static("\n".join(self._lines), id="text", markup=False)
        yield Footer()

    def update(self, lines: list[str]) -> None:
        """Draw these lines in place of the ones before."""
        if lines != self._lines and self.is_mounted:
            self._lines = lines
            self.query_one("#text", Static).update("\n".join(lines))


def remainder(before: list[str], now: list[str]) -> list[str]:
    """What a tail has that the one before it had not: the longest end of that one is where this begins."""
    for length in range(min(len(before), len(now)), 0, -1):
        if before[-length:] == now[:length]:
            return now[length:]
    return now


class LogScreen(Screen[None]):
    """The tail of a unit's log, followed until somebody scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        Binding("slash", "search", "search", id="top.search"),
        Binding("f", "follow", "follow", id="top.follow"),
        Binding("w", "wrap", "wrap", id="top.wrap"),
    ]

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self._lines: list[str] = []
        """All that was given, as far as `MOST_LINES`."""
        self._tail: list[str] = []
        """As it was given last."""
        self._wanted = ""
        self._follows = True
        self._ready = False

    def compose(self) -> ComposeResult:
        yield Static(f"log of {visible(self.address)}", id="headline", markup=False)
        yield RichLog(id="log", max_lines=MOST_LINES, auto_scroll=False, markup=False, highlight=False)
        yield Input(id="line", placeholder="words that a line must have; !word must not")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#line", Input).display = False
        self.query_one("#log", RichLog).focus()
        self._ready = True
        self._fill()

    def give(self, lines: list[str]) -> None:
        """The tail as it is now."""
        tail = [visible(line) for line in lines]
        fresh = remainder(self._tail, tail)
        first = not self._lines
        self._tail = tail
        self._lines = [*self._lines, *fresh][-MOST_LINES:]
        if not self._ready:
            return
        if first:
            self._fill()
        else:
            self._write(fresh)

    def _fill(self) -> None:
        """All lines that pass the filter, from the first on."""
        self.query_one("#log", RichLog).clear()
        self._write(self._lines or ["nothing was written yet"])

    def _write(self, lines: list[str]) -> None:
        """Below what stands there; who has scrolled away from the end stays where he is."""
        log = self.query_one("#log", RichLog)
        to_end = self._follows and log.is_vertical_scroll_end
        for line in lines:
            if not self._lines or matches((line,), self._wanted):
                log.write(Text(line), scroll_end=to_end)

    def action_search(self) -> None:
        line = self.query_one("#line", Input)
        line.display = True
        line.focus()

    def action_follow(self) -> None:
        self._follows = not self._follows
        if self._follows:
            self.query_one("#log", RichLog).scroll_end(animate=False)
        self.notify("following" if self._follows else "not following")

    def action_wrap(self) -> None:
        log = self.query_one("#log", RichLog)
        log.wrap = not log.wrap
        self._fill()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._fill()

    def on_input_submitted(self) -> None:
        self.query_one("#log", RichLog).focus()
