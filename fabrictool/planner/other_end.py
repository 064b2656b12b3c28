"""A copy of this process that works its way through the same things from their other end, until the two meet.

With a second core it takes half as long; where that is busy nothing is waited for, and nothing comes out otherwise.
There is a copy only where a fork is safe: on Linux, and while no other thread of Python runs. Those of NumPy's linear
algebra wait for work, and it hears of forks.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from typing import NoReturn, Self

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
        self._copy: int | None = None
        """A descriptor of its process."""
        if wanted and _may_fork():
            self._begin(items, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._copy is None:
            return
        # By its descriptor: where nobody waits for children (SIGCHLD is ignored) its number may be another's by now.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._copy, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._copy, os.WEXITED)
        os.close(self._copy)
        self._copy = None

    def done(self, at: int) -> R | None:
        """What the copy made of an item; None: it is not there yet."""
        with suppress(EOFError, OSError):
            while self._reader is not None and self._reader.poll():
                where, result = self._reader.recv()
                self._done[where] = result
        return self._done.pop(at, None)

    def _begin(self, items: Sequence[T], work: Callable[[T], R]) -> None:
        from multiprocessing.connection import Pipe  # noqa: PLC0415 - --help must not pay for it

        self._reader, writer = Pipe(duplex=False)
        _widen(writer.fileno())
        try:
            former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the copy does not hear
            try:
                self._fork(items, work, writer)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
        except BaseException:  # Ctrl-C that waited
            self.__exit__()
            raise
        finally:
            writer.close()

    def _fork(self, items: Sequence[T], work: Callable[[T], R], writer: Connection) -> None:
        with warnings.catch_warnings(), suppress(OSError):  # no memory for another process
            warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy's threads: see above
            copy = os.fork()
            if not copy:
                self._work(items, work, writer)
            self._copy = os.pidfd_open(copy)

    def _work(self, items: Sequence[T], work: Callable[[T], R], writer: Connection) -> NoReturn:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            gc.disable()  # it would write to all memory that the two share
            os.nice(PATIENCE)
            if self._reader is not None:
                self._reader.close()
            for at in reversed(range(len(items))):
                writer.send((at, work(items[at])))
        finally:
            os._exit(0)  # whatever went wrong: who began it does that item, too, and says so


def _may_fork() -> bool:
    return hasattr(os, "pidfd_open") and _cores() > 1 and threading.active_count() == 1


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _widen(pipe: int) -> None:
    import fcntl  # noqa: PLC0415 - not everywhere

    with suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, ROOM)
