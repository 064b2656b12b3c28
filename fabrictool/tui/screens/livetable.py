"""A table that is filled again and again: filtered, sorted, and drawn so that little goes over a slow line.

Our own and not Textual's `DataTable`, which draws every cell by itself: with 300 nodes, of which all in sight change
each second, that was 19 kB/s and a seventh of a core, and here it is 6 and a fortieth (`tests/bench/top.py`). Of a row
that changed only what lies between its first and its last other letter is sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from fabrictool.tui.rows import columns_that_fit, cut, matches, natural

if TYPE_CHECKING:
    from textual.binding import BindingType
    from textual.events import Click

    from fabrictool.tui.rows import Level, TableRow

COLOURS: dict[Level, str] = {"bad": "bold red", "worth a look": "yellow", "well": "green"}
JUDGED = ("STATE", "LINK", "WHAT", "SLO", "KIND")
"""Columns that have the colour of their row; the word says it, too."""
MARK = "●"
AGAIN = "\0"
"""Between the key of a row and its number, where other rows have that key, too."""
MOST_ROWS = 1000
"""That are shown at once; the filter looks at all of them."""
HEADING = 1
"""Lines above the rows, which stay when they are scrolled."""
CURSOR = "table--cursor"

Piece = tuple[str, str]
"""Text and its style."""


class LiveTable(ScrollView, can_focus=True):
    """Rows that bear a key each; the cursor stays on its row whatever moves."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "table--headings", "table--odd-row", "table--even-row", CURSOR,
    }  # fmt: skip
    DEFAULT_CSS = """
    LiveTable {
        background: $surface;
        color: $foreground;
        height: auto;
        max-height: 100%;
        & > .table--headings { text-style: bold; background: $panel; color: $foreground; }
        & > .table--even-row { background: $surface-lighten-1 50%; }
        &:dark > .table--even-row { background: $surface-darken-1 40%; }
        & > .table--cursor {
            background: $block-cursor-blurred-background;
            color: $block-cursor-blurred-foreground;
            text-style: $block-cursor-blurred-text-style;
        }
        &:focus {
            background-tint: $foreground 5%;
            & > .table--headings { background-tint: $foreground 5%; }
            & > .table--cursor {
                background: $block-cursor-background;
                color: $block-cursor-foreground;
                text-style: $block-cursor-text-style;
            }
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "turn_page(-1)", show=False),
        Binding("pagedown", "turn_page(1)", show=False),
        Binding("home,ctrl+home", "first", show=False),
        Binding("end,ctrl+end", "last", show=False),
    ]

    class Opened(Message):
        """Somebody wants to know all about the row under the cursor."""

        def __init__(self, table: LiveTable) -> None:
            super().__init__()
            self.table = table

        @property
        def control(self) -> LiveTable:
            return self.table

    def __init__(self, columns: tuple[str, ...], *, id: str) -> None:  # noqa: A002 - Textual's word
        super().__init__(id=id)
        self._every = columns
        self._given: list[TableRow] = []
        self.rows: list[TableRow] = []
        """Those that are shown, from above."""
        self.cursor_row = 0
        self._letters: dict[str, int] = {}
        """Column that there is room for → letters of its cells."""
        self._painted: dict[int, tuple[Piece, ...]] = {}
        """Number of a row → how it was drawn last."""
        self._headings_painted: list[str] = []
        self.wanted = ""
        """Text that a row must have to be shown; "": all are."""
        self.sorted_by = ""
        """Column; "": as the rows come, problems first."""
        self.descending = False
        self.marked: set[str] = set()
        """Keys of rows."""

    # -- what is in it ---------------------------------------------------------------------------------------------

    @property
    def row_count(self) -> int:
        return len(self.rows)

    @property
    def headings(self) -> list[str]:
        """Of the columns that are shown."""
        return [self._heading(column) for column in self._letters]

    @property
    def key_under_cursor(self) -> str | None:
        key = self._row_under_cursor()
        return None if key is None else key.partition(AGAIN)[0]

    def _row_under_cursor(self) -> str | None:
        return self.rows[self.cursor_row].key if self.cursor_row < len(self.rows) else None

    @property
    def keys_meant(self) -> list[str]:
        """The marked rows; without any, that under the cursor."""
        there = [row.key for row in self.rows if row.key in self.marked]
        under = self.key_under_cursor
        return [key.partition(AGAIN)[0] for key in there if key] or ([under] if under is not None else [])

    @property
    def is_filtered(self) -> bool:
        """Whether rows are left out."""
        return len(self.rows) < len(self._given)

    def give(self, rows: list[TableRow], width: int) -> None:
        """Show these in so many columns of the terminal."""
        self._given = _with_keys_of_their_own(rows)
        self.fill(width)

    def fill(self, width: int) -> None:
        """The rows that there are, as filter and sorting want them now."""
        rows = [row for row in self._given if matches(row.cells, self.wanted)] if self.wanted else list(self._given)
        if self.sorted_by in self._every:
            at = self._every.index(self.sorted_by)
            rows.sort(key=lambda row: natural(row.cells[at]), reverse=self.descending)
        under, self.rows = self._row_under_cursor(), rows[:MOST_ROWS]
        headings = [self._heading(column) for column in self._every]
        letters = columns_that_fit(self._every, self.rows, width, headings)
        grown = any(count > self._letters.get(column, 0) for column, count in letters.items())
        if grown or list(letters) != list(self._letters) or self._width > width:
            self._letters = letters
            self._painted.clear()
            self.refresh()
        self.virtual_size = Size(self._width, len(self.rows) + HEADING)
        self._stay_on(under)
        self._repaint()

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
            self.action_move(1)

    def cells_at(self, number: int) -> dict[str, Piece]:
        """Column → its text and style in that row; not markup: a node chose these words."""
        row = self.rows[number]
        return {
            column: (cut(cell, self._letters[column]), COLOURS[row.level] if column in JUDGED else "")
            for column, cell in zip(self._every, row.cells, strict=True)
            if column in self._letters
        }

    def _heading(self, column: str) -> str:
        return column if column != self.sorted_by else f"{column} {'▼' if self.descending else '▲'}"

    @property
    def _width(self) -> int:
        """Of all columns, with a space on both sides of a column."""
        return sum(self._letters.values()) + 2 * len(self._letters)

    # -- where one is ----------------------------------------------------------------------------------------------

    def _stay_on(self, key: str | None) -> None:
        """Its row may be another number now, or gone."""
        if self._row_under_cursor() != key:
            numbers = (number for number, row in enumerate(self.rows) if row.key == key)
            self.move_cursor(next(numbers, self.cursor_row))

    def move_cursor(self, row: int) -> None:
        """To that row or the nearest that there is, and bring it in sight."""
        before, self.cursor_row = self.cursor_row, max(0, min(row, len(self.rows) - 1))
        for number in (before, self.cursor_row):
            self.refresh_line(number + HEADING)
        top, lines = self.scroll_offset.y, self._lines
        if self.cursor_row < top:
            self.scroll_to(y=self.cursor_row, animate=False)
        elif lines and self.cursor_row >= top + lines:
            self.scroll_to(y=self.cursor_row - lines + 1, animate=False)

    @property
    def _lines(self) -> int:
        """Rows that are in sight at once."""
        return max(0, self.scrollable_content_region.height - HEADING)

    def action_move(self, rows: int) -> None:
        self.move_cursor(self.cursor_row + rows)

    def action_turn_page(self, pages: int) -> None:
        self.move_cursor(self.cursor_row + pages * max(1, self._lines))

    def action_first(self) -> None:
        self.move_cursor(0)

    def action_last(self) -> None:
        self.move_cursor(len(self.rows) - 1)

    def action_open(self) -> None:
        if self.rows:
            self.post_message(self.Opened(self))

    def on_click(self, event: Click) -> None:
        """The first brings the cursor, the second opens the row."""
        number = event.y - HEADING + self.scroll_offset.y
        if event.y >= HEADING and number < len(self.rows):
            if number == self.cursor_row:
                self.action_open()
            else:
                self.move_cursor(number)

    # -- how it is drawn -------------------------------------------------------------------------------------------

    def _repaint(self) -> None:
        """Just what is in sight and differs from what stands there."""
        if self._headings_painted != self.headings:
            self.refresh(Region(0, 0, self.size.width, HEADING))
        top = self.scroll_offset.y
        for number in range(top, top + self._lines):
            if number not in self._painted:
                if number < len(self.rows):
                    self.refresh_line(number + HEADING)
            elif number >= len(self.rows):
                del self._painted[number]
                self.refresh_line(number + HEADING)
            elif (now := self._pieces(number)) != (before := self._painted[number]):
                start, end = _differing(before, now)
                self.refresh(Region(start - self.scroll_offset.x, number + HEADING - top, end - start, 1))

    def render_line(self, y: int) -> Strip:
        """Line `y` of what is in sight."""
        width = self.size.width
        number = y - HEADING + self.scroll_offset.y
        if y < HEADING:
            style = self.get_component_rich_style("table--headings")
            self._headings_painted = self.headings
            text = "".join(
                _padded(heading, self._letters[column])
                for column, heading in zip(self._letters, self.headings, strict=True)
            )
            strip = Strip([Segment(text, style)])
        elif number < len(self.rows):
            kind = self._kind(number)
            style = self.get_component_rich_style(kind)
            self._painted[number] = pieces = self._pieces(number)
            coloured = kind != CURSOR  # which has a ground on which no other colour is read well
            strip = Strip(
                [Segment(text, style + Style.parse(name) if name and coloured else style) for text, name in pieces]
            )
        else:
            return Strip.blank(width, self.rich_style)
        left = self.scroll_offset.x
        return strip.crop_extend(left, left + width, style)

    def _kind(self, number: int) -> str:
        return CURSOR if number == self.cursor_row else ("table--even-row", "table--odd-row")[number % 2]

    def _pieces(self, number: int) -> tuple[Piece, ...]:
        """The row from left to right, as few pieces as it has styles."""
        pieces: list[Piece] = []
        for column, (text, style) in self.cells_at(number).items():
            padded = _padded(text, self._letters[column])
            if pieces and pieces[-1][1] == style:
                pieces[-1] = (pieces[-1][0] + padded, style)
            else:
                pieces.append((padded, style))
        if self.rows[number].key in self.marked:  # in the space before it, so that no letter of its name goes
            first, style = pieces[0]
            pieces[0] = (MARK + first[1:], style)
        return tuple(pieces)


def _padded(text: str, letters: int) -> str:
    return f" {set_cell_size(text, letters)} "


def _differing(before: tuple[Piece, ...], now: tuple[Piece, ...]) -> tuple[int, int]:
    """From where to where, in columns of the terminal, one row as it was drawn differs from another."""
    old, new = ("".join(text for text, _ in pieces) for pieces in (before, now))
    whole = max(cell_len(old), cell_len(new))
    shape = [[(len(text), style) for text, style in pieces] for pieces in (before, now)]
    plain = all(cell_len(letter) == 1 for letter in {*old, *new})
    if shape[0] != shape[1] or not plain:  # with wide letters a place in the text is none on the screen
        return 0, whole
    places = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return places[0], places[-1] + 1


def _with_keys_of_their_own(rows: list[TableRow]) -> list[TableRow]:
    """Nobody promises that no two nodes say the same of themselves."""
    seen: Counter[str] = Counter()
    own = []
    for row in rows:
        seen[row.key] += 1
        own.append(row if seen[row.key] == 1 else replace(row, key=f"{row.key}{AGAIN}{seen[row.key]}"))
    return own
