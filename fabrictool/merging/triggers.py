"""When all replicas should be one group: as long as there is little to do.

The paper gives no thresholds; these are ours. Rates are shares of what the whole group can take; a mode is kept for
some seconds, or replicas would merge and split for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AVERAGED_S = 4.0
"""Over which arrivals are counted; older ones fade."""
SPLIT_SHARE = 0.6
MERGE_SHARE = 0.45
MOST_QUEUED = 8
DWELL_S = 4.0


@dataclass(slots=True)
class LoadTrigger:
    """Whether replicas should be merged, by what arrives."""

    group_rate: float
    """Requests/s that one group of all can take."""
    most_in_flight: float
    """Requests with which it may still form: half of all replicas' places."""
    merged: bool = True
    since: float = -math.inf
    forced: bool | None = None
    """As somebody wants it, whatever the load."""
    _rate: float = 0.0
    _at: float = 0.0

    def arrived(self, now: float) -> None:
        self._rate = self.rate(now) + 1.0 / AVERAGED_S
        self._at = now

    def rate(self, now: float) -> float:
        """Requests/s of the last seconds, of which older ones count less."""
        return self._rate * math.exp(-(now - self._at) / AVERAGED_S)

    def decide(self, now: float, queued: int, in_flight: int) -> bool:
        """Whether they should be merged now."""
        if self.forced is not None:
            self.merged = self.forced
            return self.merged
        if now - self.since < DWELL_S:
            return self.merged
        rate = self.rate(now)
        if self.merged:
            other = rate > SPLIT_SHARE * self.group_rate or queued > MOST_QUEUED
        else:
            other = rate < MERGE_SHARE * self.group_rate and in_flight < self.most_in_flight
        if other:
            self.merged, self.since = not self.merged, now
        return self.merged
