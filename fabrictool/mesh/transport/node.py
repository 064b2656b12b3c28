"""A node of the mesh: its registry, its links to others, and the loops that keep them.

An agent dials; a gateway (a *hub*) also listens. Both are this class.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import TYPE_CHECKING, Protocol

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.tlswords import spoken
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.framing import Beat, StreamHead
from fabrictool.mesh.gossip import Changed, Effect, Gossip, Refused, Send
from fabrictool.mesh.identity import Credential, IdentityVerifier, VerifiedSession
from fabrictool.mesh.records import Body, Record, seal
from fabrictool.mesh.registry import Registry
from fabrictool.mesh.transport.reach import Route
from fabrictool.mesh.transport.tls import IdentityFiles, client_context, server_context
from fabrictool.mesh.transport.tunnel import Tunnel, TunnelStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import EgressSpec

_log = logging.getLogger("fabrictool.mesh")

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 30.0
LEAVE_SECONDS = 2.0

Load = tuple[tuple[bytes, int, int, float, int], ...]
"""As in `Beat.load`."""


class Listener(Protocol):
    """What the owner of a node hears of the mesh; all calls come from the event loop."""

    def record_changed(self, record: Record) -> None:
        """The registry holds something new."""

    def link_changed(self, session: bytes, *, up: bool, reason: str) -> None:
        """A neighbour's tunnel came or went: the earliest evidence of life and death."""

    def load_reported(self, session: bytes, load: Load) -> None: ...

    def load(self, peer: bytes) -> Load:
        """Our own volatile load, for the next beat to this neighbour."""

    def stream_opened(self, stream: TunnelStream, head: StreamHead, peer: VerifiedSession) -> asyncio.Protocol | None:
        """A neighbour asks for one of our services; None refuses."""


