"""A screen that is one table: filtered, updated cell by cell so that little goes over a slow line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from fabrictool.tui.rows import matches

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from fabrictool.tui.rows import Row


class TableScreen(Screen[None]):
    """Columns and a way to fill them; subclasses say which."""

    TITLE_TEXT: ClassVar[str] = ""
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    EMPTY: ClassVar[str] = "nothing to show yet"
    BINDINGS: ClassVar[list[BindingType]] = [("slash", "filter", "filter"), ("escape", "clear", "clear filter")]

    def __init__(self, redraw: Callable[[], None]) -> None:
        super().__init__()
        self._redraw = redraw
        self.ready = False
        """Whether the table has its columns."""
        self._wanted = ""
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        yield Static("connecting …", id="headline", markup=False)
        yield Static(id="tabs")
        with Vertical():
            yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
            yield Static(self.EMPTY, id="empty")
        yield Input(placeholder="words that must occur; !word must not", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Make the columns; the filter line waits for its key."""
        table = self.query_one("#table", DataTable)
        for column in self.COLUMNS:
            table.add_column(column, key=column)
        self.query_one("#filter", Input).display = False
        table.focus()
        self.ready = True
        self._redraw()

    def show(self, headline: str, tabs: str, rows: list[Row]) -> None:
        self.query_one("#headline", Static).update(headline)
        self.query_one("#tabs", Static).update(tabs)
        self._rows = rows
        self._fill()

    def action_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.display = True
        line.focus()

    def action_clear(self) -> None:
        line = self.query_one("#filter", Input)
        line.value = ""
        line.display = False
        self._wanted = ""
        self.query_one("#table", DataTable).focus()
        self._fill()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value
        self._fill()

    def on_input_submitted(self) -> None:
        self.query_one("#table", DataTable).focus()

    def _fill(self) -> None:
        table = self.query_one("#table", DataTable)
        rows = {key: cells for key, cells in self._rows if matches(cells, self._wanted)}
        for key in [row.value for row in table.rows if row.value not in rows]:
            if key is not None:
                table.remove_row(key)
        for key, cells in rows.items():
            if key not in table.rows:
                table.add_row(*[Text(cell) for cell in cells], key=key)  # not markup: a node chose these words
                continue
            for column, cell in zip(self.COLUMNS, cells, strict=True):
                if str(table.get_cell(key, column)) != cell:
                    table.update_cell(key, column, Text(cell), update_width=True)
        empty = self.query_one("#empty", Static)
        empty.display = not rows
        empty.update("no row passes the filter" if self._rows else self.EMPTY)
