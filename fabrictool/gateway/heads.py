"""The head of a request, or of an answer, that came before on the same connection: clients and engines send the same
octets again and again, but for the length of the body.

What llhttp made of them need not be made again. Nothing is parsed here: octets are known again or they are not, and
what is not known again, or is not whole, goes to llhttp as ever.
"""

from __future__ import annotations

import re
from typing import Final

MOST_DIGITS: Final = 8
"""Of a body that is taken so."""
HEADS_LEARNED: Final = 3
"""Of a connection on end, of which none came again: a peer whose every head differs is not looked at any longer."""
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,8})(?=\r\n)", re.IGNORECASE)
_END: Final = b"\r\n\r\n"


class KnownHead:
    """All octets of a head but the digits of its ``content-length``."""

    __slots__ = ("_after", "_before", "_head", "_octets", "_rest")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._octets = len(before) + len(after)
        self._rest = 0
        """Of the last message: octets of the body and of the digits."""
        self._head = b""
        """Its head; empty: there is none before a body of that size."""

    def body_at(self, data: bytes) -> int:
        """Where the body begins in `data`, if that is this head and one whole body; 0: it is something else."""
        rest = len(data) - self._octets
        if rest != self._rest:
            self._rest, self._head = rest, self._before_rest(rest)
        octets = len(self._head)
        return octets if octets and data[:octets] == self._head else 0

    def _before_rest(self, rest: int) -> bytes:
        """The one head that so many octets follow, its own digits among them: a length has as few as it can."""
        for digits in range(1, min(MOST_DIGITS, rest) + 1):
            length = b"%d" % (rest - digits)
            if len(length) == digits:
                return self._before + length + self._after
        return b""


def known_head(data: bytes, body_octets: int) -> KnownHead | None:
    """The head in `data`, of which llhttp made one whole message with one length; None: it cannot be known again."""
    end = data.find(_END) + len(_END)
    if end + body_octets != len(data):
        return None
    length = _LENGTH.search(data, 0, end)
    return None if length is None else KnownHead(data[: length.start(1)], data[length.end(1) : end])
