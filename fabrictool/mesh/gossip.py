"""How records travel: pushed at once to every neighbour, repaired by comparing digests. Sans I/O.

Inputs are method calls with the time as an argument; each returns the effects that the transport carries out, beside
what waits in the outbox for `flush`, at the end of the turn: what one turn brings goes out in one message a neighbour.

* A local update is pushed to all hubs that a node is linked with.
* A *hub* forwards what is new to it to its other links; an agent is a leaf, so the cost of an update stays one record a
  node and hub (mesh.md §3, "hub2"). An agent between two hubs that do not know each other carries records across by
  repair, and so do the agents of a site among themselves: as long as hubs are there they bring it sooner.
* An agent that lost its last hub is *alone*, and says so with its beats. To and from such a one agents push and forward
  like hubs: without any hub the agents of a site keep the map among themselves, and one of them that has a hub left
  speaks for the others.
* Every heartbeat carries the root digest. Beats with different roots start a repair: bucket digests, then summaries of
  the differing buckets, then only the records that one side lacks. A repair after which both roots are what they were
  was in vain (one side refuses what the other holds): it is tried ever more seldom, and said.
* A certificate chain is four fifths of a node record. It goes to a neighbour once a session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from fabrictool.mesh.digests import BUCKETS
from fabrictool.mesh.holders import Holds
from fabrictool.mesh.records import Envelope, Id, NodeBody, Record, body_hash
from fabrictool.mesh.registry import Merge, Registry, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

PUSH_RECORDS = 32
"""Records in one message: 32 × 4.2 KiB (body and chain at their limits) stays under the frame limit."""
PUSH_OCTETS = 16 * 1024
"""A message is one frame, and a beat waits behind it."""
SIGNATURE_OCTETS = 70
PATIENCE_BEATS = 2
"""A push in flight makes roots differ for a moment; repairing sooner only duplicates it."""
SECOND_PATIENCE_BEATS = 4
"""Of the side with the greater session id: when both began at once, every record would cross twice."""
VAIN_BEATS_MAX = 64
"""The longest wait after repairs in vain: about a minute."""
MAX_SUMMARY = 2048
MAX_TAIL = 4000
"""Characters of a log's end."""
REFUSED_KEPT = 4096


