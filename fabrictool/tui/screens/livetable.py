"""A table that is filled again and again: filtered, sorted, and updated cell by cell, so that little goes over a slow
line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from fabrictool.tui.rows import columns_that_fit, cut, matches, natural

if TYPE_CHECKING:
    from textual.geometry import Region

    from fabrictool.tui.rows import Level, TableRow

COLOURS: dict[Level, str] = {"bad": "bold red", "worth a look": "yellow", "well": "green"}
JUDGED = ("STATE", "LINK", "WHAT", "SLO", "KIND")
"""Columns that have the colour of their row; the word says it, too."""
MARK = "● "
AGAIN = "\0"
"""Between the key of a row and its number, where other rows have that key, too."""
MOST_ROWS = 1000
"""That are shown at once: a table of more is slow. The filter looks at all of them."""


class LiveTable(DataTable[Text]):
    """Rows that bear a key each; the cursor stays on its row whatever moves."""

    def __init__(self, columns: tuple[str, ...], *, id: str) -> None:  # noqa: A002 - Textual's word
        self._quiet = False
        """While a cell is changed that is painted by itself."""
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self._every = columns
        self._given: list[TableRow] = []
        self._shown: tuple[str, ...] = ()
        """Headings."""
        self._drawn: dict[str, dict[str, tuple[str, str]]] = {}
        """Row → its cells."""
        self._letters: dict[str, int] = {}
        """Column that there is room for → letters of its cells."""
        self.wanted = ""
        """Text that a row must have to be shown; "": all are."""
        self.sorted_by = ""
        """Column; "": as the rows come, problems first."""
        self.descending = False
        self.marked: set[str] = set()
        """Keys of rows."""

    @property
    def key_under_cursor(self) -> str | None:
        key = self._row_under_cursor()
        return None if key is None else key.partition(AGAIN)[0]

    def _row_under_cursor(self) -> str | None:
        keys = [row.value for row in self.rows]
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None

    @property
    def keys_meant(self) -> list[str]:
        """The marked rows; without any, that under the cursor."""
        there = [row.value for row in self.rows if row.value in self.marked]
        under = self.key_under_cursor
        return [key.partition(AGAIN)[0] for key in there if key] or ([under] if under is not None else [])

    @property
    def is_filtered(self) -> bool:
        """Whether rows are left out."""
        return self.row_count < len(self._given)

    def give(self, rows: list[TableRow], width: int) -> None:
        """Show these in so many columns of the terminal."""
        self._given = _with_keys_of_their_own(rows)
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
        grown = any(letters > self._letters.get(column, 0) for column, letters in columns.items())
        if grown or headings != self._shown or sum(self._letters.values()) + 2 * len(columns) > width:
            self._letters = {column: max(letters, len(self._heading(column))) for column, letters in columns.items()}
            self._shown = ()
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
        key = self._row_under_cursor()
        if key is not None:
            self.marked ^= {key}
            self.action_cursor_down()

    def _heading(self, column: str) -> str:
        return column if column != self.sorted_by else f"{column} {'▼' if self.descending else '▲'}"

    def _build(self, headings: tuple[str, ...], rows: list[TableRow]) -> None:
        """Anew, in the order of `rows`; the cursor stays on its row."""
        cursor = self._row_under_cursor()
        self.clear(columns=headings != self._shown)
        self._drawn.clear()
        if headings != self._shown:
            for column, heading in zip(self._letters, headings, strict=True):
                self.add_column(heading, key=column, width=self._letters[column])
            self._shown = headings
        for number, row in enumerate(rows):
            self._drawn[row.key] = cells = self._cells(row)
            self.add_row(*(Text(*cell) for cell in cells.values()), key=row.key)
            if row.key == cursor:
                self.move_cursor(row=number)

    def _update(self, rows: list[TableRow]) -> None:
        """Just the cells that changed, and of these just the ones in sight are painted again."""
        top = self.scroll_offset.y
        for at, row in enumerate(rows):
            before, now = self._drawn.get(row.key), self._cells(row)
            if before == now:
                continue
            for column, (number, cell) in zip(now, enumerate(now.values()), strict=True):
                if before is None or before[column] != cell:
                    self._quiet = True
                    self.update_cell(row.key, column, Text(*cell))
                    self._quiet = False
                    if top <= at <= top + self.size.height:
                        self.refresh_coordinate(Coordinate(at, number))
            self._drawn[row.key] = now

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """As of any widget; but not the whole table because of a cell."""
        if self._quiet and not regions:
            return self
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def _cells(self, row: TableRow) -> dict[str, tuple[str, str]]:
        """Column → its text and style; not markup: a node chose these words."""
        cells = {
            column: (cut(cell, self._letters[column]), COLOURS[row.level] if column in JUDGED else "")
            for column, cell in zip(self._every, row.cells, strict=True)
            if column in self._letters
        }
        if row.key in self.marked:
            first = self._every[0]
            cells[first] = (MARK + cells[first][0], "bold")
        return cells


def _with_keys_of_their_own(rows: list[TableRow]) -> list[TableRow]:
    """Nobody promises that no two nodes say the same of themselves."""
    seen: Counter[str] = Counter()
    own = []
    for row in rows:
        seen[row.key] += 1
        own.append(row if seen[row.key] == 1 else replace(row, key=f"{row.key}{AGAIN}{seen[row.key]}"))
    return own
