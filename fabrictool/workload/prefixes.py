"""Which earlier request began as this one does, so that an engine may have that part in its cache.

Nothing of a text is kept, and no hash of it leaves the process: what is written down is an earlier request's id and how
much both have in common. Blocks are of about 16 tokens, as engines' are (vLLM). Hashes are Python's own of bytes,
SipHash under a secret that the process draws at its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS: Final = 16
BLOCK: Final = 64
"""Octets: English has four in a token."""
STRIDE: Final = 1024
"""Octets that are compared at a time before blocks are: most of a long conversation was there before."""
LEAST: Final = 1024
"""Octets of a text that is worth the time."""
MOST: Final = 256 * 1024
"""Octets that are looked at: of longer texts the beginning."""
REMEMBERED: Final = 50_000
"""Blocks, 800,000 tokens and about 5 MB, twice. More: reuse is seen after a longer time."""


class PrefixTable:
    """The beginnings of the latest requests; those that come again are remembered longer."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._young: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def add(self, model: str, text: bytes, request: str) -> tuple[str, float]:
        """Remember the text of a request; returns the id of an earlier one for the model with the longest equal
        beginning, and which share of this text that is: `("", 0.0)` where there is none of a block at least.
        """
        if len(text) < LEAST:
            return "", 0.0
        seen, earlier, shared = text[:MOST], "", 0
        step = hash(model)
        for at in range(STRIDE, len(seen) + 1, STRIDE):
            following = hash((step, seen[at - STRIDE : at]))
            owner = self._owner(following)
            if owner is None:
                break
            step, earlier, shared = following, owner, at
        blocks = self._blocks(step, seen, shared)
        for end, key in blocks:
            owner = self._owner(key)
            if owner is None:
                self._young[key] = request
                break
            earlier, shared = owner, end
        for _, key in blocks:
            self._young[key] = request
        if len(self._young) > self._remembered:
            self._young, self._old = {}, self._young
        return earlier, shared / len(text)

    def _owner(self, key: int) -> str | None:
        owner = self._young.get(key)
        if owner is None and (owner := self._old.get(key)) is not None:
            self._young[key] = owner
        return owner

    def _blocks(self, step: int, text: bytes, begin: int) -> Iterator[tuple[int, int]]:
        """Where each whole block after `begin`, the end of a stride, ends, and its key; and the strides' among them."""
        key = step
        for end in range(begin + BLOCK, len(text) + 1, BLOCK):
            key = hash((key, text[end - BLOCK : end]))
            yield end, key
            if end % STRIDE == 0:
                key = step = hash((step, text[end - STRIDE : end]))
                yield end, key
