"""Who has how much of a node's memory, while sizes change one after the other and out of order.

Two views of it (LLM-Mesh, section 6.3). The *budget* counts sizes as they were decided, so that decisions need not wait
for memory that is being freed. What is *tracked* counts the larger of the old and the new size until a change is done:
only what fits there is begun, so memory never runs out. A growth that does not fit yet waits in the station, and every
one gets its turn: all of them fit in the budget, so what they wait for is being freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

AGED_S = 5.0
"""A growth that has waited for so long is overtaken by no younger one."""


@dataclass(slots=True)
class Holding:
    """What a replica has, in octets."""

    granted: int
    """As decided."""
    physical: int = 0
    """When the last change was done."""
    moving_to: int | None = None
    """By the change under way."""
    waits_since: float | None = None
    """A growth, in the station."""

    @property
    def tracked(self) -> int:
        """That may be in use."""
        return max(self.physical, self.moving_to or 0)


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """To be begun now; its end is reported by `MemoryLedger.changed`."""

    replica: int
    before: int
    after: int


class MemoryLedger:
    """One node's; sizes in octets."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.holdings: dict[int, Holding] = {}

    @property
    def budget(self) -> int:
        return sum(holding.granted for holding in list(self.holdings.values()))  # also read by other threads

    @property
    def tracked(self) -> int:
        return sum(holding.tracked for holding in list(self.holdings.values()))

    def fits(self, more: int) -> bool:
        """Whether so much more may be decided."""
        return self.budget + more <= self.capacity

    def granted(self, replica: int) -> int:
        """0 of one that is not here."""
        holding = self.holdings.get(replica)
        return holding.granted if holding else 0

    def is_changing(self, replica: int) -> bool:
        """Whether a change of it is under way or waits."""
        holding = self.holdings.get(replica)
        return holding is not None and (holding.moving_to is not None or holding.granted != holding.physical)

    def is_waiting(self, replica: int) -> bool:
        """Whether its growth is in the station."""
        holding = self.holdings.get(replica)
        return holding is not None and holding.waits_since is not None and holding.moving_to is None

    def grant(self, replica: int, size: int, now: float) -> list[MemoryChange]:
        """Decides on a size; 0: it leaves. The newest decision replaces one that was not begun.

        Raises ValueError where the budget has no room: ask `fits` first.
        """
        if not self.fits(size - self.granted(replica)):
            message = f"{size} octets for replica {replica} are more than the budget has left"
            raise ValueError(message)
        holding = self.holdings.setdefault(replica, Holding(0))
        holding.granted = size
        if size <= holding.physical:
            holding.waits_since = None
        if not size and not holding.physical and holding.moving_to is None:  # nothing of it was ever begun
            del self.holdings[replica]
        return list(self._begin(now))

    def changed(self, replica: int, now: float) -> list[MemoryChange]:
        """The change under way is done; what may be begun now."""
        holding = self.holdings[replica]
        if holding.moving_to is None:
            message = f"no change of replica {replica} is under way"
            raise ValueError(message)
        holding.physical, holding.moving_to = holding.moving_to, None
        if not holding.granted and not holding.physical:
            del self.holdings[replica]
        return list(self._begin(now))

    def _begin(self, now: float) -> Iterator[MemoryChange]:
        resting = [(key, h) for key, h in self.holdings.items() if h.moving_to is None]
        for key, holding in resting:
            if holding.granted < holding.physical:
                yield _change(key, holding)
            elif holding.granted > holding.physical and holding.waits_since is None:
                holding.waits_since = now
        waiting = [(h.waits_since, key, h) for key, h in resting if h.waits_since is not None]
        for since, key, holding in sorted(waiting, key=lambda entry: entry[:2]):
            if self.tracked + holding.granted - holding.physical <= self.capacity:
                yield _change(key, holding)
            elif now - since >= AGED_S:
                return


def _change(key: int, holding: Holding) -> MemoryChange:
    holding.moving_to, holding.waits_since = holding.granted, None
    return MemoryChange(key, holding.physical, holding.granted)
