"""Requests that wait in the gateway while all replicas that may serve them are full (`routing.admission`).

While none is full this is a comparison for each candidate: nothing is awaited, and no task or queue is made. Who waits
is sent on by the end of another request; a tick every second looks after deadlines, and after room that others made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from fabrictool.routing.admission import LIMIT, PRIORITIES, STANDARD, AdmissionQueue, Busy, Waiter, with_room

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.gateway.directory import RoutingTarget

PRIORITY_HEADER: Final = "x-fabric-priority"
MAX_WAIT_HEADER: Final = "x-fabric-max-wait"
LONGEST_WAIT_S: Final = 3600


class Admitted(Protocol):
    """A request that may have to wait."""

    @property
    def waiter(self) -> Waiter[Admitted]:
        """With its class and deadline; the same each time."""

    @property
    def model(self) -> str: ...

    @property
    def priority(self) -> int: ...

    def able(self) -> Sequence[RoutingTarget]:
        """Who could serve it now; empty: nobody, and it is of no use to wait."""

    def admitted(self) -> None:
        """It is its turn."""

    def refused(self, busy: Busy) -> None:
        """It waits no longer."""


class Admission:
    """A gateway's queues, by model."""

    def __init__(self) -> None:
        self._queues: dict[str, AdmissionQueue[Admitted]] = {}
        """By model; those in which somebody waits."""
        self._kept: dict[str, AdmissionQueue[Admitted]] = {}
        """All that there were: they know their pace."""
        self._pumping = False

    def waiting(self) -> dict[str, int]:
        """Requests that wait, by class."""
        return {
            name: sum(queue.waiting(number) for queue in self._queues.values())
            for number, name in enumerate(PRIORITIES)
        }

    @property
    def queued(self) -> frozenset[str]:
        """Models for which requests wait."""
        return frozenset(self._queues)

    def enter(self, request: Admitted, able: Sequence[RoutingTarget], now: float) -> Sequence[RoutingTarget]:
        """Those of `able` that have room for it; none: it waits, or was refused."""
        model = request.model
        free = self.free(model, request.priority, able)
        if free:
            return free
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = self._kept.setdefault(model, AdmissionQueue(LIMIT))
        busy, gone = queue.offer(request.waiter, now)
        if gone is not None:
            gone.item.refused(Busy(full=True, retry_after_s=queue.retry_after_s(gone.priority, now)))
        if busy is not None:
            request.refused(busy)
            self._forget_empty()
        else:
            self.pump(now)
        return ()

    def free(self, model: str, priority: int, able: Sequence[RoutingTarget]) -> Sequence[RoutingTarget]:
        """Those of `able` that have room for a request of that class; none where others wait for the model."""
        return () if model in self._queues else with_room(able, priority)

    def is_first(self, model: str, priority: int) -> bool:
        """Whether nobody waits for the model who would come before one of that class."""
        queue = self._queues.get(model)
        return queue is None or not any(queue.waiting(other) for other in range(priority + 1))

    def leave(self, request: Admitted) -> None:
        """It ended while it waited."""
        queue = self._queues.get(request.model)
        if queue is not None:
            queue.remove(request.waiter)
            self._forget_empty()

    def pump(self, now: float) -> None:
        """Send on whoever finds room: a request ended, of this model or of another one on the same server."""
        if not self._queues or self._pumping:
            return
        self._pumping = True
        try:
            for queue in list(self._queues.values()):
                for waiter in queue.starting(_has_room, now):
                    waiter.item.admitted()
        finally:
            self._pumping = False
        self._forget_empty()

    def tick(self, now: float) -> None:
        """Refuse who waited for too long."""
        for queue in list(self._queues.values()):
            for waiter in queue.late(now):
                waiter.item.refused(Busy(full=False, retry_after_s=queue.retry_after_s(waiter.priority, now)))
        self.pump(now)

    def _forget_empty(self) -> None:
        for model in [model for model, queue in self._queues.items() if not queue]:
            del self._queues[model]


def _has_room(waiter: Waiter[Admitted]) -> bool:
    """Or nobody to wait for: the request then says itself why."""
    able = waiter.item.able()
    return not able or bool(with_room(able, waiter.priority))


def priority_of(headers: Mapping[str, str]) -> int | str | None:
    """The class that a request asks for; None: it does not; or what is wrong."""
    word = headers.get(PRIORITY_HEADER)
    if word is None:
        return None
    if word not in PRIORITIES:
        return f"{PRIORITY_HEADER} is one of {', '.join(PRIORITIES)}, not {word!r}"
    return PRIORITIES.index(word)


def priority_within(limit: int | None, asked: int | None) -> int:
    """A request's class: what it asks for, no more important than `limit` (None: none is set)."""
    if limit is None:
        return STANDARD if asked is None else asked
    return limit if asked is None else max(asked, limit)


def longest_wait(headers: Mapping[str, str]) -> float | str | None:
    """Seconds for which a request would wait, as it says; None: it does not; or what is wrong."""
    word = headers.get(MAX_WAIT_HEADER)
    if word is None:
        return None
    if not (word.isascii() and word.isdigit() and int(word[:9]) <= LONGEST_WAIT_S):
        return f"{MAX_WAIT_HEADER} is a whole number of seconds up to {LONGEST_WAIT_S}, not {word[:40]!r}"
    return float(word)
