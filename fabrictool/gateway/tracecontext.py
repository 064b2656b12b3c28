"""W3C Trace Context: the trace that a client's request belongs to (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

PARENT_OCTETS = 128
"""Later versions may append to the 55 octets of version 00."""
STATE_OCTETS = 512
STATE_MEMBERS = 32
SAMPLED = 1
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


class TraceContext(msgspec.Struct, frozen=True):
    """What is told of a trace to whom is asked next; both as headers have them."""

    parent: str
    """``traceparent``."""
    state: str = ""
    """``tracestate``; empty: none."""

    @property
    def trace_id(self) -> bytes:
        """16 octets, not all of them 0."""
        return bytes.fromhex(self.parent[3:35])

    @property
    def span_id(self) -> bytes:
        """8 octets, not all of them 0."""
        return bytes.fromhex(self.parent[36:52])

    @property
    def sampled(self) -> bool:
        """Whether who asks may keep its own part."""
        return bool(int(self.parent[53:55], 16) & SAMPLED)


def trace_context(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """Of all headers of these names; None where there is not exactly one ``traceparent``, or it is malformed.

    A malformed ``tracestate``, or one of over 512 octets, counts as none.
    """
    if len(parents) != 1 or len(parents[0]) > PARENT_OCTETS:
        return None
    parent = parents[0]
    seen = _PARENT.fullmatch(parent)
    if seen is None or (seen[1] == "00" and seen[5]):
        return None
    return TraceContext(parent, _state(states))


def _state(states: Sequence[str]) -> str:
    members = [member for line in states for text in line.split(",") if (member := text.strip(" \t"))]
    state = ",".join(members)
    if len(state) > STATE_OCTETS or len(members) > STATE_MEMBERS:
        return ""
    return state if all(_MEMBER.fullmatch(member) for member in members) else ""
