"""Ctrl-C from the first moment on: it ends a command with 130 and one line, also while modules are loaded.

An import swallows a KeyboardInterrupt when it comes in one of its callbacks, and a C extension may be left half made by
it. So while one is under way nothing is raised: nothing has begun then that would have to be ended in order, and the
process ends at once. This module imports almost nothing, for it is loaded before all others.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

INTERRUPTED = 130
MESSAGE = "fabrictool: interrupted"
_IMPORTERS = "<frozen importlib"


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """For a whole command; one that ignores Ctrl-C, as a shell's background job does, goes on ignoring it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _pressed(_number: int, frame: FrameType | None) -> None:
    if importing(frame):
        os.write(2, f"{MESSAGE}\n".encode())  # not print: buffered files are not re-entrant
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def importing(frame: FrameType | None) -> bool:
    """Whether an import is among what `frame` was called by."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTERS):
            return True
        frame = frame.f_back
    return False
