"""How long an engine's iterations take, between samples. Source: LLM-Mesh, section 5.2."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fabrictool.domain.steps import SHORTEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SAMPLES = 3
"""A sample is the least of so many: whatever else a machine does makes an iteration longer, never shorter."""
LONG_S = 1.0
"""A sample that takes so long is taken once."""
_ABOUT = 2.0


class IterationTimes(Protocol):
    """Of one model on one kind of node."""

    def prefill_s(self, tokens: float) -> float:
        """Seconds for a prompt of so many tokens."""

    def decode_s(self, batch: float, length: float) -> float:
        """Seconds for a token for each of `batch` requests with contexts of `length` tokens on average."""


@dataclass(frozen=True, slots=True)
class IterationTable:
    """Seconds of one model's iterations on one kind of node, at powers of two; linear between them."""

    lengths: tuple[float, ...]
    """Tokens, ascending: of a prompt, or of a batch's contexts on average."""
    batches: tuple[float, ...]
    """Requests, ascending."""
    prefill: tuple[float, ...]
    """Seconds at each of the lengths."""
    decode: tuple[tuple[float, ...], ...]
    """Seconds at each of the batches, at each of the lengths."""

    @classmethod
    def sampled(
        cls,
        prefill: Callable[[float], float],
        decode: Callable[[float, float], float],
        longest: int,
        largest: int,
    ) -> IterationTable:
        """From `prefill(tokens)` and `decode(batch, mean context)` in seconds, as measured or as forecast."""
        lengths = _doubling(SHORTEST, longest)
        batches = _doubling(1, largest)
        return cls(
            lengths,
            batches,
            tuple(prefill(length) for length in lengths),
            tuple(tuple(decode(batch, length) for length in lengths) for batch in batches),
        )

    def prefill_s(self, tokens: float) -> float:
        """Seconds for a prompt of so many tokens."""
        left, share = _place(self.lengths, tokens)
        return self.prefill[left] + share * (self.prefill[left + 1] - self.prefill[left])

    def decode_s(self, batch: float, length: float) -> float:
        """Seconds for a token for each of `batch` requests with contexts of `length` tokens on average."""
        row, down = _place(self.batches, batch)
        left, share = _place(self.lengths, length)
        upper, lower = self.decode[row], self.decode[row + 1]
        above = upper[left] + share * (upper[left + 1] - upper[left])
        below = lower[left] + share * (lower[left + 1] - lower[left])
        return above + down * (below - above)


def still_true(pairs: Iterable[tuple[float, float]]) -> bool:
    """Whether what is measured now is about what was kept, (now, kept) in seconds: that may be of a time when the
    machine was busy, or of another one.
    """
    return all(kept / _ABOUT <= now <= _ABOUT * kept for now, kept in pairs)


LEARNED = 0.1
"""Weight of the newest iteration: a table follows a change of the machine's pace within some twenty iterations."""
STRAY = 4.0
"""Times the pace so far that a single iteration counts for at most: a pause of the machine says little of its pace."""
RESTED_S = 10.0
"""Without an iteration half of what was learned is forgotten after so long. A pace that refuses every request would
never be corrected otherwise."""


@dataclass(slots=True)
class RefinedTable:
    """A table that was measured once, and goes at the pace at which iterations go now."""

    table: IterationTable
    prefill_pace: float = 1.0
    """Seconds a second of the table."""
    decode_pace: float = 1.0
    heard_at: float = 0.0

    def prefill_s(self, tokens: float) -> float:
        return self.prefill_pace * self.table.prefill_s(tokens)

    def decode_s(self, batch: float, length: float) -> float:
        return self.decode_pace * self.table.decode_s(batch, length)

    def learn_prefill(self, tokens: float, seconds: float, now: float) -> None:
        """From a prompt that was read."""
        ratio = min(seconds / self.table.prefill_s(tokens), STRAY * self.prefill_pace)
        self.prefill_pace += LEARNED * (ratio - self.prefill_pace)
        self.heard_at = now

    def learn_decode(self, batch: float, length: float, seconds: float, now: float) -> None:
        """From an iteration that gave each of `batch` requests a token."""
        ratio = min(seconds / self.table.decode_s(batch, length), STRAY * self.decode_pace)
        self.decode_pace += LEARNED * (ratio - self.decode_pace)
        self.heard_at = now

    def rest(self, now: float) -> None:
        """Forget by and by what was learned."""
        kept = 0.5 ** (max(0.0, now - self.heard_at) / RESTED_S)
        self.prefill_pace = 1.0 + kept * (self.prefill_pace - 1.0)
        self.decode_pace = 1.0 + kept * (self.decode_pace - 1.0)
        self.heard_at = max(now, self.heard_at)


def _doubling(first: int, last: int) -> tuple[float, ...]:
    """Two values at least, so that there is something to interpolate between."""
    values = [float(first)]
    while values[-1] < last or len(values) < 2:
        values.append(2.0 * values[-1])
    return tuple(values)


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """(left neighbour, share of the way to the right one): the first sample below the axis, a line above it."""
    if value <= axis[0]:
        return 0, 0.0
    left = min(bisect_right(axis, value), len(axis) - 1) - 1
    return left, (value - axis[left]) / (axis[left + 1] - axis[left])