class Push(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Records, nodes before the services that lean on them."""

    envelopes: Annotated[list[Envelope], msgspec.Meta(max_length=PUSH_RECORDS)]


class Buckets(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The sender's 256 bucket digests: answer with a `Summary` of those that differ."""

    digests: Annotated[list[bytes], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]


class Summary(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """What the sender holds in some buckets: answer with what is newer, ask for what is missing."""

    buckets: Annotated[list[int], msgspec.Meta(max_length=BUCKETS)]
    entries: Annotated[list[tuple[bytes, int, int, bytes]], msgspec.Meta(max_length=MAX_SUMMARY)]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Keys whose records the sender lacks."""

    keys: Annotated[list[bytes], msgspec.Meta(max_length=MAX_SUMMARY)]


Life = Literal["alive", "gone", "never"]
"""Of a session, to a hub: there is a tunnel, there was one, there was none that it knows of."""


class LifeQuestion(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Do you hold a tunnel to this session?"""

    suspect: Id


class LifeAnswer(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """What a hub knows of a session's tunnel."""

    suspect: Id
    life: Life


class LogTail(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The last lines of an engine that died: for hubs of its own provider, never a record, which all may read."""

    service: Id
    text: Annotated[str, msgspec.Meta(max_length=MAX_TAIL)]


Message = Push | Buckets | Summary | Want | LifeQuestion | LifeAnswer | LogTail | Holds
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: carry `message` to the neighbour."""

    peer: bytes
    message: bytes


@dataclass(frozen=True, slots=True)
class Changed:
    """Effect: the map holds a new record for this key."""

    record: Record


@dataclass(frozen=True, slots=True)
class Refused:
    """Effect: the neighbour sent something that does not prove itself."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Vain:
    """Effect: repairs with this neighbour bring nothing; something is refused on one side, again and again."""

    peer: bytes
    repairs: int


Effect = Send | Changed | Refused | Vain


@dataclass(slots=True)
class _Peer:
    """What is known of one link."""

    hub: bool = True
    alone: bool = False
    """It has no hub, by its last beat."""
    differing_beats: int = 0
    roots: tuple[bytes, bytes] | None = None
    """Ours and theirs when the last repair began."""
    repairs_in_vain: int = 0
    has_chain: int = 0
    """A bit for each session whose newest chain has crossed this link, either way; `Gossip._bit` says which one."""
    outbox: dict[bytes, Envelope] = field(default_factory=dict)
    refused: dict[bytes, None] = field(default_factory=dict)
    """Hashes of bodies that came over this link and were refused: not asked for again here."""


class Gossip:
    """The dissemination state of one node over its registry."""

    def __init__(self, registry: Registry, *, me: bytes, hub: bool) -> None:
        self.registry = registry
        self._me = me
        self._hub = hub
        self._peers: dict[bytes, _Peer] = {}
        self._due: dict[bytes, None] = {}
        """Neighbours in whose outbox something waits, in the order in which it came to be so."""
        self._places: dict[bytes, tuple[int, bytes]] = {}
        """Session → its bit in `has_chain`, and of which certificate. A set of ten thousand ids for each of a thousand
        links would be half a GB."""
        self._free_places: list[int] = []

    @property
    def alone(self) -> bool:
        """Whether this is an agent without a hub."""
        return not self._hub and not any(state.hub for state in self._peers.values())

    def linked(self, session: bytes) -> bool:
        return session in self._peers

    def link_up(self, peer: bytes, *, hub: bool = True) -> list[Effect]:
        """A neighbour is here: compare maps at once."""
        self._peers[peer] = _Peer(hub)
        return [self._compare_all(peer)] if self._me <= peer else []

    def link_down(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def publish(self, record: Record, *, wall: float) -> list[Effect]:
        """A record of our own; see `take`."""
        return self.take(record.envelope, wall=wall)

    def take(self, envelope: Envelope, *, wall: float) -> list[Effect]:
        """Merge what no neighbour brought, and push it."""
        merge = self.registry.merge(envelope, wall=wall)
        if merge.verdict is Verdict.REJECTED:
            return [Refused(self._me, merge.reason)]
        if merge.verdict is not Verdict.NEW or merge.record is None:
            return []
        everybody = self._hub or self.alone
        self._spread([merge.record], [p for p, state in self._peers.items() if everybody or state.hub or state.alone])
        return [Changed(merge.record)]

    def beat(self, peer: bytes, root: bytes, *, alone: bool = False) -> list[Effect]:
        """The neighbour's root digest, with its heartbeat."""
        state = self._peers.get(peer)
        if state is None:
            return []
        state.alone = alone
        mine = self.registry.root()
        if root == mine:
            state.differing_beats, state.roots, state.repairs_in_vain = 0, None, 0
            return []
        if state.roots is not None and state.roots != (mine, root):
            state.roots, state.repairs_in_vain = None, 0
        state.differing_beats += 1
        patience = PATIENCE_BEATS if self._me <= peer else SECOND_PATIENCE_BEATS
        if state.differing_beats < min(patience << state.repairs_in_vain, VAIN_BEATS_MAX):
            return []
        state.differing_beats = 0
        effects: list[Effect] = [self._compare_all(peer)]
        if state.roots is not None:
            state.repairs_in_vain += 1
            if state.repairs_in_vain == 2:
                effects.append(Vain(peer, state.repairs_in_vain))
        state.roots = mine, root
        return effects

    def received(self, peer: bytes, message: Push | Buckets | Summary | Want, *, wall: float) -> list[Effect]:
        """Records and what repairs are made of."""
        match message:
            case Push():
                return self._merge(peer, message.envelopes, wall)
            case Buckets():
                mine = self.registry.bucket_digests()
                differing = [i for i in range(BUCKETS) if mine[i] != message.digests[i]]
                return [Send(peer, encode(self._summary(differing)))] if differing else []
            case Summary():
                return self._compare(peer, message)
            case Want():
                self._send_whole(peer, message.keys)
                return []

    def forget(self, sessions: Iterable[bytes]) -> None:
        """They are no longer in the map."""
        places = [self._places.pop(session)[0] for session in sessions if session in self._places]
        if places:
            self._free_places += places
            rest = ~sum(1 << place for place in places)
            for state in self._peers.values():
                state.has_chain &= rest

    def flush(self, last: Collection[bytes] = ()) -> list[Send]:
        """Everything that the turn brought, in as few messages as it fits; what all are told is written once.

        Hubs come first, for they tell others; those in `last` hear it from somebody else, most likely sooner.
        """
        sends = []
        written: dict[tuple[int, ...], tuple[list[Envelope], list[bytes]]] = {}
        due = [(peer, state) for peer in self._due if (state := self._peers.get(peer)) is not None and state.outbox]
        for peer, state in sorted(due, key=lambda item: (not item[1].hub, item[0] in last)):
            keys = sorted(state.outbox, key=lambda key: (len(key), key))  # nodes before what leans on them
            envelopes = [state.outbox[key] for key in keys]
            state.outbox = {}
            same = tuple(map(id, envelopes))  # the objects live as long as `written`
            if same not in written:
                written[same] = envelopes, [encode(Push(batch)) for batch in _batches(envelopes)]
            sends += [Send(peer, message) for message in written[same][1]]
        self._due = {}
        return sends

    # -- internals --------------------------------------------------------------------------------------------

    def _summary(self, differing: list[int]) -> Summary:
        """Of as many whole buckets as one message takes: what is missing of a bucket would be taken for not there."""
        buckets, entries = [differing[0]], self.registry.summary(differing[:1])[:MAX_SUMMARY]
        for bucket in differing[1:]:
            more = self.registry.summary([bucket])
            if len(entries) + len(more) > MAX_SUMMARY:
                break
            buckets.append(bucket)
            entries += more
        return Summary(buckets, entries)

    def _compare_all(self, peer: bytes) -> Send:
        return Send(peer, encode(Buckets(self.registry.bucket_digests())))

    def _compare(self, peer: bytes, summary: Summary) -> list[Effect]:
        theirs = {key: (lifecycle, version, hash_) for key, lifecycle, version, hash_ in summary.entries}
        buckets = [b for b in summary.buckets if 0 <= b < BUCKETS]
        ours = {key: (lifecycle, version, hash_) for key, lifecycle, version, hash_ in self.registry.summary(buckets)}
        self._send_whole(peer, [key for key, rank in ours.items() if key not in theirs or theirs[key] < rank])
        refused = self._peers[peer].refused if peer in self._peers else {}
        newer = [
            key for key, rank in theirs.items() if (key not in ours or ours[key] < rank) and rank[2] not in refused
        ]
        return [Send(peer, encode(Want(newer)))] if newer else []

    def _merge(self, peer: bytes, envelopes: list[Envelope], wall: float) -> list[Effect]:
        effects: list[Effect] = []
        fresh: list[Record] = []
        for envelope in envelopes:
            merge = self.registry.merge(envelope, wall=wall)
            self._learn(peer, merge)
            if merge.verdict is Verdict.NEW and merge.record is not None:
                effects.append(Changed(merge.record))
                fresh.append(merge.record)
            elif merge.verdict is Verdict.STALE and merge.record is not None:
                self._spread([merge.record], [peer])
            elif merge.verdict is Verdict.REJECTED:
                self._remember_refusal(peer, envelope)
                if not merge.repeated:
                    effects.append(Refused(peer, merge.reason))
        if fresh:
            source = self._peers.get(peer)
            everybody = self._hub or self.alone or (source is not None and source.alone)
            self._spread(fresh, [p for p, state in self._peers.items() if p != peer and (everybody or state.alone)])
        return effects

    def _learn(self, peer: bytes, merge: Merge) -> None:
        """Who sends the node record that we hold has its chain; who sends an older one may lack a renewed one."""
        body = merge.record.body if merge.record is not None and merge.verdict is not Verdict.STALE else None
        if isinstance(body, NodeBody) and peer in self._peers:
            self._peers[peer].has_chain |= self._bit(body)

    def _bit(self, body: NodeBody) -> int:
        """Of a session; a certificate that was renewed has crossed no link yet."""
        place, certificate = self._places.get(body.session, (-1, b""))
        if place < 0:
            place = self._free_places.pop() if self._free_places else len(self._places)
        elif certificate != body.certificate:
            for state in self._peers.values():
                state.has_chain &= ~(1 << place)
        self._places[body.session] = place, body.certificate
        return 1 << place

    def _remember_refusal(self, peer: bytes, envelope: Envelope) -> None:
        state = self._peers.get(peer)
        if state is not None:
            state.refused[body_hash(envelope)] = None
            if len(state.refused) > REFUSED_KEPT:
                del state.refused[next(iter(state.refused))]

    def _spread(self, records: Iterable[Record], peers: Iterable[bytes]) -> None:
        """Into the outboxes; the newest of a key replaces an older one that waits there."""
        states = [(peer, self._peers[peer]) for peer in peers if peer in self._peers]
        self._due.update((peer, None) for peer, _ in states)
        for record in records:
            whole = record.envelope
            if not isinstance(record.body, NodeBody):
                for _, state in states:
                    state.outbox[record.key] = whole
                continue
            bare, bit = Envelope(whole.body, whole.signature), self._bit(record.body)
            for _, state in states:
                waiting = state.outbox.get(record.key)
                known = state.has_chain & bit and (waiting is None or not waiting.chain)
                state.has_chain |= bit
                state.outbox[record.key] = bare if known else whole

    def _send_whole(self, peer: bytes, keys: Iterable[bytes]) -> None:
        """With chains: who asks has nothing to go by."""
        state = self._peers.get(peer)
        if state is not None:
            for key in keys:
                record = self.registry.get(key)
                if record is not None:
                    state.outbox[key] = record.envelope
                    self._due[peer] = None
                    if isinstance(record.body, NodeBody):
                        state.has_chain |= self._bit(record.body)


def _batches(envelopes: list[Envelope]) -> Iterator[list[Envelope]]:
    """As many as one message takes."""
    batch: list[Envelope] = []
    octets = 0
    for envelope in envelopes:
        size = len(envelope.body) + sum(map(len, envelope.chain)) + SIGNATURE_OCTETS
        if batch and (len(batch) == PUSH_RECORDS or octets + size > PUSH_OCTETS):
            yield batch
            batch, octets = [], 0
        batch.append(envelope)
        octets += size
    yield batch


def decode_message(payload: bytes) -> Message:
    """Raises msgspec.DecodeError or ValueError on anything else."""
    message: Message = _decoder.decode(payload)
    return message


encode = msgspec.msgpack.encode
