"""A node of the mesh: its registry, its links to others, and the loops that keep them.

An agent dials; a gateway (a *hub*) also listens. Both are this class. An agent dials the hubs that it was told of, and
those that it learns of from the registry: a gateway that was added, or moved, is found without a restart of anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.tlswords import spoken
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.fleet import View
from fabrictool.mesh.framing import Beat, StreamHead
from fabrictool.mesh.gossip import MAX_TAIL, Changed, LogTail, Refused, Send, Vain
from fabrictool.mesh.identity import Credential, IdentityError, IdentityVerifier, VerifiedSession
from fabrictool.mesh.member import BEAT_SECONDS, Member, SessionEnded, TailHeard
from fabrictool.mesh.records import Body, Lifecycle, NodeBody, Record, RevocationBody
from fabrictool.mesh.trace import TracedMember
from fabrictool.mesh.transport.reach import Route
from fabrictool.mesh.transport.tls import IdentityFiles, client_context, server_context
from fabrictool.mesh.transport.tunnel import Tunnel, TunnelStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import EgressSpec
    from fabrictool.mesh.member import Effect
    from fabrictool.mesh.records import Envelope, Evidence
    from fabrictool.mesh.registry import Registry

_log = logging.getLogger("fabrictool.mesh")

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
"""A gateway that comes back is found within it. With many hubs the attempts would add up."""
RETRY_MAX_OF_MANY_S = 30.0
RETRY_MAX_BY_SSH_S = 60.0
"""Where a failed attempt logs in to somebody's host, while another hub's tunnel is up."""
MAX_HUBS = 8
"""Hubs that a node dials because it learned of them, beside those that it was told of."""
LEAVE_SECONDS = 2.0
LAST_WORD_S = 0.2
"""For what was written to reach a neighbour whose tunnel will be closed."""

Load = tuple[tuple[bytes, int, int, float, int], ...]
"""As in `Beat.load`."""


class Listener(Protocol):
    """What the owner of a node hears of the mesh; all calls come from the event loop."""

    def record_changed(self, record: Record) -> None:
        """The registry holds something new."""

    def session_ended(self, reason: str) -> None:
        """The others will not hear this session any more; only a new one."""

    def tail_heard(self, session: bytes, service: bytes, text: str) -> None:
        """A neighbour of our provider tells how its engine's log ended."""

    def link_changed(self, session: bytes, *, up: bool, reason: str) -> None:
        """A neighbour's tunnel came or went: the earliest evidence of life and death."""

    def load_reported(self, session: bytes, load: Load) -> None: ...

    def load(self, peer: bytes) -> Load:
        """Our own volatile load, for the next beat to this neighbour."""

    def stream_opened(self, stream: TunnelStream, head: StreamHead, peer: VerifiedSession) -> asyncio.Protocol | None:
        """A neighbour asks for one of our services; None refuses."""


