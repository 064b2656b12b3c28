"""A table that is filled again and again: filtered, sorted, and updated cell by cell, so that little goes over a slow
line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import DataTable

from fabrictool.tui.rows import columns_that_fit, cut, matches, natural

if TYPE_CHECKING:
    from fabrictool.tui.rows import Level, TableRow

COLOURS: dict[Level, str] = {"bad": "bold red", "worth a look": "yellow", "well": "green"}
JUDGED = ("STATE", "LINK", "WHAT", "SLO", "KIND")
"""Columns that have the colour of their row; the word says it, too."""
MARK = "● "
MOST_ROWS = 1000
"""That are shown at once: a table of more is slow. The filter looks at all of them."""


class LiveTable(DataTable[Text]):
    """Rows that bear a key each; the cursor stays on its row whatever moves."""

    def __init__(self, columns: tuple[str, ...], *, id: str) -> None:  # noqa: A002 - Textual's word
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self._every = columns
        self._given: list[TableRow] = []
        self._shown: tuple[str, ...] = ()
        """Headings."""
        self._letters: dict[str, int] = {}
        """Column that there is room for → letters of its cells."""
        self.wanted = ""
        """The filter."""
        self.sorted_by = ""
        """Column; "": as the rows come, problems first."""
        self.descending = False
        self.marked: set[str] = set()
        """Keys of rows."""

    @property
    def key_under_cursor(self) -> str | None:
        keys = [row.value for row in self.rows]
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None

    @property
    def keys_meant(self) -> list[str]:
        """The marked rows; without any, that under the cursor."""
        there = [row.value for row in self.rows if row.value in self.marked]
        under = self.key_under_cursor
        return [key for key in there if key] or ([under] if under is not None else [])

    @property
    def is_filtered(self) -> bool:
        """Whether rows are left out."""
        return self.row_count < len(self._given)

    def give(self, rows: list[TableRow], width: int) -> None:
        """Show these in so many columns of the terminal."""
        self._given = rows
        self.fill(width)

    def fill(self, width: int) -> None:
        """The rows that there are, as filter and sorting want them now."""
        rows = [row for row in self._given if matches(row.cells, self.wanted)]
        if self.sorted_by in self._every:
            at = self._every.index(self.sorted_by)
            rows.sort(key=lambda row: natural(row.cells[at]), reverse=self.descending)
        rows = rows[:MOST_ROWS]
        columns = columns_that_fit(self._every, rows, width)
        keys = [row.key for row in rows]
        headings = tuple(self._heading(column) for column in columns)
        self._letters = columns
        if headings != self._shown or keys != [row.value for row in self.rows]:
            self._build(headings, rows)
        else:
            self._update(rows)

    def sort_by_next(self) -> str:
        """Another column, then none; its name."""
        order = ["", *self._every]
        self.sorted_by = order[(order.index(self.sorted_by) + 1) % len(order)]
        return self.sorted_by

    def mark(self) -> None:
        """The row under the cursor, or take its mark away."""
        key = self.key_under_cursor
        if key is not None:
            self.marked ^= {key}
            self.action_cursor_down()

    def _heading(self, column: str) -> str:
        return column if column != self.sorted_by else f"{column} {'▼' if self.descending else '▲'}"

    def _build(self, headings: tuple[str, ...], rows: list[TableRow]) -> None:
        """Anew, in the order of `rows`; the cursor stays on its row."""
        cursor = self.key_under_cursor
        self.clear(columns=headings != self._shown)
        if headings != self._shown:
            for column, heading in zip(self._letters, headings, strict=True):
                self.add_column(heading, key=column)
            self._shown = headings
        for number, row in enumerate(rows):
            self.add_row(*self._cells(row).values(), key=row.key)
            if row.key == cursor:
                self.move_cursor(row=number)

    def _update(self, rows: list[TableRow]) -> None:
        """Just the cells that changed."""
        for row in rows:
            for column, cell in self._cells(row).items():
                there = self.get_cell(row.key, column)
                if (str(there), there.style) != (str(cell), cell.style):
                    self.update_cell(row.key, column, cell, update_width=True)

    def _cells(self, row: TableRow) -> dict[str, Text]:
        """Column → its text; not markup: a node chose these words."""
        texts = {
            column: Text(cut(cell, self._letters[column]), style=COLOURS[row.level] if column in JUDGED else "")
            for column, cell in zip(self._every, row.cells, strict=True)
            if column in self._letters
        }
        if row.key in self.marked:
            first = self._every[0]
            texts[first] = Text(MARK + str(texts[first]), style="bold")
        return texts
