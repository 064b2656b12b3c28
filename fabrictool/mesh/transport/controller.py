"""A controller's visit to the mesh: it links, looks, says what one session shall serve, sees that it spread, and goes.

A controller is no node: it has no record of its own and serves nobody. It runs where its identity lies.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UnreachableError
from fabrictool.mesh.assignments import check_assignment, early_end, sign_assignment
from fabrictool.mesh.fleet import members_of
from fabrictool.mesh.gossip import Push, Want, decode_message, encode
from fabrictool.mesh.identity import describe_chain
from fabrictool.mesh.member import BEAT_SECONDS
from fabrictool.mesh.records import AssignmentBody, Lifecycle, RecordError, assignment_key, decode
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.status.fleet import OVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import HostPort
    from fabrictool.mesh.framing import Beat, StreamHead
    from fabrictool.mesh.identity import VerifiedSession
    from fabrictool.mesh.records import Record, ServiceBody
    from fabrictool.mesh.transport.listener import Listener, Load
    from fabrictool.mesh.transport.tls import IdentityFiles
    from fabrictool.mesh.transport.tunnel import Tunnel, TunnelStream
    from fabrictool.status.fleet import FleetMember, FleetQuery

LINK_S = 15.0
"""To reach a gateway and to have the whole map."""
SPREAD_S = 10.0
"""For the gateways to say that they hold what was said."""
ASK_S = 1.0
"""Between two questions whether they do."""
AGREED_S = 3 * BEAT_SECONDS
"""For so long what a gateway's beat said of its map holds: the map of a busy mesh is another one at once."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class AssignmentOutcome:
    """What became of an assignment."""

    session: str
    version: int
    model: str
    """Empty: it shall be idle."""
    former: str
    """The model that it was assigned before; "": none."""
    service: ServiceBody | None = None
    """The engine start that followed it, SERVING or given up; None: there is none, or nobody waited for it."""


class _Visitor(MeshNode):
    """Notes what the hubs say that they hold: their whole map in each beat, one record when they are asked for it."""

    # Wide: as its parent's.
    def __init__(self, files: IdentityFiles, listener: Listener, clock: Clock) -> None:
        super().__init__(files, listener, clock, hub=False)
        self._now = clock.monotonic
        self._agreed_at: dict[bytes, float] = {}
        """Hub → when its map was last ours."""
        self._asked = b""
        """Key of the record in question."""
        self._shown: dict[bytes, bytes] = {}
        """Hub → hash of the record that it showed."""

    @property
    def up_to_date(self) -> bool:
        """Whether it has hubs, and each has just had the map that we had."""
        since = self._now() - AGREED_S
        hubs = [tunnel.peer.session for tunnel in self.hub_tunnels if tunnel.peer is not None]
        return bool(hubs) and all(self._agreed_at.get(hub, -math.inf) >= since for hub in hubs)

    def ask(self, key: bytes) -> None:
        """All hubs for what they hold there."""
        if key != self._asked:
            self._asked, self._shown = key, {}
        for tunnel in self.hub_tunnels:
            tunnel.gossip(encode(Want([key])))

    def holders(self, record: Record) -> list[bool]:
        """Of each hub, whether it has shown this record when it was asked."""
        peers = [tunnel.peer.session for tunnel in self.hub_tunnels if tunnel.peer is not None]
        return [self._shown.get(peer) == record.hash for peer in peers]

    def beat_received(self, tunnel: Tunnel, beat: Beat) -> None:
        super().beat_received(tunnel, beat)
        if tunnel.peer is not None and beat.root == self.registry.root():
            self._agreed_at[tunnel.peer.session] = self._now()

    def gossip_received(self, tunnel: Tunnel, payload: bytes) -> None:
        super().gossip_received(tunnel, payload)
        if not self._asked or tunnel.peer is None:
            return
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecordError):
            message = decode_message(payload)
            for envelope in message.envelopes if isinstance(message, Push) else ():
                if (record := decode(envelope)).key == self._asked:
                    self._shown[tunnel.peer.session] = record.hash


