"""What happened to one member of the mesh, input by input, so that an incident can be played again.

A trace is lines of JSON: who it was, then every input with its times and a digest of what followed from it. The core is
sans-I/O and decides alike in every process, so `replay` leads a new member through the same inputs and compares. No key
is in it: the member's own signatures are recorded, and given again in their order.

Trace files hold what travels in the mesh (records, addresses, names of models), never a request or an answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from fabrictool.mesh.gossip import Changed, Refused, Send, Vain
from fabrictool.mesh.member import Member, SessionEnded, TailHeard
from fabrictool.mesh.records import Body, Envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fabrictool.mesh.identity import IdentityVerifier
    from fabrictool.mesh.member import Effect
    from fabrictool.mesh.records import Evidence

FORMAT = 1
AGENT = "agent"
ALONE = "alone"
InputKind = Literal["take", "publish", "renew", "link-up", "link-down", "received", "beat", "tick", "retire", "flush"]


class TraceHead(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="line"):
    """The first line: who it was."""

    format: int = FORMAT
    root: bytes
    """The federation's root certificate, DER."""
    session: bytes
    chain: tuple[bytes, ...]
    hub: bool


class TraceInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="input", tag_field="line"):
    """One input, and what followed."""

    kind: InputKind
    now: float = 0.0
    """Monotonic seconds; 0 where the input has none."""
    wall: float = 0.0
    peer: bytes = b""
    data: bytes = b""
    """A payload, a digest, or a body or envelope in MessagePack."""
    how: str = ""
    """How a link was lost; `AGENT` of one that came, to an agent; `ALONE` of a beat."""
    signed: tuple[bytes, ...] = ()
    """Signatures that the member made of its own."""
    outcome: bytes = b""
    """Digest of the effects and of the map after them."""


Line = TraceHead | TraceInput
_lines = msgspec.json.Decoder(Line)
_bodies = msgspec.msgpack.Decoder(Body)
_envelopes = msgspec.msgpack.Decoder(Envelope)


