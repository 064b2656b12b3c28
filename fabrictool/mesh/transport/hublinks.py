"""Keeps the links to hubs that a node dials: those that it was told of, and those that it learns of from the registry,
each by whatever path leads there and for ever. A gateway that was added, or moved, is found without anybody's restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.tlswords import spoken
from fabrictool.mesh.member import BEAT_SECONDS
from fabrictool.mesh.transport.reach import Route

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import EgressSpec, HostPort
    from fabrictool.mesh.transport.tunnel import Tunnel

_log = logging.getLogger("fabrictool.mesh")

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
"""A gateway that comes back is found within it. With many hubs the attempts would add up."""
RETRY_MAX_OF_MANY_S = 30.0
RETRY_MAX_BY_SSH_S = 60.0
"""Where a failed attempt logs in to somebody's host, while another hub's tunnel is up."""
MAX_HUBS = 8
"""Hubs that a node dials because it learned of them, beside those that it was told of."""


class HubLinks:
    """The links of one node to the hubs that it dials."""

    def __init__(
        self,
        clock: Clock,
        context: ssl.SSLContext,
        new_tunnel: Callable[[], Tunnel],
        linked: Callable[[bytes], bool],
    ) -> None:
        """`new_tunnel` refuses everybody but a hub; `linked` says whether a session has a tunnel, whoever dialled."""
        self._clock = clock
        self._context = context
        self._new_tunnel = new_tunnel
        self._linked = linked
        self._dialled: dict[HostPort, asyncio.Task[None]] = {}
        self._told: set[HostPort] = set()
        """As against learned."""
        self._egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET
        self._seeking: asyncio.Task[None] | None = None
        self.alone = asyncio.Event()
        """No hub's tunnel is up: whoever waits before another attempt does not wait long."""
        self.alone.set()
        self.routes: dict[str, Route] = {}
        """Address → the paths to it: which is in use, and why others failed."""
        self.errors: dict[str, str] = {}
        """Address → why the last attempt to reach it failed; empty while connected."""
        self.tunnels: dict[str, Tunnel] = {}
        """Address → the last connection that we dialled there; it may be over."""

    def dial(self, hubs: Iterable[HostPort], egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET) -> None:
        """Keep a link to each of these. Told others later, the former ones are kept while a hub claims them."""
        self._egress = egress
        self._told = set(hubs)
        self._dial_also(self._told)

    def seek(self, addresses: Sequence[HostPort], new_tunnel: Callable[[], Tunnel]) -> None:
        """Dial these, hubs or agents, in turn, whenever no tunnel is up; `new_tunnel` lets in both."""
        if self._seeking is not None:
            self._seeking.cancel()
        self._seeking = asyncio.create_task(self._seek(addresses, new_tunnel)) if addresses else None

    def learn(self, hubs: Iterable[HostPort]) -> None:
        """A hub says where it is."""
        self._dial_also(list(hubs)[: max(0, MAX_HUBS - len(self._dialled.keys() - self._told))])

    def forget(self, advertised: Iterable[str]) -> None:
        """Those that we learned of, that no living hub claims any more, and that we hold no tunnel to.

        Others may have voted a hub out that serves us well.
        """
        claimed = set(advertised)
        for hub in self._dialled.keys() - self._told:
            last = self.tunnels.get(address := str(hub))
            if address not in claimed and (last is None or last.closed.done()):
                self._dialled.pop(hub).cancel()
                for table in (self.errors, self.routes, self.tunnels):
                    table.pop(address, None)

    async def close(self) -> None:
        tasks = [*self._dialled.values(), *([self._seeking] if self._seeking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dial_also(self, hubs: Iterable[HostPort]) -> None:
        for hub in hubs:
            if hub not in self._dialled:
                self.routes[str(hub)] = Route(hub, self._egress, os.environ)
                self._dialled[hub] = asyncio.create_task(self._keep(str(hub)))

    async def _keep(self, address: str) -> None:
        delay = RETRY_FIRST_S
        peer = b""
        while True:
            if self._linked(peer):  # it dialled us; ours would only replace its tunnel
                await asyncio.sleep(BEAT_SECONDS)
                continue
            try:
                async with self.routes[address].connect(self._new_tunnel, self._context) as tunnel:
                    self.errors.pop(address, None)
                    self.tunnels[address] = tunnel
                    began = self._clock.monotonic()
                    await tunnel.closed
                peer = b"" if tunnel.peer is None else tunnel.peer.session
                if tunnel.refusal is not None:
                    self.errors[address] = str(tunnel.refusal)
                elif self._clock.monotonic() - began > RETRY_FIRST_S * 10:
                    delay = RETRY_FIRST_S
            except (OSError, ValueError, FabrictoolError) as error:  # ValueError: no name that can be resolved
                self.errors[address] = spoken(error, "is of another federation")
                _log.debug("cannot reach %s: %s", address, error)
            delay = await self._wait(delay, by_ssh=self.routes[address].by_ssh)

    async def _seek(self, addresses: Sequence[HostPort], new_tunnel: Callable[[], Tunnel]) -> None:
        for address in itertools.cycle(addresses):
            await asyncio.sleep(random.uniform(0.5, 1.0) * BEAT_SECONDS)
            await self.alone.wait()
            try:
                async with Route(address, msgspec.UNSET, {}).connect(new_tunnel, self._context) as reached:
                    await reached.closed
            except (OSError, ValueError, FabrictoolError) as error:
                _log.debug("cannot reach %s: %s", address, error)

    async def _wait(self, delay: float, *, by_ssh: bool) -> float:
        """Before another attempt, for about `delay`; returns the next one's. Once no tunnel is up it is cut short."""
        longest = RETRY_MAX_S if len(self._dialled) <= MAX_HUBS else RETRY_MAX_OF_MANY_S
        shortest, whole = min(delay, longest), random.uniform(0.5, 1.0) * delay
        await asyncio.sleep(min(whole, shortest))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, whole - shortest)):
                await self.alone.wait()
        return min(delay * 2, RETRY_MAX_BY_SSH_S if by_ssh and not self.alone.is_set() else longest)
