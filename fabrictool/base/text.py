"""Text that others wrote, made fit for a terminal: no character of it moves the cursor or turns the writing round."""

from __future__ import annotations

import re

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but for tab and line end
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of writing (Unicode's annex 9)
    "\u2028\u2029\ufeff\ud800-\udfff]"  # line ends that terminals do not know, and halves of characters
)


def visible(text: str) -> str:
    """`text` without colours, and with a replacement character for each that a terminal would obey, not show."""
    return _UNSEEN.sub("\ufffd", _COLOUR.sub("", text.replace("\r\n", "\n")))


def escaped_json(text: str) -> str:
    """The same for a JSON document, which stays the document that it was."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
