"""What was measured once and is kept for the next start, in files named by what the figures depend on."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def facts_key(facts: Sequence[object]) -> str:
    """A file's name: figures of anything else are measured anew."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def kept(place: Path | None, kind: type[T]) -> T | None:
    """What is there; None where nothing is, or it cannot be read."""
    if place is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(place.read_bytes(), type=kind)
    return None


def keep(place: Path | None, value: object) -> None:
    """A folder that cannot be written costs a measurement at the next start, nothing else."""
    if place is not None:
        with contextlib.suppress(OSError, FabrictoolError):
            write_atomic(place, msgspec.json.encode(value))


def processor() -> str:
    """Of this machine, in its own words; "" where it has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return ""
