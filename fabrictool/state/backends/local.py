"""The state in a folder of this machine: the default.

The lease is a lock of the operating system, which ends with its process, however that ends; who holds it and what for
stands in the locked file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.domain.state import Lease
from fabrictool.state.backends import document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.domain.state import State

KEPT = 20
"""Versions of the state that are kept."""
PATIENCE_S = 10.0
"""For another writer; a write takes milliseconds."""
LOOKS, LOOK_S = 3, 0.03
"""Whoever asks for the holder has the lock for an instant."""


class LocalStore:
    """``state.json``, ``state-history/SERIAL.json`` and ``lease`` in `folder`."""

    def __init__(self, folder: Path, *, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._ours: tuple[Lease, int] | None = None
        """The lease and its locked file, while it is held."""

    @property
    def place(self) -> str:
        return str(self._file)

    @property
    def _file(self) -> Path:
        return self._folder / "state.json"

    @property
    def _lease_file(self) -> Path:
        return self._folder / "lease"

    # -- state ------------------------------------------------------------------------------------------------

    def read(self) -> State:
        return document.state_of(self.raw(), self.place)

    def raw(self) -> bytes | None:
        try:
            return self._file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise file_error(error, self._file) from error

    def write(self, new: State, *, read: State) -> State:
        """Compare and set, one process at a time."""
        with self._one_at_a_time():
            self._check_lease()
            document.check_unmoved(self.raw(), read, self.place)
            written = document.successor(new, read)
            self._put(written)
            return written

    def replace(self, new: State) -> State:
        with self._one_at_a_time():
            self._check_lease()
            self._put(new)
            return new

    def history(self) -> list[document.Version]:
        versions = []
        for file in self._versions()[::-1]:
            with contextlib.suppress(FabrictoolError, OSError):
                state = document.decode_state(file.read_bytes(), str(file))
                versions.append(document.Version(at=file.stat().st_mtime, state=state))
        return versions

    def _put(self, state: State) -> None:
        """The version first: if there is no room for it, the state stays as it was."""
        data = document.encode_state(state)
        write_atomic(self._folder / "state-history" / f"{state.serial}.json", data, mode=0o600)
        write_atomic(self._file, data, mode=0o600)
        for file in self._versions()[:-KEPT]:
            with contextlib.suppress(OSError):
                file.unlink()

    def _versions(self) -> list[Path]:
        """Files of former states, oldest first."""
        files = [file for file in (self._folder / "state-history").glob("*.json") if file.stem.isdecimal()]
        return sorted(files, key=lambda file: int(file.stem))

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        file = self._folder / "state.lock"
        descriptor = self._open(file)
        try:
            if not locked_within(descriptor, PATIENCE_S):
                hint = "a command that was stopped with Ctrl-Z may hold it"
                message = "another process holds the state file and does not release it"
                raise FabrictoolError.of("FT4202", message, file=str(file), hint=hint, transient=True)
            yield
        finally:
            os.close(descriptor)

    # -- lease ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, purpose: str, *, now: float) -> Iterator[Lease]:
        """Hold the lock of the lease file."""
        descriptor = self._locked(now)
        try:
            lease = document.new_lease(purpose, now=now)
            with contextlib.suppress(OSError):  # on a full disk the lock still holds, without a name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(lease), 0)
            self._ours = (lease, descriptor)
            yield lease
        finally:
            self._ours = None
            os.close(descriptor)

    def holder(self) -> Lease | None:
        """Nobody when nobody holds the lock, whatever the file says."""
        try:
            descriptor = os.open(self._lease_file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise file_error(error, self._lease_file) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _content(descriptor) or document.UNKNOWN_HOLDER
        finally:
            os.close(descriptor)
        return None

    def unlock(self, lease_id: str) -> Lease:
        """Take the file away: its holder keeps the lock of a file that no longer counts."""
        lease = self.holder()
        if lease is None or lease.id != lease_id:
            raise document.no_such_lease(lease_id, lease, str(self._lease_file))
        try:
            self._lease_file.unlink(missing_ok=True)
        except OSError as error:
            raise file_error(error, self._lease_file) from error
        return lease

    def _locked(self, now: float) -> int:
        """A descriptor of the lease file that counts, locked."""
        tries = LOOKS
        while True:
            descriptor = self._open(self._lease_file)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                other = _content(descriptor)
                os.close(descriptor)
                tries -= 1
                if tries:
                    time.sleep(LOOK_S)
                    continue
                raise document.held(other, str(self._lease_file), now=now) from error
            if self._counts(descriptor):
                return descriptor
            os.close(descriptor)  # it was taken away between opening and locking

    def _check_lease(self) -> None:
        if self._ours is not None and not self._counts(self._ours[1]):
            raise document.lost(self._ours[0], "it was unlocked by hand", str(self._lease_file))

    def _counts(self, descriptor: int) -> bool:
        try:
            there, ours = self._lease_file.stat(), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise file_error(error, self._lease_file) from error
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _open(self, file: Path) -> int:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise file_error(error, file) from error


def locked_within(descriptor: int, seconds: float) -> bool:
    """Take the lock of an open file; False when somebody else keeps it for so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_S)
        else:
            return True


def _content(descriptor: int) -> Lease | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Lease)
    except (msgspec.DecodeError, OSError):
        return None
