"""Which stream goes on elsewhere so that a request is served in time (LLM-Mesh, section 7.1). Pure.

Where a request would find no place, or be late, at every replica that may serve it, one of their streams may be able to
go on at another one: it has sent its tokens faster than it has to, or may go where the request may not. The one with
most headroom is tried first. It goes only if the shadow play says that all targets are kept: the request's and the
others' without it, and its own and the others' where it goes, with its prompt and all that it said read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fabrictool.routing.protocol import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from fabrictool.routing.protocol import RoutedRequest

C = TypeVar("C", bound=Candidate)

MOST_MOVES = 2
"""Of one stream: each costs that its text is read again."""
STREAMS_TRIED = 4
"""Those with most headroom; more cost more than they bring."""


class ShadowPlay(Protocol):
    """What a policy knows of replicas' next steps. Of whom too little is known nothing is said: no."""

    def late(self, candidates: Sequence[Candidate], request: RoutedRequest, now: float) -> bool:
        """Whether it, or somebody else for it, would be late at each of them."""

    def in_time_without(self, candidate: Candidate, request: RoutedRequest, stream: Hashable, now: float) -> bool:
        """Whether it and all others there would be in time if that stream were not there."""

    # Wide: what a stream is to a replica that did not begin it.
    def in_time_there(self, candidate: Candidate, model: str, tokens: int, due: float, now: float) -> bool:
        """Whether a stream that has so many tokens to be read, and its next one due then, would be in time there with
        all others.
        """


@dataclass(frozen=True, slots=True)
class RunningStream(Generic[C]):
    """One that may go on elsewhere."""

    id: Hashable
    model: str
    at: C
    priority: int
    """See `routing.admission`."""
    tokens: int
    """Of its prompt and of what was said, about."""
    due: float
    """When its next token is."""
    places: Callable[[], Sequence[C]]
    """Others that may serve it and have room."""


@dataclass(frozen=True, slots=True)
class Move(Generic[C]):
    """That stream goes there."""

    stream: RunningStream[C]
    to: C


# Wide: whose place it is to be, and who could make it.
def move_for(
    request: RoutedRequest,
    priority: int,
    due: float,
    streams: Iterable[RunningStream[C]],
    play: ShadowPlay,
    now: float,
) -> Move[C] | None:
    """The move that lets `request`, whose first token is due then, be in time where that stream was; None: there is
    none. `streams` are at replicas that may serve it.
    """
    lax = [stream for stream in streams if stream.priority >= priority and stream.due > max(now, due)]
    lax.sort(key=lambda stream: -stream.due)
    for stream in lax[:STREAMS_TRIED]:
        if not play.in_time_without(stream.at, request, stream.id, now):
            continue
        for place in stream.places():
            if play.in_time_there(place, stream.model, stream.tokens, stream.due, now):
                return Move(stream, place)
    return None
