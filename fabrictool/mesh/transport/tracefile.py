"""Where the lines of a trace go: a file of the run folder that stops growing at its size."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING

from fabrictool.base.files import file_error

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("fabrictool.mesh")


class TraceFile:
    """Appends lines; a full disk ends the trace and nothing else."""

    def __init__(self, path: Path, most_octets: int) -> None:
        self._left = most_octets
        self._path = path
        try:  # each run has a trace of its own: a member's state begins empty
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            self._end(_coded(error, path))

    def write(self, line: bytes) -> None:
        if self._left <= 0:
            return
        self._left -= len(line) + 1
        if self._left <= 0:
            self._end("it has reached its size")
            return
        try:
            _write_whole(self._descriptor, line + b"\n")
        except OSError as error:
            self._end(_coded(error, self._path))

    def _end(self, why: str) -> None:
        self._left = 0
        _log.warning("the trace of the mesh ends here: %s", why)


def _write_whole(descriptor: int, line: bytes) -> None:
    """Or nothing of it: what replays a trace reads whole lines."""
    written = os.write(descriptor, line)
    if written < len(line):
        os.ftruncate(descriptor, os.lseek(descriptor, -written, os.SEEK_CUR))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _coded(error: OSError, path: Path) -> str:
    problem = file_error(error, path).problems[0]
    return f"{problem.code} {problem.message}"
