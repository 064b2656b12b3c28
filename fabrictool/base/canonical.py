"""Canonical JSON and digests: same value, same bytes, on every machine."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces; floats in Python's shortest round-trip form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the canonical JSON: 64 bits, for change detection, not for security."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]


class LateDigest:
    """The digest of what `value` gives, which is asked once, and not before the digest is."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    @cached_property
    def sha256(self) -> str:
        """Its first 16 hex digits, as `digest` gives them."""
        return digest(self._value())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LateDigest) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


def tidy(value: float) -> float:
    """Six significant digits: the rest is noise of the last operation and would differ between machines."""
    return float(f"{value:.6g}")
