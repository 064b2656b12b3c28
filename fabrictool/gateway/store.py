"""Where request records are kept for good, what budgets have left, and issued keys: SQLite beside the gateway, or
PostgreSQL.

A record is inserted by its id, once: whoever is not sure whether a batch arrived sends it again. A gateway uses
it through `storeprocess`.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import create_engine, event, exc, func, insert, inspect, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import StaticPool

from fabrictool.base.errors import InvalidInputError
from fabrictool.gateway.filestore import CONNECT_S, away, connected, no_store
from fabrictool.gateway.inserting import RecordInsertion
from fabrictool.gateway.keyrecords import IssuedKey, KeyChanges, KeyState
from fabrictool.gateway.keys import KEY_DIGITS
from fabrictool.gateway.records import LAYOUT
from fabrictool.gateway.tables import BUDGETS, KEYS, LAYOUT_TABLE, READABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Select
    from sqlalchemy.engine import Connection, Engine

    from fabrictool.gateway.records import StoreAwayError


ANSWER_S = 30
MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x66616272
"""Of PostgreSQL's advisory locks: gateways that start together do not both make the tables."""
_KEYS_LOCK = 0x66616273
"""Revisions of keys are committed in their order, so that nobody who has read one misses an earlier one."""


def store_url(text: str) -> URL:
    """Of PostgreSQL or SQLite, whose file an absolute path names, too.

    Raises InvalidInputError FT8121, which never shows what it was given.
    """
    if text.startswith("/"):
        return URL.create("sqlite", database=text)
    hint = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError) as error:
        raise InvalidInputError.of("FT8121", "the store's address is no URL", hint=hint) from error
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername != "sqlite" or not url.database:
        raise InvalidInputError.of("FT8121", f"there is no store of the kind {url.drivername}", hint=hint)
    return url


_RETENTION_LOCK = 0x66616274
"""Gateways that share a store do not forget the same hours at the same time."""
STREAMED = 5000


