"""Where the lines of a trace go: a file of the run folder that stops growing at its size."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("fabrictool.mesh")


class TraceFile:
    """Appends lines; a full disk ends the trace and nothing else."""

    def __init__(self, path: Path, most_octets: int) -> None:
        self._left = most_octets
        try:  # each run has a trace of its own: a member's state begins empty
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._end(f"cannot be written: {error}")

    def write(self, line: bytes) -> None:
        if self._left <= 0:
            return
        self._left -= len(line) + 1
        if self._left <= 0:
            self._end("has reached its size")
            return
        try:
            os.write(self._descriptor, line + b"\n")
        except OSError as error:
            self._end(f"cannot be written: {error}")

    def _end(self, why: str) -> None:
        self._left = 0
        _log.warning("the trace of the mesh ends here: it %s", why)
