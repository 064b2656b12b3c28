"""How long the steps of a replica's engine take, as measured at powers of two before it served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORTEST = 32
"""Tokens of the shortest prompt that is sampled."""
MOST_SAMPLES = 24
"""Of prompts, or of batches: more than any context or batch has powers of two."""

_Times = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**32)], ...], msgspec.Meta(min_length=1, max_length=MOST_SAMPLES)
]
"""Microseconds."""


class MeasuredSteps(msgspec.Struct, frozen=True, array_like=True):
    """Small enough for a record of the mesh: whole microseconds, and powers of two by their place."""

    prompts: _Times
    """To the first token of a prompt of 32, 64, 128 … tokens, alone."""
    batches: _Times
    """For a token for each of 1, 2, 4 … requests with contexts of a middling length."""

    def of_prompts(self) -> Iterator[tuple[int, float]]:
        """Tokens and the seconds to the first one after them."""
        return ((SHORTEST << place, time / 1e6) for place, time in enumerate(self.prompts))

    def of_batches(self) -> Iterator[tuple[int, float]]:
        """Requests and the seconds for a token for each."""
        return ((1 << place, time / 1e6) for place, time in enumerate(self.batches))


def microseconds(seconds: float) -> int:
    """As `MeasuredSteps` has them."""
    return min(round(1e6 * seconds), 2**32 - 1)
