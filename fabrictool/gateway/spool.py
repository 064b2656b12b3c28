"""Request records on their way to a store: kept in local files until the store has them, however long it is away.

A spool is a folder that its process holds by a lock. Whoever finds another one whose process is gone brings that one's
records to the store, too. No request waits for any of it, and none fails for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import threading
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import file_error
from fabrictool.base.ids import random_id
from fabrictool.gateway.segments import SEGMENT_OCTETS, Cursor, Segments, read_lines

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.gateway.records import RequestRecord

MOST_OCTETS: Final = 512 * 1024 * 1024
"""About two million requests; more are lost, counted and said."""
WAITING: Final = 20_000
"""Records that wait in memory for a segment, 10 MB or so; it takes a disk a moment to allocate one."""
FLUSH_S: Final = 1.0
RETRY_S: Final = 5.0
ADOPT_S: Final = 60.0
BATCH_OCTETS: Final = 512 * 1024
"""Larger ones cost their store little less, and both processes megabytes that they keep."""
LONGEST: Final = 64 * 1024
"""Of a record; they have a few hundred octets."""
CURSOR_FILE: Final = "cursor"

_log = logging.getLogger("fabrictool.gateway")
_encoder: Final = msgspec.json.Encoder()


class Store(Protocol):
    """Where records go; it blocks."""

    def put(self, fabric: str, gateway: str, lines: bytes) -> int:
        """Returns how many of these whole lines are no records; raises FabrictoolError where it takes none now."""


class RecordSpool:
    """`append` on the event loop; `run` beside it; `close` at the end, in that order."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        fabric: str,
        gateway: str,
        segment_octets: int = SEGMENT_OCTETS,
        most_octets: int = MOST_OCTETS,
    ) -> None:
        """`folder` holds the spools of all processes of this gateway.

        Raises
        ------
        FabrictoolError
            FT4301 or FT4302 where the folder cannot be made.
        """
        self._spools = folder
        self._folder = folder / random_id()
        self._lock = _claimed(self._folder)
        self._journal = Segments(self._folder, segment_octets=segment_octets, most_octets=most_octets)
        self._fabric, self._gateway = fabric, gateway
        self._store = store
        self._waiting: list[bytes] = []
        self._cursor = Cursor()
        self._woken = asyncio.Event()
        self._at_work = threading.Lock()
        """A turn that was cancelled goes on in its thread."""
        self._trouble: dict[str, str] = {}
        self._adopting_at = 0.0
        self.lost = 0
        """Records that no file had room for, or that could not be read again."""
        self._lost_said = 0
        with contextlib.suppress(OSError):  # `run` says it
            self._journal.prepare()

    @property
    def waiting_octets(self) -> int:
        """Of records that the store does not have yet, at most."""
        return self._journal.behind(self._cursor) + sum(map(len, self._waiting))

    def append(self, record: RequestRecord) -> bool:
        """Keep it; never raises, never waits. True: the kernel has it, and this process may be killed."""
        line = _encoder.encode(record) + b"\n"
        if not self._waiting and self._journal.append(line):
            if self._journal.wants_segment:
                self._woken.set()
            return True
        if len(self._waiting) < WAITING and len(line) <= LONGEST:
            self._waiting.append(line)
        else:
            self.lost += 1
        self._woken.set()
        return False

    async def run(self) -> None:
        """Until cancelled: segments ahead of time, records to the store, spools of processes that are gone."""
        while True:
            self._woken.clear()
            flushed = await self.turn()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S if flushed else RETRY_S):
                    await self._woken.wait()

    async def turn(self) -> bool:
        """Once all of it; False where the store could not be used."""
        await asyncio.to_thread(self._make_room)
        while self._waiting and self._drain() and self._journal.wants_segment:
            await asyncio.to_thread(self._make_room)
        self._say_losses()
        flushed = await asyncio.to_thread(self._flush)
        now = asyncio.get_running_loop().time()
        if flushed and now >= self._adopting_at:
            self._adopting_at = now + ADOPT_S
            await asyncio.to_thread(self._adopt)
        return flushed

    def close(self) -> None:
        """Flush what can be flushed; a spool that is empty leaves nothing behind."""
        self._make_room()
        while self._waiting and self._drain():
            self._make_room()
        self.lost += len(self._waiting)
        self._say_losses()
        empty = self._flush()
        self._journal.close()
        if empty:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    # -- internals --------------------------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Waiting lines to the journal; False when none of them went."""
        for count, line in enumerate(self._waiting):
            if not self._journal.append(line):
                del self._waiting[:count]
                return count > 0
        drained, self._waiting = bool(self._waiting), []
        return drained

    def _make_room(self) -> None:
        try:
            with self._at_work:
                room = self._journal.prepare()
            if room:
                self._mended("room")
            else:
                self._say("room", "the spool of request records is full, and its store is away")
        except OSError as error:
            self._say("room", _coded(file_error(error, self._folder)))

    def _say_losses(self) -> None:
        if self.lost > self._lost_said:
            _log.error("%d request records were lost: there was no room for them", self.lost - self._lost_said)
            self._lost_said = self.lost

    def _flush(self) -> bool:
        with self._at_work:
            return self._flush_alone()

    def _flush_alone(self) -> bool:
        try:
            self._cursor = self._bring(self._folder, self._cursor, self._journal.end)
            self._journal.drop_before(self._cursor.segment)
        except OSError as error:
            self._say("store", _coded(file_error(error, self._folder)))
            return False
        except FabrictoolError as error:
            self._say("store", _coded(error))
            self._sync()
            return False
        self._mended("store")
        return True

    def _sync(self) -> None:
        """Only while the store is away: pages that were synced cost the next request that writes to them a fault."""
        try:
            if self._journal.dirty:
                self._journal.sync()
        except OSError as error:
            self._say("store", _coded(file_error(error, self._folder)))

    def _bring(self, folder: Path, cursor: Cursor, until: Cursor | None = None) -> Cursor:
        """All lines from `cursor` on, batch by batch; raises OSError and FabrictoolError.

        `until`: what follows there waits for the next turn. A busy gateway appends meanwhile: to run after its last
        line would be to bring a few at a time, each time with a transaction.
        """
        while until is None or cursor < until:
            lines, following = read_lines(folder, cursor, BATCH_OCTETS)
            if not lines:
                return following
            self.lost += self._store.put(self._fabric, self._gateway, lines)
            cursor = following
            with contextlib.suppress(OSError):  # a batch that comes twice does no harm
                _remember(folder / CURSOR_FILE, cursor)
        return cursor

    def _adopt(self) -> None:
        """Spools whose processes are gone; the lock says so, on this machine."""
        for folder in sorted(self._spools.iterdir()) if self._spools.is_dir() else ():
            if folder == self._folder or not folder.is_dir():
                continue
            try:
                lock = _claimed(folder)
            except (FabrictoolError, BlockingIOError):
                continue
            try:
                with self._at_work:
                    self._bring(folder, _cursor_of(folder))
                shutil.rmtree(folder, ignore_errors=True)
            except OSError as error:
                self._say("adopted", _coded(file_error(error, folder)))
            except FabrictoolError as error:
                self._say("adopted", _coded(error))
            finally:
                os.close(lock)

    def _say(self, kind: str, why: str) -> None:
        """Once until it is mended."""
        if kind not in self._trouble:
            _log.warning("request records wait on this machine: %s", why)
        self._trouble[kind] = why

    def _mended(self, kind: str) -> None:
        if self._trouble.pop(kind, None) is not None:
            _log.info("request records go on")


def _claimed(folder: Path) -> int:
    """The descriptor of its lock; BlockingIOError when another process lives there, FT4301 or FT4302."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise file_error(error, folder) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:  # a file system without locks: its spools are not adopted
        os.close(descriptor)
        raise file_error(error, folder) from error
    return descriptor


def _remember(path: Path, cursor: Cursor) -> None:
    """Over what was there, in as many octets: a file that is emptied is brought to the disk when it is closed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, b"%010d %012d" % cursor, 0)
    finally:
        os.close(descriptor)


def _cursor_of(folder: Path) -> Cursor:
    """Where its process was; from the start where that cannot be read."""
    try:
        segment, offset = (folder / CURSOR_FILE).read_text().split()
        return Cursor(int(segment), int(offset))
    except (OSError, ValueError):
        return Cursor()


def _coded(error: FabrictoolError) -> str:
    return "; ".join(f"{problem.code} {problem.message}" for problem in error.problems)
