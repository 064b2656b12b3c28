"""One fact and its judgement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer."""

    name: str
    good: bool
    text: str
    hint: str = ""
    warning: bool = False
    """Good enough to go on, and worth a word."""
