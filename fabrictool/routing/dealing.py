"""By which weights a request is dealt out: its consumer group's where the plan gave some, else the one of each replica.

A group's weight of 0 means that the plan sends it elsewhere: such a replica gets none of its requests by weight as long
as there is another one. Where all that are left have 0, the one weight counts: whoever may serve a request serves it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNDIVIDED: Final[Mapping[str, float]] = MappingProxyType({})
"""The group weights of a replica whose model's demand is not divided."""


class Weighed(Protocol):
    """A replica, as this needs it."""

    @property
    def weight(self) -> float: ...

    @property
    def group_weights(self) -> Mapping[str, float]: ...


def part_of(candidates: Sequence[Weighed], group: str | None) -> str | None:
    """Whose weights a request of `group` is dealt out by: its own, or those of everybody else (""); None: of nobody,
    as no candidate has such.
    """
    others: str | None = None
    for candidate in candidates:
        weights = candidate.group_weights
        if weights:
            if group is not None and group in weights:
                return group
            if "" in weights:
                others = ""
    return others


def weights_for(candidates: Sequence[Weighed], part: str | None) -> list[float]:
    """One each, at least one of them above 0; `part` is what `part_of` says of these candidates."""
    if part is not None:
        weights = [candidate.group_weights.get(part, candidate.weight) for candidate in candidates]
        if any(weights):
            return weights
    return [candidate.weight for candidate in candidates]
