"""An engine's part in a prefill/decode pair: where the other one finds it.

What an engine that shares requests at once has for that listens where its API does, which must be loopback alone: the
administrative routes of some stand open there. So its agent listens in its place, at the node's address, and passes on
the few questions that the other one has. All else is refused: whoever could register an engine there would be given
prompts. That address asks nobody for a key, as those at which caches are given out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import aiohttp
from aiohttp import web

from fabrictool.engines.protocol import CacheHandover
from fabrictool.mesh.transport.sitelinks import own_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.web_protocol import RequestHandler

    from fabrictool.domain.specs import AgentSpec
    from fabrictool.engines.protocol import Capabilities

MOST_CONNECTIONS = 1024
"""Held at the same time, from all peers together."""
MOST_OF_A_PEER = 256
"""From one address: a decode replica keeps some for each of its workers."""
SILENCE_S = 30.0
"""A connection that asks nothing for so long is closed; they ask for a sign of life every five."""
MOST_OCTETS = 64 * 1024
"""Of a question: each worker of a decode replica tells its address."""
ANSWER_S = 5.0
"""For a question and its answer: they wait no longer."""


class PairMember:
    """One replica's; of a unified one it does nothing."""

    def __init__(self, spec: AgentSpec, capabilities: Capabilities, note: Callable[[str, str, str], None]) -> None:
        self._spec, self._note = spec, note
        self._routes = capabilities.meeting_routes
        self._host = "127.0.0.1"
        self._port = 0
        """Of the engine that runs now, at loopback."""
        self._place: MeetingPlace | None = None
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
        if self._spec.phase == "prefill" and self._routes:
            self._place = MeetingPlace(self._routes, lambda: self._port)
            self.meets_at = f"{self._host}:{await self._place.open(self._host)}"

    def handover(self, port: int) -> CacheHandover | None:
        """For the engine that starts now; None for one that does both."""
        self._port, phase = port, self._spec.phase
        return None if phase == "unified" else CacheHandover(phase == "prefill", self._host, port, self._spec.device)

    async def close(self) -> None:
        if self._place is not None:
            await self._place.close()


class MeetingPlace(web.Server):
    """Passes on what an engine tells those it shares requests with.

    `routes` are the methods and paths that may be asked; `port` tells where the engine listens now, at loopback.
    """

    def __init__(self, routes: frozenset[tuple[str, str]], port: Callable[[], int]) -> None:
        super().__init__(self._answer, keepalive_timeout=SILENCE_S, access_log=None)
        self._routes, self._port = routes, port
        self._peers: dict[RequestHandler, str] = {}
        self._silent: dict[RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have yet to ask: aiohttp's own limit holds only between two requests."""

    async def open(self, host: str) -> int:
        """The port that it listens at."""
        self._engine = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self._listener = await asyncio.get_running_loop().create_server(self, host, 0)
        return cast("int", self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._listener.close()
        await self.shutdown(1.0)
        await self._engine.close()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")[0]
        if len(self._peers) >= MOST_CONNECTIONS or list(self._peers.values()).count(peer) >= MOST_OF_A_PEER:
            transport.abort()
            return
        self._peers[handler] = peer
        self._silent[handler] = asyncio.get_running_loop().call_later(SILENCE_S, transport.abort)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._peers.pop(handler, None)
        self._has_asked(handler)

    def _has_asked(self, handler: RequestHandler) -> None:
        if (timer := self._silent.pop(handler, None)) is not None:
            timer.cancel()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        self._has_asked(request.protocol)
        if (request.method, request.path) not in self._routes:
            return web.Response(status=403, text="this is only for what decode replicas ask\n")
        if request.can_read_body and request.content_length is None:
            return web.Response(status=411, text="say how long the question is\n")
        if (request.content_length or 0) > MOST_OCTETS:
            return web.Response(status=413, text=f"a question has at most {MOST_OCTETS} octets\n")
        url = f"http://127.0.0.1:{self._port()}{request.path_qs}"
        try:
            async with asyncio.timeout(ANSWER_S):
                body, headers = await request.read(), {"content-type": request.content_type}
                async with self._engine.request(request.method, url, data=body or None, headers=headers) as answer:
                    told = await answer.read()
                    return web.Response(status=answer.status, body=told, content_type=answer.content_type)
        except (aiohttp.ClientError, OSError, TimeoutError):  # the engine has yet to listen, or is gone
            return web.Response(status=503, text="the engine does not answer\n")
