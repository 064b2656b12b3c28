"""A screen that is one table: filtered, updated cell by cell so that little goes over a slow line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from fabrictool.tui.rows import columns_that_fit, matches

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from fabrictool.tui.rows import Level, TableRow

COLOURS: dict[Level, str] = {"bad": "bold red", "worth a look": "yellow", "well": "green"}
JUDGED = ("STATE", "LINK")
"""Columns that have the colour of their row; the word says it, too."""
FRAME = 2
"""Columns that the table leaves free at its sides."""


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
        self._rows: list[TableRow] = []
        self._shown: tuple[str, ...] = ()
        """The columns that there is room for."""

    def compose(self) -> ComposeResult:
        yield Static("connecting …", id="headline", markup=False)
        yield Static(id="tabs")
        with Vertical():
            yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
            yield Static(self.EMPTY, id="empty")
        yield Input(placeholder="words that must occur; !word must not", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """The filter line waits for its key."""
        self.query_one("#filter", Input).display = False
        self.query_one("#table", DataTable).focus()
        self.ready = True
        self._redraw()

    def show(self, headline: str, tabs: str, rows: list[TableRow]) -> None:
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

    def on_resize(self) -> None:
        if self.ready:
            self._fill()

    def on_input_submitted(self) -> None:
        self.query_one("#table", DataTable).focus()

    def _fill(self) -> None:
        table = self.query_one("#table", DataTable)
        rows = [row for row in self._rows if matches(row.cells, self._wanted)]
        columns = columns_that_fit(self.COLUMNS, rows, self.size.width - FRAME)
        keys = [row.key for row in rows]
        if columns != self._shown or keys != [row.value for row in table.rows]:
            self._build(table, columns, rows)
        else:
            self._update(table, rows)
        empty = self.query_one("#empty", Static)
        empty.display = not rows
        empty.update("no row passes the filter" if self._rows else self.EMPTY)

    def _build(self, table: DataTable[Text], columns: tuple[str, ...], rows: list[TableRow]) -> None:
        """Anew, in the order of `rows`; the cursor stays on its row."""
        cursor = self._under_cursor(table)
        table.clear(columns=columns != self._shown)
        if columns != self._shown:
            for column in columns:
                table.add_column(column, key=column)
            self._shown = columns
        for number, row in enumerate(rows):
            table.add_row(*self._cells(row).values(), key=row.key)
            if row.key == cursor:
                table.move_cursor(row=number)

    def _update(self, table: DataTable[Text], rows: list[TableRow]) -> None:
        """Just the cells that changed: little goes over a slow line."""
        for row in rows:
            for column, cell in self._cells(row).items():
                there = table.get_cell(row.key, column)
                if (str(there), there.style) != (str(cell), cell.style):
                    table.update_cell(row.key, column, cell, update_width=True)

    def _cells(self, row: TableRow) -> dict[str, Text]:
        """Column → its text; not markup: a node chose these words."""
        return {
            column: Text(cell, style=COLOURS[row.level] if column in JUDGED else "")
            for column, cell in zip(self.COLUMNS, row.cells, strict=True)
            if column in self._shown
        }

    @staticmethod
    def _under_cursor(table: DataTable[Text]) -> str | None:
        keys = [row.value for row in table.rows]
        return keys[table.cursor_row] if 0 <= table.cursor_row < len(keys) else None