class TracedMember(Member):
    """A member that tells `write` of each input, as a line without its end."""

    # Wide: a member, and where its lines go.
    def __init__(
        self,
        verifier: IdentityVerifier,
        *,
        session: bytes,
        sign: Callable[[bytes], bytes],
        chain: tuple[bytes, ...],
        hub: bool,
        root: bytes,
        write: Callable[[bytes], None],
    ) -> None:
        self._signatures: list[bytes] = []

        def remembered(message: bytes) -> bytes:
            self._signatures.append(sign(message))
            return self._signatures[-1]

        super().__init__(verifier, session=session, sign=remembered, chain=chain, hub=hub)
        self._write = write
        self._depth = 0
        write(msgspec.json.encode(TraceHead(root=root, session=session, chain=chain, hub=hub)))

    def take(self, envelope: Envelope, *, now: float, wall: float) -> list[Effect]:
        about = TraceInput(kind="take", now=now, wall=wall, data=msgspec.msgpack.encode(envelope))
        return self._told(about, lambda: Member.take(self, envelope, now=now, wall=wall))

    def publish(self, body: Body, *, wall: float) -> list[Effect]:
        about = TraceInput(kind="publish", wall=wall, data=msgspec.msgpack.encode(body))
        return self._told(about, lambda: Member.publish(self, body, wall=wall))

    def renew(self, chain: tuple[bytes, ...], *, wall: float) -> list[Effect]:
        about = TraceInput(kind="renew", wall=wall, data=msgspec.msgpack.encode(chain))
        return self._told(about, lambda: Member.renew(self, chain, wall=wall))

    def link_up(self, peer: bytes, *, wall: float, hub: bool = True) -> list[Effect]:
        about = TraceInput(kind="link-up", wall=wall, peer=peer, how="" if hub else AGENT)
        return self._told(about, lambda: Member.link_up(self, peer, wall=wall, hub=hub))

    def link_down(self, peer: bytes, how: Evidence, *, now: float) -> None:
        def act() -> list[Effect]:
            Member.link_down(self, peer, how, now=now)
            return []

        self._told(TraceInput(kind="link-down", now=now, peer=peer, how=how), act)

    def received(self, peer: bytes, payload: bytes, *, now: float, wall: float) -> list[Effect]:
        about = TraceInput(kind="received", now=now, wall=wall, peer=peer, data=payload)
        return self._told(about, lambda: Member.received(self, peer, payload, now=now, wall=wall))

    def beat(self, peer: bytes, root: bytes, *, alone: bool = False) -> list[Effect]:
        about = TraceInput(kind="beat", peer=peer, data=root, how=ALONE if alone else "")
        return self._told(about, lambda: Member.beat(self, peer, root, alone=alone))

    def tick(self, *, now: float, wall: float) -> list[Effect]:
        about = TraceInput(kind="tick", now=now, wall=wall)
        return self._told(about, lambda: Member.tick(self, now=now, wall=wall))

    def retire(self) -> None:
        Member.retire(self)
        self._write(msgspec.json.encode(TraceInput(kind="retire", outcome=_outcome(self, []))))

    def flush(self) -> Sequence[Send]:
        sends = Member.flush(self)
        if sends:
            self._write(msgspec.json.encode(TraceInput(kind="flush", outcome=_outcome(self, sends))))
        return sends

    def _told(self, about: TraceInput, act: Callable[[], list[Effect]]) -> list[Effect]:
        """What an input leads the member to say itself is part of that input."""
        if self._depth:
            return act()
        self._depth, self._signatures = 1, []
        try:
            effects = act()
        finally:
            self._depth = 0
        done = msgspec.structs.replace(about, signed=tuple(self._signatures), outcome=_outcome(self, effects))
        self._write(msgspec.json.encode(done))
        return effects


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to."""

    member: Member
    """As it was after the last input that was played."""
    inputs: int
    differs_at: int | None = None
    """Number of the first input (from 1) that had another outcome than then; None: all were the same."""


def read_head(line: bytes) -> TraceHead:
    """Raises msgspec.DecodeError or ValueError for what is no trace of this format."""
    head = _lines.decode(line)
    if not isinstance(head, TraceHead) or head.format != FORMAT:
        raise ValueError("it does not begin as a trace of this release does")
    return head


def replay(
    lines: Iterable[bytes],
    verifier: IdentityVerifier,
    seen: Callable[[TraceInput, Sequence[Effect]], None] = lambda *_: None,
) -> Replayed:
    """Leads a new member through a trace; `seen` is told each input and what follows from it. Raises as `read_head`.

    It stops at the first input whose outcome is another: what comes after that has no meaning.
    """
    rest = iter(lines)
    head = read_head(next(rest, b""))
    signatures: list[bytes] = []
    member = Member(
        verifier,
        session=head.session,
        sign=lambda _: signatures.pop(0) if signatures else bytes(64),
        chain=head.chain,
        hub=head.hub,
    )
    count = 0
    for line in rest:
        told = _lines.decode(line)
        if not isinstance(told, TraceInput):
            raise ValueError("a second head in one trace")  # noqa: TRY004 - of the file, not of the program
        count += 1
        signatures[:] = told.signed
        effects = _played(member, told)
        seen(told, effects)
        if _outcome(member, effects) != told.outcome:
            return Replayed(member, count, count)
    return Replayed(member, count)


def _played(member: Member, told: TraceInput) -> Sequence[Effect]:
    match told.kind:
        case "take":
            return member.take(_envelopes.decode(told.data), now=told.now, wall=told.wall)
        case "publish":
            return member.publish(_bodies.decode(told.data), wall=told.wall)
        case "renew":
            return member.renew(msgspec.msgpack.decode(told.data, type=tuple[bytes, ...]), wall=told.wall)
        case "link-up":
            return member.link_up(told.peer, wall=told.wall, hub=told.how != AGENT)
        case "link-down":
            member.link_down(told.peer, told.how, now=told.now)  # type: ignore[arg-type]  # written by `link_down`
            return []
        case "received":
            return member.received(told.peer, told.data, now=told.now, wall=told.wall)
        case "beat":
            return member.beat(told.peer, told.data, alone=told.how == ALONE)
        case "tick":
            return member.tick(now=told.now, wall=told.wall)
        case "retire":
            member.retire()
            return []
        case "flush":
            return member.flush()


def _outcome(member: Member, effects: Sequence[Effect]) -> bytes:
    digest = hashlib.blake2b(member.registry.root(), digest_size=8)
    for effect in effects:
        match effect:
            case Send(peer, message):
                parts = (b"send", peer, message)
            case Changed(record):
                parts = (b"changed", record.key, record.hash)
            case Refused(peer, reason):
                parts = (b"refused", peer, reason.encode())
            case Vain(peer, repairs):
                parts = (b"vain", peer, str(repairs).encode())
            case TailHeard(peer, service, text):
                parts = (b"tail", peer, service + text.encode())
            case SessionEnded(reason):
                parts = (b"ended", b"", reason.encode())
        for part in parts:
            digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