class RecordStore:
    """One connection, for one thread at a time; its methods block."""

    def __init__(self, address: str, *, read_only: bool = False) -> None:
        """`read_only`: nothing is made, and it must be there.

        Raises
        ------
        InvalidInputError
            FT8121 for an address that is none, FT8122 for a database that is no store of this release.
        StoreAwayError
            FT8120 where it does not answer.
        """
        url = store_url(address)
        self.made = False
        """Whether the tables had to be made, or brought up to date."""
        self.place = url.database or "" if url.drivername == "sqlite" else f"{url.host or ''}/{url.database or ''}"
        self._postgres = url.drivername != "sqlite"
        self._read_only = read_only
        if self._postgres:
            arguments: dict[str, Any] = {
                "connect_timeout": CONNECT_S,
                "tcp_user_timeout": ANSWER_S * 1000,
                "keepalives_idle": ANSWER_S // 3,  # of a host that is gone after it took our last word
                "keepalives_interval": ANSWER_S // 6,
                "keepalives_count": 3,
                "options": f"-c statement_timeout={ANSWER_S * 1000}",
            }
            self._engine = create_engine(url, poolclass=StaticPool, connect_args=arguments)
        else:
            self._engine = _file_engine(url, read_only=read_only)
        insert_new = postgresql.insert if self._postgres else sqlite.insert
        self._insertion = RecordInsertion(postgres=self._postgres)
        self._open_account = insert_new(BUDGETS).on_conflict_do_nothing()
        try:
            with self._transaction() as connection:
                self._make_tables(connection)
        except BaseException:
            self.close()
            raise

    def put(self, rows: list[tuple[Any, ...]]) -> None:
        """Insert those that are not there yet, each with the values of `COLUMNS`; raises StoreAwayError."""
        with self._transaction() as connection:
            self._insertion.insert(connection.exec_driver_sql, rows)

    def read(self, query: Select[Any]) -> list[tuple[Any, ...]]:
        """The rows of a query; raises StoreAwayError."""
        with self._transaction() as connection:
            return [tuple(row) for row in connection.execute(query)]

    def stream(self, query: Select[Any]) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, some thousand at a time; raises StoreAwayError."""
        with self._transaction() as connection:
            for row in connection.execution_options(yield_per=STREAMED).execute(query):
                yield tuple(row)

    def forget(self, fabric: str, before: float) -> int:
        """Forget records that are older than `before` (wall time, seconds); see `retention`. Raises StoreAwayError."""
        from fabrictool.gateway.retention import forget  # noqa: PLC0415 - where records are forgotten at all

        with self._transaction() as connection:
            if self._postgres:
                connection.execute(select(func.pg_advisory_xact_lock(_RETENTION_LOCK)))
            return forget(connection, fabric, before)

    def take(self, account: str, period: str, *, wanted: int, limit: int) -> int:
        """Up to `wanted` tokens of an account's budget; returns how many, so that all that was ever taken of a
        period and not given back is `limit` at most, whoever asks at the same time. Raises StoreAwayError.
        """
        row = (BUDGETS.c.account == account) & (BUDGETS.c.period == period)
        with self._transaction() as connection:
            connection.execute(self._open_account, {"account": account, "period": period, "taken": 0})
            locked = select(BUDGETS.c.taken).where(row).with_for_update()
            taken = connection.execute(locked).scalar_one()
            granted: int = max(0, min(wanted, limit - taken))
            connection.execute(update(BUDGETS).where(row).values(taken=taken + granted))
        return granted

    def give(self, account: str, period: str, tokens: int) -> None:
        """Give back what was taken and not used; below zero: more was used than taken. Raises StoreAwayError."""
        row = (BUDGETS.c.account == account) & (BUDGETS.c.period == period)
        with self._transaction() as connection:
            connection.execute(update(BUDGETS).where(row).values(taken=BUDGETS.c.taken - tokens))

    def keys(self, fabric: str, since: int) -> KeyChanges:
        """What changed after the revision `since`; the whole where that is 0, or not of this database, which may have
        been restored. Raises StoreAwayError, and InvalidInputError FT8122 for a newer release's keys.
        """
        of = KEYS.c
        query = select(of.sha256, of.document, of.revision, of.ended).where(of.fabric == fabric)
        with self._transaction() as connection:
            newest = connection.execute(select(func.max(of.revision)).where(of.fabric == fabric)).scalar() or 0
            whole = since == 0 or newest < since
            query = query.where(~of.ended) if whole else query.where(of.revision > since)
            rows = connection.execute(query.order_by(of.revision)).all()
        try:
            states = [KeyState(row[0], msgspec.json.decode(row[1], type=IssuedKey), row[2], row[3]) for row in rows]
        except msgspec.DecodeError as error:
            raise self._no_store(f"a key cannot be read: {error}") from error
        return KeyChanges(newest, states, whole)

    def write_keys(self, fabric: str, states: Sequence[KeyState]) -> int:
        """All of them or none; returns their revision. 0: one of them is not of the revision any more that it says,
        or has the alias, or the digits, of another one. Raises StoreAwayError.
        """
        try:
            with self._transaction() as connection:
                if self._postgres:
                    connection.execute(select(func.pg_advisory_xact_lock(_KEYS_LOCK)))
                newest = connection.execute(select(func.max(KEYS.c.revision)).where(KEYS.c.fabric == fabric)).scalar()
                for state in states:
                    _write_key(connection, fabric, state, (newest or 0) + 1)
        except _KeysChangedError:
            return 0
        return (newest or 0) + 1

    def close(self) -> None:
        self._engine.dispose()

    # -- internals --------------------------------------------------------------------------------------------

    def _make_tables(self, connection: Connection) -> None:
        self.layout = self._layout(connection)
        """As it is; of a store that is not only read, the newest."""
        if self.layout == LAYOUT or (self._read_only and self.layout in READABLE):
            return
        if self._read_only:
            raise self._no_store("it holds no records, or another release's")
        if self._postgres:
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        from alembic import command  # noqa: PLC0415 - for new and old stores only
        from alembic.config import Config  # noqa: PLC0415
        from alembic.util import CommandError  # noqa: PLC0415

        self.made = True
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        try:
            command.upgrade(config, LAYOUT)
        except CommandError as error:
            raise self._no_store("its layout is of a newer release") from error
        self.layout = LAYOUT

    def _layout(self, connection: Connection) -> str:
        if not inspect(connection).has_table(LAYOUT_TABLE.name):
            return ""
        return connection.execute(select(LAYOUT_TABLE.c.version_num)).scalar() or ""

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except (exc.OperationalError, exc.InterfaceError, exc.InternalError) as error:
            raise self._away(str(error.orig).strip().splitlines()[0]) from error
        except exc.DBAPIError as error:
            if error.connection_invalidated:
                raise self._away("the connection was lost") from error
            raise self._no_store(str(error.orig).strip().splitlines()[0]) from error
        except exc.SQLAlchemyError as error:
            raise self._away(type(error).__name__) from error

    def _away(self, why: str) -> StoreAwayError:
        return away(self.place, why, "is its server up?") if self._postgres else away(self.place, why)

    def _no_store(self, why: str) -> InvalidInputError:
        return no_store(self.place, why)


class _KeysChangedError(Exception):
    """Another gateway was first; the transaction is rolled back."""


def _write_key(connection: Connection, fabric: str, state: KeyState, revision: int) -> None:
    values = {
        "alias": None if state.ended else state.key.alias or None,
        "revision": revision,
        "ended": state.ended,
        "document": msgspec.json.encode(state.key).decode(),
    }
    if not state.revision:
        names = {"sha256": state.sha256, "digits": state.sha256[:KEY_DIGITS], "fabric": fabric}
        try:
            connection.execute(insert(KEYS).values(names | values))
        except exc.IntegrityError as error:
            raise _KeysChangedError from error
        return
    former = (KEYS.c.sha256 == state.sha256) & (KEYS.c.fabric == fabric) & (KEYS.c.revision == state.revision)
    try:
        changed = connection.execute(update(KEYS).where(former).values(values)).rowcount
    except exc.IntegrityError as error:
        raise _KeysChangedError from error
    if changed != 1:
        raise _KeysChangedError


def _file_engine(url: URL, *, read_only: bool) -> Engine:
    """SQLite, where a transaction takes the right to write at its begin: none fails half way for another's."""
    path = Path(url.database or "").absolute()

    engine = create_engine("sqlite://", creator=partial(connected, path, read_only=read_only), poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("begin" if read_only else "begin immediate")

    return engine
