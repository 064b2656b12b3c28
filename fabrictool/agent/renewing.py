"""A joined agent's certificate is renewed in place, by the issuer that signed it, as long as its token allows."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING

from fabrictool.agent.admission import ask_renewal
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.mesh.identity import chain_pem, describe_chain
from fabrictool.mesh.transport.tls import IdentityFiles

if TYPE_CHECKING:
    from fabrictool.base.clock import Clock
    from fabrictool.base.runfolder import RunFolder
    from fabrictool.mesh.jointoken import JoinToken

_log = logging.getLogger("fabrictool.agent")

RENEW_BEFORE_S = 8 * 3600.0
"""So much before its end, or a third of its life when that is less: an issuer may be away for a night's maintenance,
and four hours before the end the agent says that it has got no other one."""
LOOK_S = 60.0
"""Clocks are set, and processes are stopped."""
RETRY_S = 600.0


class RenewalWatch:
    """Asks for another certificate in time; the agent takes it over as it does one that `apply` brings."""

    # Wide: what signed it, where it lies, its time, and how long it is needed.
    def __init__(self, token: JoinToken, folder: RunFolder, clock: Clock, ends_at: float | None) -> None:
        self._token, self._folder, self._clock, self._ends_at = token, folder, clock, ends_at
        self._files = IdentityFiles(folder.identity)
        self._taken_at = clock.wall()
        self._trouble = ""

    async def run(self) -> None:
        """Until no other one is needed, or cancelled."""
        while True:
            pause = await self.look()
            if pause is None:
                return
            await asyncio.sleep(pause)

    async def look(self) -> float | None:
        """Ask if it is time; returns the seconds until the next look, None when no other is needed."""
        try:
            return await asyncio.to_thread(self._look)
        except (FabrictoolError, OSError) as error:
            told = error if isinstance(error, FabrictoolError) else file_error(error, self._folder.spec)
            why = f"{told.problems[0].code} {told.problems[0].message}"
            if why != self._trouble:
                _log.warning("the certificate was not renewed, and is asked for again: %s", why)
            self._trouble = why
            return RETRY_S * (0.5 + random.random())  # after a refusal, too: it may be our clock that was wrong

    def _look(self) -> float | None:
        now, end = self._clock.wall(), describe_chain(chain_pem(self._files.read()[0].chain)).end
        if self._ends_at is not None and end >= self._ends_at:
            return None  # it outlives its job
        left = end - min(RENEW_BEFORE_S, (end - self._taken_at) / 3) - now
        if left > 0:
            return min(left, LOOK_S)
        chain = ask_renewal(self._token, self._files, ends_at=self._ends_at)
        write_atomic(self._files.chain, chain_pem(chain))
        os.utime(self._folder.spec)  # the agent looks at it, and then at its certificate
        self._taken_at, self._trouble = now, ""
        return LOOK_S
