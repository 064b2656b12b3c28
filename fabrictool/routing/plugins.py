"""Routing policies of other packages: an entry point of the group ``fabrictool.routing_policies``.

It stands for a class or a function that takes `PolicyMeans` and returns an object with the methods of `RoutingPolicy`.
What it does wrong costs no request: where it raises, or names somebody who is no candidate, a policy of our own is
asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.plugins import ROUTING_POLICIES, load_plugin
from fabrictool.routing.protocol import ANY_REQUEST, Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.routing.protocol import PolicyMeans, RequestOutcome, RoutedRequest, RoutingPolicy

C = TypeVar("C", bound=Candidate)
_METHODS = ("pick", "on_request_start", "on_request_end")


class Guarded:
    """A plug-in's policy, with another one for when it fails."""

    learns = True

    def __init__(self, policy: Any, name: str, fallback: RoutingPolicy, complain: Callable[[str], None]) -> None:
        """`fallback` is one that does not learn; `complain` is told once."""
        self.name = name
        self.failures = 0
        """Times that the fallback had to choose, or that it did not listen."""
        self._policy = policy
        self._fallback = fallback
        self._complain = complain

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        """Its choice, if that is a candidate."""
        try:
            chosen = self._policy.pick(candidates, request, now)
        except Exception as error:  # noqa: BLE001 - a stranger's code: no request may fail by it
            self._failed(f"pick: {type(error).__name__}: {error}")
        else:
            for candidate in candidates:
                if candidate is chosen:
                    return candidate
            self._failed(f"pick: returned {type(chosen).__name__}, which is none of the candidates")
        return self._fallback.pick(candidates, request, now)

    def on_request_start(self, candidate: Candidate, request: RoutedRequest, now: float) -> None:
        try:
            self._policy.on_request_start(candidate, request, now)
        except Exception as error:  # noqa: BLE001 - see `pick`
            self._failed(f"on_request_start: {type(error).__name__}: {error}")

    def on_request_end(self, candidate: Candidate, request: RoutedRequest, outcome: RequestOutcome) -> None:
        try:
            self._policy.on_request_end(candidate, request, outcome)
        except Exception as error:  # noqa: BLE001 - see `pick`
            self._failed(f"on_request_end: {type(error).__name__}: {error}")

    def _failed(self, what: str) -> None:
        self.failures += 1
        if self.failures == 1:
            text = f"the routing policy {self.name!r} misbehaves ({what}); {self._fallback.name} chooses when it does"
            self._complain(f"{text}. This is said once.")


def plugged_in(name: str, means: PolicyMeans, fallback: RoutingPolicy, complain: Callable[[str], None]) -> Guarded:
    """The installed policy of that name.

    Raises
    ------
    InvalidInputError
        FT8130 when it cannot be loaded or made, or lacks a method.
    """
    maker: Any = load_plugin(ROUTING_POLICIES, name)
    try:
        policy = maker(means)
    except Exception as error:  # whatever a stranger's code does
        message = f"the routing policy {name!r} cannot be made: {type(error).__name__}: {error}"
        raise InvalidInputError.of("FT8130", message, thing=name) from error
    lacks = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if lacks:
        message = f"the routing policy {name!r} lacks {', '.join(lacks)}"
        raise InvalidInputError.of("FT8130", message, thing=name, hint=f"it needs {', '.join(_METHODS)}")
    return Guarded(policy, name, fallback, complain)
