"""Where a gateway keeps its request records: a spool and, unless a database is named, SQLite, beside its run folders.

A gateway that is replaced gets another run folder, and its records stay: on a site they lie in
``records/FABRIC/GATEWAY`` beside ``units``, on the tool's own machine in ``RUNS.records/FABRIC/GATEWAY``. ``destroy``
leaves them: they are what was used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway.spool import RecordSpool
from fabrictool.gateway.storeprocess import REST_S, StoreProcess
from fabrictool.mesh.transport.reach import read_secret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import LoginSpec
    from fabrictool.gateway.accounts import KeyAccounts
    from fabrictool.gateway.calls import PathOwner
    from fabrictool.gateway.gateway import GatewayServer

FORGET_S = 600.0
"""Between two looks for records that are old enough; an hour's go at a time."""
_log = logging.getLogger("fabrictool.gateway")
RECORDS_FILE = "records.db"
FIRST_TURN_S = 5.0
FIRST_LOOK_S = 5.0
"""A gateway begins without the newest keys where the store does not answer."""
UNITS = "units"
"""Where a site has its run folders, by fabric."""


def records_folder(runs: Path, fabric: str, gateway: str) -> Path:
    """The same for all run folders of a gateway on its host; `runs` holds them."""
    runs = runs.absolute()
    beside = runs.parent if runs.parent.name == UNITS else runs  # on a site: units/FABRIC/OPERATION
    return beside.with_name("records" if beside is not runs else f"{runs.name}.records") / fabric / gateway


@contextlib.asynccontextmanager
async def storing(folder: Path, database: str) -> AsyncIterator[StoreProcess]:
    """The store; `database` is a reference to its address, read anew each time, or "" for the file in `folder`. What
    uses it raises FT1401 to FT1403 for a reference that leads nowhere.
    """

    def address() -> str:
        return read_secret(database, os.environ) if database else str(folder.absolute() / RECORDS_FILE)

    store = StoreProcess(address)
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


@contextlib.asynccontextmanager
async def spooling(folder: Path, store: StoreProcess, fabric: str, gateway: str) -> AsyncIterator[RecordSpool]:
    """A spool that is flushed until the context ends, and once more then."""
    spool = RecordSpool(folder / "spool", store, fabric=fabric, gateway=gateway)
    tasks = [asyncio.create_task(spool.run()), asyncio.create_task(_rest(store))]
    try:
        yield spool
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(spool.close)


async def forget_old(store: StoreProcess, clock: Clock, fabric: str, keep_s: float) -> None:
    """Until cancelled: records that are older."""
    trouble = ""
    while True:
        await asyncio.sleep(FORGET_S)
        try:
            while forgotten := await asyncio.to_thread(store.forget, fabric, clock.wall() - keep_s):
                _log.info("%d request records of over %d hours ago are forgotten", forgotten, keep_s / 3600)
        except FabrictoolError as error:
            if str(error) != trouble:
                _log.warning("old request records are not forgotten: %s", error)
            trouble = str(error)


@contextlib.asynccontextmanager
async def budgeting(accounts: KeyAccounts, store: StoreProcess) -> AsyncIterator[None]:
    """Purses are filled at once and until the context ends; then what is left is given back."""
    filled = asyncio.Event()
    accounts.after_turn(filled.set)
    accounts.wake()
    task = asyncio.create_task(accounts.run(store))
    with contextlib.suppress(TimeoutError):  # a gateway serves those without a budget while its database is away
        await asyncio.wait_for(filled.wait(), FIRST_TURN_S)
    try:
        yield
    finally:
        accounts.end()
        await task
        await accounts.close(store)


# Wide: whose keys they are, and where they lie.
@contextlib.asynccontextmanager
async def issuing(
    gateway: GatewayServer,
    store: StoreProcess,
    folder: Path,
    clock: Clock,
    *,
    fabric: str,
    group: str,
    login: LoginSpec | None = None,
    look_s: float | None = None,
) -> AsyncIterator[None]:
    """The key API, the login and the keys that they made; `folder` holds their copy.

    Raises FT1401 to FT1403 for a login's secret that cannot be had.
    """
    # Here, for they take 2 MB, and most gateways make no keys.
    from fabrictool.gateway.issued import COPY_FILE, LOOK_S, IssuedKeys  # noqa: PLC0415
    from fabrictool.gateway.keyapi import KeyApi  # noqa: PLC0415

    look_s = LOOK_S if look_s is None else look_s
    issued = IssuedKeys(store, folder / COPY_FILE, fabric=fabric, group=group, look_s=look_s)
    await asyncio.to_thread(issued.load)
    owners: list[PathOwner] = [KeyApi(issued, store, clock, fabric=fabric, note=gateway.note)]
    if login is not None:
        from fabrictool.gateway.login.login import LoginPages  # noqa: PLC0415 - loads Starlette and Authlib

        secret = read_secret(login.secret, os.environ) if login.secret else ""
        owners.append(LoginPages(login, issued, clock, fabric=fabric, secret=secret, note=gateway.note))
    gateway.issue_keys(issued, *owners)
    issued.on_change = gateway.know_keys
    gateway.know_keys()
    task = asyncio.create_task(issued.run())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(issued.looked.wait()), FIRST_LOOK_S)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _rest(store: StoreProcess) -> None:
    while True:
        await asyncio.sleep(REST_S / 4)
        await asyncio.to_thread(store.rest)
