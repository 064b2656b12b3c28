"""Sums over processes of one host, through shared memory: what an all-reduce is between devices.

Each member writes its part and then its turn; it waits until all have written theirs, and adds the parts up in the
order of ranks, so that all members have the same bits. There are two buffers: who is at turn n + 2 knows that all have
read turn n. Members spin: a sum takes tens of microseconds, and a decode step has two for each layer.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory

    from numpy.typing import NDArray

_LINE = 8
"""Turns are that many 8-byte words apart, each in a cache line of its own."""
_PATIENCE = 200
"""Looks until others are let run."""
ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether the processor shows writes to others in the order they were made. Elsewhere parts may be seen too late."""


class GroupBrokenError(Exception):
    """A member is gone; the sum will never be complete."""


def shared_bytes(members: int, values: int) -> int:
    """Of the memory that a group of so many needs for parts of so many values."""
    return 8 * _LINE * (members + 1) + 2 * members * values * 4


class SharedSum:
    """A member's way into a group's sums."""

    def __init__(self, memory: SharedMemory, rank: int, members: int, values: int) -> None:
        """`values`: of a part at most."""
        head = 8 * _LINE * (members + 1)
        self._words = np.ndarray((members + 1, _LINE), np.int64, memory.buf)
        self._turns = self._words[:members, 0]
        self._parts = np.ndarray((2, members, values), np.float32, memory.buf, offset=head)
        self._rank = rank
        self._turn = 0
        self._parent = os.getppid()

    def break_up(self) -> None:
        """Members that wait raise `GroupBrokenError`."""
        self._words[-1, 0] = 1

    def __call__(self, part: NDArray[np.float32]) -> NDArray[np.float32]:
        """The sum of all members' parts, of the shape that all have."""
        turn, size = self._turn, part.size
        buffer = self._parts[turn & 1, :, :size]
        buffer[self._rank] = part.reshape(-1)
        self._turn = turn + 1
        self._turns[self._rank] = turn + 1
        looks = 0
        while self._turns.min() <= turn:
            looks += 1
            if looks % _PATIENCE == 0:
                os.sched_yield()
                if self._words[-1, 0] or os.getppid() != self._parent:  # who would tell us is gone as well
                    raise GroupBrokenError
        total: NDArray[np.float32] = buffer[0] + buffer[1]
        for other in buffer[2:]:
            total += other
        return total.reshape(part.shape)