class MeshNode:
    """Membership of one process in the mesh."""

    # Wide: who it is, whom it tells, its time, and where its trace goes.
    def __init__(
        self,
        files: IdentityFiles,
        listener: Listener,
        clock: Clock,
        *,
        hub: bool,
        trace: Callable[[bytes], None] | None = None,
    ) -> None:
        """`trace` is given the lines of `mesh.trace`."""
        self._files = files
        self.credential: Credential
        self.credential, root = files.read()
        self._verifier = IdentityVerifier(root)
        self._listener = listener
        self._clock = clock
        session, sign, chain = self.session, self.credential.sign, self.credential.chain
        self._member = (
            Member(self._verifier, session=session, sign=sign, chain=chain, hub=hub)
            if trace is None
            else TracedMember(self._verifier, session=session, sign=sign, chain=chain, hub=hub, root=root, write=trace)
        )
        self._hub = hub
        self._tunnels: dict[bytes, Tunnel] = {}
        self._acknowledged: dict[bytes, bytes] = {}
        self._ack = asyncio.Event()
        self._dialled: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._alone = asyncio.Event()
        """No tunnel is up: whoever waits before another attempt does not wait long."""
        self._alone.set()
        self._told: set[tuple[str, int]] = set()
        """Addresses that we were given, as against learned."""
        self._egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET
        self._ticking: asyncio.Task[None] | None = None
        self._flush_soon = False
        self._refusals: Counter[bytes] = Counter()
        """Neighbour → records of its that were refused since it came."""
        self._server: asyncio.Server | None = None
        self.routes: dict[str, Route] = {}
        """Address → the paths to it: which is in use, and why others failed."""
        self.dial_errors: dict[str, str] = {}
        """Address → why the last attempt to reach it failed; empty while connected."""
        self.dialled_tunnels: dict[str, Tunnel] = {}
        """Address → the last connection that we dialled there; it may be over."""
        self.refused_records = 0
        self.vain_repairs = 0

    @property
    def view(self) -> View:
        """For documents: what we know at this moment."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        return View(self._member, self.federation, self._hub, now=now, wall=wall)

    @property
    def registry(self) -> Registry:
        """Our replica of the map."""
        return self._member.registry

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

    @property
    def in_step(self) -> bool:
        """Whether it has neighbours, and all of them say that they hold what we hold."""
        return bool(self._tunnels) and self._all_agree()

    # -- lifecycle --------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int) -> int:
        """Accept agents and other hubs; returns the port (for port 0).

        Raises
        ------
        FabrictoolError
            FT6204 when the address is in use or not ours.
        """
        loop = asyncio.get_running_loop()
        self._begin()
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
        self._begin()
        self._egress = egress
        self._told.update(addresses)
        self._dial_also(addresses)

    def publish(self, body: Body) -> None:
        """Sign a record of our own and spread it; its version is chosen here."""
        self._perform(self._member.publish(body, wall=self._clock.wall()))

    def confide(self, service: bytes, lines: Sequence[str]) -> None:
        """Tell the neighbours of our provider, and nobody else, how an engine's log ended."""
        message = msgspec.msgpack.encode(LogTail(service, "\n".join(lines)[-MAX_TAIL:]))
        for tunnel in list(self._tunnels.values()):
            if tunnel.peer is not None and tunnel.peer.claims.provider == self.credential.claims.provider:
                tunnel.gossip(message)

    def take(self, envelope: Envelope) -> None:
        """Spread a signed record that the operator brought; one that does not prove itself is refused and logged."""
        self._perform(self._member.take(envelope, now=self._clock.monotonic(), wall=self._clock.wall()))

    async def leave(self) -> bool:
        """Wait until every neighbour acknowledged our last record; then close. Returns whether all did in time."""
        deadline = self._clock.monotonic() + LEAVE_SECONDS
        complete = True
        self._flush()
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
        tasks = [*self._dialled.values(), *([self._ticking] if self._ticking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for tunnel in list(self._tunnels.values()):
            tunnel.close("leaving")
        await asyncio.sleep(0)

    # -- Host, for tunnels ------------------------------------------------------------------------------------

    def verify(self, chain: tuple[bytes, ...], *, dialled: bool) -> VerifiedSession:
        """Whom we dialled must be a hub: an agent's certificate is no licence to listen."""
        session = self._verifier.verify(chain, now=self._clock.wall())
        if self.registry.revoked(session):
            raise IdentityError.of("FT6007", f"{session.claims.uri()} was revoked")
        if dialled and session.claims.role != "gateway":
            raise IdentityError.of("FT6003", f"{session.claims.uri()} answers where a gateway should")
        return session

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
        self._alone.clear()
        if former is not None:
            former.close("replaced by a newer connection")
        self._perform(self._member.link_up(peer, wall=self._clock.wall()))
        self._listener.link_changed(peer, up=True, reason="connected")

    def tunnel_down(self, tunnel: Tunnel, reason: str) -> None:
        peer = _session(tunnel)
        if self._tunnels.get(peer) is not tunnel:
            return
        del self._tunnels[peer]
        if not self._tunnels:
            self._alone.set()
        self._acknowledged.pop(peer, None)
        self._refusals.pop(peer, None)
        how: Evidence = "silent" if tunnel.fell_silent else "closed"
        self._member.link_down(peer, how, now=self._clock.monotonic())
        self._ack.set()
        self._listener.link_changed(peer, up=False, reason=reason)

    def gossip_received(self, tunnel: Tunnel, payload: bytes) -> None:
        """Merge, and acknowledge a last word at once: its sender waits for that before it closes."""
        peer = _session(tunnel)
        effects = self._member.received(peer, payload, now=self._clock.monotonic(), wall=self._clock.wall())
        self._perform(effects)
        if any(_is_last_word(effect, peer) for effect in effects):
            tunnel.send_beat()

    def beat_received(self, tunnel: Tunnel, beat: Beat) -> None:
        """Compare digests; note the peer's load."""
        peer = _session(tunnel)
        self._acknowledged[peer] = beat.root
        self._ack.set()
        self._perform(self._member.beat(peer, beat.root))
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

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    tunnel = self._tunnels.get(peer)
                    if tunnel is not None:
                        tunnel.gossip(message)
                case Changed(record):
                    self._learn_hubs(record)
                    if isinstance(record.body, RevocationBody):
                        self._cut_off_revoked()
                    self._listener.record_changed(record)
                case Refused(peer, reason):
                    self._refused(peer, reason)
                case Vain(peer, repairs):
                    self.vain_repairs += 1
                    _log.warning(
                        "%d repairs with %s brought nothing: one side refuses records", repairs, peer.hex()[:8]
                    )
                case TailHeard(peer, service, text):
                    self._listener.tail_heard(peer, service, text)
                case SessionEnded(reason):
                    self._listener.session_ended(reason)
        if not self._flush_soon:
            self._flush_soon = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _cut_off_revoked(self) -> None:
        """After they were told, so that they stop dialling."""
        self._flush()
        for tunnel in list(self._tunnels.values()):
            if tunnel.peer is not None and self.registry.revoked(tunnel.peer):
                asyncio.get_running_loop().call_later(LAST_WORD_S, tunnel.close, "the peer was revoked")

    def _refused(self, peer: bytes, reason: str) -> None:
        """Say it, ever more seldom: whoever sends rubbish must not fill our log with it."""
        self.refused_records += 1
        self._refusals[peer] += 1
        if (count := self._refusals[peer]).bit_count() == 1:
            _log.warning("refused a record from %s (%d by now): %s", peer.hex()[:8], count, reason)

    def _flush(self) -> None:
        """What came in this turn of the loop goes out together."""
        self._flush_soon = False
        for send in self._member.flush():
            tunnel = self._tunnels.get(send.peer)
            if tunnel is not None:
                tunnel.gossip(send.message)

    def _begin(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_forever())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._perform(self._member.tick(now=self._clock.monotonic(), wall=self._clock.wall()))
            self._forget_hubs()

    def _learn_hubs(self, record: Record) -> None:
        """Dial hubs that say where they are. Hubs themselves are told who dials whom: two need one tunnel."""
        body = record.body
        if self._hub or not isinstance(body, NodeBody) or body.role != "gateway" or body.lifecycle >= Lifecycle.DOWN:
            return
        addresses = [(host, int(port)) for host, _, port in (a.rpartition(":") for a in body.addresses)]
        learned = len(self._dialled.keys() - self._told)
        self._dial_also([address for address in addresses if address[1] < 65536][: max(0, MAX_HUBS - learned)])

    def _forget_hubs(self) -> None:
        """Those that we learned of, that no living hub claims any more, and that we hold no tunnel to.

        Others may have voted a hub out that serves us well.
        """
        advertised = {address for hub in self.registry.hubs(wall=self._clock.wall()) for address in hub.addresses}
        for host, port in self._dialled.keys() - self._told:
            last = self.dialled_tunnels.get(address := f"{host}:{port}")
            if address not in advertised and (last is None or last.closed.done()):
                self._dialled.pop((host, port)).cancel()
                for table in (self.dial_errors, self.routes, self.dialled_tunnels):
                    table.pop(address, None)

    def _dial_also(self, addresses: Iterable[tuple[str, int]]) -> None:
        for host, port in addresses:
            if (host, port) not in self._dialled:
                hub = HostPort(host, port)
                self.routes[str(hub)] = Route(hub, self._egress, os.environ)
                self._dialled[host, port] = asyncio.create_task(self._keep_dialled(host, port))

    async def _keep_dialled(self, host: str, port: int) -> None:
        address = f"{host}:{port}"
        context = client_context(self._files)
        delay = RETRY_FIRST_S
        peer: VerifiedSession | None = None
        while True:
            if peer is not None and peer.session in self._tunnels:  # it dialled us; ours would only replace its tunnel
                await asyncio.sleep(BEAT_SECONDS)
                continue
            try:
                route = self.routes[address].connect(lambda: Tunnel(self, self._clock.monotonic, dialler=True), context)
                async with route as tunnel:
                    self.dial_errors.pop(address, None)
                    self.dialled_tunnels[address] = tunnel
                    began = self._clock.monotonic()
                    await tunnel.closed
                peer = tunnel.peer
                if tunnel.refusal is not None:
                    self.dial_errors[address] = str(tunnel.refusal)
                elif self._clock.monotonic() - began > RETRY_FIRST_S * 10:
                    delay = RETRY_FIRST_S
            except (OSError, ValueError, FabrictoolError) as error:  # ValueError: no name that can be resolved
                self.dial_errors[address] = spoken(error, "is of another federation")
                _log.debug("cannot reach %s: %s", address, error)
            delay = await self._pause(delay, by_ssh=self.routes[address].by_ssh)

    async def _pause(self, delay: float, *, by_ssh: bool) -> float:
        """Before another attempt, for about `delay`; returns the next one's. Once no tunnel is up it is cut short."""
        longest = RETRY_MAX_S if len(self._dialled) <= MAX_HUBS else RETRY_MAX_OF_MANY_S
        shortest, whole = min(delay, longest), random.uniform(0.5, 1.0) * delay
        await asyncio.sleep(min(whole, shortest))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, whole - shortest)):
                await self._alone.wait()
        return min(delay * 2, RETRY_MAX_BY_SSH_S if by_ssh and not self._alone.is_set() else longest)


def _is_last_word(effect: Effect, peer: bytes) -> bool:
    """Whether the neighbour says that it leaves."""
    body = effect.record.body if isinstance(effect, Changed) else None
    return isinstance(body, NodeBody) and body.session == peer and body.lifecycle is Lifecycle.LEFT


def _session(tunnel: Tunnel) -> bytes:
    if tunnel.peer is None:
        raise FabrictoolError.of("FT6201", "a peer sent data before it proved its identity")
    return tunnel.peer.session
