"""Time as an argument: pure rooms receive a `Clock`, edges pass the system's, tests pass a manual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: monotonic for every timeout, wall for display and certificate validity."""

    def monotonic(self) -> float:
        """Seconds on a clock that never steps; only differences mean anything."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)  # not wrapped: a gateway looks at it ten times a request
    wall = staticmethod(time.time)


def duration_text(seconds: float) -> str:
    """``42 s``, ``3 m 10 s``, ``23 h 10 m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} m"


def minute_text(at: float) -> str:
    """``11-22 14:05Z``, of wall seconds."""
    return time.strftime("%m-%d %H:%MZ", time.gmtime(at))
