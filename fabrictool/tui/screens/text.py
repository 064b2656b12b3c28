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
        self._wanted = ""
        self._shown: list[str] = []
        self._ready = False

    def compose(self) -> ComposeResult:
        yield Static(f"log of {visible(self.address)}", id="headline", markup=False)
        yield RichLog(id="log", auto_scroll=True, markup=False, highlight=False)
        yield Input(id="line", placeholder="words that a line must have; !word must not")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#line", Input).display = False
        self.query_one("#log", RichLog).focus()
        self._ready = True
        self._fill()

    def give(self, lines: list[str]) -> None:
        """The tail as it is now."""
        self._lines = [visible(line) for line in lines]
        self._fill()

    def _fill(self) -> None:
        if not self._ready:
            return
        lines = [line for line in self._lines if matches((line,), self._wanted)]
        if not self._lines:
            lines = ["nothing was written yet"]
        if lines == self._shown:
            return
        log = self.query_one("#log", RichLog)
        fresh = lines[len(self._shown) :] if lines[: len(self._shown)] == self._shown else None
        if fresh is None:
            log.clear()
        for line in lines if fresh is None else fresh:
            log.write(Text(line))
        self._shown = lines

    def action_search(self) -> None:
        line = self.query_one("#line", Input)
        line.display = True
        line.focus()

    def action_follow(self) -> None:
        log = self.query_one("#log", RichLog)
        log.auto_scroll = not log.auto_scroll
        self.notify("following" if log.auto_scroll else "not following")

    def action_wrap(self) -> None:
        log = self.query_one("#log", RichLog)
        log.wrap = not log.wrap
        self._shown = []
        log.clear()
        self._fill()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._shown = []
        self.query_one("#log", RichLog).clear()
        self._fill()

    def on_input_submitted(self) -> None:
        self.query_one("#log", RichLog).focus()
