"""Signs of life in the run folder: what a cluster reads where no port of the unit can be reached.

``health.json`` is one short line for surveys of many units; ``status.json`` is the whole status document. Both are
written when something changes, and now and then, so that a standstill shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.status.documents import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.runfolder import RunFolder
    from fabrictool.status.documents import Health, StatusDocument

_log = logging.getLogger("fabrictool.status")

PERIOD_S = 15.0
"""Two small writes a unit; a shared file system carries thousands of them a second."""


class SignsOfLife:
    """Writes until `run` is cancelled; `touch` makes the next write come now."""

    def __init__(
        self,
        folder: RunFolder,
        health: Callable[[], Health],
        document: Callable[[], StatusDocument],
        period_s: float = PERIOD_S,
    ) -> None:
        self._folder = folder
        self._period_s = period_s
        self._health = health
        self._document = document
        self._changed = asyncio.Event()
        self._failure = ""
        """Why the last one could not be written: said once, not every few seconds."""

    def touch(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            await self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):  # Python 3.11's wait_for may swallow a cancellation
                    await self._changed.wait()

    async def write(self) -> None:
        """Once; in a thread, for a shared file system may make it wait."""
        health, document = msgspec.json.encode(self._health()), encode(self._document())
        try:
            await asyncio.to_thread(self._write, health, document)
        except FabrictoolError as error:
            why = "; ".join(f"{problem.code} {problem.message}" for problem in error.problems)
            if why != self._failure:
                _log.warning("no sign of life can be written, until further notice: %s", why)
            self._failure = why
        else:
            if self._failure:
                _log.info("signs of life can be written again")
            self._failure = ""

    def _write(self, health: bytes, document: bytes) -> None:
        self._folder.write_health(health, document)
        self._folder.bound_log()
