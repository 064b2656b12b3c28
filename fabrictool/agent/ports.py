"""Ports of one machine for one start of an engine, which no other agent there takes, whoever's it is.

Engines look for free ports by themselves, and let go of them before they use them: two that start at the same time take
the same one (vLLM issue 43206). So each gets a block of its own, below those that the kernel gives to connections.
"""

from __future__ import annotations

import random
import socket
from typing import Self

FIRST, LAST = 20_000, 32_000
"""Linux takes ports of connections from 32768 on, unless it is told otherwise."""
SIZE = 64
MOST_DEVICES = 32
"""Of an engine on one node; each may give out caches at a port of its own."""


class PortBlock:
    """`SIZE` ports in a row. The first is kept until the context ends, so that other agents see them as taken."""

    def __init__(self, guard: socket.socket) -> None:
        self._guard = guard
        first: int = guard.getsockname()[1]
        self.api = first + 1
        self.meeting = first + 2
        """Where the processes of an engine on several nodes find each other."""
        self.handover = first + 3
        """First of `MOST_DEVICES` where caches are given out."""
        self.inner = self.handover + MOST_DEVICES
        """First of those that the engine chooses from by itself."""

    @classmethod
    def take(cls, rng: random.Random | None = None) -> PortBlock:
        """Raises OSError where no block is free."""
        firsts = list(range(FIRST, LAST - SIZE, SIZE))
        (rng or random.Random()).shuffle(firsts)
        for first in firsts:
            guard = _bound(first)
            if guard is None:
                continue
            if all(_is_free(port) for port in range(first + 1, first + SIZE)):
                return cls(guard)
            guard.close()
        raise OSError(f"no {SIZE} ports in a row are free from {FIRST} to {LAST}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.close()


def _bound(port: int) -> socket.socket | None:
    """At all addresses of this machine, and never listening."""
    own = socket.socket(socket.AF_INET)
    try:
        own.bind(("", port))
    except OSError:
        own.close()
        return None
    return own


def _is_free(port: int) -> bool:
    own = _bound(port)
    if own is not None:
        own.close()
    return own is not None
