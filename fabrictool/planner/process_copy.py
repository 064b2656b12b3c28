"""A copy of this process that works on something beside it, where a fork is safe.

That is on Linux, while no other thread of Python runs. Those of NumPy's linear algebra wait for work, and it hears of
forks.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""


class ProcessCopy:
    """It does its work without a sound, hears no Ctrl-C, and is gone once it is closed or who began it is gone."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong in `work` ends the copy alone. There is none where there is no memory for it."""
        self.descriptor: int | None = None
        """Of its process; None: there is none, or it is gone."""
        try:
            former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the copy does not hear
            try:
                self._fork(work)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
        except BaseException:  # Ctrl-C that waited
            self.close()
            raise

    def close(self) -> None:
        if self.descriptor is None:
            return
        # By its descriptor: where nobody waits for children (SIGCHLD is ignored) its number may be another's by now.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED)
        os.close(self.descriptor)
        self.descriptor = None

    def _fork(self, work: Callable[[], None]) -> None:
        with warnings.catch_warnings(), suppress(OSError):  # no memory for another process
            warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy's threads: see above
            parent = os.getpid()
            copy = os.fork()
            if not copy:
                try:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    _end_with(parent)
                    gc.freeze()  # or it would write to all memory that the two share
                    work()
                finally:
                    os._exit(0)  # who began it does the same without it, and says what is wrong
            try:
                self.descriptor = os.pidfd_open(copy)
            except OSError:  # no descriptor is left
                os.kill(copy, signal.SIGKILL)
                os.waitpid(copy, 0)


def may_copy() -> bool:
    """Whether a copy is safe, and there is a second core for it."""
    return _cores() > 1 and threading.active_count() == 1 and _has_descriptors()


def _has_descriptors() -> bool:
    """Of processes: Linux from 5.3 on has them, where nothing forbids it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _end_with(parent: int) -> None:
    """Have the kernel end this process when that one is gone, however it went."""
    import ctypes  # noqa: PLC0415 - only copies need it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
