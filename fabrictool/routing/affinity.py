"""Which replica had the beginning of a conversation in its cache: a preference that yields to health and load. Pure.

Nobody has to name a session. The key is who asks and what first distinguishes the conversation: the first message that
is not the system's, for the system's is what all share. The replica is found by rendezvous hashing (Thaler and
Ravishankar, 1998): the same at every gateway without a memory, and when a replica comes or goes only its own
conversations move. Where requests are dealt out by a group's weights alone, each replica is home to as many of its
conversations as it has weight (weighted rendezvous). It is taken as long as its load is no more than `SLACK` requests,
or a quarter, above the least loaded one that could be its home (consistent hashing with bounded loads, Mirrokni et al.,
2018): a conversation that all the world repeats spreads by itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from zlib import crc32

from fabrictool.routing.dealing import weights_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SLACK: Final = 2.0
"""Requests. Less: conversations move at any small difference, and their prefix is computed again."""
FACTOR: Final = 1.25


class Hashable(Protocol):
    """A replica, as this needs it."""

    @property
    def key(self) -> bytes:
        """Which stays the same as long as its cache does."""

    @property
    def load(self) -> float: ...

    @property
    def weight(self) -> float: ...

    @property
    def group_weights(self) -> Mapping[str, float]: ...


H = TypeVar("H", bound=Hashable)


def preferred(candidates: Sequence[H], conversation: int, part: str | None = None) -> H | None:
    """The candidate that this conversation belongs to; None if it has too much to do, or is the only one. `part`: by
    whose weights homes are dealt out, as `dealing.part_of` says; None: by nobody's.
    """
    if len(candidates) < 2:
        return None
    rivals = candidates
    if part is None:
        home = max(candidates, key=lambda candidate: (_mixed(crc32(candidate.key, conversation)), candidate.key))
    else:
        weights = weights_for(candidates, part)
        home = _home(candidates, weights, conversation)
        # Where none of the part goes, an idle replica takes nothing off its homes. By the one weight all the same: a
        # replica's load is that of all groups together.
        rivals = [candidate for candidate, weight in zip(candidates, weights, strict=True) if weight]
    least = min((rival.load + 1.0) / rival.weight for rival in rivals)
    return home if (home.load + 1.0) / home.weight <= least * FACTOR + SLACK / home.weight else None


def conversation_of(who: str, beginning: bytes) -> int:
    """A key, from who asks and the message that distinguishes what is said."""
    return crc32(beginning, crc32(who.encode()))


def _home(candidates: Sequence[H], weights: list[float], conversation: int) -> H:
    """The first to ring of clocks that ring by chance, each as often as its weight says; equal weights are as none."""
    best, soonest = candidates[0], (math.inf, b"")
    for candidate, weight in zip(candidates, weights, strict=True):
        if weight:
            drawn = (_mixed(crc32(candidate.key, conversation)) + 1) / (1 << 32)
            rings = (-math.log(drawn) / weight, candidate.key)
            if rings < soonest:
                best, soonest = candidate, rings
    return best


def _mixed(value: int) -> int:
    """32 bits without the linearity of a CRC, by which some replicas would have four times the share of others (an
    integer hash of Chris Wellons' search, 2018).
    """
    value = (value ^ value >> 16) * 0x7FEB352D & 0xFFFFFFFF
    value = (value ^ value >> 15) * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16
