"""Log lines on stderr: one line each, UTC, level, logger, message."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections import deque
from typing import TextIO

from fabrictool.base.files import file_error
from fabrictool.base.text import visible


class _VisibleLines(logging.Formatter):
    """What others wrote is in the lines, too."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


KEPT = 20
"""Lost lines of warnings that are written later: the rest of a log tells what was usual."""


class _Lines(logging.StreamHandler[TextIO]):
    """Writes whole lines. Of those that the disk has no room for, the warnings and the number are written when it has.

    Unbuffered: Python's own stream would keep what it could not write, and fail again with each line until it fits.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._raw = getattr(getattr(stream, "buffer", None), "raw", None)
        self._lost = 0
        self._kept: deque[str] = deque(maxlen=KEPT)
        self._why = ""
        self._cut = False
        """Whether a line ends in its middle."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - whatever is wrong with a line, its caller must not suffer
            self.handleError(record)
            return
        text = f"{line}\n"
        if self._lost:
            head = f"{line.partition(': ')[0]}: {self._why}: {self._lost} lines are missing here, but for warnings\n"
            text = head + "".join(self._kept) + text
        try:
            self._write("\n" * self._cut + text)
        except OSError as error:
            problem = file_error(error, "the log").problems[0]
            self._lost, self._why = self._lost + 1, f"{problem.code} {problem.message}"
            if record.levelno >= logging.WARNING:
                self._kept.append(f"{line}\n")
        else:
            self._lost, self._cut = 0, False
            self._kept.clear()

    def _line(self, record: logging.LogRecord) -> str:
        """Of one whose words and arguments do not fit together, what there is of both."""
        try:
            return self.format(record)
        except (TypeError, ValueError, KeyError) as error:
            words = f"{record.msg!s} {record.args!r} (a defect of this log line: {error})"
            return self.format(logging.makeLogRecord({**record.__dict__, "msg": words, "args": None}))

    def _write(self, text: str) -> None:
        if self._raw is None:  # a test reads along
            self.stream.write(text)
            self.stream.flush()
            return
        left = memoryview(text.encode(errors="replace"))
        while left:
            written = self._raw.write(left)
            if written is None:  # whoever else has this terminal or pipe made it so that it does not wait
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            self._cut = self._cut or 0 < written < len(left)
            left = left[written:]


def configure_logging(level: str) -> None:
    """Send the package's log to stderr at `level`; called once by each process's entry point."""
    handler = _Lines(sys.stderr)
    formatter = _VisibleLines("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("fabrictool")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
