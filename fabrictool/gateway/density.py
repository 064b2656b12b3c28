"""How many tokens an octet of a request makes, learned from what engines said of requests like it.

An engine says at the end what a prompt took. Of an answer that is given up or breaks off before that, this is the best
that is known: the prompt was read all the same.
"""

from __future__ import annotations

from typing import Final

OCTETS_A_TOKEN: Final = 3
"""Of a model of which no engine has said anything yet. English has four."""
ENOUGH: Final = 4096
"""Octets from which on what was learned counts."""
MOST: Final = 16 * 2**20
"""Octets at which half is forgotten: what is asked changes."""


class TokenDensity:
    """Of one gateway, by model."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def learn(self, model: str, octets: int, tokens: int) -> None:
        """A request of so many octets was a prompt of so many tokens."""
        seen = self._seen.get(model)
        if seen is not None:
            octets += seen[0]
            tokens += seen[1]
            if octets > MOST:
                octets >>= 1
                tokens >>= 1
        self._seen[model] = (octets, tokens)

    def tokens(self, model: str, octets: int, most: int) -> int:
        """Of a prompt, about; `most` is the context of who read it, 0: not known."""
        seen = self._seen.get(model)
        known = seen if seen is not None and seen[0] >= ENOUGH else (OCTETS_A_TOKEN, 1)
        tokens = octets * known[1] // known[0]
        return min(tokens, most) if most else tokens
