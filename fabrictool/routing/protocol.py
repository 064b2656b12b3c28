"""What a routing policy sees and is told: the surface that plug-ins are written against. Pure.

A policy is an object with `name` and three methods, called from one thread and never awaited: `pick` for an attempt,
`on_request_start` with whom the attempt went to (which affinity may have chosen), and `on_request_end` once for each
start. Gateway and simulator call it alike; times are seconds of the caller's own monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from fabrictool.routing.candidates import RoutableReplica

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable, Mapping, Sequence

    from fabrictool.domain.steps import MeasuredSteps


class Candidate(RoutableReplica, Protocol):
    """A replica that may serve the request; hashable, and the same object as long as the replica is there."""

    @property
    def device(self) -> str:
        """In the catalogue's words; empty: unknown."""

    @property
    def site(self) -> str: ...

    @property
    def waiting(self) -> int:
        """Requests in its queue, as its engine said last."""

    @property
    def ttft_s(self) -> float | None:
        """To the first octet of recent streams, a moving mean; None: no stream was seen."""

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first, of the same."""

    @property
    def steps(self) -> MeasuredSteps | None:
        """How long its steps take, as measured before it served; None: nobody did."""


class RoutedRequest(Protocol):
    """A request, as far as routing may look into it."""

    @property
    def id(self) -> Hashable:
        """The same for all attempts."""

    @property
    def model(self) -> str: ...

    @property
    def prompt_tokens(self) -> int:
        """About: nobody has tokenised it."""

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, if the client says."""

    @property
    def conversation(self) -> int | None:
        """See `routing.affinity.preferred`, which finds the candidate that has its beginning in the cache."""

    @property
    def group(self) -> str | None:
        """The consumer group that asks; None: nobody knows. Every candidate may serve it."""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How an attempt ended."""

    answered: bool
    ttft_s: float | None = None
    """None: it was no stream, or nothing came."""
    tpot_s: float | None = None
    prompt_tokens: int = 0
    """0: the engine did not say."""
    completion_tokens: int = 0


LOST = RequestOutcome(answered=False)
PASSED_OVER = RequestOutcome(answered=True)
"""It had no room for the request in time, and said so: another one is asked."""


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A request of which nothing is known."""

    id: Hashable = ""
    model: str = ""
    prompt_tokens: int = 0
    most_tokens: int | None = None
    conversation: int | None = None
    group: str | None = None


ANY_REQUEST = Unnamed()


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """What a model's streams are to keep; the defaults are LLM-Mesh's."""

    ttft_s: float = 2.0
    tpot_s: float = 0.25


C = TypeVar("C", bound=Candidate)


class RoutingPolicy(Protocol):
    """Chooses one of at least one candidate."""

    name: str
    """As blueprints write it."""
    learns: bool
    """Whether it wants to hear of starts and ends: those that do not cost nothing."""

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        """The chosen candidate; never called with an empty sequence."""

    def on_request_start(self, candidate: Candidate, request: RoutedRequest, now: float) -> None:
        """An attempt goes to `candidate`."""

    def on_request_end(self, candidate: Candidate, request: RoutedRequest, outcome: RequestOutcome) -> None:
        """That attempt is over."""


@dataclass(frozen=True, slots=True)
class PolicyMeans:
    """What a policy is made from: the random source is an argument, so that a simulation can be repeated."""

    rng: random.Random
    targets: Mapping[str, StreamTarget]
    """Model → what its streams are to keep; a model without has the default."""
