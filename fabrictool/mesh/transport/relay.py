"""Reaches an agent that has no tunnel to us through a hub that it has one to, and carries that for others.

    gateway ──── tunnel ──── hub ──── tunnel ──── agent
       └──────── the mesh's TLS, end to end ─────────┘

The hub joins two streams and sees octets that it cannot read. What runs inside is a tunnel like any other, by which the
gateway proves itself to the agent; but records and beats of the mesh stay on the links that are there anyway, and what
such a tunnel's end says of its peer's life is no path of its own (`mesh.detector`): it hangs on the hub.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.framing import Beat, StreamHead
from fabrictool.mesh.transport.door import Door
from fabrictool.mesh.transport.making import made
from fabrictool.mesh.transport.splice import Splice
from fabrictool.mesh.transport.tunnel import Host, Tunnel, TunnelStream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable

    from fabrictool.base.clock import Clock
    from fabrictool.mesh.identity import VerifiedSession
    from fabrictool.mesh.transport.tunnel import Expected

_log = logging.getLogger("fabrictool.mesh")

RELAY = "RELAY"
"""A stream's method: its service is the session to which it shall lead."""
OPEN_S = 5.0
"""Until the agent at the other end has proved itself. A hub that swallows what we send costs a request that much."""
UNUSED_S = 60.0
"""A relayed tunnel without a stream is closed after it; to open one takes two round trips."""
PIPE_OCTETS = 32 * 1024
"""What may lie between a stream and the TLS inside it, for the reason that `tunnel.py` keeps the socket's buffer
short."""
REFUSED_S = 2.0
"""A hub that did not lead to an agent, whatever it said of it, is not asked for that one again before."""
SWALLOWED_S = 60.0
"""A hub behind which nobody answered is not asked for that agent, and after others for the rest: one of the two is
stuck or lies, and nobody can say which."""


CLOSING_TURNS = 50
CARRIED_LOOK_S = 0.1


class RelayError(FabrictoolError):
    """No hub leads to the agent (FT6210)."""


class RelayHost(Host, Protocol):
    """Who opens relayed tunnels, or is reached by them."""

    def load_received(self, tunnel: Tunnel, beat: Beat) -> None:
        """The load that such a tunnel's beat brought; its digest counts for nothing."""

    def load_unknown(self, session: bytes) -> None:
        """There is no tunnel any more that would bring it."""


