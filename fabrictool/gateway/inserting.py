"""How records are inserted: many rows by one statement, and in values that a driver takes as they are.

Python's sqlite3 asks every value that is neither a number nor a text how it wants to be adapted, True and None, too,
and that takes longer than to store it: SQLite gets numbers instead.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from sqlalchemy import Boolean
from sqlalchemy.dialects import postgresql, sqlite

from fabrictool.gateway.tables import REQUESTS

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

TOGETHER = 40
"""Rows of one statement: each by itself takes a fifth longer."""
NOBODYS = -1.0
"""For None, of a time."""
_columns = list(REQUESTS.columns)
_WIDTH = len(_columns)
_TRUTHS = [place for place, column in enumerate(_columns) if isinstance(column.type, Boolean)]
_TIMES = [place for place, column in enumerate(_columns) if column.nullable]


class RecordInsertion:
    """For a kind of database; by the places of values: a row is a tuple."""

    def __init__(self, *, postgres: bool) -> None:
        self._postgres = postgres
        insertion = postgresql.insert(REQUESTS) if postgres else sqlite.insert(REQUESTS)
        spoken: Any = postgresql.dialect if postgres else sqlite.dialect
        dialect = spoken(paramstyle="format" if postgres else "qmark")
        self._single = str(insertion.on_conflict_do_nothing().compile(dialect=dialect))
        before, word, rest = self._single.partition(" VALUES ")
        row, conflict, after = rest.partition(" ON CONFLICT")
        if not postgres:
            values = row[1:-1].split(", ")
            for place in _TIMES:
                values[place] = f"nullif({values[place]}, {NOBODYS})"
            row = f"({', '.join(values)})"
        self._many = before + word + ", ".join([row] * TOGETHER) + conflict + after

    def insert(self, connection: Connection, rows: list[tuple[Any, ...]]) -> None:
        """Those that are not there yet, each with the values of `COLUMNS`."""
        begins = range(0, len(rows) - TOGETHER + 1, TOGETHER)
        if begins:
            connection.exec_driver_sql(self._many, [self._values(rows[at : at + TOGETHER]) for at in begins])
        if others := rows[len(begins) * TOGETHER :]:
            connection.exec_driver_sql(self._single, others)

    def _values(self, rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """All those of one statement, one after the other, as the driver takes them."""
        values = list(chain.from_iterable(rows))
        if not self._postgres:
            for place in _TRUTHS:
                values[place::_WIDTH] = map(int, values[place::_WIDTH])
            for place in _TIMES:
                values[place::_WIDTH] = [NOBODYS if value is None else value for value in values[place::_WIDTH]]
        return tuple(values)
