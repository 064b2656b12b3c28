"""Where a gateway keeps its request records: a spool and, unless a database is named, SQLite, beside its run folders.

A gateway that is replaced gets another run folder, and its records stay: they lie in ``RUNS.records/FABRIC/GATEWAY``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from fabrictool.gateway.spool import RecordSpool
from fabrictool.mesh.transport.reach import read_secret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from fabrictool.gateway.accounts import KeyAccounts
    from fabrictool.gateway.store import RecordStore

RECORDS_FILE = "records.db"


def records_folder(runs: Path, fabric: str, gateway: str) -> Path:
    """The same for all run folders of a gateway on its host; `runs` holds them."""
    runs = runs.absolute()
    return runs.with_name(f"{runs.name}.records") / fabric / gateway


def opener(folder: Path, database: str) -> Callable[[], RecordStore]:
    """Opens the store; `database` is a reference to its address, read anew each time, or "" for the file in `folder`.
    It blocks and raises as `RecordStore` does, and FT1401 to FT1403 for a reference that leads nowhere.
    """

    def open_store() -> RecordStore:
        from fabrictool.gateway.store import RecordStore, sqlite_url  # noqa: PLC0415 - see there

        return RecordStore(read_secret(database, os.environ) if database else sqlite_url(folder / RECORDS_FILE))

    return open_store


@contextlib.asynccontextmanager
async def spooling(
    folder: Path, open_store: Callable[[], RecordStore], fabric: str, gateway: str
) -> AsyncIterator[RecordSpool]:
    """A spool that is flushed until the context ends, and once more then."""
    spool = RecordSpool(folder / "spool", open_store, fabric=fabric, gateway=gateway)
    task = asyncio.create_task(spool.run())
    try:
        yield spool
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(spool.close)


@contextlib.asynccontextmanager
async def budgeting(accounts: KeyAccounts, open_store: Callable[[], RecordStore]) -> AsyncIterator[None]:
    """Purses are filled at once and until the context ends; then what is left is given back."""
    await accounts.turn(open_store)
    task = asyncio.create_task(accounts.run(open_store))
    try:
        yield
    finally:
        accounts.end()
        await task
        await accounts.close(open_store)
