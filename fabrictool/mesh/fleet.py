"""What a node of the mesh knows, as documents: pure functions of its member and its links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool import __version__
from fabrictool.mesh.records import (
    AssignmentBody,
    Lifecycle,
    NodeBody,
    NodeHardware,
    RevocationBody,
    ServiceBody,
    WitnessBody,
    assignment_key,
)
from fabrictool.status.fleet import (
    OVER,
    Accusation,
    FleetAssignment,
    FleetMember,
    FleetNodeLink,
    FleetService,
    FleetStatus,
    RecordRow,
    RecordsStatus,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from fabrictool.mesh.member import Member
    from fabrictool.mesh.records import Body, Evidence, Record
    from fabrictool.mesh.registry import Registry
    from fabrictool.status.fleet import FleetLink, MemberState, RecordKind


_LOSSES: tuple[Evidence, ...] = ("closed", "silent")
"""A tunnel that was. Who never came may be on its way, and is linked to another hub."""


@dataclass(frozen=True, slots=True)
class View:
    """Of whom a document is made, and when."""

    member: Member
    federation: str
    hub: bool
    now: float
    """Monotonic seconds: the detector's."""
    wall: float

    @property
    def registry(self) -> Registry:
        return self.member.registry

    @property
    def role(self) -> str:
        return "gateway" if self.hub else "agent"

    @property
    def own(self) -> NodeBody | None:
        """None until it has said who it is."""
        return self.registry.node(self.member.session)


# Wide: what the registry does not hold and the transport knows.
def fleet_of(
    view: View, *, linked: Collection[bytes], links: list[FleetLink], refused_records: int, vain_repairs: int
) -> FleetStatus:
    """`linked`: the sessions with which there is a tunnel now."""
    head = fleet_head(view, links=links, refused_records=refused_records, vain_repairs=vain_repairs)
    return msgspec.structs.replace(head, members=list(members_of(view, linked)))


def members_of(view: View, linked: Collection[bytes]) -> Iterator[FleetMember]:
    """One by one, for there may be thousands; who joins meanwhile is not among them."""
    nodes = [record.body for record in view.registry if isinstance(record.body, NodeBody)]
    there, lost = {view.member.session, *linked}, view.member.detector.lost
    held = view.member.holders.held
    for body in sorted(nodes, key=lambda n: (n.role != "gateway", n.cluster, n.node, n.session)):
        here = body.session in there
        elsewhere = here or body.session in held  # it let go of us, for it keeps to other hubs
        yield _member(view, body, None if elsewhere else lost.get(body.session), linked=here)


def fleet_head(view: View, *, links: list[FleetLink], refused_records: int, vain_repairs: int) -> FleetStatus:
    """The document without its members."""
    member, registry, own = view.member, view.registry, view.own
    return FleetStatus(
        release=__version__,
        at=view.wall,
        fabric=own.fabric if own is not None else "",
        federation=view.federation,
        session=member.session.hex(),
        role=view.role,
        root=registry.root().hex(),
        records=len(registry),
        refused_records=refused_records,
        vain_repairs=vain_repairs,
        silent_because=member.detector.silent(view.now),
        members=[],
        links=links,
    )


def records_of(view: View) -> RecordsStatus:
    return msgspec.structs.replace(records_head(view), rows=list(rows_of(view)))


def rows_of(view: View) -> Iterator[RecordRow]:
    """One by one, like `members_of`."""
    for record in sorted(view.registry, key=lambda record: record.key):
        yield _record_row(view.registry, record)


def records_head(view: View) -> RecordsStatus:
    """The document without its rows."""
    registry, own = view.registry, view.own
    return RecordsStatus(
        release=__version__,
        at=view.wall,
        fabric=own.fabric if own is not None else "",
        session=view.member.session.hex(),
        role=view.role,
        root=registry.root().hex(),
        rows=[],
    )


def _member(view: View, body: NodeBody, lost: tuple[float, Evidence] | None, *, linked: bool) -> FleetMember:
    """`lost`: since when, on the detector's clock, and how."""
    registry = view.registry
    identity = registry.session(body.session)
    accusations = [
        Accusation(
            hub=witness.session.hex(),
            provider=hub.provider if (hub := registry.node(witness.session)) is not None else "",
            evidence=list(witness.evidence),
            votes=witness.votes,
            seen=witness.seen,
            stands=witness.seen >= body.version,
        )
        for witness in registry.witnesses(body.session)
        if witness.suspects
    ]
    suspected = any(accusation.stands for accusation in accusations)
    state = _state(view, body, suspected=suspected, lost=lost is not None and lost[1] in _LOSSES)
    lost = None if state in OVER else lost
    hardware = body.hardware or NodeHardware("", 0)
    return FleetMember(
        session=body.session.hex(),
        role=body.role,
        provider=body.provider,
        site=body.site,
        cluster=body.cluster,
        node=body.node,
        lifecycle=body.lifecycle.name,
        version=body.version,
        state=state,
        linked=linked,
        ingress=body.ingress,
        held_by=[hub.hex() for hub in view.member.holders.of(body.session)],
        lost_at=view.wall - (view.now - lost[0]) if lost is not None else None,
        lost_how=lost[1] if lost is not None else "",
        accusations=accusations,
        certificate_ends_at=identity.not_after if identity is not None else None,
        ends_at=body.ends_at,
        release=body.release,
        addresses=list(body.addresses),
        device=hardware.device,
        devices=hardware.devices,
        memory=hardware.memory,
        driver=hardware.driver,
        free=list(hardware.free),
        node_links=[FleetNodeLink(kind=link.kind, mbit_s=link.mbit_s, count=link.count) for link in hardware.links],
        assignable=body.assignable,
        assignment=_assignment_of(registry, body),
        idle=state == "serving" and is_idle(registry, body),
        services=[_service(service) for service in registry.services_of(body.session)],
    )


