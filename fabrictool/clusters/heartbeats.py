"""Whether a unit gives signs of life, on whichever clocks: a wrong clock never decides it.

A heartbeat carries two stamps, its writer's and the file server's, and there are two clocks to compare them with, the
login node's and ours. It counts as fresh when any pair says so. Otherwise only a second look decides: a beat that
changes is alive, whatever its stamps say, and one that stays the same for `LOOK_AGAIN_S` is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

SILENT_S = 90.0
"""A unit that gave no sign of life for so long is not believed to live on its files alone; six beats of its heart."""
AHEAD_S = 10.0
"""A stamp that is further in the future is of a wrong clock."""
LOOK_AGAIN_S = 50.0
"""Two beats, and the half minute for which a client of NFS may show an old folder (acdirmin)."""

WHOLE_SECONDS = 2.0
"""`date` prints whole ones, and a clock that is right to that is right enough."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What one look, with those before it, says of a heart."""

    verdict: Literal["alive", "silent", "unsure"]
    age_s: float
    """Of the last beat; of one that is not believed by its stamps, as long as we saw no other."""
    skewed: bool = False
    """The clocks or the stamps do not agree with each other, so its age may be wrong."""


ALIVE = Pulse("alive", 0.0)


@dataclass(slots=True)
class _Seen:
    stamps: tuple[float, ...]
    since: float
    changed: bool
    """Another beat was seen before this one."""


class Heartbeats:
    """What one process saw of the hearts of a cluster's units, over all its looks."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def pulse(self, operation: str, stamps: tuple[float, ...], clocks: Sequence[float], at: float) -> Pulse:
        """`stamps` and `clocks` in wall seconds, `at` in our monotonic ones."""
        seen = self._seen.get(operation)
        if seen is None or seen.stamps != stamps:
            seen = self._seen[operation] = _Seen(stamps, at, changed=seen is not None)
        ages = [clock - stamp for clock in clocks for stamp in stamps]
        age = min((max(0.0, age) for age in ages if age >= -AHEAD_S), default=None)
        still = at - seen.since
        skewed = max(clocks) - min(clocks) > AHEAD_S or max(stamps) - min(stamps) > AHEAD_S or age is None
        if age is not None and age <= SILENT_S:
            return Pulse("alive", age)
        if seen.changed and still <= SILENT_S:
            return Pulse("alive", still)
        if still >= LOOK_AGAIN_S:
            return Pulse("silent", max(still, age or 0.0))
        return Pulse("unsure", still if age is None else age, skewed)


def skew_s(theirs: float, before: float, after: float) -> float:
    """How far a clock is ahead of ours that was read between `before` and `after`, less what that may be in error."""
    ahead = theirs - (before + after) / 2
    error = (after - before) / 2 + WHOLE_SECONDS
    return math.copysign(round(abs(ahead)), ahead) if abs(ahead) > error else 0.0
