"""Which of the hubs that it knows an agent keeps tunnels to. Pure.

Two, of different providers where there are such: each more costs a beat a second at both ends, and who has no tunnel to
it reaches it by those (`transport/relay.py`). Hubs that clients ask come first, for by any other one a request takes a
step more. Beyond that a race decides: who answers first is near. While it lacks a hub it dials a few at once, and after
some beats others as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

ENOUGH = 2
"""With fewer a hub's end is an interruption."""
RACE = 4
"""Dialled at once. More finds nearer ones; 10,000 agents that come together cost the hubs a handshake each."""
RACE_BEATS = 3
"""Until others are tried as well."""

_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class LinkedHub:
    """A hub to which there is a tunnel."""

    provider: str
    ingress: bool = True
    """Whether clients ask it."""


class HubChoice(Generic[_A]):
    """One agent's, over addresses of whatever kind."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turns: dict[_A, float] = {}
        """Address → its place in the order of trying; at random, or all agents would try the same first."""
        self._providers: dict[_A, str] = {}
        """Of hubs that were linked once."""
        self._beats_short = 0

    def wanted(
        self, known: Iterable[_A], linked: Mapping[_A, LinkedHub], *, providers: int, beat: bool = False
    ) -> set[_A]:
        """Whom to dial or stay linked with, each `beat` and when something changed.

        `linked`: oldest first. `providers`: how many have hubs, as far as is known.
        """
        candidates = list(known)
        self._turns = {address: self._turns.get(address, self._rng.random()) for address in candidates}
        self._providers |= {address: hub.provider for address, hub in linked.items()}
        kept = self._best(linked)
        there = {linked[address].provider for address in kept}
        if len(kept) == ENOUGH and (len(there) > 1 or providers < 2):
            self._beats_short = 0
            return set(kept)
        self._beats_short += beat
        lacking = [
            address
            for address in sorted(candidates, key=lambda address: self._turns[address])
            if address not in kept and (len(kept) < ENOUGH or self._providers.get(address) not in there)
        ]
        return {*kept, *lacking[: RACE * (1 + self._beats_short // RACE_BEATS)]}

    @staticmethod
    def _best(linked: Mapping[_A, LinkedHub]) -> list[_A]:
        """The oldest, and the oldest of another provider, or the next if there is none."""
        order = sorted(linked, key=lambda address: not linked[address].ingress)
        if not order:
            return []
        others = sorted(order[1:], key=lambda address: linked[address].provider == linked[order[0]].provider)
        return [order[0], *others[: ENOUGH - 1]]