class ControllerVisit:
    """To be used as a context; it holds the whole map inside."""

    def __init__(self, identity: IdentityFiles, gateways: Sequence[HostPort], clock: Clock) -> None:
        self.ended = ""
        """Why nobody hears it any more."""
        self._clock = clock
        self._gateways = gateways
        self.mesh = _Visitor(identity, self, clock)

    async def __aenter__(self) -> Self:
        """Raises FT6107 when no gateway lets it in, or shows it the map, in time."""
        self.mesh.dial([(gateway.host, gateway.port) for gateway in self._gateways])
        if not await self._until(lambda: self.mesh.up_to_date, LINK_S):
            why = "; ".join(f"{address}: {error}" for address, error in sorted(self.mesh.hub_links.errors.items()))
            await self.mesh.close()
            message = f"no gateway lets this controller in{': ' + why if why else ' in time'}"
            hint = "name one with --gateway HOST:PORT; gateways of an earlier release know no controllers"
            raise UnreachableError.of("FT6107", message, hint=hint, transient=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.mesh.close()

    @property
    def ends_at(self) -> float:
        """Wall time at which its own certificate ends."""
        return describe_chain(self.mesh.credential.chain_pem()).end

    @property
    def early_end(self) -> str:
        """A warning, where its certificate ends before a session that it assigns something may; else ""."""
        return early_end(self.mesh.chain, now=self._clock.wall())

    def members(self) -> list[FleetMember]:
        """Living sessions of our provider's agents."""
        gone = (*OVER, "evicted", "down")
        return [row for row in self.every_agent() if row.state not in gone]

    def every_agent(self) -> list[FleetMember]:
        """Sessions of our provider's agents that are on record, whatever became of them."""
        provider, rows = self.mesh.credential.claims.provider, members_of(self.mesh.view, ())
        return [row for row in rows if row.provider == provider and row.role == "agent"]

    def session(self, prefix: str) -> FleetMember:
        """The one that begins with `prefix`.

        Raises
        ------
        InvalidInputError
            FT6106 when there is none, or there are several, FT6104 when it takes no assignments.
        """
        fitting = [member for member in self.members() if member.session.startswith(prefix.lower())]
        if len(fitting) != 1:
            provider = self.mesh.credential.claims.provider
            message = f"{len(fitting)} sessions of {provider} begin with {prefix!r}"
            raise InvalidInputError.of("FT6106", message, hint="`fabrictool mesh members --idle` lists them")
        if not fitting[0].assignable:
            message = f"{fitting[0].session[:8]} did not join with --idle: it serves what its own job gave it"
            raise InvalidInputError.of("FT6104", message)
        return fitting[0]

    def assigned(self, model: str) -> int:
        """How many are assigned `model`, whether they serve it yet or not."""
        return sum(member.assignment is not None and member.assignment.model == model for member in self.members())

    def refused(self, wanted: AssignmentBody, query: FleetQuery) -> FabrictoolError | None:
        """Why none of the idle that fit may be assigned `wanted`; None: one may, or none is there."""
        fitting = [member for member in self.members() if member.idle and query.wants(member)]
        refusals = [self.refusal(member, wanted) for member in fitting]
        return refusals[0] if refusals and None not in refusals else None

    def missing(self, wanted: AssignmentBody, query: FleetQuery, count: int) -> list[FleetMember]:
        """Idle ones to be assigned `wanted`, that `count` may serve it. Those where it was given up count, too: a model
        that cannot be started must not try one node after the other.
        """
        fitting = [m for m in self.members() if m.idle and query.wants(m) and self.refusal(m, wanted) is None]
        fitting.sort(key=lambda member: (-max(member.free, default=0), member.session))
        return fitting[: max(0, count - self.assigned(wanted.model))]

    def refusal(self, member: FleetMember, wanted: AssignmentBody) -> FabrictoolError | None:
        """Why every node would refuse it, FT6103 to FT6105; None: they would not."""
        subject = self.mesh.registry.session(bytes.fromhex(member.session))
        body = msgspec.structs.replace(wanted, by=self.mesh.session)
        try:
            if subject is not None:
                check_assignment(body, self.mesh.verify(self.mesh.chain, "agent or gateway"), subject)
        except FabrictoolError as error:
            return error
        return None

    async def say(self, member: FleetMember, wanted: AssignmentBody) -> AssignmentOutcome:
        """Sign `wanted` for `member` with the next version, and see that the gateways hold it, or one at least.

        Raises
        ------
        FabrictoolError
            FT6103 to FT6105 as every node would refuse it, FT6107 when no gateway said in time that it holds it, though
            one may, when another controller has spoken since, and when our own map refuses it.
        """
        registry, credential = self.mesh.registry, self.mesh.credential
        session, former = bytes.fromhex(member.session), registry.get(assignment_key(bytes.fromhex(member.session)))
        node = registry.node(session)
        version = 1 + max(former.body.version if former is not None else 0, node.heard if node is not None else 0)
        body = msgspec.structs.replace(
            wanted, federation=self.mesh.federation, session=session, by=self.mesh.session, version=version
        )
        if (refusal := self.refusal(member, body)) is not None:
            raise refusal
        await self._spread(sign_assignment(credential, body))
        before = member.assignment.model if member.assignment is not None else ""
        return AssignmentOutcome(member.session, version, wanted.model, before)

    async def wait_for(self, outcome: AssignmentOutcome, timeout_s: float) -> AssignmentOutcome:
        """With what came of it: the engine start that serves, or was given up; of being idle, that nothing runs.

        Raises
        ------
        UnreachableError
            FT6107 when nothing of that happened in time; it may still.
        FabrictoolError
            FT6108 when the session is no more.
        """
        session = bytes.fromhex(outcome.session)

        def settled() -> ServiceBody | None:
            services = self.mesh.registry.services_of(session)
            ours = [service for service in services if service.assigned == outcome.version]
            return next((s for s in ours if s.lifecycle is Lifecycle.SERVING or s.given_up), None)

        def over() -> bool:
            services = self.mesh.registry.services_of(session)
            return all(service.lifecycle is Lifecycle.DOWN for service in services)

        def left() -> bool:
            return not self.mesh.registry.lives(session, wall=self._clock.wall())

        def followed() -> bool:
            return settled() is not None if outcome.model else over()

        await self._until(lambda: followed() or left(), timeout_s)
        if not followed() and left():
            raise FabrictoolError.of("FT6108", f"{outcome.session[:8]} left the mesh, or was lost, before it followed")
        if not followed():
            message = f"{outcome.session[:8]} was told, and has not followed after {timeout_s:.0f} s"
            hint = f"`fabrictool mesh records {outcome.session[:8]}` says what it does"
            raise UnreachableError.of("FT6107", message, hint=hint, transient=True)
        return replace(outcome, service=settled())

    async def _spread(self, record: Record) -> None:
        """Raises FT6107 as `say` does."""
        registry, whose = self.mesh.registry, record.body.session.hex()[:8]
        self.mesh.take(record.envelope)
        merge = registry.merge(record.envelope, wall=self._clock.wall())  # it is there: this says so, or why not
        if merge.record is None or merge.record.hash != record.hash:
            raise UnreachableError.of(
                "FT6107", f"{whose} can be told nothing now: {merge.reason or 'it has heard more'}"
            )

        def superseded() -> bool:
            held = registry.get(record.key)
            return held is None or held.hash != record.hash

        def settled() -> bool:
            holders = self.mesh.holders(record)
            return superseded() or (bool(holders) and all(holders))

        deadline = self._clock.monotonic() + SPREAD_S
        await asyncio.sleep(0)  # what was taken goes out at the end of the turn, and the question behind it
        while not settled() and (left := deadline - self._clock.monotonic()) > 0:
            self.mesh.ask(record.key)
            await self._until(settled, min(ASK_S, left))
        if superseded():
            message = f"{whose} was told, and that is over: another controller spoke since, or its session was renewed"
            raise UnreachableError.of("FT6107", message, transient=True)
        if not any(self.mesh.holders(record)):
            message = f"no gateway has said in time that it holds what {whose} was told: it may hold it all the same"
            raise UnreachableError.of("FT6107", message, transient=True)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._clock.monotonic() + timeout_s
        while not condition():
            if self._clock.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    # -- Listener, for the mesh: whoever visits looks by itself, and serves nobody --------------------------------

    def record_changed(self, record: Record) -> None: ...

    def session_ended(self, reason: str) -> None:
        self.ended = reason

    def tail_heard(self, session: bytes, service: bytes, text: str) -> None: ...

    def link_changed(self, session: bytes, *, up: bool, reason: str) -> None: ...

    def load_reported(self, session: bytes, load: Load) -> None: ...

    def load(self, peer: bytes) -> Load:
        return ()

    def stream_opened(self, stream: TunnelStream, head: StreamHead, peer: VerifiedSession) -> None:
        """Nobody may ask it for anything."""
