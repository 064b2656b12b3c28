"""How records are inserted: many rows by one statement, and in values that a driver takes as they are.

Python's sqlite3 asks every value that is neither a number nor a text how it wants to be adapted, True and None, too,
and that takes longer than to store it: SQLite gets numbers instead.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from fabrictool.gateway.records import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

TOGETHER = 40
"""Rows of one statement: each by itself takes a fifth longer."""
NOBODYS = -1.0
"""For None, of a time."""
_columns = ("id", "fabric", "gateway", "hour", *RequestRecord.__struct_fields__[1:])
_TRUTHS = [_columns.index(name) for name in ("stream", "counted")]
_TIMES = [_columns.index(name) for name in ("ttft_s", "tpot_s")]


class RecordInsertion:
    """For a kind of database; by the places of values: a row is a tuple."""

    def __init__(self, *, postgres: bool) -> None:
        self._postgres = postgres
        values = ["%s" if postgres else "?"] * len(_columns)
        names = ", ".join(f'"{name}"' for name in _columns)
        statement = f"INSERT INTO fabrictool_requests ({names}) VALUES {{}} ON CONFLICT DO NOTHING"  # noqa: S608 - our own
        self._single = statement.format(f"({', '.join(values)})")
        if not postgres:
            for place in _TIMES:
                values[place] = f"nullif(?, {NOBODYS})"
        self._many = statement.format(", ".join([f"({', '.join(values)})"] * TOGETHER))

    def insert(self, execute: Callable[[str, list[tuple[Any, ...]]], object], rows: list[tuple[Any, ...]]) -> None:
        """Those that are not there yet, each with the values of `COLUMNS`; `execute` has a statement carried out with
        some values, then with others.
        """
        begins = range(0, len(rows) - TOGETHER + 1, TOGETHER)
        if begins:
            execute(self._many, [self._values(rows[at : at + TOGETHER]) for at in begins])
        if others := rows[len(begins) * TOGETHER :]:
            execute(self._single, others)

    def _values(self, rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """All those of one statement, one after the other, as the driver takes them."""
        values = list(chain.from_iterable(rows))
        if not self._postgres:
            for place in _TRUTHS:
                values[place :: len(_columns)] = map(int, values[place :: len(_columns)])
            for place in _TIMES:
                times = values[place :: len(_columns)]
                values[place :: len(_columns)] = [NOBODYS if time is None else time for time in times]
        return tuple(values)
