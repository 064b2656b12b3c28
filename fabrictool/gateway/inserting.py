"""How records are inserted: many rows by one statement, and in values that a driver takes as they are.

Python's sqlite3 asks every value that is neither a number nor a text how it wants to be adapted, True and None, too,
and that takes longer than to store it: SQLite gets numbers instead. And it copies each value: what the rows of one
statement have in common, most of their texts, it gets once for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fabrictool.gateway.records import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

TOGETHER = 40
"""Rows of one statement: each by itself takes a fifth longer."""
NOBODYS = -1.0
"""For None, of a time."""
_columns = ("id", "fabric", "gateway", "hour", *RequestRecord.__struct_fields__[1:])
_truths = ("stream", "counted")
_times = ("ttft_s", "tpot_s")
_own = ("id", "at", "e2e_s", "prompt_tokens", "cached_tokens", "completion_tokens", "prefix_of", "prefix_tokens")
_common = tuple(name for name in _columns if name not in (*_own, *_times))
"""What many records of a moment have alike."""
_common_of = itemgetter(*map(_columns.index, _common))
_own_of = itemgetter(*map(_columns.index, (*_own, *_times)))

_Row = tuple[Any, ...]


class RecordInsertion:
    """For a kind of database; by the places of values: a row is a tuple."""

    def __init__(self, *, postgres: bool) -> None:
        self._postgres = postgres
        mark = "%s" if postgres else "?"
        single = _values_of([mark] * len(_columns))
        times = [f"nullif(?, {NOBODYS})" if name in _times and not postgres else mark for name in _columns]
        self._single, self._many = _statement([single]), _statement([_values_of(times)] * TOGETHER)
        self._alike = _statement(_rows_alike())

    def insert(self, execute: Callable[[str, list[_Row]], object], rows: list[_Row]) -> None:
        """Those that are not there yet, each with the values of `COLUMNS`; `execute` has a statement carried out with
        some values, then with others.
        """
        if not self._postgres:
            alike, rows = _grouped(rows)
            if alike:
                execute(self._alike, alike)
        begins = range(0, len(rows) - TOGETHER + 1, TOGETHER)
        if begins:
            execute(self._many, [self._values(rows[at : at + TOGETHER]) for at in begins])
        if others := rows[len(begins) * TOGETHER :]:
            execute(self._single, others)

    def _values(self, rows: list[_Row]) -> _Row:
        """All those of one statement, one after the other, as the driver takes them."""
        values = list(chain.from_iterable(rows))
        if not self._postgres:
            _as_numbers(values, _columns)
        return tuple(values)


def _statement(rows: list[str]) -> str:
    names = ", ".join(f'"{name}"' for name in _columns)
    return f"INSERT INTO fabrictool_requests ({names}) VALUES {', '.join(rows)} ON CONFLICT DO NOTHING"  # noqa: S608 - our own


def _values_of(words: list[str]) -> str:
    return f"({', '.join(words)})"


def _rows_alike() -> list[str]:
    """SQLite's words for rows whose common values stand first, once."""
    common = {name: f"?{number}" for number, name in enumerate(_common, start=1)}
    numbers, rows = count(len(common) + 1), []
    for _ in range(TOGETHER):
        own = {name: f"?{next(numbers)}" for name in _own}
        times = {name: f"nullif(?{next(numbers)}, {NOBODYS})" for name in _times}
        words = common | own | times
        rows.append(_values_of([words[name] for name in _columns]))
    return rows


def _grouped(rows: list[_Row]) -> tuple[list[_Row], list[_Row]]:
    """The values of statements for rows with the same `_common`, and the rows that are left."""
    groups = defaultdict[_Row, list[_Row]](list)
    for row in rows:
        groups[_common_of(row)].append(row)
    alike, others = list[_Row](), list[_Row]()
    for common, group in groups.items():
        begins = range(0, len(group) - TOGETHER + 1, TOGETHER)
        shared = list(common)
        _as_numbers(shared, _common)
        for at in begins:
            values = list(chain.from_iterable(map(_own_of, group[at : at + TOGETHER])))
            _as_numbers(values, (*_own, *_times))
            alike.append((*shared, *values))
        others += group[len(begins) * TOGETHER :]
    return alike, others


def _as_numbers(values: list[Any], columns: tuple[str, ...]) -> None:
    """Truths and times that are None, of rows that stand one after the other and have these columns."""
    for place, name in enumerate(columns):
        if name in _truths:
            values[place :: len(columns)] = map(int, values[place :: len(columns)])
        elif name in _times:
            values[place :: len(columns)] = [
                NOBODYS if time is None else time for time in values[place :: len(columns)]
            ]
