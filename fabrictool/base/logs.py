"""Log lines on stderr: one line each, UTC, level, logger, message."""

from __future__ import annotations

import logging
import sys
import time

from fabrictool.base.text import visible


class _VisibleLines(logging.Formatter):
    """What others wrote is in the lines, too."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def configure_logging(level: str) -> None:
    """Send the package's log to stderr at `level`; called once by each process's entry point."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = _VisibleLines("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("fabrictool")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
