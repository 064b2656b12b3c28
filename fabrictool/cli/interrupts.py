"""Ctrl-C from the first moment on: it ends a command with 130 and one line, also while modules are loaded.

An import swallows a KeyboardInterrupt when it comes in one of its callbacks, and a C extension may be left half made by
it. So while one is under way nothing is raised: nothing has begun then that would have to be ended in order, and the
process ends at once. This module imports next to nothing (not even `signal`, which imports `enum` and more), for until
it has been read a Ctrl-C shows a traceback.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 130
MESSAGE = "fabrictool: interrupted"
_IMPORTERS = "<frozen importlib"


class HearingInterrupts:
    """For a whole command, as a context; one that ignores Ctrl-C, as a shell's background job does, goes on so."""

    def __enter__(self) -> None:
        self._heard = False
        if _signal.getsignal(_signal.SIGINT) is not _signal.default_int_handler:
            return
        try:
            _signal.signal(_signal.SIGINT, _pressed)
        except ValueError:  # not in the main thread, which alone hears signals
            return
        self._heard = True

    def __exit__(self, *_: object) -> None:
        if self._heard:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def leave(code: int) -> NoReturn:
    """End this process with `code`. After an interrupt at once: a solver's own threads may still run, and tearing them
    down would abort.
    """
    if code == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code)
    sys.exit(code)


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
