"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

MOST = 1 << 20
"""Containers allow a billion, and an engine may try to close each of them."""


def open_files() -> int:
    """How many there may be now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files() -> None:
    """To what the system allows without asking anybody. Shells begin with 1,024 for the sake of programs that use
    ``select``, and each open stream takes two.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MOST)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # more than the kernel allows now
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
