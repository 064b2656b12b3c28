"""What ``/fleet`` and ``/records`` answer: the mesh as one of its nodes sees it. Any of them can be asked.

A node tells only what it knows. Requests and loads are a gateway's own (`GatewayStatus`); since when a session is lost
is known to hubs, agents know what hubs say of it. What a node does not know is None, never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fabrictool.status.documents import API, LifecycleName, StatusDocument

RecordKind = Literal["node", "service", "witness", "revocation"]
MemberState = Literal["serving", "joining", "suspected", "lost", "down", "evicted", "revoked", "left", "expired"]
"""Of a member, by this view; what needs somebody is `suspected`, `lost`, `down` and `evicted`."""


class Accusation(msgspec.Struct, frozen=True, kw_only=True):
    """What one hub says of a session that it lost."""

    hub: str
    provider: str
    """The hub's."""
    evidence: list[str] = []
    votes: bool = False
    """To evict it, not only to suspect it."""
    seen: int
    """The version of the session's node record that it is about."""
    stands: bool
    """False once its subject has spoken again, with a newer version."""


class FleetService(msgspec.Struct, frozen=True, kw_only=True):
    """One engine start, as its owner's record says."""

    service: str
    replica: str
    model: str
    engine: str
    precision: str = ""
    context: int = 0
    tp: int = 1
    lifecycle: LifecycleName
    accepting: bool
    note: str = ""
    """Why it is DOWN, without its log: that is its provider's."""


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """One session, as its record says, and what is known of its life."""

    session: str
    role: str
    provider: str
    site: str
    cluster: str
    node: str
    lifecycle: LifecycleName
    """As its owner said last."""
    version: int
    state: MemberState
    linked: bool
    """Whether the node whose view this is holds a tunnel with it, or is it."""
    lost_at: float | None = None
    """Since when the hub whose view this is has no tunnel with it, in wall seconds; agents do not know."""
    lost_how: str = ""
    """``closed``, ``silent``, ``never-came`` or ``other-hub``, where `lost_at` is known."""
    accusations: list[Accusation] = []
    certificate_ends_at: float | None = None
    ends_at: float | None = None
    """Wall time at which its allocation ends."""
    release: str = ""
    addresses: list[str] = []
    """``host:port`` where it listens: a gateway for all, an agent for its site."""
    device: str = ""
    devices: int = 0
    memory: int = 0
    """Octets over all devices; 0: it did not say."""
    services: list[FleetService] = []


class FleetLink(msgspec.Struct, frozen=True, kw_only=True):
    """One connection of the node whose view this is, or an address to which it has none."""

    peer: str
    """Session; empty before the first connection."""
    address: str = ""
    """Which this node dials; empty when the peer dialled it."""
    up: bool
    path: str = ""
    """``direct``, ``proxy``, ``ssh`` or ``login``; empty when the address is not in use, or the peer dialled."""
    failures: dict[str, str] = {}
    """Path → why it was given up at the last attempt."""
    error: str = ""
    """Why the last attempt failed as a whole."""
    sent_octets: int | None = None
    silent_s: float | None = None
    """Since the peer was heard last; a beat comes every second."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True, tag="fleet", tag_field="kind"):
    """The mesh in the eyes of one node."""

    api: str = API
    release: str
    at: float
    fabric: str
    federation: str
    session: str
    """Whose view this is."""
    role: str
    root: str
    """Digest of its map: two nodes whose roots are equal hold the same records."""
    records: int
    refused_records: int
    """By this node, since it started."""
    vain_repairs: int
    """Repairs that were given up as vain, since it started."""
    silent_because: str = ""
    """Why this hub accuses nobody now."""
    members: list[FleetMember]
    links: list[FleetLink]


class RecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """One signed record of the map."""

    key: str
    record: RecordKind
    owner: str
    provider: str
    about: str
    """The node, the replica, or the session that a witness speaks of."""
    lifecycle: LifecycleName
    version: int
    not_after: float | None
    """Wall time at which it stops to count: the end of its owner's certificate, or of a witness's subject's."""
    octets: int
    """Signed body, signature and certificate chain."""
    hash: str


class RecordsStatus(msgspec.Struct, frozen=True, kw_only=True, tag="records", tag_field="kind"):
    """The whole map of one node, by key."""

    api: str = API
    release: str
    at: float
    fabric: str
    session: str
    role: str
    root: str
    rows: list[RecordRow]


LiveDocument = StatusDocument | FleetStatus
"""What `top` shows: a gateway's own document, or the fleet in the eyes of an agent."""

NEEDS_SOMEBODY: tuple[MemberState, ...] = ("suspected", "lost", "down", "evicted")
OVER: tuple[MemberState, ...] = ("left", "revoked", "expired")
"""Nothing is expected of these any more."""


def engines_shown(member: FleetMember) -> list[FleetService]:
    """Those that live, or the last that died."""
    living = [service for service in member.services if service.lifecycle in ("JOIN", "SERVING")]
    return living or [service for service in member.services if service.lifecycle == "DOWN"][-1:]


def engine_text(service: FleetService) -> str:
    """``vllm bf16 draining``: what it is, and what it does unless it serves."""
    serving = "" if service.accepting else "draining"
    state = {"JOIN": "loading", "SERVING": serving}.get(service.lifecycle, service.lifecycle)
    return " ".join(filter(None, (service.engine, service.precision, state))) or "–"
