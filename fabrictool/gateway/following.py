"""What a gateway hears from the mesh: its directory follows the registry, and the operator is told what happens."""

from __future__ import annotations

import ipaddress
import logging
from typing import TYPE_CHECKING

from fabrictool import __version__
from fabrictool.base.clock import duration_text
from fabrictool.gateway.tails import Tails
from fabrictool.gateway.view import mesh_rows, static_rows
from fabrictool.mesh.records import AssignmentBody, Lifecycle, NodeBody, RevocationBody, ServiceBody, WitnessBody

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import GatewaySpec, HostPort
    from fabrictool.gateway.directory import Directory
    from fabrictool.mesh.evidence import Attestation
    from fabrictool.mesh.framing import StreamHead
    from fabrictool.mesh.identity import VerifiedSession
    from fabrictool.mesh.records import Record
    from fabrictool.mesh.transport.listener import Load
    from fabrictool.mesh.transport.node import MeshNode
    from fabrictool.mesh.transport.tunnel import TunnelStream
    from fabrictool.status.documents import NodeRow

UNATTESTED_KEPT = 1000
LOST_KEPT = 10_000
CERTIFICATE_WARNING_S = 4 * 3600.0
"""A session lives for about a day; an operator who looks in twice a shift sees this in time."""

_log = logging.getLogger("fabrictool.gateway")


