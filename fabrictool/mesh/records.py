"""The registry's records: what an owner says, signed, ordered without clocks.

Five kinds share one lattice. A *node* record speaks for one session of one agent or gateway; a *service* record
speaks for one start of one engine beside it, so that an engine may restart without a new session; a *witness* record
is what a hub says of a session that it lost; an *assignment* is what a provider's controller wants one of the
provider's sessions to serve; a *revocation* is the root's or a provider's last word on a session or on a provider's
certificate. All carry (lifecycle, version): the larger pair wins, and the content hash decides between two bodies that
claim the same pair, which only a cloned key, two controllers at once or a bug can produce (mesh.md §5).
"""

from __future__ import annotations

import enum
import hashlib
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.specs import Pairing, Phase
from fabrictool.domain.steps import MeasuredSteps

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BODY_OCTETS = 2048
MAX_NOTE = 1000
NOTE_HEAD_OCTETS = 8
"""What the field ``note`` costs in MessagePack beside its text: its name and two length prefixes."""
NOTE_ROOM_OCTETS = 300
"""Kept free for it, and for a version that grows, beside what an engine start repeats of its assignment."""
MAX_VERSION = 2**32 - 1
MAX_DEVICES_TOLD = 16
"""Devices of a node whose free memory is told one by one."""
MAX_LINKS = 8
MAX_VERSION_STEP = 2**16
"""A poisoned record cannot jump to the end of the version space and freeze its key."""

_DOMAIN = b"fabrictool record v1\0"

Name = Annotated[str, msgspec.Meta(max_length=200)]
DialAddress = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9:][A-Za-z0-9.:-]{0,252}:[0-9]{1,5}\Z")]
"""``host:port``. Strict: who reads it dials it, through a proxy or a login node's shell perhaps."""
MeetingAddress = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9.]{7,15}|[0-9A-Fa-f:]{2,39}):[0-9]{1,5}\Z")]
"""``address:port``, and never a name: whoever resolves that could be led elsewhere."""
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


class RecordError(FabrictoolError):
    """A record is malformed, unsigned or too large (FT61xx)."""


class Lifecycle(enum.IntEnum):
    """The registry's monotone states; coming back means a new session."""

    JOIN = 0
    SERVING = 1
    DOWN = 2
    LEFT = 3


class NodeLink(msgspec.Struct, frozen=True, omit_defaults=True):
    """Links of one kind and speed that a node has."""

    kind: Name
    """``nic``, ``infiniband`` or ``nvlink``."""
    mbit_s: Annotated[int, msgspec.Meta(ge=0)]
    """In one direction, of one of them."""
    count: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1


