"""Which of the candidates: routing policies, synchronous, without I/O, with their random source as an argument."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from typing import TYPE_CHECKING, Protocol, TypeVar

from fabrictool.base.errors import InvalidInputError
from fabrictool.routing.candidates import RoutableReplica

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

R = TypeVar("R", bound=RoutableReplica)

GOLDEN = 0.6180339887498949
ROUTING_POLICIES = ("least-loaded", "random", "round-robin")


class RoutingPolicy(Protocol):
    """Chooses one of at least one candidate."""

    name: str
    """As blueprints write it."""

    def pick(self, candidates: Sequence[R]) -> R:
        """The chosen one; never called with an empty sequence."""


class RandomPolicy:
    """Uniform over the candidates, by weight when weights differ (paper 001, §3.4's default)."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[R]) -> R:
        return self._rng.choices(candidates, weights=[c.weight for c in candidates])[0]


class RoundRobinPolicy:
    """One after the other, over all models together; a candidate that comes or goes shifts the turn by one.

    Where weights differ, each has turns in proportion to its weight.
    """

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = itertools.count()

    def pick(self, candidates: Sequence[R]) -> R:
        turn = next(self._turn)
        weights = [candidate.weight for candidate in candidates]
        if min(weights) == max(weights):
            return candidates[turn % len(candidates)]
        # Multiples of the golden ratio lie evenly in [0, 1): each soon has had its share, without a memory.
        sums = list(itertools.accumulate(weights))
        return candidates[min(bisect(sums, turn * GOLDEN % 1.0 * sums[-1]), len(candidates) - 1)]


class LeastLoadedPolicy:
    """The smallest load for its weight, with the request on it; equal ones are drawn at random, so that idle replicas
    share the work, and the request counts so that of idle ones the one with the largest weight is taken.
    """

    name = "least-loaded"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, candidates: Sequence[R]) -> R:
        if len(candidates) == 1:
            return candidates[0]
        least, idlest = math.inf, list[R]()
        for candidate in candidates:
            load = (candidate.load + 1.0) / candidate.weight
            if load < least:
                least, idlest = load, [candidate]
            elif load == least:
                idlest.append(candidate)
        return idlest[0] if len(idlest) == 1 else self._rng.choice(idlest)


def routing_policy(name: str, rng: random.Random) -> RoutingPolicy:
    """The routing policy of that name; raises FT8003 for another."""
    match name:
        case "random":
            return RandomPolicy(rng)
        case "round-robin":
            return RoundRobinPolicy()
        case "least-loaded":
            return LeastLoadedPolicy(rng)
    raise InvalidInputError.of(
        "FT8003", f"there is no routing policy {name!r}", hint=f"one of: {', '.join(ROUTING_POLICIES)}"
    )
