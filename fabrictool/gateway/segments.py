"""Lines that outlive their process: appended to a mapped file, so that writing one is a copy in memory and no call of
the operating system. What was appended is the kernel's at once and survives ``kill -9``; a power cut may take what is
younger than the last `Segments.sync`.

A segment is a file of a fixed size, allocated before it is used: on a full disk there is no next segment, and never
one whose pages cannot be written. Its pages are made ready for writing, too: the first write to one that is not, or
that was brought to the disk since, may wait for the file system's journal, and the event loop with it. Behind its last
line it holds zeros; what follows the last line's end is torn.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

SEGMENT_OCTETS: Final = 1024 * 1024
"""Two of them are in memory: the one that is written, and the next."""
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of madvise(2). MAP_POPULATE only reads the pages of a shared mapping."""
_NAME: Final = re.compile(r"([0-9]{8})\.log")


class Cursor(NamedTuple):
    """Up to where a journal was read."""

    segment: int = 0
    offset: int = 0


class Segments:
    """The segments of one folder, with one writer. `append` is for one thread; the other methods may run in another."""

    def __init__(self, folder: Path, *, segment_octets: int = SEGMENT_OCTETS, most_octets: int) -> None:
        """`folder` is there, and has no segments yet."""
        self._folder = folder
        self._octets = segment_octets
        self._most_segments = max(2, most_octets // segment_octets)
        self._current: tuple[mmap.mmap, int] | None = None
        self._next: tuple[mmap.mmap, int] | None = None
        self._number = 0
        self._end = 0
        self.dirty = False
        """Whether anything was appended since the last `sync`."""

    def behind(self, cursor: Cursor) -> int:
        """Octets at most that were appended after it."""
        return (self._number - max(1, cursor.segment)) * self._octets + self._end - cursor.offset if self._number else 0

    @property
    def end(self) -> Cursor:
        """Of what was appended."""
        return Cursor(self._number, self._end)

    def append(self, line: bytes) -> bool:
        """One line, with its newline. False where there is no room until `prepare` was called."""
        end = self._end + len(line)
        if self._current is None or end > len(self._current[0]):
            if self._next is None or len(line) > self._octets:
                return False
            former, self._current, self._next = self._current, self._next, None
            if former is not None:
                _close(former)
            self._number += 1
            self._end, end = 0, len(line)
        self._current[0][self._end : end] = line
        self._end = end
        self.dirty = True
        return True

    @property
    def wants_segment(self) -> bool:
        return self._next is None

    def prepare(self) -> bool:
        """Allocate the next segment; False where the journal is as large as may be. Raises OSError on a full disk."""
        if self._next is not None:
            return True
        if len(segments_of(self._folder)) >= self._most_segments:
            return False
        room = os.statvfs(self._folder)
        if room.f_bavail * room.f_frsize < 2 * self._octets:
            # Some file systems (tmpfs) take all that is left before they fail: nobody else could write meanwhile. And
            # another process of the gateway may be about to do the same.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        path = self._path(self._number + 1)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._octets)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._next = self._map(self._number + 1)
        return True

    def sync(self) -> None:
        """Wait until the disk has it; raises OSError."""
        current, self.dirty = self._current, False
        if current is not None:
            descriptor = os.dup(current[1])  # the writer may go on to the next segment meanwhile
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def drop_before(self, segment: int) -> None:
        """Remove what was read; never the segment that is written."""
        for number in segments_of(self._folder):
            if number < min(segment, self._number):
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        for opened in (self._current, self._next):
            if opened is not None:
                _close(opened)
        if self._next is not None:
            self._path(self._number + 1).unlink(missing_ok=True)
        self._current = self._next = None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.log"

    def _map(self, number: int) -> tuple[mmap.mmap, int]:
        descriptor = os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(descriptor, 0)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            os.close(descriptor)
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        with contextlib.suppress(OSError):  # Linux before 5.14
            mapped.madvise(_POPULATE_WRITE)
        return mapped, descriptor


def segments_of(folder: Path) -> list[int]:
    """Their numbers, ascending; raises OSError."""
    return sorted(int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))  # noqa: PTH208


def read_lines(folder: Path, cursor: Cursor, most_octets: int) -> tuple[bytes, Cursor]:
    """Whole lines from `cursor` on, all of one segment, and where the next ones begin; raises OSError.

    Its process may be writing: a segment is left only when the next one was seen to have lines before this one was
    read to its end.
    """
    numbers = [number for number in segments_of(folder) if number >= cursor.segment]
    following = dict(pairwise(numbers))
    for number in numbers:
        later = following.get(number)
        offset = cursor.offset if number == cursor.segment else 0
        over = later is not None and _read(folder, later, 0, 1)[:1] not in (b"", b"\0")
        data = _read(folder, number, offset, most_octets)
        if whole := whole_octets(data):
            return data[:whole], Cursor(number, offset + whole)
        if not over:
            return b"", Cursor(number, offset)
    return b"", cursor


def _read(folder: Path, number: int, offset: int, octets: int) -> bytes:
    with (folder / f"{number:08}.log").open("rb") as file:
        file.seek(offset)
        return file.read(octets)


def whole_octets(data: bytes) -> int:
    """Up to the end of the last whole line: zeros follow it, or a line that was torn."""
    written = data.find(b"\0")
    return data.rfind(b"\n", 0, len(data) if written < 0 else written) + 1


def _close(opened: tuple[mmap.mmap, int]) -> None:
    opened[0].close()
    os.close(opened[1])