class NodeHardware(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the node offers, in the catalogue's words."""

    device: Name
    devices: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 1
    memory: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Octets over all devices."""
    driver: Name = ""
    """Version of the devices' driver."""
    free: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_DEVICES_TOLD)] = ()
    """Octets that were free on each device when its agent looked last; empty: it does not say."""
    links: Annotated[tuple[NodeLink, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()


class NodeBody(msgspec.Struct, frozen=True, tag="n", omit_defaults=True):
    """One session of one agent or gateway."""

    federation: Name
    session: Id
    lifecycle: Lifecycle
    version: Version
    role: Literal["agent", "gateway"]
    fabric: Name
    provider: Name
    site: Name
    cluster: Name
    node: Name
    hardware: NodeHardware | None = None
    ends_at: float | None = None
    """Wall time at which the allocation ends; routers drain before it."""
    release: Name = ""
    """Version of the tool that the agent runs."""
    addresses: Annotated[tuple[DialAddress, ...], msgspec.Meta(max_length=4)] = ()
    """``host:port`` where others can dial it: everybody a hub, the nodes of its site an agent."""
    build: Annotated[bytes, msgspec.Meta(max_length=400)] = b""
    """Evidence of the software that it runs (`mesh.attestation`); empty: it shows none."""
    certificate: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Fingerprint of the session's certificate that goes with this version: it is renewed for the same key, and who
    knows an earlier one needs the chain again. Empty: written by an earlier release."""
    ingress: bool = True
    """Of a gateway: whether clients ask it."""
    assignable: bool = False
    """It serves what its provider's controller assigns to it."""
    heard: Version = 0
    """Version of the newest assignment that it has heard: no earlier one counts any more, whatever becomes of this
    one. 0: of none."""
    follows: bool = False
    """Whether it is to serve what that one says: the record of it may be gone before, with its signer's certificate."""


class AssignedUnit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The unit of a plan that an assignment is."""

    replica: Name
    """``MODEL/NUMBER``: the agent's records bear it."""
    operation: Name
    """Under which it was started."""
    lineage: Name
    """Of the state whose plan that is."""
    partition: Name
    """Of the inventory's."""


MAX_ADAPTERS = 64
"""Of one engine: a record is small."""


class ServiceBody(msgspec.Struct, frozen=True, tag="s", omit_defaults=True):
    """One start of one engine, owned by a session."""

    federation: Name
    session: Id
    service: Id
    lifecycle: Lifecycle
    version: Version
    replica: Name
    """The replica's address in the placement, such as ``smollm2-135m/0``."""
    model: Name
    engine: Name
    precision: Name = ""
    context: Annotated[int, msgspec.Meta(ge=0)] = 0
    tp: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    accepting: bool = True
    """False while draining: no new requests, old ones finish."""
    note: Annotated[str, msgspec.Meta(max_length=MAX_NOTE)] = ""
    """Why it is DOWN, in a line: all institutions read it."""
    assigned: Version = 0
    """Version of the assignment that it follows; 0: of none."""
    given_up: bool = False
    """Its agent starts no other one in its place until it is assigned something anew."""
    unit: AssignedUnit | None = None
    """With the next two, what its assignment said and no field above does: it outlives that record. None: no plan's."""
    source: Annotated[str, msgspec.Meta(max_length=500)] = ""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """Requests that its engine works on at the same time; 0: not said."""
    phase: Phase = "unified"
    """Of serving: ``prefill`` computes prompts for the others of its model, ``decode`` fetches them there."""
    pairing: Pairing = "relayed"
    """How it shares a request, unless its phase is unified; earlier releases know no other way."""
    meets_at: MeetingAddress | None = None
    """Of one that computes prompts ``together``: where those that fetch them find it. No gateway connects there."""
    adapters: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ADAPTERS)] = ()
    """What it serves beside its model, LoRA adapters or other models, by the names that clients ask for."""
    dp: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Base engines of `tp` devices each that merge while they answer; `max_num_seqs` is that of all."""
    steps: MeasuredSteps | None = None
    """As measured before it served; None: not measured, or there is no room."""
    by_priority: bool = False
    """Its engine serves requests by their ``priority``, the smallest first."""


Evidence = Literal["closed", "silent", "never-came", "other-hub"]
"""Of a death: our tunnel was closed by its end, or fell silent, or never was; another hub lost it too."""


class WitnessBody(msgspec.Struct, frozen=True, tag="w", omit_defaults=True):
    """What a hub says of a session that it lost; always JOIN, so that it can take back what it said."""

    federation: Name
    session: Id
    """The hub that speaks."""
    suspect: Id
    lifecycle: Lifecycle
    version: Version
    seen: Version
    """The suspect's newest version then: a newer one refutes."""
    until: float
    """Wall time at which the suspect's certificate ends, and with it what there is to say."""
    suspects: bool = False
    votes: bool = False
    """To evict it, after the grace period."""
    evidence: Annotated[tuple[Evidence, ...], msgspec.Meta(max_length=8)] = ()


class AssignmentBody(msgspec.Struct, frozen=True, tag="a", omit_defaults=True):
    """What a session shall serve, as its provider's controller says; it is kept as long as its subject.

    It holds no word of a command line: the agent makes that itself, if its node's owner allows all of this.
    """

    federation: Name
    session: Id
    """Who is to serve."""
    by: Id
    """The controller's session; its chain is in the envelope."""
    version: Version
    model: Name = ""
    """The name that clients ask for; empty: nothing, be idle."""
    source: Annotated[str, msgspec.Meta(max_length=500)] = ""
    engine: Name = ""
    precision: Name = ""
    context: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: the model's own."""
    tp: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    max_num_seqs: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """0: the agent's usual."""
    unit: AssignedUnit | None = None
    """Where no model is named, the unit that ends; None: it is no plan's, but somebody's own word."""

    @property
    def lifecycle(self) -> Lifecycle:
        """Always the same: no assignment is the last one."""
        return Lifecycle.JOIN