class Relays:
    """The relayed tunnels of one node: those that it opened, those that lead to it, those that it carries."""

    # Wide: for whom, what it knows of the others, and how it proves itself.
    def __init__(
        self,
        host: RelayHost,
        session: bytes,
        clock: Clock,
        *,
        hub: bool,
        tunnel_to: Callable[[bytes], Tunnel | None],
        holders_of: Callable[[bytes], Iterable[bytes]],
        client_tls: ssl.SSLContext,
        server_tls: ssl.SSLContext,
    ) -> None:
        """`tunnel_to` a session, straight; `holders_of` it, the hubs that say they have such a one."""
        self._host = host
        self._session = session
        self._clock = clock
        self._hub = hub
        self._tunnel_to = tunnel_to
        self._holders_of = holders_of
        self._client_tls = client_tls
        self._server_tls = server_tls
        self._door = Door()
        """Of its own: who crowds it keeps nobody of our site out."""
        self._turned_away: Counter[bytes] = Counter()
        """Hub → how many that it brought."""
        self._tunnels: dict[bytes, tuple[Tunnel, bytes]] = {}
        """Agent → the tunnel that we opened to it, and by which hub."""
        self._replaced: set[Tunnel] = set()
        """Those whose hub is leaving, and whose streams are not over."""
        self._opening: dict[bytes, asyncio.Task[Tunnel]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._carried: list[Splice] = []
        """On the way to agents, for others."""
        self._sockets: set[Splice] = set()
        """Between a stream and the TLS inside it."""
        self._arrived: set[Tunnel] = set()
        """Gateways' tunnels that lead to us."""
        self._unused_since: dict[bytes, float] = {}
        self._avoided_until: dict[bytes, float] = {}
        """Hub and agent → when to ask again."""
        self._slow_until: dict[bytes, float] = {}
        """Hub → until when others come first."""

    # -- for gateways -----------------------------------------------------------------------------------------

    def tunnel(self, session: bytes) -> Tunnel | None:
        """The relayed tunnel to an agent, if one is open and its hub is not about to leave."""
        known = self._tunnels.get(session)
        return known[0] if known is not None and known[1] in self._holders_of(session) else None

    @property
    def opened(self) -> list[tuple[bytes, bytes, Tunnel]]:
        """The relayed tunnels to agents: to whom, by which hub."""
        return [(session, hub, tunnel) for session, (tunnel, hub) in sorted(self._tunnels.items())]

    def by(self, session: bytes) -> bytes | None:
        """The hub through which an agent is reached now, or would be."""
        if self.tunnel(session) is not None:
            return self._tunnels[session][1]
        return next(iter(self.hubs_to(session)), None)

    def hubs_to(self, session: bytes) -> list[bytes]:
        """By which an agent can be reached, as far as is known."""
        now, avoided = self._clock.monotonic(), self._avoided_until
        return [
            hub
            for hub in self._holders_of(session)
            if avoided.get(hub + session, now) <= now and self._tunnel_to(hub) is not None
        ]

    def leads_to(self, session: bytes) -> bool:
        """Whether an agent can be reached so, as far as is known."""
        return self.tunnel(session) is not None or bool(self.hubs_to(session))

    async def reach(self, session: bytes) -> Tunnel:
        """A relayed tunnel to this agent; whoever asks while it is opened waits for the same.

        Raises
        ------
        RelayError
            FT6210 when no hub leads there.
        """
        if (known := self.tunnel(session)) is not None:
            return known
        if session not in self._opening:
            self._opening[session] = task = asyncio.create_task(self._open(session))
            task.add_done_callback(lambda _: self._opening.pop(session, None))
        return await asyncio.shield(self._opening[session])

    def look(self) -> None:
        """Each beat: close what nobody needs, or what a straight tunnel has taken the place of."""
        now = self._clock.monotonic()
        self._avoided_until = {key: until for key, until in self._avoided_until.items() if until > now}
        self._slow_until = {hub: until for hub, until in self._slow_until.items() if until > now}
        self._sockets = {end for end in self._sockets if not end.lost}
        for tunnel in [*self._replaced]:
            if not tunnel.open_streams:
                tunnel.close("another hub has taken over")
        for session, _, tunnel in self.opened:
            if tunnel.open_streams:
                self._unused_since.pop(session, None)
                continue
            unused = now - self._unused_since.setdefault(session, now) > UNUSED_S
            if unused or self._tunnel_to(session) is not None or self.tunnel(session) is None:
                tunnel.close("it is not needed any more")

    def cut_off(self, revoked: Callable[[VerifiedSession], bool]) -> None:
        for tunnel in self._all():
            if tunnel.peer is not None and revoked(tunnel.peer):
                tunnel.close("the peer was revoked")

    async def close(self) -> None:
        """Returns when no socket is left, which takes some turns of the loop."""
        tasks = [*self._opening.values(), *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for tunnel in self._all():
            tunnel.close("leaving")
        for end in self._sockets:
            end.close()
        for _ in range(CLOSING_TURNS):
            if all(end.lost for end in self._sockets):
                break
            await asyncio.sleep(0)

    # -- what neighbours ask ----------------------------------------------------------------------------------

    def asked(self, head: StreamHead, peer: VerifiedSession) -> asyncio.Protocol | None:
        """The handler of a stream whose method is `RELAY`; None refuses. Only hubs ask, and only for agents."""
        if peer.claims.role != "gateway":
            return None
        if not self._hub:
            return self._answer(peer.session) if head.service == self._session else None
        tunnel = self._tunnel_to(head.service)
        if tunnel is None or tunnel.peer is None or tunnel.peer.claims.role != "agent":
            return None
        near, far = Splice.pair()
        self._carried = [end for end in self._carried if not end.lost]
        try:
            tunnel.open_stream(head, far)
        except FabrictoolError as error:
            _log.warning("cannot relay to %s: %s", head.service.hex()[:8], error)
            return None
        self._carried.append(far)
        return near

    async def carried_out(self, seconds: float) -> None:
        """Wait until nothing is carried for others any more, for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(end.lost for end in self._carried):  # noqa: ASYNC110 - many may end, and this is rare
                    await asyncio.sleep(CARRIED_LOOK_S)

    def _answer(self, hub: bytes) -> asyncio.Protocol | None:
        """A gateway comes through the hub at the other end of this stream; None when too many wait that it brought."""
        host = _Inner(self._host, self._arrived.add, self._arrived.discard)
        tunnel = Tunnel(host, self._clock.monotonic, dialler=False, expected="gateway")
        try:
            self._door.let_in(tunnel, self._clock.monotonic(), by=hub)
        except ConnectionRefusedError:
            self._turned_away[hub] += 1
            if (count := self._turned_away[hub]).bit_count() == 1:  # it must not fill our log, either
                _log.warning("hub %s brings too many who do not prove themselves (%d by now)", hub.hex()[:8], count)
            return None
        near, far = Splice.pair()
        task = asyncio.create_task(self._serve(near, far, tunnel))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return far

    async def _serve(self, near: Splice, far: Splice, tunnel: Tunnel) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(OPEN_S):
                inner = await self._socket_to(near)
                await made(loop.connect_accepted_socket(lambda: tunnel, inner, ssl=self._server_tls))
        except (OSError, TimeoutError) as error:
            _log.warning("a relayed gateway did not get through: %s", error)
            near.close()
            far.close()

    # -- internals --------------------------------------------------------------------------------------------

    def _all(self) -> list[Tunnel]:
        return [*self._arrived, *self._replaced, *(tunnel for _, _, tunnel in self.opened)]

    async def _open(self, session: bytes) -> Tunnel:
        hubs = self.hubs_to(session)
        random.shuffle(hubs)  # the load of an agent's two hubs
        hubs.sort(key=self._slow_until.__contains__)
        why = "no hub holds a tunnel to it"
        for hub in hubs:
            try:
                async with asyncio.timeout(OPEN_S):
                    return await self._through(hub, session)
            except TimeoutError:
                why = f"nobody answered by hub {hub.hex()[:8]} within {OPEN_S:.0f} s"
                until = self._clock.monotonic() + SWALLOWED_S
                self._avoided_until[hub + session] = self._slow_until[hub] = until
            except (OSError, FabrictoolError) as error:
                why = f"by hub {hub.hex()[:8]}: {error}"
                self._avoided_until[hub + session] = self._clock.monotonic() + REFUSED_S
            _log.warning("cannot reach %s: %s", session.hex()[:8], why)
        raise RelayError.of("FT6210", f"agent {session.hex()[:8]} cannot be reached: {why}", transient=True)

    async def _through(self, hub: bytes, session: bytes) -> Tunnel:
        loop = asyncio.get_running_loop()
        proved: asyncio.Future[Tunnel] = loop.create_future()

        def came(tunnel: Tunnel) -> None:
            former = self._tunnels.get(session)
            self._tunnels[session] = tunnel, hub
            if former is not None:
                self._replaced.add(former[0])
            if not proved.done():
                proved.set_result(tunnel)

        def went(tunnel: Tunnel) -> None:
            self._replaced.discard(tunnel)
            known = self._tunnels.get(session)
            if known is not None and known[0] is tunnel:
                del self._tunnels[session]
                self._unused_since.pop(session, None)
                self._host.load_unknown(session)

        outer_tunnel = self._tunnel_to(hub)
        if outer_tunnel is None:
            raise ConnectionError("its tunnel is gone")
        near, far = Splice.pair()
        outer_tunnel.open_stream(StreamHead(session, RELAY, "", (), 0), far)
        try:
            inner = await self._socket_to(near)
            tunnel = await made(
                loop.create_unix_connection(
                    lambda: Tunnel(
                        _Inner(self._host, came, went), self._clock.monotonic, dialler=True, expected=session
                    ),
                    sock=inner, ssl=self._client_tls, server_hostname="",
                )
            )  # fmt: skip
        except BaseException as error:  # the sockets are closed by their transports
            near.close()
            far.close()
            if isinstance(error, OSError):
                raise ConnectionError(far.reason or str(error) or "it broke off") from error
            raise
        tunnel.closed.add_done_callback(lambda _: _broken(proved, str(tunnel.refusal or far.reason or "it broke off")))
        try:
            return await proved
        except BaseException:
            tunnel.close("it was not proved in time")
            raise

    async def _socket_to(self, near: Splice) -> socket.socket:
        """Whose other end is `near`."""
        outer, inner = _pipe()
        try:
            await made(asyncio.get_running_loop().create_unix_connection(lambda: near, sock=outer))
        except BaseException:
            inner.close()
            raise
        self._sockets.add(near)
        return inner


class _Inner:
    """A node as the host of a relayed tunnel: who is who, and streams; the mesh itself is kept out of it."""

    def __init__(self, host: RelayHost, came: Callable[[Tunnel], None], went: Callable[[Tunnel], None]) -> None:
        self._host = host
        self._came = came
        self._went = went

    @property
    def chain(self) -> tuple[bytes, ...]:
        return self._host.chain

    def verify(self, chain: tuple[bytes, ...], expected: Expected) -> VerifiedSession:
        return self._host.verify(chain, expected)

    def expired(self, session: VerifiedSession) -> bool:
        return self._host.expired(session)

    def beat(self, session: VerifiedSession) -> Beat:
        return self._host.beat(session)

    def tunnel_up(self, tunnel: Tunnel) -> None:
        self._came(tunnel)

    def tunnel_down(self, tunnel: Tunnel, reason: str) -> None:
        self._went(tunnel)

    def gossip_received(self, tunnel: Tunnel, payload: bytes) -> None:
        """Nothing of the mesh comes this way."""

    def beat_received(self, tunnel: Tunnel, beat: Beat) -> None:
        self._host.load_received(tunnel, beat)

    def stream_opened(self, stream: TunnelStream, head: StreamHead) -> asyncio.Protocol | None:
        return None if head.method == RELAY else self._host.stream_opened(stream, head)


def _pipe() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIPE_OCTETS)
    return ends


def _broken(proved: asyncio.Future[Tunnel], why: str) -> None:
    if not proved.done():
        proved.set_exception(ConnectionError(why))
