"""Who waits when all replicas are full, in which order, and who is told at once that it is of no use. Pure.

An engine's own queue is first come, first served, and without an end: at four times what can be served, every answer
comes too late, and none is useful. So no more than its slots are sent to a replica, and the rest waits here: the more
important class first, in a class the earliest deadline. Who cannot be served in time is refused at once, with a time to
try again, and what is never begun costs an engine nothing: the work that is done is work that somebody waits for.

Batch uses what the others leave: it gets no slot while somebody else waits, and never the last tenth of a replica's.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

Priority = Literal["interactive", "standard", "batch"]
PRIORITIES: Final[tuple[Priority, ...]] = ("interactive", "standard", "batch")
"""The most important first; elsewhere a class is its index here."""
INTERACTIVE, STANDARD, BATCH = range(3)
PATIENCE_S = (30.0, 120.0, 600.0)
"""How long a request of a class waits at most, if it does not say."""
LIMIT = 1024
"""Requests of one model that may wait."""
OVER: Final = 0.1
"""Of a replica's slots: so many more are sent, so that an engine whose step ends has the next one there."""
RESERVE: Final = 0.1
"""Of a replica's slots: what batch never gets, so that somebody in a hurry finds one."""
LEARNED: Final = 8
"""Starts from which on the pace of a queue is known."""
NEWS: Final = 0.1
SURE: Final = 1.25
"""Who is expected to wait nearly as long as he may is refused: an expectation is too short half of the time."""
RETRY_S = (1.0, 60.0)
_LAST: Final = sys.maxsize


class Slotted(Protocol):
    """A replica, as admission sees it."""

    @property
    def load(self) -> float: ...

    @property
    def slots(self) -> int:
        """Requests that it works on at the same time; 0: nobody knows, and it is never full."""


S = TypeVar("S", bound=Slotted)
T = TypeVar("T")


def usable_slots(slots: int, priority: int) -> int:
    """Of a replica with so many slots, at least one: how many requests may be in it when another of that class is
    sent.
    """
    if priority == BATCH:
        return max(1, slots - math.ceil(RESERVE * slots))
    return slots + math.ceil(OVER * slots)


def with_room(candidates: Sequence[S], priority: int) -> Sequence[S]:
    """Those that can take a request of that class now."""
    if priority == BATCH:
        return [c for c in candidates if not c.slots or c.load < usable_slots(c.slots, priority)]
    # The usual answer first: this is asked for each request.
    return [
        c for c in candidates if not c.slots or (load := c.load) < c.slots or load < usable_slots(c.slots, priority)
    ]


class Waiter(Generic[T]):
    """Somebody with a place in a queue."""

    def __init__(self, item: T, priority: int, deadline: float, kind: Hashable) -> None:
        """Those of a `kind` may go to the same replicas: where there is no room for one there is none for the next."""
        self.item = item
        self.priority = priority
        self.deadline = deadline
        self.kind = kind
        self.number = 0

    @property
    def order(self) -> tuple[float, int]:
        return self.deadline, self.number


@dataclass(slots=True)
class _Pace:
    """How fast those of a class are sent on while some wait; the more important ones, who come first, slow it."""

    gap_s: float = 0.0
    """Between two starts, a moving mean."""
    starts: int = 0
    started_at: float | None = None
    """The last start; None: nobody has waited since."""

    def start(self, now: float, *, backlog: bool) -> None:
        if self.started_at is not None:
            self.starts += 1
            self.gap_s += max(NEWS, 1.0 / self.starts) * (now - self.started_at - self.gap_s)
        self.started_at = now if backlog else None

    def expected_s(self, place: int, now: float) -> float:
        """Until the start of the one at that place, from 1; 0 where nothing is known."""
        if self.starts < LEARNED:
            return 0.0
        since = 0.0 if self.started_at is None else now - self.started_at
        return place * max(self.gap_s, since)


@dataclass(frozen=True, slots=True)
class Busy:
    """Why somebody may not wait."""

    full: bool
    """Otherwise: he would wait for nothing."""
    retry_after_s: float


class AdmissionQueue(Generic[T]):
    """Of one model. Times in monotonic seconds."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._classes: tuple[list[tuple[float, int, Waiter[T]]], ...] = ([], [], [])
        self._number = 0
        self._paces = (_Pace(), _Pace(), _Pace())

    def __len__(self) -> int:
        return sum(map(len, self._classes))

    def waiting(self, priority: int) -> int:
        return len(self._classes[priority])

    def offer(self, waiter: Waiter[T], now: float) -> tuple[Busy | None, Waiter[T] | None]:
        """Let it wait. Returns why not, and who had to leave for it: the last of a less important class."""
        before = bisect(self._classes[waiter.priority], (waiter.deadline, _LAST), key=_key)
        expected = self._paces[waiter.priority].expected_s(before + 1, now)
        # Also where nothing is known: who does not want to wait would have the earliest deadline, and the next slot.
        if waiter.deadline <= now or now + SURE * expected > waiter.deadline:
            return Busy(full=False, retry_after_s=_again(expected)), None
        gone = None
        if len(self) >= self._limit:
            last = next((entries[-1][2] for entries in reversed(self._classes) if entries), None)
            if last is None or last.priority <= waiter.priority:
                return Busy(full=True, retry_after_s=_again(expected)), None
            self.remove(last)
            gone = last
        self._number += 1
        waiter.number = self._number
        insort(self._classes[waiter.priority], (waiter.deadline, waiter.number, waiter), key=_key)
        return None, gone

    def remove(self, waiter: Waiter[T]) -> bool:
        """It waits no longer; returns whether it did."""
        entries = self._classes[waiter.priority]
        at = bisect(entries, waiter.order, key=_key) - 1
        waited = at >= 0 and entries[at][2] is waiter
        if waited:
            del entries[at]
        if not entries:
            self._paces[waiter.priority].started_at = None
        return waited

    def starting(self, has_room: Callable[[Waiter[T]], bool], now: float) -> Iterator[Waiter[T]]:
        """Those that can be sent, one by one: each is to be sent before the next is asked for."""
        without_room: set[Hashable] = set()
        for entries in self._classes:
            for _, _, waiter in list(entries):
                if waiter.kind in without_room:
                    continue
                if not has_room(waiter):
                    without_room.add(waiter.kind)
                    continue
                if self.remove(waiter):  # it may have ended by what its predecessor did
                    self._paces[waiter.priority].start(now, backlog=bool(entries))
                    yield waiter

    def late(self, now: float) -> list[Waiter[T]]:
        """Those whose deadline has passed; they wait no longer."""
        gone = [entry[2] for entries in self._classes for entry in entries[: bisect(entries, (now, _LAST), key=_key)]]
        for waiter in gone:
            self.remove(waiter)
        return gone

    def retry_after_s(self, priority: int, now: float) -> float:
        """For one of that class who is refused now."""
        return _again(self._paces[priority].expected_s(len(self._classes[priority]) + 1, now))


def _key(entry: tuple[float, int, Waiter[T]]) -> tuple[float, int]:
    return entry[0], entry[1]


def _again(seconds: float) -> float:
    return float(math.ceil(min(max(seconds, RETRY_S[0]), RETRY_S[1])))
