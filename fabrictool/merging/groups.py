"""Which replicas may merge, and what their caches hold then. Source: Flying Serving, sections 4.2 and 4.3."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ReplicaGroup:
    """Neighbours that compute each step together; of one alone the degree is 1."""

    first: int
    degree: int
    """Replicas, a power of two; `first` is a multiple of it."""

    @property
    def members(self) -> range:
        return range(self.first, self.first + self.degree)


def degrees(replicas: int) -> tuple[int, ...]:
    """1, 2, 4 … up to all."""
    powers = []
    power = 1
    while power <= replicas:
        powers.append(power)
        power *= 2
    return tuple(powers)


def groups(replicas: int) -> tuple[ReplicaGroup, ...]:
    """All that may form: aligned, so that their number grows with the replicas and communicators are few (2n - 1)."""
    return tuple(
        ReplicaGroup(first, degree) for degree in degrees(replicas) for first in range(0, replicas - degree + 1, degree)
    )


@dataclass(frozen=True, slots=True)
class BlockPool:
    """Each replica's cache. A block's octets are the same in every group (equations 2 and 3)."""

    blocks: int
    tokens: int
    """In a block of one replica alone."""

    def needed(self, tokens: int, degree: int) -> int:
        """Blocks on every member (equation 4)."""
        return -(-tokens // (degree * self.tokens))

    def longest(self, degree: int) -> int:
        """Tokens of a request at most."""
        return self.blocks * self.tokens * degree

    def degree(self, tokens: int, replicas: int) -> int | None:
        """The smallest that holds so many; None: not even all together do."""
        return next((d for d in degrees(replicas) if tokens <= self.longest(d)), None)
