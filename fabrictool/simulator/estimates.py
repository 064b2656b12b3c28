"""What a run shows of a share of requests and of a percentile, with what chance leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.simulator.slo import Criterion

SURE = 1.2
"""Of a percentile's 95 % interval, its upper end over its lower one: what is narrower needs no more requests."""


@dataclass(frozen=True, slots=True)
class ShareEstimate:
    """How large the share is, with its 95 % interval."""

    criterion: Criterion
    share: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        """Whether the whole interval keeps what is wanted: the share alone may be luck.

        Where all requests have to, no interval can say it: then all that were played have to.
        """
        return self.low >= self.criterion.share or self.share >= self.criterion.share >= 1.0

    @property
    def missed(self) -> bool:
        """Whether nothing of the interval keeps what is wanted; where all requests have to, one is enough."""
        return self.high < self.criterion.share or self.share < 1.0 <= self.criterion.share

    @property
    def clear(self) -> bool:
        """Whether more requests would change nothing: the interval lies on one side of what is wanted."""
        return self.low >= self.criterion.share or self.missed


@dataclass(frozen=True, slots=True)
class Percentile:
    """The 95th, seconds, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        return self.high <= SURE * self.low
