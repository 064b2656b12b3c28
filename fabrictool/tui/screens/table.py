"""A screen that is a table; the overview has a second one, of clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from fabrictool.tui.screens.livetable import LiveTable
from fabrictool.tui.tables import CLUSTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from fabrictool.tui.tables import TableSpec
    from fabrictool.tui.view import ScreenView

FRAME = 2
"""Columns that a table leaves free at its sides."""


class TableScreen(Screen[None]):
    """Headline, tabs, one table or two, and a line for a filter or a command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", id="top.filter"),
        Binding("colon", "go", "go", id="top.go", show=False),
        Binding("s", "sort", "sort", id="top.sort", show=False),
        Binding("S", "turn", "turn the order", id="top.turn", show=False),
        Binding("space", "mark", "mark", id="top.mark", show=False),
        Binding("escape", "clear", "clear", id="top.clear", show=False),
    ]

    def __init__(self, spec: TableSpec, go: Callable[[str], None], opened: Callable[[], None]) -> None:
        super().__init__()
        self.spec = spec
        self._go, self._opened = go, opened
        self.ready = False
        """Whether the tables are there."""
        self._view: ScreenView | None = None

    @property
    def table(self) -> LiveTable:
        return self.query_one("#table", LiveTable)

    @property
    def in_focus(self) -> LiveTable:
        """Of the overview's two the one whose rows are meant."""
        return self.focused if isinstance(self.focused, LiveTable) else self.table

    @property
    def about(self) -> str:
        """What the rows of that one are."""
        return self.spec.name if self.in_focus is self.table else CLUSTERS.name

    def compose(self) -> ComposeResult:
        yield Static("connecting …", id="headline", markup=False)
        yield Static(id="tabs")
        with Vertical():
            yield LiveTable(self.spec.columns, id="table")
            yield Static("", id="empty", markup=False)
            if self.spec.name == "overview":
                yield LiveTable(CLUSTERS.columns, id="clusters")
        yield Input(id="line", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#line", Input).display = False
        self.table.focus()
        self.ready = True
        self._opened()

    def show(self, view: ScreenView, headline: str, tabs: str) -> None:
        """Draw it from a view."""
        self._view = view
        self.say(headline)
        _tell(self.query_one("#tabs", Static), tabs)
        self.table.give(self.spec.rows(view), self._width)
        for clusters in self.query("#clusters").results(LiveTable):
            clusters.give(CLUSTERS.rows(view), self._width)
        self._say_why_empty()

    def say(self, headline: str) -> None:
        """Just that: the tables stay as they are."""
        _tell(self.query_one("#headline", Static), headline)

    def _fill(self) -> None:
        self.table.fill(self._width)
        self._say_why_empty()

    def _say_why_empty(self) -> None:
        empty = self.query_one("#empty", Static)
        empty.display = not self.table.row_count
        if self._view is not None:
            _tell(
                empty,
                f"no row passes the filter “{self.table.wanted}”; esc takes it away"
                if self.table.is_filtered
                else self.spec.empty(self._view),
            )

    @property
    def _width(self) -> int:
        return self.size.width - FRAME

    def on_resize(self) -> None:
        if self.ready:
            self._fill()

    def action_filter(self) -> None:
        self._ask("words that must occur; !word must not; ~wrd its letters in this order", self.table.wanted)

    def action_go(self) -> None:
        self._ask("a screen or a model: nodes, jobs, llama-70b …", ":")

    def _ask(self, hint: str, text: str) -> None:
        line = self.query_one("#line", Input)
        line.display = True
        line.placeholder = hint
        line.value = text
        line.cursor_position = len(text)
        line.focus()

    def action_clear(self) -> None:
        """The filter, the marks and the sorting, or the line that is open."""
        line = self.query_one("#line", Input)
        line.value, line.display = "", False
        self.table.wanted, self.table.sorted_by, self.table.descending = "", "", False
        self.table.marked.clear()
        self.table.focus()
        self._fill()

    def action_sort(self) -> None:
        self.table.sort_by_next()
        self._fill()

    def action_turn(self) -> None:
        self.table.descending = not self.table.descending
        self._fill()

    def action_mark(self) -> None:
        self.in_focus.mark()
        self._fill()

    def filter_by(self, words: str) -> None:
        """As if somebody had typed them."""
        self.table.wanted = words
        self._fill()

    def on_input_changed(self, event: Input.Changed) -> None:
        if not event.value.startswith(":"):
            self.filter_by(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        line = self.query_one("#line", Input)
        self.table.focus()
        if event.value.startswith(":"):
            line.value, line.display = "", False
            self._go(event.value.lstrip(":").strip())

    def on_live_table_opened(self, event: LiveTable.Opened) -> None:
        if event.table is self.in_focus:
            self.app.call_later(self.app.run_action, "describe")


def _tell(line: Static, text: str) -> None:
    """Say it there, and lay the screen out anew only where it takes more or fewer lines than what stood there: that
    paints everything again.
    """
    if text == line.content:
        return
    around, width = line.screen.size, line.content_size.width
    before = line.get_content_height(around, around, width)
    line.update(text, layout=False)
    if line.get_content_height(around, around, width) != before:
        line.refresh(layout=True)