def _state(view: View, body: NodeBody, *, suspected: bool, lost: bool) -> MemberState:
    identity = view.registry.session(body.session)
    if body.lifecycle is Lifecycle.LEFT:
        return "left"
    if identity is None or identity.not_after < view.wall:
        return "expired"
    if view.registry.revoked(identity):
        return "revoked"
    if view.registry.evicted(body.session):
        return "evicted"
    if body.lifecycle is Lifecycle.DOWN:
        return "down"
    if suspected:
        return "suspected"
    if lost:
        return "lost"
    return "joining" if body.lifecycle is Lifecycle.JOIN else "serving"


def is_idle(registry: Registry, body: NodeBody) -> bool:
    """Whether it could be assigned a model, and has none."""
    assignment = registry.assignment(body.session)
    return (
        body.assignable
        and body.lifecycle is Lifecycle.SERVING
        and not body.follows
        and (assignment is None or not assignment.model)
        and all(service.lifecycle is Lifecycle.DOWN for service in registry.services_of(body.session))
    )


def _assignment_of(registry: Registry, node: NodeBody) -> FleetAssignment | None:
    """Its controller's word; where that was forgotten with its signer's certificate, what the session itself says."""
    if registry.get(assignment_key(node.session)) is not None or not node.follows:
        told = registry.assignment(node.session)
        return _assignment(told) if told is not None else None
    starts = [start for start in registry.services_of(node.session) if start.assigned == node.heard]
    return _followed(starts[0]) if starts else None


def _followed(start: ServiceBody) -> FleetAssignment:
    """What an engine start says that it was assigned as."""
    unit = start.unit
    return FleetAssignment(
        by="",
        version=start.assigned,
        model=start.model,
        engine=start.engine,
        source=start.source,
        precision=start.precision,
        context=start.context,
        tp=start.tp,
        max_num_seqs=start.max_num_seqs,
        replica=unit.replica if unit is not None else "",
        operation=unit.operation if unit is not None else "",
        lineage=unit.lineage if unit is not None else "",
        partition=unit.partition if unit is not None else "",
    )


def _assignment(body: AssignmentBody) -> FleetAssignment:
    unit = body.unit
    return FleetAssignment(
        by=body.by.hex(),
        version=body.version,
        model=body.model,
        engine=body.engine,
        source=body.source,
        precision=body.precision,
        context=body.context,
        tp=body.tp,
        max_num_seqs=body.max_num_seqs,
        replica=unit.replica if unit is not None else "",
        operation=unit.operation if unit is not None else "",
        lineage=unit.lineage if unit is not None else "",
        partition=unit.partition if unit is not None else "",
    )


def _service(body: ServiceBody) -> FleetService:
    """The log's tail stays out: this document is read at other institutions, too."""
    return FleetService(
        service=body.service.hex(),
        replica=body.replica,
        model=body.model,
        engine=body.engine,
        precision=body.precision,
        context=body.context,
        tp=body.tp,
        lifecycle=body.lifecycle.name,
        accepting=body.accepting,
        note=next(iter(body.note.splitlines()), ""),
        assigned=body.assigned,
        given_up=body.given_up,
    )


def _owner(body: Body) -> str:
    match body:
        case RevocationBody():
            return ""
        case AssignmentBody():
            return body.by.hex()
        case _:
            return body.session.hex()


def _record_row(registry: Registry, record: Record) -> RecordRow:
    body, envelope = record.body, record.envelope
    identity = registry.session(body.session)
    not_after = identity.not_after if identity is not None else None
    kind: RecordKind
    match body:
        case NodeBody():
            kind, about = "node", "/".join(filter(None, (body.cluster, body.node)))
        case ServiceBody():
            kind, about = "service", body.replica
        case WitnessBody():
            kind, about = "witness", body.suspect.hex()
            not_after = body.until if not_after is None else min(body.until, not_after)
        case AssignmentBody():
            kind, about = "assignment", body.model or "nothing"
        case RevocationBody():
            kind, about, not_after = "revocation", body.session.hex(), body.until
    return RecordRow(
        key=record.key.hex(),
        record=kind,
        owner=_owner(body),
        provider=body.provider if isinstance(body, RevocationBody) else identity.claims.provider if identity else "",
        about=about,
        lifecycle=body.lifecycle.name,
        version=body.version,
        not_after=not_after,
        octets=len(envelope.body) + len(envelope.signature) + sum(map(len, envelope.chain)),
        hash=record.hash.hex(),
    )
