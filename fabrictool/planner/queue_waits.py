"""How long a job waits in its queue: one order of belief for successors, schedules and clients that wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CAUTIOUS = 0.95
"""Share of our last jobs that waited no longer than is reckoned with, where being late costs requests."""


def queue_wait_s(stated: float | None, measured: Sequence[float], usual: float, share: float = CAUTIOUS) -> float:
    """Seconds: what the inventory states; else what `share` of our last jobs did not exceed; else what is `usual`.

    The operator may know what no job of ours has met yet, such as a reservation or a queue that is new.
    """
    return percentile(measured, share, usual) if stated is None else stated


def percentile(values: Sequence[float], share: float, default: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else default
