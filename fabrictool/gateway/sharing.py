"""Workers of a gateway share the limits of keys and models: each tells the others what it let begin, and what it
took.

They speak by datagrams in the folder of their records, twenty times a second. So all of them together can let begin
what came within a twentieth of a second too much, and over time the limits are kept, as with one process. A budget
needs none of this: it is kept exactly by its ledger (`accounts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fabrictool.base.clock import Clock
    from fabrictool.gateway.accounts import KeyAccounts

PERIOD_S = 0.05
GREETING_S = 0.5
"""At least so often a worker is heard, also when it has nothing to tell."""
SILENT_S = 3.0
"""One that was not heard for so long is gone, and its open requests with it."""
ENTRIES = 200
"""Of a datagram, which holds some kilobytes."""
DATAGRAM_OCTETS = 1 << 17
_FOLDER = "workers"
_log = logging.getLogger("fabrictool.gateway")


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """Of one limit, since the one who reads it was told last."""

    name: str
    requests: int
    tokens: int
    open: int
    """Now."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What one worker sends another: all that changed, or nothing, which says that it lives."""

    sender: str
    taken: list[Taken]


_decoder = msgspec.msgpack.Decoder(Told)


class LimitSharing:
    """`open`, then `run` beside the requests, then `close`."""

    def __init__(self, folder: Path, name: str, accounts: KeyAccounts, clock: Clock) -> None:
        """`folder`: of the workers' records."""
        self._folder = folder / _FOLDER
        self.process = f"{name}.{os.getpid()}"
        self._accounts = accounts
        self._clock = clock
        self._told: dict[str, dict[str, tuple[int, int, int]]] = {}
        """Another's socket → limit → what it knows: begun, used, open."""
        self._told_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._socket: socket.socket | None = None
        self._descriptor = -1

    def open(self) -> None:
        """Be there for the others. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(FileNotFoundError):
            Path(self._path(self.process)).unlink()
        own.bind(self._path(self.process))
        self._socket = own
        asyncio.get_running_loop().add_reader(own.fileno(), self._read)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with contextlib.suppress(OSError):
                Path(self._path(self.process)).unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def run(self) -> None:
        """Tell and forget, until cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(PERIOD_S)

    def turn(self) -> None:
        """Tell all others what they do not know; forget those that are gone."""
        now = self._clock.monotonic()
        current = {name: (its.begun, its.used, its.open) for name, its in self._accounts.shareable()}
        others = {entry.name for entry in self._folder.iterdir()} - {self.process}
        for other in others:
            if other not in self._told:  # what was before its time does not concern it, but for what is open
                self._told[other] = {name: (begun, used, 0) for name, (begun, used, _) in current.items()}
            self._tell(other, current, now)
        for gone in self._told.keys() - others:
            self._forget(gone)
        for silent in [other for other, at in self._heard_at.items() if now - at > SILENT_S]:
            del self._heard_at[silent]
            for _, allowance in self._accounts.shareable():
                allowance.left(silent)

    # -- internals --------------------------------------------------------------------------------------------

    def _path(self, process: str) -> str:
        """A short name: the kernel takes 107 octets, and folders are deep."""
        return f"/proc/self/fd/{self._descriptor}/{process}"

    def _tell(self, other: str, current: dict[str, tuple[int, int, int]], now: float) -> None:
        known = self._told[other]
        news = [
            Taken(name, begun - was[0], used - was[1], open_)
            for name, (begun, used, open_) in current.items()
            if (was := known.get(name, (0, 0, 0))) != (begun, used, open_)
        ]
        if not news and now - self._told_at.get(other, -GREETING_S) < GREETING_S:
            return
        for at in range(0, max(1, len(news)), ENTRIES):
            part = news[at : at + ENTRIES]
            if not self._send(other, Told(self.process, part)):
                return
            known.update((taken.name, current[taken.name]) for taken in part)
        self._told_at[other] = now

    def _send(self, other: str, told: Told) -> bool:
        """False: it did not go, and is told later, if there is somebody."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(msgspec.msgpack.encode(told), self._path(other))
        except (ConnectionRefusedError, FileNotFoundError):  # it was killed
            with contextlib.suppress(OSError):
                Path(self._path(other)).unlink()
            self._forget(other)
            return False
        except OSError:  # it is busy
            return False
        return True

    def _forget(self, other: str) -> None:
        self._told.pop(other, None)
        self._told_at.pop(other, None)

    def _read(self) -> None:
        while self._socket is not None:
            try:
                told = _decoder.decode(self._socket.recv(DATAGRAM_OCTETS))
            except BlockingIOError:
                return
            except (OSError, msgspec.DecodeError) as error:
                _log.warning("a worker's word cannot be read: %s", error)
                return
            now = self._clock.monotonic()
            self._heard_at[told.sender] = now
            for taken in told.taken:
                allowance = self._accounts.shared(taken.name)
                if allowance is not None:
                    allowance.took_elsewhere(told.sender, taken.requests, taken.tokens, taken.open, now)


@contextlib.asynccontextmanager
async def sharing(folder: Path, name: str, accounts: KeyAccounts, clock: Clock) -> AsyncIterator[LimitSharing]:
    """Limits are shared with the other workers until the context ends."""
    shares = LimitSharing(folder, name, accounts, clock)
    shares.open()
    task = asyncio.create_task(shares.run())
    try:
        yield shares
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        shares.close()
