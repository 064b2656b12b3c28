"""Keeps the links to hubs that a node dials: of those that it was told of, and those that it learns of from the
registry, each by whatever path leads there. A gateway that was added, or moved, is found without anybody's restart.

A hub keeps a link to all, an agent to two (`mesh.hubchoice`).
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
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.hubchoice import LinkedHub
from fabrictool.mesh.member import BEAT_SECONDS
from fabrictool.mesh.transport.reach import Route

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import EgressSpec
    from fabrictool.mesh.hubchoice import HubChoice
    from fabrictool.mesh.records import NodeBody
    from fabrictool.mesh.transport.tunnel import Tunnel

_log = logging.getLogger("fabrictool.mesh")

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
"""A gateway that comes back is found within it. With many hubs the attempts would add up."""
RETRY_MAX_OF_MANY_S = 30.0
RETRY_MAX_BY_SSH_S = 60.0
"""Where a failed attempt logs in to somebody's host, while another hub's tunnel is up."""
MAX_HUBS = 8
"""Hubs that a node knows because it learned of them, beside those that it was told of."""


class HubLinks:
    """The links of one node to the hubs that it dials."""

    def __init__(
        self,
        clock: Clock,
        context: ssl.SSLContext,
        new_tunnel: Callable[[], Tunnel],
        linked: Callable[[bytes], bool],
        hubs: Callable[[], Iterable[NodeBody]],
        choice: HubChoice[HostPort] | None,
    ) -> None:
        """`new_tunnel` refuses everybody but a hub; `linked` says whether a session has a tunnel, whoever dialled;
        `hubs`: those that live; without a `choice` it dials all.
        """
        self._hubs = hubs
        self._choice = choice
        self._clock = clock
        self._context = context
        self._new_tunnel = new_tunnel
        self._linked = linked
        self._dialled: dict[HostPort, asyncio.Task[None]] = {}
        self._told: set[HostPort] = set()
        self._learned: set[HostPort] = set()
        self._sessions: dict[str, bytes] = {}
        """Address → who answered there last: a hub may have several, and needs one tunnel."""
        self._former: set[asyncio.Task[None]] = set()
        """Of hubs that other processes take over from; each ends with its tunnel."""
        self._closed = False
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
        """Address → the last connection that we dialled there; it may be over. The newest stands last."""

    def dial(self, hubs: Iterable[HostPort], egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET) -> None:
        """Keep links to these. Told others later, the former ones are kept while a hub claims them."""
        self._egress = egress
        former, self._told = self._told, set(hubs)
        self._learned = (self._learned | former) - self._told
        self.look()

    def seek(self, addresses: Sequence[HostPort], new_tunnel: Callable[[], Tunnel]) -> None:
        """Dial these, hubs or agents, in turn, whenever no tunnel is up; `new_tunnel` lets in both."""
        if self._seeking is not None:
            self._seeking.cancel()
        self._seeking = asyncio.create_task(self._seek(addresses, new_tunnel)) if addresses else None

    def learn(self, hubs: Iterable[HostPort]) -> None:
        """A hub says where it is."""
        fresh = [hub for hub in hubs if hub not in self._learned and hub not in self._told]
        self._learned.update(fresh[: max(0, MAX_HUBS - len(self._learned))])
        self.look()

    def beat(self) -> None:
        """Forget those that we learned of, that no living hub claims any more, and that we hold no tunnel to.

        Others may have voted a hub out that serves us well.
        """
        living = list(self._hubs())
        claimed = {address for hub in living for address in hub.addresses}
        self._learned = {hub for hub in self._learned if str(hub) in claimed or self._open(hub) is not None}
        self.look(living, beat=True)

    def look(self, living: Iterable[NodeBody] | None = None, *, beat: bool = False) -> None:
        """Dial who is wanted, and let go of the others when nothing flows there; each `beat`, and at any change.

        `living` hubs, where they were read already.
        """
        if self._closed:
            return
        known = self._told | self._learned
        wanted = known
        if self._choice is not None:
            living = self._hubs() if living is None else living
            hubs = {hub.session: LinkedHub(hub.provider, hub.ingress) for hub in living}
            addresses = {str(hub): hub for hub in known}
            linked = {
                addresses[address]: hubs.get(tunnel.peer.session, LinkedHub(tunnel.peer.claims.provider))
                for address, tunnel in self.tunnels.items()
                if tunnel.peer is not None and not tunnel.closed.done() and address in addresses
            }
            providers = {hub.provider for hub in (*hubs.values(), *linked.values())}
            wanted = self._choice.wanted(sorted(known, key=str), linked, providers=len(providers), beat=beat)
        answered = {address: last.peer.session for address, last in self.tunnels.items() if last.peer is not None}
        names = {str(hub) for hub in known}
        self._sessions = {a: session for a, session in (self._sessions | answered).items() if a in names}
        for hub in self._dialled.keys() - wanted:
            tunnel = self._open(hub)
            if tunnel is None or not tunnel.open_streams:
                self._let_go(hub, tunnel)
        for hub in wanted - self._dialled.keys():
            self.routes[str(hub)] = Route(hub, self._egress, os.environ)
            self._dialled[hub] = asyncio.create_task(self._keep(str(hub)))

    def dial_beside(self, tunnel: Tunnel) -> None:
        """Another process accepts where we dialled this tunnel: have one to that process, too."""
        for hub, task in self._dialled.items():
            if self.tunnels.get(str(hub)) is tunnel and not self._closed:
                del self.tunnels[str(hub)]
                self._sessions.pop(str(hub), None)
                self._former.add(task)
                task.add_done_callback(self._former.discard)
                self.routes[str(hub)] = Route(hub, self._egress, os.environ)
                self._dialled[hub] = asyncio.create_task(self._keep(str(hub)))
                return

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._dialled.values(), *self._former, *([self._seeking] if self._seeking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, hub: HostPort) -> Tunnel | None:
        """Our connection there, if one is up."""
        tunnel = self.tunnels.get(str(hub))
        return None if tunnel is None or tunnel.closed.done() else tunnel

    def _let_go(self, hub: HostPort, tunnel: Tunnel | None) -> None:
        task = self._dialled.pop(hub)
        if tunnel is None:
            task.cancel()
        else:
            self._former.add(task)
            task.add_done_callback(self._former.discard)
            tunnel.leave("other hubs are enough")
        for table in (self.errors, self.routes, self.tunnels):
            table.pop(str(hub), None)

    async def _keep(self, address: str) -> None:
        delay = RETRY_FIRST_S
        while True:
            if self._linked(self._sessions.get(address, b"")):  # or it dialled us; ours would only replace that tunnel
                await asyncio.sleep(BEAT_SECONDS)
                continue
            try:
                async with self.routes[address].connect(self._new_tunnel, self._context) as tunnel:
                    self.errors.pop(address, None)
                    self.tunnels.pop(address, None)
                    self.tunnels[address] = tunnel
                    began = self._clock.monotonic()
                    await tunnel.closed
                if asyncio.current_task() in self._former:
                    return
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


def addresses_of(node: NodeBody) -> Iterator[HostPort]:
    """Where it says that it can be dialled."""
    for host, _, port in (address.rpartition(":") for address in node.addresses):
        if int(port) < 65536:
            yield HostPort(host, int(port))
