"""Streams that may go on at another replica, so that a more urgent request gets their place (`routing.making_room`).

Only those whose clients take that (`x-fabric-continue`), and only where the routing policy knows how long steps take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fabrictool.routing.admission import usable_slots, with_room
from fabrictool.routing.making_room import RunningStream, move_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.gateway.admission import Admission
    from fabrictool.gateway.directory import RoutingTarget
    from fabrictool.gateway.modelrequest import ModelRequest
    from fabrictool.routing.headroom import HeadroomPolicy


class Movable(Protocol):
    """An exchange that streams."""

    def as_stream(self, policy: HeadroomPolicy) -> RunningStream[RoutingTarget] | None:
        """As the decision sees it; None: it cannot move now."""

    def move(self, to: RoutingTarget) -> bool:
        """Go on there; False where it cannot, and stays."""


class Streams:
    """Of a gateway, by their request's id."""

    def __init__(self) -> None:
        self._running: dict[str, Movable] = {}

    def add(self, name: str, stream: Movable) -> None:
        self._running[name] = stream

    def discard(self, name: str) -> None:
        self._running.pop(name, None)

    # Wide: who asks, what the gateway's queue says, and what the policy does.
    def make_room(
        self,
        asked: ModelRequest,
        able: Sequence[RoutingTarget],
        admission: Admission | None,
        policy: HeadroomPolicy,
        now: float,
    ) -> RoutingTarget | None:
        """A replica of `able` that has room and time for it, now that one of its streams has gone; None: that is not
        needed, or cannot be.
        """
        if not self._running or (admission is not None and not admission.is_first(asked.model, asked.priority)):
            return None
        roomy = able if admission is None else with_room(able, asked.priority)
        if roomy and not policy.late(roomy, asked, now):
            return None
        freed = {target.key for target in able if admission is None or _has_room_without_one(target, asked.priority)}
        due = now + policy.target_of(asked.model).ttft_s
        while (move := move_for(asked, asked.priority, due, self._at(freed, policy), policy, now)) is not None:
            name = str(move.stream.id)
            if self._running[name].move(move.to):
                return move.stream.at
            self.discard(name)
        return None

    def _at(self, keys: set[bytes], policy: HeadroomPolicy) -> Iterator[RunningStream[RoutingTarget]]:
        for running in list(self._running.values()):
            stream = running.as_stream(policy)
            if stream is not None and stream.at.key in keys:
                yield stream


def _has_room_without_one(target: RoutingTarget, priority: int) -> bool:
    return not target.slots or target.load - 1 < usable_slots(target.slots, priority)