class RevocationBody(msgspec.Struct, frozen=True, tag="r", omit_defaults=True):
    """Who is no longer to be believed. Signed by the root, or by the provider for its own sessions; final."""

    federation: Name
    session: Id
    """The session, or the fingerprint of a provider's certificate (`identity.fingerprint`)."""
    provider: Name
    """Who revokes; empty: the federation's root."""
    at: float
    """Wall time."""
    until: float
    """Wall time at which what is revoked ends by itself."""
    lifecycle: Lifecycle = Lifecycle.LEFT
    version: Version = 1


Body = NodeBody | ServiceBody | WitnessBody | AssignmentBody | RevocationBody

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Body)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A signed body; a node's and an assignment's also carry the chain that proves its signer's key."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_OCTETS)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    chain: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=2)] = ()


class Record(msgspec.Struct, frozen=True):
    """An envelope with its decoded body and its place in the order."""

    key: bytes
    """16 octets for a node (the session), 17 for its assignment (session, 1), 32 for a service (session, service), 33
    for a witness (session, 0, suspect), 40 for a revocation (a word, of whom, by whom).
    """
    body: Body
    envelope: Envelope
    hash: bytes
    """32 octets of BLAKE2b over the signed body."""

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """What the join maximises."""
        return (self.body.lifecycle, self.body.version, self.hash)


def signed_bytes(body: bytes) -> bytes:
    """What the owner signs: the body under a domain string, so that no other signature of the key fits."""
    return _DOMAIN + body


def seal(body: Body, sign: Callable[[bytes], bytes], chain: tuple[bytes, ...] = ()) -> Record:
    """Encode and sign `body` with its owner's key."""
    encoded = _encoder.encode(body)
    if len(encoded) > MAX_BODY_OCTETS:
        raise RecordError.of("FT6101", f"record of {len(encoded)} octets is over the limit of {MAX_BODY_OCTETS}")
    proved = isinstance(body, NodeBody | AssignmentBody | RevocationBody)
    envelope = Envelope(encoded, sign(signed_bytes(encoded)), chain if proved else ())
    return _record(body, envelope)


def with_assignment(body: ServiceBody, followed: AssignmentBody) -> ServiceBody:
    """`body` as an engine start that follows it; its unit and source only where they leave room for a note."""
    bare = msgspec.structs.replace(body, assigned=followed.version, max_num_seqs=0)
    whole = msgspec.structs.replace(
        bare, unit=followed.unit, source=followed.source, max_num_seqs=followed.max_num_seqs
    )
    return whole if len(_encoder.encode(whole)) + NOTE_ROOM_OCTETS <= MAX_BODY_OCTETS else bare


def with_steps(body: ServiceBody, steps: MeasuredSteps | None) -> ServiceBody:
    """`body` with what was measured, where it leaves room for a note."""
    told = msgspec.structs.replace(body, steps=steps)
    return told if len(_encoder.encode(told)) + NOTE_ROOM_OCTETS <= MAX_BODY_OCTETS else body


def with_note(body: ServiceBody, reason: str) -> ServiceBody:
    """`body` with as much of `reason` as its record has room for."""
    bare = msgspec.structs.replace(body, note="")
    room = min(MAX_NOTE, MAX_BODY_OCTETS - len(_encoder.encode(bare)) - NOTE_HEAD_OCTETS)
    return msgspec.structs.replace(bare, note=reason.encode(errors="replace")[:room].decode(errors="ignore"))


def decode(envelope: Envelope) -> Record:
    """The record inside `envelope`, its signature unchecked; raises FT6102 on anything malformed."""
    try:
        body = _decoder.decode(envelope.body)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError.of("FT6102", f"malformed record: {error}") from error
    return _record(body, envelope)


def _record(body: Body, envelope: Envelope) -> Record:
    match body:
        case NodeBody():
            key = body.session
        case ServiceBody():
            key = body.session + body.service
        case WitnessBody():
            key = body.session + b"\0" + body.suspect
        case AssignmentBody():
            key = assignment_key(body.session)
        case RevocationBody():
            # Of each who revokes one: whoever may not must not stand in the place of who may.
            key = b"revoked\0" + body.session + hashlib.blake2b(body.provider.encode(), digest_size=16).digest()
    return Record(key, body, envelope, body_hash(envelope))


def assignment_key(session: bytes) -> bytes:
    """Of what a session is assigned: there is one, whichever of its provider's controllers spoke last."""
    return session + b"\1"


def body_hash(envelope: Envelope) -> bytes:
    """32 octets that stand for what was signed."""
    return hashlib.blake2b(envelope.body, digest_size=32).digest()
