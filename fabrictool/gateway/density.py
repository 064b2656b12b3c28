"""How many tokens a request of so many octets is, learned from what engines said of requests like it.

An engine says at the end what a prompt took. Of an answer that is given up or breaks off before that, this is the best
that is known: the prompt was read all the same. Of text an octet is about as many tokens each time; a request with
pictures or sound in it has far fewer, and says nothing of text.
"""

from __future__ import annotations

from typing import Final

OCTETS_A_TOKEN: Final = 3
"""Of a model of which no engine has said anything yet. English has four."""
LEAST_DENSE: Final = 12
"""Octets a token of the thinnest text, such as tables full of blanks; what has more is no text."""
ENOUGH: Final = 4096
"""Octets from which on what was learned counts."""
MOST: Final = 16 * 2**20
"""Octets at which half is forgotten: what is asked changes."""


class TokenDensity:
    """Of one gateway, by model and path."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], tuple[int, int]] = {}
        self._others: dict[tuple[str, str], int] = {}
        """Tokens of the last request that was no text."""

    def learn(self, model: str, path: str, octets: int, tokens: int) -> None:
        """A request of so many octets was a prompt of so many tokens."""
        key = (model, path)
        if tokens * LEAST_DENSE < octets:
            self._others[key] = tokens
            return
        known = self._texts.get(key)
        if known is not None:
            octets += known[0]
            tokens += known[1]
            if octets > MOST:
                octets >>= 1
                tokens >>= 1
        self._texts[key] = (octets, tokens)

    def tokens(self, model: str, path: str, octets: int, most: int) -> int:
        """Of a prompt, about; `most` is the context of who read it, 0: not known."""
        key = (model, path)
        known = self._texts.get(key)
        if known is None or known[0] < ENOUGH:
            known = (OCTETS_A_TOKEN, 1)
        tokens = octets * known[1] // known[0]
        # What would be longer than the context was read all the same: it is no text.
        return tokens if not most or tokens <= most else self._others.get(key, most)
