"""How long a job may run: never into a maintenance window, and not all until the same minute."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.domain.observed import Away, Queue

STAGGER = 0.15
"""Ends are spread over this share of the walltime: successors of many replicas then do not queue at once. More spreads
better and wastes more of each allocation."""
STAGGERED_FROM_S = 1800.0
"""Shorter allocations are not cut."""
WINDOW_MARGIN_S = 60.0
"""Between our end and the window's begin."""
SHORTEST_S = 600.0
"""A window that leaves less than this is waited for instead."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is asked of the scheduler."""

    walltime_s: float | None
    begin_in_s: float = 0.0
    window: str = ""
    """Name of the reservation that shortened or delayed it."""


def allocation(
    operation: str, partition: str, nominal_s: float | None, queue: Queue | None, away: Iterable[Away], now: float
) -> Allocation:
    """The walltime for one unit; `nominal_s` is the inventory's, None for no limit of its own."""
    longest = queue.longest_s if queue is not None else None
    limits = [limit for limit in (nominal_s, longest) if limit is not None]
    walltime = min(limits) if limits else None
    if walltime is not None and walltime >= STAGGERED_FROM_S:
        walltime *= 1.0 - STAGGER * _share(operation)
    begin, window = now, ""
    here = [a for a in away if not a.nodes and (not a.partitions or partition in a.partitions)]
    for reservation in sorted(here, key=lambda a: a.begin):
        room = reservation.begin - WINDOW_MARGIN_S - begin
        if reservation.end <= begin or (walltime is not None and room >= walltime):
            continue
        window = reservation.name
        if room >= min(SHORTEST_S, walltime or SHORTEST_S):
            return Allocation(room, begin - now, window)
        if reservation.enforced:
            break  # the scheduler holds it until after the window, or starts it at once when that is called off
        begin = reservation.end
    return Allocation(walltime, begin - now, window)


def usual_lengths(walltime_s: float, number: int) -> list[float]:
    """Seconds of so many allocations that begin together: ends spread evenly, as those of many are."""
    cut = STAGGER if STAGGERED_FROM_S <= walltime_s < math.inf else 0.0
    return (
        [walltime_s * (1.0 - cut * (at + 0.5) / number) for at in reversed(range(number))]
        if cut
        else [walltime_s] * number
    )


def _share(operation: str) -> float:
    """In [0, 1), the same for the same operation."""
    return int.from_bytes(hashlib.sha256(operation.encode()).digest()[:4], "big") / 2**32
