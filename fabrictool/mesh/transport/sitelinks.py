"""Keeps an agent linked with the next ones of its site, where the network allows it (`mesh.sites` says who they are).

They are dialled straight and by no other path: whoever cannot be reached so is no neighbour. The one of two that comes
first in order dials; the other does so after a while, for a firewall may let only one of them through.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.sites import SITE_LINKS
from fabrictool.mesh.transport.reach import Route

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import HostPort
    from fabrictool.mesh.sites import Sites
    from fabrictool.mesh.transport.tunnel import Tunnel

_log = logging.getLogger("fabrictool.mesh")

SECOND_DIALLER_S = 3.0
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 60.0
"""After dials that failed: a site may forbid what we try."""
NAMES_S = 2.0
"""For the gateways' names to be resolved."""
ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737)."""
REST_S = 60.0
"""Before somebody who could not be reached is tried again; the ones behind it come first."""
LOOKED_AT = 32
"""Of those on a ring that live, each beat: in a site that allows nothing the pause sets the pace, and not its size."""


async def own_address(hubs: Sequence[HostPort]) -> str:
    """The address of this machine from which the way to the hubs begins, or from which any does.

    Raises
    ------
    OSError
        No way leads out of this node.
    """
    loop = asyncio.get_running_loop()
    with suppress(TimeoutError):
        async with asyncio.timeout(NAMES_S):
            for hub in hubs:
                with suppress(OSError):
                    for family, _, _, _, address in await loop.getaddrinfo(hub.host, hub.port, type=socket.SOCK_DGRAM):
                        return _source(family, address)
    return _source(socket.AF_INET, ELSEWHERE)  # where names cannot be resolved, as behind a proxy


def _source(family: int, address: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: it asks the routing table, and sends nothing
        return str(probe.getsockname()[0])


class SiteLinks:
    """The links of one agent; `look` is called each beat."""

    # Wide: who it is, what it reads, and how it dials.
    def __init__(
        self,
        session: bytes,
        sites: Sites,
        clock: Clock,
        context: ssl.SSLContext,
        *,
        address_of: Callable[[bytes], HostPort | None],
        tunnel_to: Callable[[bytes], Tunnel | None],
        new_tunnel: Callable[[bytes], Tunnel],
    ) -> None:
        """`address_of` a session that lives; `new_tunnel` refuses everybody but that session."""
        self._session = session
        self._sites = sites
        self._clock = clock
        self._context = context
        self._address_of = address_of
        self._tunnel_to = tunnel_to
        self._new_tunnel = new_tunnel
        self._dialling: dict[bytes, asyncio.Task[None]] = {}
        self.addresses: dict[bytes, HostPort] = {}
        """Whom we dial, and where."""
        self._missed_since: dict[bytes, float] = {}
        """Whom the other one should dial → since when there is no link."""
        self._rest_until: dict[bytes, float] = {}
        self._next_at = 0.0
        self._pause = PAUSE_FIRST_S

    def look(self) -> None:
        """Dial who is missing, and let go of who is no longer next."""
        now = self._clock.monotonic()
        self._rest_until = {session: until for session, until in self._rest_until.items() if until > now}
        wanted = self._wanted()
        linked = [session for session in wanted if self._tunnel_to(session) is not None]
        missing = [session for session in wanted if session not in linked and session not in self._dialling]
        self._missed_since = {session: self._missed_since.get(session, now) for session in missing}
        for session in missing:
            ours = self._session < session or now - self._missed_since[session] >= SECOND_DIALLER_S
            address = self._address_of(session)
            if ours and address is not None and now >= self._next_at:
                self.addresses[session] = address
                self._dialling[session] = asyncio.create_task(self._dial(session, address))
        if len(linked) == len(wanted):
            for session in self._dialling.keys() - set(wanted):
                del self.addresses[session]
                self._dialling.pop(session).cancel()

    async def close(self) -> None:
        tasks = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wanted(self) -> list[bytes]:
        living = (s for s in self._sites.behind(self._session) if self._address_of(s) is not None)
        near = (session for session in islice(living, LOOKED_AT) if session not in self._rest_until)
        return list(islice(near, SITE_LINKS))

    async def _dial(self, session: bytes, address: HostPort) -> None:
        try:
            route = Route(address, msgspec.UNSET, {})  # no proxy, whatever the environment says
            async with route.connect(lambda: self._new_tunnel(session), self._context) as tunnel:
                try:
                    await tunnel.closed
                finally:
                    tunnel.close("another agent is nearer")
            if tunnel.peer is None:
                self._failed(session, str(tunnel.refusal or "it closed the connection at once"))
            else:
                self._pause = PAUSE_FIRST_S
        except (OSError, ValueError, FabrictoolError) as error:
            self._failed(session, str(error))
        finally:
            if self._dialling.get(session) is asyncio.current_task():
                del self._dialling[session], self.addresses[session]

    def _failed(self, session: bytes, why: str) -> None:
        now = self._clock.monotonic()
        _log.debug("cannot reach %s of our site: %s", session.hex()[:8], why)
        self._rest_until[session] = now + REST_S
        self._next_at = now + random.uniform(0.5, 1.0) * self._pause
        self._pause = min(self._pause * 2, PAUSE_MAX_S)
