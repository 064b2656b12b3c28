"""What ``/fleet`` and ``/records`` answer: the mesh as one of its nodes sees it. Any of them can be asked, for all
members or for those that a `FleetQuery` means.

A node tells only what it knows. Requests and loads are a gateway's own (`GatewayStatus`); since when a session is lost
is known to hubs, agents know what hubs say of it. What a node does not know is None, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from fabrictool.base.errors import UsageError
from fabrictool.base.units import Memory, UnitError
from fabrictool.status.documents import API, LifecycleName, StatusDocument

if TYPE_CHECKING:
    from collections.abc import Mapping

RecordKind = Literal["node", "service", "witness", "assignment", "revocation"]
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
    assigned: int = 0
    """Version of the assignment that it follows; 0: of none."""
    given_up: bool = False
    """No other one is started in its place."""


class FleetNodeLink(msgspec.Struct, frozen=True, kw_only=True):
    """Links of one kind and speed that a node has."""

    kind: str
    """``nic``, ``infiniband``, ``nvlink`` or what a later release knows."""
    mbit_s: int
    """In one direction, of one of them."""
    count: int = 1


class FleetAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a member is told to serve."""

    by: str
    """The controller's session; empty: its word was forgotten with its certificate, and the member says what it was."""
    version: int
    model: str
    """Empty: nothing."""
    engine: str = ""
    source: str = ""
    precision: str = ""
    context: int = 0
    tp: int = 1
    max_num_seqs: int = 0
    replica: str = ""
    """Of the plan whose word it is; empty: of none."""
    operation: str = ""
    lineage: str = ""
    partition: str = ""


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
    ingress: bool = True
    """Of a gateway: whether clients ask it; otherwise it is a hub."""
    held_by: list[str] = []
    """Hubs that say they hold one with it: any of them can relay. Agents do not know."""
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
    driver: str = ""
    free: list[int] = []
    """Octets that were free on each device when its agent looked last; empty: it does not say."""
    node_links: list[FleetNodeLink] = []
    assignable: bool = False
    """It serves what its provider's controller assigns to it."""
    assignment: FleetAssignment | None = None
    idle: bool = False
    """It lives, could be assigned a model, and has none."""
    services: list[FleetService] = []


def role_text(member: FleetMember) -> str:
    """What a table calls it: a gateway without clients is a hub."""
    return "hub" if member.role == "gateway" and not member.ingress else member.role


class FleetLink(msgspec.Struct, frozen=True, kw_only=True):
    """One connection of the node whose view this is, or an address to which it has none."""

    peer: str
    """Session; empty before the first connection."""
    address: str = ""
    """Which this node dials; empty when the peer dialled it."""
    up: bool
    path: str = ""
    """``direct``, ``proxy``, ``ssh``, ``login`` or ``relay``; empty when the address is not in use, or the peer
    dialled."""
    by: str = ""
    """Of a relayed tunnel: the hub that carries it."""
    failures: dict[str, str] = {}
    """Path → why it was given up at the last attempt."""
    error: str = ""
    """Why the last attempt failed as a whole."""
    sent_octets: int | None = None
    silent_s: float | None = None
    """Since the peer was heard last; a beat comes every second."""


def link_text(view: FleetStatus, member: FleetMember) -> str:
    """How the node whose view it is reaches a member, in a table; agents do not reach each other's engines."""
    if member.session == view.session:
        return "itself"
    if member.linked:
        return "up"
    if member.held_by:
        return f"by {member.held_by[0][:8]}"
    return "–" if "agent" == view.role == member.role else "none"


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


class FleetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which members are meant; what is empty lets all pass."""

    model: str = ""
    """They serve or load it."""
    provider: str = ""
    device: str = ""
    """How its id in the catalogue begins, such as ``a100``."""
    free: int = 0
    """Octets that are free on each of `devices` devices. Who does not say is not meant."""
    devices: int = 1
    idle: bool = False

    def wants(self, member: FleetMember) -> bool:
        """Whether it passes, whatever its state is."""
        return (
            self.provider in ("", member.provider)
            and (not self.model or any(service.model == self.model for service in engines_shown(member)))
            and member.device.startswith(self.device.lower())
            and (self.devices < 2 or member.devices >= self.devices)
            and (not self.free or sum(octets >= self.free for octets in member.free) >= self.devices)
            and (member.idle or not self.idle)
        )


def read_query(words: Mapping[str, str]) -> FleetQuery:
    """From the words behind the question mark of ``/fleet?device=a100&free=40GiB&idle=true``.

    Raises
    ------
    UsageError
        FT5205 for words that mean nothing here.
    """
    given: dict[str, str | int] = {**words}
    try:
        if "free" in given:
            given["free"] = int(Memory.parse(words["free"]))
        return msgspec.convert(given, FleetQuery, strict=False)
    except (UnitError, msgspec.ValidationError) as error:
        hint = f"such as ?device=a100&free=40GiB&idle=true; words: {', '.join(FleetQuery.__struct_fields__)}"
        raise UsageError.of("FT5205", f"the fleet cannot be asked so: {error}", hint=hint) from error


LiveDocument = StatusDocument | FleetStatus
"""What `top` shows: a gateway's own document, or the fleet in the eyes of an agent."""

NEEDS_SOMEBODY: tuple[MemberState, ...] = ("suspected", "lost", "down", "evicted")
OVER: tuple[MemberState, ...] = ("left", "revoked", "expired")
"""Nothing is expected of these any more."""


def engines_shown(member: FleetMember) -> list[FleetService]:
    """Those that live, or the last that died."""
    living = [service for service in member.services if service.lifecycle in ("JOIN", "SERVING")]
    return living or dead_engines(member)[-1:]


def dead_engines(member: FleetMember) -> list[FleetService]:
    """Those that are DOWN, of what the member is to serve now; what it was assigned before is over. Last comes the one
    that was given up.
    """
    assigned = member.assignment.version if member.assignment is not None else 0
    dead = [service for service in member.services if service.lifecycle == "DOWN" and service.assigned == assigned]
    return sorted(dead, key=lambda service: service.given_up)


def engine_text(service: FleetService) -> str:
    """``vllm bf16 draining``: what it is, and what it does unless it serves."""
    serving = "" if service.accepting else "draining"
    state = {"JOIN": "loading", "SERVING": serving}.get(service.lifecycle, service.lifecycle)
    return " ".join(filter(None, (service.engine, service.precision, state))) or "–"