class MeshNode:
    """Membership of one process in the mesh."""

    def __init__(self, files: IdentityFiles, listener: Listener, clock: Clock, *, hub: bool) -> None:
        self._files = files
        self.credential: Credential
        self.credential, root = files.read()
        self._verifier = IdentityVerifier(root)
        self._listener = listener
        self._clock = clock
        self.registry = Registry(self._verifier)
        self._gossip = Gossip(self.registry, hub=hub)
        self._tunnels: dict[bytes, Tunnel] = {}
        self._acknowledged: dict[bytes, bytes] = {}
        self._ack = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.routes: dict[str, Route] = {}
        """Address → the paths to it: which is in use, and why others failed."""
        self.dial_errors: dict[str, str] = {}
        """Address → why the last attempt to reach it failed; empty while connected."""

    @property
    def chain(self) -> tuple[bytes, ...]:
        return self.credential.chain

    @property
    def federation(self) -> str:
        return self._verifier.federation

    @property
    def session(self) -> bytes:
        return bytes.fromhex(self.credential.claims.session)

    def tunnel(self, session: bytes) -> Tunnel | None:
        """The live connection to a neighbour."""
        return self._tunnels.get(session)

    @property
    def neighbours(self) -> list[bytes]:
        """Sessions that we hold a tunnel with."""
        return sorted(self._tunnels)

    # -- lifecycle --------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int) -> int:
        """Accept agents and other hubs; returns the port (for port 0).

        Raises
        ------
        FabrictoolError
            FT6204 when the address is in use or not ours.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Tunnel(self, self._clock.monotonic, dialler=False), host, port, ssl=server_context(self._files)
            )
        except OSError as error:
            raise FabrictoolError.of(
                "FT6204",
                f"cannot listen for agents on {host}:{port}: {(error.strerror or str(error)).lower()}",
                thing=f"{host}:{port}",
                hint="choose another port in the blueprint's gateway section, or stop what holds this one",
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def dial(
        self, addresses: Sequence[tuple[str, int]], egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET
    ) -> None:
        """Keep a tunnel to each of these hubs, for ever, by whatever path leads there."""
        for hub in (HostPort(*address) for address in addresses):
            self.routes[str(hub)] = Route(hub, egress, os.environ)
        self._tasks += [asyncio.create_task(self._keep_dialled(host, port)) for host, port in addresses]

    def publish(self, body: Body) -> None:
        """Sign a record of our own and spread it."""
        record = seal(body, self.credential.sign, self.credential.chain)
        self._perform(self._gossip.publish(record, wall=self._clock.wall()))

    async def leave(self) -> bool:
        """Wait until every neighbour acknowledged our last record; then close. Returns whether all did in time."""
        deadline = self._clock.monotonic() + LEAVE_SECONDS
        complete = True
        for tunnel in list(self._tunnels.values()):
            tunnel.send_beat()
        while self._tunnels and not self._all_agree():
            self._ack.clear()
            remaining = deadline - self._clock.monotonic()
            try:
                await asyncio.wait_for(self._ack.wait(), max(0.0, remaining))
            except TimeoutError:
                complete = False
                break
        await self.close()
        return complete

    async def close(self) -> None:
        """Stop at once, without waiting for acknowledgements."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for tunnel in list(self._tunnels.values()):
            tunnel.close("leaving")
        await asyncio.sleep(0)

    # -- Host, for tunnels ------------------------------------------------------------------------------------

    def verify(self, chain: tuple[bytes, ...]) -> VerifiedSession:
        return self._verifier.verify(chain, now=self._clock.wall())

    def expired(self, session: VerifiedSession) -> bool:
        """Whether a session that was valid when it connected has ended."""
        return session.not_after < self._clock.wall()

    def beat(self, session: VerifiedSession) -> Beat:
        """Our root digest and load, as this peer needs it."""
        return Beat(self.registry.root(), self._listener.load(session.session))

    def tunnel_up(self, tunnel: Tunnel) -> None:
        """A peer proved itself; a second connection of the same session replaces the first."""
        peer = _session(tunnel)
        former = self._tunnels.get(peer)
        self._tunnels[peer] = tunnel
        if former is not None:
            former.close("replaced by a newer connection")
        self._perform(self._gossip.link_up(peer))
        self._listener.link_changed(peer, up=True, reason="connected")

    def tunnel_down(self, tunnel: Tunnel, reason: str) -> None:
        peer = _session(tunnel)
        if self._tunnels.get(peer) is not tunnel:
            return
        del self._tunnels[peer]
        self._acknowledged.pop(peer, None)
        self._gossip.link_down(peer)
        self._ack.set()
        self._listener.link_changed(peer, up=False, reason=reason)

    def gossip_received(self, tunnel: Tunnel, payload: bytes) -> None:
        """Merge, and acknowledge what was new with a beat."""
        effects = self._gossip.received(_session(tunnel), payload, wall=self._clock.wall())
        self._perform(effects)
        if any(isinstance(effect, Changed) for effect in effects):
            tunnel.send_beat()

    def beat_received(self, tunnel: Tunnel, beat: Beat) -> None:
        """Compare digests; note the peer's load."""
        peer = _session(tunnel)
        self._acknowledged[peer] = beat.root
        self._ack.set()
        self._perform(self._gossip.beat(peer, beat.root))
        if beat.load:
            self._listener.load_reported(peer, beat.load)

    def stream_opened(self, stream: TunnelStream, head: StreamHead) -> asyncio.Protocol | None:
        """Ask the owner who serves this stream."""
        peer = stream.tunnel.peer
        return None if peer is None else self._listener.stream_opened(stream, head, peer)

    # -- internals --------------------------------------------------------------------------------------------

    def _all_agree(self) -> bool:
        root = self.registry.root()
        return all(self._acknowledged.get(peer) == root for peer in self._tunnels)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    tunnel = self._tunnels.get(peer)
                    if tunnel is not None:
                        tunnel.gossip(message)
                case Changed(record):
                    self._listener.record_changed(record)
                case Refused(peer, reason):
                    _log.warning("refused a record from %s: %s", peer.hex()[:8], reason)

    async def _keep_dialled(self, host: str, port: int) -> None:
        address = f"{host}:{port}"
        context = client_context(self._files)
        delay = RETRY_FIRST_S
        while True:
            try:
                route = self.routes[address].connect(lambda: Tunnel(self, self._clock.monotonic, dialler=True), context)
                async with route as tunnel:
                    self.dial_errors.pop(address, None)
                    began = self._clock.monotonic()
                    await tunnel.closed
                if tunnel.refusal is not None:
                    self.dial_errors[address] = str(tunnel.refusal)
                elif self._clock.monotonic() - began > RETRY_FIRST_S * 10:
                    delay = RETRY_FIRST_S
            except (OSError, FabrictoolError) as error:
                self.dial_errors[address] = spoken(error, "is of another federation")
                _log.debug("cannot reach %s: %s", address, error)
            await asyncio.sleep(random.uniform(0.5, 1.0) * delay)
            delay = min(delay * 2, RETRY_MAX_S)


def _session(tunnel: Tunnel) -> bytes:
    if tunnel.peer is None:
        raise FabrictoolError.of("FT6201", "a tunnel spoke before it proved itself")
    return tunnel.peer.session
