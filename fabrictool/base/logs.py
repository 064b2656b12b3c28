"""Log lines on stderr: one line each, UTC, level, logger, message."""

from __future__ import annotations

import logging
import sys
import time


def configure_logging(level: str) -> None:
    """Send the package's log to stderr at `level`; called once by each process's entry point."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("fabrictool")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
