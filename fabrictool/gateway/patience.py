"""How long a replica may take to its first octet, learned from what its model's answers took before.

A stopped engine takes requests and says nothing. A fixed limit that is safe for a model which thinks for minutes would
let everybody else wait for minutes, too; so each model has its own, for streams and for whole answers (which begin when
they end).
"""

from __future__ import annotations

from collections import deque
from typing import Final

KEPT: Final = 512
LEARNED: Final = 20
"""Answers from which on a model counts as known."""
TIMES: Final = 4.0
"""The longest of the last answers, so many times over, may be waited for."""
LEAST_S: Final = 30.0
"""A queue that fills up must not look like a death."""
UNKNOWN_STREAM_S: Final = 120.0
IDLE_UPSTREAM_S: Final = 600.0
"""A replica may think this long between two octets (paper 001's reasoning requests have a P95 of 174 s)."""


class Patience:
    """Of one gateway, in seconds."""

    def __init__(self) -> None:
        self._waits: dict[tuple[str, bool], deque[float]] = {}

    def learn(self, model: str, *, stream: bool, seconds: float) -> None:
        """An answer began after so long."""
        waits = self._waits.get((model, stream))
        if waits is None:
            waits = self._waits[model, stream] = deque(maxlen=KEPT)
        waits.append(seconds)

    def limit(self, model: str, *, stream: bool) -> float:
        """Of the wait for the first octet."""
        waits = self._waits.get((model, stream), ())
        if len(waits) < LEARNED:
            return UNKNOWN_STREAM_S if stream else IDLE_UPSTREAM_S
        return min(IDLE_UPSTREAM_S, max(LEAST_S, TIMES * max(waits)))
