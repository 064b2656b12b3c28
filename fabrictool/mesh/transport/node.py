"""A node of the mesh: its registry, its links to others, and the loops that keep them.

An agent dials hubs (`hublinks.py`) and the next agents of its site (`sitelinks.py`), and listens for the latter; a
gateway (a *hub*) listens for all. Both are this class. Longer than most modules: its loops and the protocol's effects
change the same tunnels and timers; what keeps links on either side is taken out already.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.listening import Listening
from fabrictool.domain.specs import HostPort
from fabrictool.mesh.fleet import View
from fabrictool.mesh.framing import Beat
from fabrictool.mesh.gossip import MAX_TAIL, Changed, LogTail, Refused, Send, Vain
from fabrictool.mesh.hubchoice import HubChoice
from fabrictool.mesh.identity import Credential, IdentityError, IdentityVerifier, VerifiedSession
from fabrictool.mesh.member import BEAT_SECONDS, Member, SessionEnded, TailHeard
from fabrictool.mesh.records import Body, Lifecycle, NodeBody, Record, RevocationBody
from fabrictool.mesh.trace import TracedMember
from fabrictool.mesh.transport.door import HANDSHAKE_S, Door
from fabrictool.mesh.transport.hublinks import HubLinks, addresses_of
from fabrictool.mesh.transport.relay import RELAY, Relays
from fabrictool.mesh.transport.sitelinks import SiteLinks
from fabrictool.mesh.transport.tls import IdentityFiles, client_context, server_context
from fabrictool.mesh.transport.tunnel import Tunnel

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import EgressSpec
    from fabrictool.mesh.framing import StreamHead
    from fabrictool.mesh.member import Effect
    from fabrictool.mesh.records import Envelope, Evidence
    from fabrictool.mesh.registry import Registry
    from fabrictool.mesh.transport.listener import Listener
    from fabrictool.mesh.transport.tunnel import Expected, TunnelStream

_log = logging.getLogger("fabrictool.mesh")

LEAVE_SECONDS = 2.0
LAST_WORD_S = 0.2
"""For what was written to reach a neighbour whose tunnel will be closed."""


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
        self._client_tls = client_context(files)
        self._server_tls = server_context(files)
        self.hub_links = HubLinks(
            clock,
            self._client_tls,
            lambda: self._dialled("gateway"),
            self._tunnels.__contains__,
            lambda: self.registry.hubs(wall=clock.wall()),
            None if hub else HubChoice(random.Random()),
        )
        self._ticking: asyncio.Task[None] | None = None
        self._flush_soon = False
        self._refusals: Counter[bytes] = Counter()
        """Neighbour → records of its that were refused since it came."""
        self.listening = Listening(self._accepted, ssl=self._server_tls, ssl_handshake_timeout=HANDSHAKE_S)
        self._aside = False
        """Another process accepts connections at our address."""
        self._site_links: SiteLinks | None = None
        self._door = Door()
        self.relays = Relays(
            self,
            session,
            clock,
            hub=hub,
            tunnel_to=self.tunnel,
            holders_of=self._member.holders.of,
            client_tls=self._client_tls,
            server_tls=self._server_tls,
        )
        self.refused_records = 0
        self.vain_repairs = 0

    @property
    def view(self) -> View:
        """For documents: what we know at this moment."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        return View(self._member, self.federation, self._hub, now=now, wall=wall)

    @property
    def registry(self) -> Registry:
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

    @property
    def certificate_ends_at(self) -> float | None:
        """Wall time from which nobody hears this session; None before it has said who it is."""
        identity = self.registry.session(self.session)
        return None if identity is None else identity.not_after

    def tunnel(self, session: bytes) -> Tunnel | None:
        """Straight to it; see `relays` for others."""
        return self._tunnels.get(session)

    def reaches(self, session: bytes) -> bool:
        """Whether a stream can be opened to it, by a tunnel or by a hub that says it has one."""
        return session in self._tunnels or self.relays.leads_to(session)

    @property
    def neighbours(self) -> list[bytes]:
        return sorted(self._tunnels)

    @property
    def reached(self) -> set[bytes]:
        """To whom a stream can be opened, by a tunnel or by a hub that says it has one."""
        return self._tunnels.keys() | self._member.holders.held

    @property
    def hub_tunnels(self) -> list[Tunnel]:
        """The live connections to hubs."""
        return [tunnel for tunnel in self._tunnels.values() if _is_hub(tunnel)]

    @property
    def site_addresses(self) -> Mapping[bytes, HostPort]:
        """The agents of our site that we dial, and where."""
        return {} if self._site_links is None else self._site_links.addresses

    # -- lifecycle --------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, sockets: Iterable[socket.socket] = ()) -> int:
        """Accept agents and other hubs, or, as an agent, our site's agents and hubs; returns the port (for port 0).

        `sockets`: which another process had at that address.

        Raises
        ------
        FabrictoolError
            FT6204 when the address is in use or not ours.
        """
        self._begin()
        try:
            if sockets:
                await self.listening.adopt(sockets)
            else:
                await self.listening.open(host, port)
        except OSError as error:
            raise FabrictoolError.of(
                "FT6204",
                f"cannot listen for agents on {host}:{port}: {(error.strerror or str(error)).lower()}",
                thing=f"{host}:{port}",
                hint="choose another port in the blueprint's gateway section, or stop what holds this one",
            ) from error
        return self.listening.port

    def step_aside(self) -> None:
        """Another process accepts at our address from now on: whoever dialled us dials that one, too."""
        self.listening.pause()
        self._aside = True
        for tunnel in self._tunnels.values():
            tunnel.send_beat()

    async def come_back(self) -> None:
        """That process has ended. Raises OSError."""
        self._aside = False
        await self.listening.resume()

    def dial(
        self, addresses: Sequence[tuple[str, int]], egress: EgressSpec | msgspec.UnsetType = msgspec.UNSET
    ) -> None:
        """Keep a tunnel to each of these hubs by whatever path leads there. Called again, it is told others."""
        self._begin()
        self.hub_links.dial((HostPort(host, port) for host, port in addresses), egress)

    def seek(self, addresses: Sequence[HostPort]) -> None:
        """Dial these, hubs or agents, whenever we are linked with nobody; an agent seeks its own provider's agents."""
        self._begin()
        self.hub_links.seek(
            addresses, lambda: self._dialled("agent or gateway" if self._hub else "own agent or gateway")
        )

    def link_site(self) -> None:
        """Keep links with the agents of our site, whose records say where they listen; ours must say so, too."""
        self._site_links = SiteLinks(
            self.session,
            self._member.sites,
            self._clock,
            self._client_tls,
            address_of=self._address_of,
            tunnel_to=self.tunnel,
            new_tunnel=self._dialled,
        )

    def publish(self, body: Body) -> None:
        """Sign a record of our own and spread it; its version is chosen here."""
        self._perform(self._member.publish(body, wall=self._clock.wall()))

    async def renew(self) -> bool:
        """Look whether our certificate was renewed for the same key, and if so tell the others; returns whether it was.

        Raises
        ------
        IdentityError
            FT6001, FT6002 it cannot be read, FT6003 to FT6005 it does not prove itself, or is another session's.
        """
        credential, _ = await asyncio.to_thread(self._files.read)
        if credential.chain == self.chain:
            return False
        if self._verifier.verify(credential.chain, now=self._clock.wall()).session != self.session:
            raise IdentityError.of("FT6003", "the new certificate is another session's")
        self.credential = credential
        for context in (self._client_tls, self._server_tls):
            context.load_cert_chain(self._files.chain, self._files.key)
        self._perform(self._member.renew(credential.chain, wall=self._clock.wall()))
        return True

    def confide(self, service: bytes, lines: Sequence[str]) -> None:
        """Tell the hubs of our provider, and nobody else, how an engine's log ended."""
        message = msgspec.msgpack.encode(LogTail(service, "\n".join(lines)[-MAX_TAIL:]))
        for tunnel in list(self._tunnels.values()):
            if _is_hub(tunnel) and self._is_own(tunnel.peer):
                tunnel.gossip(message)

    def take(self, envelope: Envelope) -> None:
        """Spread a signed record that the operator brought; one that does not prove itself is refused and logged."""
        self._perform(self._member.take(envelope, now=self._clock.monotonic(), wall=self._clock.wall()))

    def retire(self) -> None:
        """As a hub that will leave: carry nothing new for other gateways."""
        self._member.retire()
        self._perform(())

    async def leave(self) -> bool:
        """Wait until every hub acknowledged our last record; then close. Returns whether all did in time."""
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
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.hub_links.close()
        await self.relays.close()
        if self._site_links is not None:
            await self._site_links.close()
        self.listening.close()
        for tunnel in list(self._tunnels.values()):
            tunnel.close("leaving")
        await asyncio.sleep(0)

    # -- Host, for tunnels ------------------------------------------------------------------------------------

    def verify(self, chain: tuple[bytes, ...], expected: Expected) -> VerifiedSession:
        """Where a hub is dialled an agent must not answer: its certificate is no licence to be one."""
        session = self._verifier.verify(chain, now=self._clock.wall())
        if self.registry.revoked(session):
            raise IdentityError.of("FT6007", f"{session.claims.uri()} was revoked")
        claims = session.claims
        if isinstance(expected, bytes):
            if session.session != expected:
                raise IdentityError.of("FT6003", f"{claims.uri()} answers where agent {expected.hex()[:8]} should")
        elif expected == "gateway" and claims.role != "gateway":
            raise IdentityError.of("FT6003", f"{claims.uri()} answers where a gateway should")
        elif expected == "own agent or gateway" and claims.role != "gateway" and not self._is_own(session):
            raise IdentityError.of("FT6003", f"{claims.uri()} is another provider's agent")
        return session

    def expired(self, session: VerifiedSession) -> bool:
        """Whether a session that was valid when it connected has ended, and was not renewed since."""
        renewed = self.registry.session(session.session)
        ends = session.not_after if renewed is None else max(session.not_after, renewed.not_after)
        return ends < self._clock.wall()

    def beat(self, session: VerifiedSession) -> Beat:
        """Our root digest and load, as this peer needs it."""
        load = () if session.claims.role == "agent" else self._listener.load(session.session)
        now = max(0, int(self._clock.wall()))
        return Beat(self.registry.root(), load, self._member.gossip.alone, now, self._aside)

    def tunnel_up(self, tunnel: Tunnel) -> None:
        """A peer proved itself; a second connection of the same session replaces the first."""
        peer = _session(tunnel)
        former = self._tunnels.get(peer)
        self._tunnels[peer] = tunnel
        hub = _is_hub(tunnel)
        if self._hub or hub:
            self.hub_links.alone.clear()
            asyncio.get_running_loop().call_soon(self.hub_links.look)
        if former is not None:
            former.close("replaced by a newer connection")
        self._perform(self._member.link_up(peer, wall=self._clock.wall(), hub=hub))
        self._listener.link_changed(peer, up=True, reason="connected")

    def tunnel_down(self, tunnel: Tunnel, reason: str) -> None:
        peer = _session(tunnel)
        if self._tunnels.get(peer) is not tunnel:
            return
        del self._tunnels[peer]
        if not (self._tunnels if self._hub else self.hub_tunnels):
            self.hub_links.alone.set()
        asyncio.get_running_loop().call_soon(self.hub_links.look)  # the tunnel says that it is over when we return
        self._acknowledged.pop(peer, None)
        self._refusals.pop(peer, None)
        how: Evidence = "silent" if tunnel.fell_silent else "closed"
        self._member.link_down(peer, how, now=self._clock.monotonic())
        self._perform(())
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
        self._perform(self._member.beat(peer, beat.root, alone=beat.alone))
        if beat.aside:
            self.hub_links.dial_beside(tunnel)
        self.load_received(tunnel, beat)

    def load_received(self, tunnel: Tunnel, beat: Beat) -> None:
        if beat.load:
            self._listener.load_reported(_session(tunnel), beat.load)

    def load_unknown(self, session: bytes) -> None:
        if session not in self._tunnels:
            self._listener.load_reported(session, ())

    def stream_opened(self, stream: TunnelStream, head: StreamHead) -> asyncio.Protocol | None:
        peer = stream.tunnel.peer
        if peer is None:
            return None
        return (
            self.relays.asked(head, peer) if head.method == RELAY else self._listener.stream_opened(stream, head, peer)
        )

    # -- internals --------------------------------------------------------------------------------------------

    def _all_agree(self) -> bool:
        root = self.registry.root()
        hubs = {_session(tunnel) for tunnel in self.hub_tunnels}  # where there are any, they tell our site
        return all(self._acknowledged.get(peer) == root for peer in hubs or self._tunnels)

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
        self.relays.cut_off(self.registry.revoked)

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

    def _is_own(self, peer: VerifiedSession | None) -> bool:
        return peer is not None and peer.claims.provider == self.credential.claims.provider

    def _accepted(self) -> Tunnel:
        if self._hub:  # it has a host of its own, and all agents may come at once
            return Tunnel(self, self._clock.monotonic, dialler=False, expected="agent or gateway")
        tunnel = Tunnel(self, self._clock.monotonic, dialler=False, expected="own agent or gateway")
        self._door.let_in(tunnel, self._clock.monotonic())
        return tunnel

    def _address_of(self, session: bytes) -> HostPort | None:
        """Where a living agent listens."""
        node = self.registry.node(session)
        if node is None or not node.addresses or not self.registry.lives(session, wall=self._clock.wall()):
            return None
        return next(addresses_of(node), None)

    def _begin(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick_forever())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._perform(self._member.tick(now=self._clock.monotonic(), wall=self._clock.wall()))
            self.hub_links.beat()
            self.relays.look()
            if self._site_links is not None:
                self._site_links.look()

    def _learn_hubs(self, record: Record) -> None:
        """Dial hubs that say where they are. Hubs themselves are told who dials whom: two need one tunnel."""
        body = record.body
        if self._hub or not isinstance(body, NodeBody) or body.role != "gateway" or body.lifecycle >= Lifecycle.DOWN:
            return
        self.hub_links.learn(addresses_of(body))

    def _dialled(self, expected: Expected) -> Tunnel:
        return Tunnel(self, self._clock.monotonic, dialler=True, expected=expected)


def _is_hub(tunnel: Tunnel) -> bool:
    return tunnel.peer is not None and tunnel.peer.claims.role == "gateway"


def _is_last_word(effect: Effect, peer: bytes) -> bool:
    """Whether the neighbour says that it leaves."""
    body = effect.record.body if isinstance(effect, Changed) else None
    return isinstance(body, NodeBody) and body.session == peer and body.lifecycle is Lifecycle.LEFT


def _session(tunnel: Tunnel) -> bytes:
    if tunnel.peer is None:
        raise FabrictoolError.of("FT6201", "a peer sent data before it proved its identity")
    return tunnel.peer.session
