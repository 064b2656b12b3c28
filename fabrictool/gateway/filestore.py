"""What a busy gateway asks of a store that is a file, by Python's sqlite3 alone: SQLAlchemy takes 35 MB and a second to
load. The tables are made, and all else is done, by `RecordStore`; it is the same file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import InvalidInputError, Place, Problem
from fabrictool.gateway.inserting import RecordInsertion
from fabrictool.gateway.records import HOUR_S, LAYOUT, StoreAwayError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONNECT_S = 5
WAL_PAGES = 4000
"""SQLite's log before it goes into the file, 16 MB: the pages that each batch changes go there four times as seldom."""


def connected(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Without transactions of Python's own. Raises sqlite3.Error."""
    mode = "ro" if read_only else "rwc"
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=CONNECT_S, check_same_thread=False, isolation_level=None
    )
    if not read_only:
        path.chmod(0o600)  # it says who asked when
        connection.execute("pragma journal_mode = wal")
        connection.execute(f"pragma wal_autocheckpoint = {WAL_PAGES}")
        connection.execute("pragma synchronous = full")  # what was settled stays settled when the power fails
    return connection


def away(place: str, why: str, hint: str = "check the file's folder: its room, its rights") -> StoreAwayError:
    """FT8120: it takes nothing now."""
    return StoreAwayError(
        Problem("FT8120", f"the records' store cannot be used: {why}", Place(thing=place), hint, True)
    )


def no_store(place: str, why: str) -> InvalidInputError:
    """FT8122: there is something else."""
    hint = "name another database, or move this one away: a gateway makes a new one"
    return InvalidInputError(Problem("FT8122", f"not a store of records: {why}", Place(thing=place), hint))


class FileStore:
    """One connection, for one thread at a time; its methods block, and do as those of `RecordStore`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """`connection`: to a file that has this release's tables; see `opened`."""
        self._place = str(path)
        self._connection = connection
        self._insertion = RecordInsertion(postgres=False)

    @classmethod
    def opened(cls, path: Path) -> FileStore | None:
        """None: it is not there, or not of this release, or cannot be used; `RecordStore` makes it, or says why."""
        if not path.is_file():
            return None
        with contextlib.suppress(sqlite3.Error, OSError):
            connection = connected(path)
            with contextlib.suppress(sqlite3.Error):
                if connection.execute("select version_num from fabrictool_layout").fetchall() == [(LAYOUT,)]:
                    return cls(path, connection)
            connection.close()
        return None

    def put(self, rows: list[tuple[Any, ...]]) -> None:
        """Insert those that are not there yet, each with the values of `COLUMNS`; raises StoreAwayError."""
        with self._transaction() as connection:
            self._insertion.insert(connection.executemany, rows)

    def take(self, account: str, period: str, *, wanted: int, limit: int) -> int:
        """Up to `wanted` tokens of a budget; returns how many. Raises StoreAwayError."""
        with self._transaction() as connection:
            row = (account, period)
            connection.execute(
                "insert or ignore into fabrictool_budgets (account, period, taken) values (?, ?, 0)", row
            )
            query = "select taken from fabrictool_budgets where account = ? and period = ?"
            (taken,) = connection.execute(query, row).fetchone()
            granted: int = max(0, min(wanted, limit - taken))
            self._add(granted, account, period)
        return granted

    def give(self, account: str, period: str, tokens: int) -> None:
        """Give back what was taken and not used. Raises StoreAwayError."""
        with self._transaction():
            self._add(-tokens, account, period)

    def has_older(self, fabric: str, before: float) -> bool:
        """Whether `RecordStore.forget` would find any record. Raises StoreAwayError."""
        whole = before // HOUR_S * HOUR_S
        query = "select 1 from fabrictool_requests where fabric = ? and at < ? limit 1"
        with self._transaction() as connection:
            return connection.execute(query, (fabric, whole)).fetchone() is not None

    def close(self) -> None:
        self._connection.close()

    def _add(self, tokens: int, account: str, period: str) -> None:
        change = "update fabrictool_budgets set taken = taken + ? where account = ? and period = ?"
        self._connection.execute(change, (tokens, account, period))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """It takes the right to write at its begin: none fails half way for another's."""
        connection = self._connection
        try:
            connection.execute("begin immediate")
            try:
                yield connection
            except BaseException:
                connection.execute("rollback")
                raise
            connection.execute("commit")
        except (sqlite3.OperationalError, sqlite3.InterfaceError, sqlite3.InternalError) as error:
            raise away(self._place, str(error)) from error
        except sqlite3.Error as error:
            raise no_store(self._place, str(error)) from error
