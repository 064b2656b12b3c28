"""How long a replica may take to its first octet, learned from what its model's answers took before.

A stopped engine takes requests and says nothing. A fixed limit that is safe for a model which thinks for minutes would
let everybody else wait for minutes, too; so each model has its own, for streams and for the whole answers of each path
(which begin when they end). Learned is what a replica took that answered, from when it was asked: what an attempt that
failed took before is what the limit is there to cut, and would raise it with each failure.
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
LEAST_WHOLE_S: Final = 120.0
"""A whole answer takes as long as it is long: that the last ones were short says little of the next one."""
UNKNOWN_STREAM_S: Final = 120.0
IDLE_UPSTREAM_S: Final = 600.0
"""A replica may think this long between two octets (paper 001's reasoning requests have a P95 of 174 s)."""
STREAM: Final = "stream"
"""The form of all streams; that of whole answers is their path, for an embedding says nothing of a chat."""


class Patience:
    """Of one gateway, in seconds. `form`: `STREAM`, or a path without its query."""

    def __init__(self) -> None:
        self._waits: dict[str, dict[str, deque[float]]] = {}

    def learn(self, model: str, form: str, seconds: float) -> None:
        """An answer began so long after its replica was asked."""
        forms = self._waits.get(model)
        if forms is None:
            forms = self._waits[model] = {}
        waits = forms.get(form)
        if waits is None:
            waits = forms[form] = deque(maxlen=KEPT)
        waits.append(seconds)

    def limit(self, model: str, form: str) -> float:
        """Of the wait for the first octet."""
        waits = self._waits.get(model, {}).get(form, ())
        if len(waits) < LEARNED:
            return UNKNOWN_STREAM_S if form == STREAM else IDLE_UPSTREAM_S
        return min(IDLE_UPSTREAM_S, max(LEAST_S if form == STREAM else LEAST_WHOLE_S, TIMES * max(waits)))
