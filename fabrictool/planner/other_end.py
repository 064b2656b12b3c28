"""A copy of this process that works its way through the same things from their other end, until the two meet.

With a second core it takes half as long; where that is busy nothing is waited for, and nothing comes out otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from fabrictool.planner.process_copy import ProcessCopy, may_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from typing import Self

T = TypeVar("T")
R = TypeVar("R")

ROOM = 2**20
"""Octets that the copy may be ahead of what is read of it."""
PATIENCE = 10
"""The copy takes what others leave of the processors, this process too."""


class OtherEnd(Generic[T, R]):
    """What a copy has done of `items`, the last one first."""

    def __init__(self, items: Sequence[T], work: Callable[[T], R], *, wanted: bool) -> None:
        """`work` gives what can be pickled; there is no copy where none is `wanted`."""
        self._done: dict[int, R] = {}
        self._reader: Connection | None = None
        self._copy: ProcessCopy | None = None
        if wanted and may_copy():
            self._begin(items, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._copy is not None:
            self._copy.close()

    def done(self, at: int) -> R | None:
        """What the copy made of an item; None: it is not there yet."""
        with suppress(EOFError, OSError):
            while self._reader is not None and self._reader.poll():
                where, result = self._reader.recv()
                self._done[where] = result
        return self._done.pop(at, None)

    def _begin(self, items: Sequence[T], work: Callable[[T], R]) -> None:
        from multiprocessing.connection import Pipe  # noqa: PLC0415 - --help must not pay for it

        reader, writer = Pipe(duplex=False)
        self._reader = reader
        _widen(writer.fileno())

        def backwards() -> None:
            os.nice(PATIENCE)
            reader.close()
            for at in reversed(range(len(items))):
                writer.send((at, work(items[at])))

        try:
            self._copy = ProcessCopy(backwards)
        except BaseException:
            reader.close()
            raise
        finally:
            writer.close()


def _widen(pipe: int) -> None:
    import fcntl  # noqa: PLC0415 - not everywhere

    with suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, ROOM)
