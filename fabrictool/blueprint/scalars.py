"""What a plain YAML scalar means: text, ``true``, ``false``, ``null`` or a decimal number, and nothing else.

YAML 1.1 readers turn ``no`` into false, ``1:30`` into 90 and ``0777`` into 511 without a word; YAML 1.2 readers keep
some of these as text. Whatever readers disagree about is refused here, each with its own code and mend.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.blueprint.tree import Scalar

_TRUTH = {"true": True, "false": False}
_YES, _NO = frozenset({"yes", "on", "y"}), frozenset({"no", "off", "n"})
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")
_DIGITS = 18
"""Longest integer: beyond, readers disagree about the value."""
_LARGEST = 1e300


class TrapError(ValueError):
    """A scalar that YAML readers understand differently."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


_TRAPS: tuple[tuple[re.Pattern[str], str, str, str], ...] = (
    (
        re.compile(r"[-+]?0[0-9_]+"),
        "FT1008",
        "`{0}` starts with a zero: some YAML readers take it for octal",
        'write the number without the zero, or "{0}" for text',
    ),
    (
        re.compile(r"[-+]?0(x[0-9a-fA-F_]+|o[0-7_]+|b[01_]+)"),
        "FT1009",
        "`{0}` is a hexadecimal, octal or binary number to some YAML readers",
        'write it in decimal, or "{0}" for text',
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?"),
        "FT1010",
        "`{0}` has underscores: a number to some YAML readers, text to others",
        'leave the underscores out, or write "{0}" for text',
    ),
    (
        re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?"),
        "FT1011",
        "`{0}` is a base-60 number to some YAML readers",
        'write a duration like 90s or 1.5h, and text as "{0}"',
    ),
    (
        re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?"),
        "FT1012",
        "`{0}` is a date to some YAML readers, text to others",
        'write "{0}"',
    ),
    (
        re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE),
        "FT1013",
        "`{0}` is not supported as a number",
        "for no limit, leave the key out",
    ),
    (
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.)([eE][-+]?[0-9]+)?"),
        "FT1014",
        "`{0}` lacks a digit beside its point: a number to some YAML readers, text to others",
        "write digits on both sides, such as 0.5",
    ),
)


def resolve(text: str) -> Scalar:
    """The value of a plain scalar.

    Raises
    ------
    TrapError
        FT1005 to FT1015 for what YAML readers disagree about.
    """
    if not text:
        return None
    first = text[0]
    if first in "+-.0123456789":
        return _number(text)
    if len(text) > 5:
        return text
    if text in _TRUTH:
        return _TRUTH[text]
    return None if text == "null" else _short_word(text)


def _short_word(text: str) -> str:
    low = text.lower()
    if low in _YES or low in _NO:
        truth = "true" if low in _YES else "false"
        message = f"`{text}` means {truth} to some YAML readers and is text to others"
        raise TrapError("FT1005", message, f'write {truth}, or "{text}" for text')
    if low in _TRUTH:
        raise TrapError("FT1006", f"`{text}` must be written in small letters", f'write {low}, or "{text}" for text')
    if low == "null" or text == "~":
        raise TrapError("FT1007", f"`{text}` is no value to some YAML readers", f'write null, or "{text}" for text')
    return text


def _number(text: str) -> Scalar:
    if _INTEGER.fullmatch(text):
        if len(text) > _DIGITS:
            raise TrapError("FT1015", f"`{text[:40]}` has more digits than can be kept", "for text, write it in quotes")
        return int(text)
    if _NUMBER.fullmatch(text):
        value = float(text)
        if abs(value) > _LARGEST:
            raise TrapError("FT1015", f"`{text[:40]}` is too large", "for text, write it in quotes")
        return value
    for pattern, code, message, hint in _TRAPS:
        if pattern.fullmatch(text):
            raise TrapError(code, message.format(text), hint.format(text))
    return text
