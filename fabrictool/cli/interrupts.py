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
    from typing import NoReturn, Self

INTERRUPTED = 130
MESSAGE = "fabrictool: interrupted"
_IMPORTERS = "<frozen importlib"


class HearingInterrupts:
    """For a whole command, as a context; one that ignores Ctrl-C, as a shell's background job does, goes on so."""

    def __enter__(self) -> None:
        self._heard = False
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            try:
                _signal.signal(_signal.SIGINT, _pressed)
                self._heard = True
            except ValueError:  # not in the main thread, which alone hears signals
                return

    def __exit__(self, *_: object) -> None:
        if self._heard:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)


class Interrupts:
    """Ctrl-C that is not lost: compiled code calls Python while it looks at arrays, and drops what that raises.

    Within the context Ctrl-C is noted, and raised by `check`; `at_once` or the second time it is raised on the spot,
    too. A process that ignores SIGINT, such as a shell's background job, goes on ignoring it.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.pressed = False
        self._at_once = at_once

    def __enter__(self) -> Self:
        self._before = _signal.getsignal(_signal.SIGINT)
        if callable(self._before):  # Python's own, or the one that every command has
            _signal.signal(_signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if callable(self._before):
            _signal.signal(_signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        again, self.pressed = self.pressed, True
        if again or self._at_once:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt when Ctrl-C was pressed, once."""
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt


class HoldingInterrupts:
    """Ctrl-C waits, also for the next program in this process, until that one has it come: `release`."""

    def __enter__(self) -> None:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT,))

    def __exit__(self, *_: object) -> None:
        self.release()

    @staticmethod
    def release() -> None:
        """What waited comes now."""
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGINT,))


def leave(code: int) -> NoReturn:
    """End this process with `code`. After an interrupt at once: a solver's own threads may still run, and tearing them
    down would abort.
    """
    if "numpy" in sys.modules:
        import gc

        gc.freeze()  # looking all that is loaded through once more takes a quarter of a second, and frees nothing
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
