"""How many requests may be tried anew after a slow failure: a share of the latest ones, over all of a gateway. Pure.

A request that failed slowly has cost an engine its time, and costs another one the same. Where many do, the fabric has
too much to do or is ill, and second attempts would double what it has to do just then. What failed at once cost nobody
anything, and is no matter of the budget.
"""

from __future__ import annotations

from math import exp
from typing import Final

RETRIED: Final = 0.1
"""Of the latest requests. More would be a load in an outage; less would give up those of one ill replica in ten."""
ALWAYS: Final = 10.0
"""Second attempts in the same time that are allowed on top, so that a gateway with few requests has some, too."""
RECENT_S: Final = 60.0
"""Requests count for so long, by fading out: longer than a hung engine is waited for (`gateway.patience`), so that
those which it holds are still counted when they fail, all in the same second."""


class RetryBudget:
    """Of one gateway. All times in monotonic seconds."""

    __slots__ = ("_counted", "_looked", "_recent", "_retried", "begun")

    def __init__(self) -> None:
        self.begun = 0
        """Requests since the start. Counted by whoever begins one, for that is all that it may cost it."""
        self._counted = 0
        self._recent = 0.0
        self._retried = 0.0
        self._looked = 0.0

    def tick(self, now: float) -> None:
        """Called each second: what came since the last look is recent, what came before fades."""
        left = exp(min(0.0, self._looked - now) / RECENT_S)
        self._recent = self._recent * left + (self.begun - self._counted)
        self._retried *= left
        self._counted, self._looked = self.begun, now

    @property
    def left(self) -> float:
        """Second attempts that are allowed, as of the last look."""
        return ALWAYS + RETRIED * self._recent - self._retried

    def allows(self, now: float) -> bool:
        """Whether a request that failed slowly may be tried anew."""
        self.tick(now)
        return self.left >= 1.0

    def spend(self, now: float) -> None:
        """A request is tried anew after it failed slowly."""
        self.tick(now)
        self._retried += 1.0