class MeshFollower:
    """The listener of a gateway's mesh node."""

    # Wide: what it keeps, by which rules, and who is told.
    def __init__(
        self,
        clock: Clock,
        directory: Directory,
        attestation: Callable[[], Attestation],
        note: Callable[[str, str, str], None],
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._attestation = attestation
        self._note = note
        self.mesh: MeshNode | None = None
        """None: its gateway has a static list."""
        self.known: set[str] = set(directory.models())
        """Models that were served since the start."""
        self.tails = Tails()
        self._lost_at: dict[bytes, float] = {}
        self._unattested: dict[bytes, str] = {}
        """Node to which nothing is sent → why; said once."""
        self._warned: set[bytes] = set()

    def rows(self) -> list[NodeRow]:
        """Nodes, for a status document."""
        if self.mesh is None:
            return static_rows(self._directory)
        return mesh_rows(self.mesh, self._directory, self._lost_at, self.tails, self._clock.wall())

    def record_changed(self, record: Record) -> None:
        """The registry moved: follow it."""
        mesh, body = self.mesh, record.body
        if mesh is None:
            return
        if isinstance(body, ServiceBody):
            text = body.note.splitlines()[0] if body.note else ("" if body.accepting else "draining")
            self._note(f"service-{body.lifecycle.name.lower()}", body.replica, text)
        elif isinstance(body, WitnessBody):
            self._note(*_testimony(body, mesh.registry.evicted(body.suspect)))
            self._follow(body.suspect)
            return
        elif isinstance(body, RevocationBody):
            self._note("revoked", body.session.hex()[:8], f"by {body.provider or 'the federation'}")
            self.follow_all()
            return
        elif isinstance(body, AssignmentBody):
            self._note("assigned", body.session.hex()[:8], f"{body.model or 'nothing'}, by {body.by.hex()[:8]}")
            return
        elif body.role == "agent":
            self._note(f"node-{body.lifecycle.name.lower()}", f"{body.cluster}/{body.node}", body.session.hex()[:8])
        self._follow(body.session)

    def session_ended(self, reason: str) -> None:
        """It stays: its tunnels work, and a new session is the operator's to give."""
        self._note("session-ended", "this gateway", f"{reason}; `fabrictool apply` replaces it")

    def tail_heard(self, session: bytes, service: bytes, text: str) -> None:
        """Of our provider's agents, about their own engines; what others send is dropped."""
        if self.mesh is not None:
            registry, ours = self.mesh.registry, self.mesh.credential.claims.provider
            if not self.tails.take(registry.session(session), service, text, registry, ours):
                _log.debug("a log's end from %s is not for us", session.hex()[:8])

    def link_changed(self, session: bytes, *, up: bool, reason: str) -> None:
        """A tunnel came or went; its replicas are routable, or not, from this moment."""
        self._note("link-up" if up else "link-down", session.hex()[:8], reason)
        if up:
            self._lost_at.pop(session, None)
        else:
            self._lost_at[session] = self._clock.wall()
            if len(self._lost_at) > LOST_KEPT:
                del self._lost_at[next(iter(self._lost_at))]
        self._follow(session)

    def load_reported(self, session: bytes, load: Load) -> None:
        self._directory.report(session, load)

    def load(self, peer: bytes) -> Load:
        return ()

    def stream_opened(self, stream: TunnelStream, head: StreamHead, peer: VerifiedSession) -> asyncio.Protocol | None:
        return None

    def follow_all(self) -> None:
        """A provider's certificate stands for many sessions."""
        if self.mesh is not None:
            for record in self.mesh.registry:
                if isinstance(record.body, NodeBody):
                    self._follow(record.body.session)

    def _follow(self, session: bytes) -> None:
        """One session's replicas: a record costs what its owner serves, however large the fabric is."""
        if self.mesh is not None:
            linked = self.mesh.tunnel(session) is not None or self.mesh.relays.tunnel(session) is not None
            serving = self.mesh.registry.serving_of(session, wall=self._clock.wall(), linked=linked)
            if serving and (refusal := self._attestation().refusal(serving[0].node)):
                self._refuse_node(serving[0].node, refusal)
                serving = []
            self._directory.follow(session, serving, self.mesh, self._clock.monotonic())
            for entry in serving:
                self.known.update((entry.service.model, *entry.service.adapters))

    def _refuse_node(self, node: NodeBody, why: str) -> None:
        if self._unattested.get(node.session) != why:
            self._unattested[node.session] = why
            self._note("not-attested", f"{node.provider} {node.cluster}/{node.node}", f"nothing is sent there: {why}")
            if len(self._unattested) > UNATTESTED_KEPT:
                del self._unattested[next(iter(self._unattested))]

    def warn_of_certificates(self) -> None:
        """Once a session, hours ahead: when its certificate ends, its tunnel is closed."""
        if self.mesh is None:
            return
        here = {*self.mesh.neighbours, self.mesh.session}
        self._warned &= here
        for session in here - self._warned:
            identity = self.mesh.registry.session(session)
            left = identity.not_after - self._clock.wall() if identity is not None else CERTIFICATE_WARNING_S
            if left < CERTIFICATE_WARNING_S:
                self._warned.add(session)
                self._note(
                    "certificate-ends",
                    session.hex()[:8],
                    f"in {duration_text(max(0.0, left))}: `fabrictool apply` renews it, unless it joined by itself",
                )


def _testimony(witness: WitnessBody, evicted: bool) -> tuple[str, str, str]:
    """Kind, subject and text of an event."""
    hub, suspect = witness.session.hex()[:8], witness.suspect.hex()[:8]
    if not witness.suspects:
        return "suspicion-withdrawn", suspect, f"by {hub}"
    text = f"by {hub}: {', '.join(witness.evidence)}"
    if not witness.votes:
        return "suspected", suspect, text
    return "evicted" if evicted else "eviction-vote", suspect, text


def node_body(mesh: MeshNode, spec: GatewaySpec, lifecycle: Lifecycle, version: int) -> NodeBody:
    """What a gateway says of itself."""
    return NodeBody(
        federation=mesh.federation,
        session=mesh.session,
        lifecycle=lifecycle,
        version=version,
        role="gateway",
        fabric=spec.fabric,
        provider=mesh.credential.claims.provider,
        site=spec.site,
        cluster=spec.cluster,
        node=spec.cluster,
        release=__version__,
        addresses=(str(spec.hub),) if _can_be_dialled(spec.hub) else (),
        ingress=spec.ingress,
    )


def _can_be_dialled(hub: HostPort) -> bool:
    """Whether it is an address, and not the word for all of a machine's own, or for any free port."""
    try:
        return hub.port != 0 and not ipaddress.ip_address(hub.host).is_unspecified
    except ValueError:
        return hub.port != 0
