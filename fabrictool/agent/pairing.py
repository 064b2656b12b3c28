"""An engine's part in a prefill/decode pair: where the other one finds it.

What an engine that shares requests at once has for that listens where its API does, which must be loopback alone: the
administrative routes of some stand open there. So its agent listens in its place, at the node's address, and passes on
what comes. That address asks nobody for a key, as those at which caches are given out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fabrictool.engines.protocol import CacheHandover
from fabrictool.mesh.transport.sitelinks import own_address
from fabrictool.mesh.transport.splice import Splice

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.domain.specs import AgentSpec, Pairing

MOST_CONNECTIONS = 1024
"""At a time; a decode replica opens one for a question, and closes it."""


class PairMember:
    """One replica's; of a unified one it does nothing."""

    def __init__(self, spec: AgentSpec, pairing: Pairing, note: Callable[[str, str, str], None]) -> None:
        self._spec, self._note = spec, note
        self._at_once = pairing == "together"
        self._host = "127.0.0.1"
        self._port = 0
        """Of the engine that runs now, at loopback."""
        self._server: asyncio.Server | None = None
        self._ends: set[Splice] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self.meets_at: str | None = None
        """Where the engines that fetch its caches find it; None: it needs no such place."""

    async def open(self) -> None:
        """Find this node's address for the others: loopback where no way leads out of it, which `note` hears."""
        if self._spec.phase == "unified":
            return
        try:
            self._host = await own_address(self._spec.hubs)
        except OSError as error:
            text = f"caches can be handed over inside this node only: {error}"
            self._note("no-address", self._spec.replica, text)
        if self._spec.phase == "prefill" and self._at_once:
            self._server = await asyncio.get_running_loop().create_server(self._enter, self._host, 0)
            self.meets_at = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    def handover(self, port: int) -> CacheHandover | None:
        """For the engine that starts now; None for one that does both."""
        self._port, phase = port, self._spec.phase
        return None if phase == "unified" else CacheHandover(phase == "prefill", self._host, port, self._spec.device)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for end in self._ends:
            end.close()
        await asyncio.gather(*self._dialling, return_exceptions=True)

    def _enter(self) -> asyncio.Protocol:
        outer, inner = Splice.pair()
        self._ends = {end for end in self._ends if not end.lost}
        if len(self._ends) >= MOST_CONNECTIONS:
            outer.close()
            return outer
        self._ends.add(outer)
        task = asyncio.get_running_loop().create_task(self._dial(inner))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return outer

    async def _dial(self, inner: Splice) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: inner, "127.0.0.1", self._port)
        except OSError:  # the engine has yet to listen, or is gone
            inner.opposite.close()
