"""How records travel: pushed at once to every neighbour, repaired by comparing digests. Sans I/O.

Inputs are method calls with the time as an argument; each returns the effects that the transport carries out.
The same object runs on sockets and on the virtual network of the tests.

* A local update is pushed to all links (an agent holds one or two, to different hubs).
* A *hub* (a gateway) forwards what is new to it to its other links; an agent is a leaf and never forwards, so the
  cost of an update stays one record a node (mesh.md §3, "hub2").
* Every heartbeat carries the root digest. Two beats with different roots start a repair: bucket digests, then
  summaries of the differing buckets, then only the records that one side lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from fabrictool.mesh.records import Envelope, Record
from fabrictool.mesh.registry import BUCKETS, Registry, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

PUSH_RECORDS = 32
"""Records in one message: 32 × 4.2 KiB (body and chain at their limits) stays under the frame limit."""
PATIENCE_BEATS = 2
"""A push in flight makes roots differ for a moment; repairing sooner only duplicates it."""
MAX_SUMMARY = 2048


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


Message = Push | Buckets | Summary | Want
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


Effect = Send | Changed | Refused


class Gossip:
    """The dissemination state of one node over its registry."""

    def __init__(self, registry: Registry, *, hub: bool) -> None:
        self.registry = registry
        self._hub = hub
        self._peers: dict[bytes, int] = {}
        """Neighbour (session id) → consecutive beats with a different root."""

    def link_up(self, peer: bytes) -> list[Effect]:
        """A neighbour is here: compare maps at once."""
        self._peers[peer] = 0
        return [Send(peer, _encode(Buckets(self.registry.bucket_digests())))]

    def link_down(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def publish(self, record: Record, *, wall: float) -> list[Effect]:
        merge = self.registry.merge(record.envelope, wall=wall)
        if merge.verdict is not Verdict.NEW:
            return []
        return [Changed(record), *self._push([record.envelope], self._peers)]

    def beat(self, peer: bytes, root: bytes) -> list[Effect]:
        """The neighbour's root digest, with its heartbeat."""
        if peer not in self._peers or root == self.registry.root():
            self._peers[peer] = 0
            return []
        self._peers[peer] += 1
        if self._peers[peer] < PATIENCE_BEATS:
            return []
        self._peers[peer] = 0
        return [Send(peer, _encode(Buckets(self.registry.bucket_digests())))]

    def received(self, peer: bytes, payload: bytes, *, wall: float) -> list[Effect]:
        try:
            message = _decoder.decode(payload)
        except (msgspec.DecodeError, ValueError) as error:
            return [Refused(peer, f"malformed message: {error}")]
        match message:
            case Push():
                return self._merge(peer, message.envelopes, wall)
            case Buckets():
                mine = self.registry.bucket_digests()
                differing = [i for i in range(BUCKETS) if mine[i] != message.digests[i]]
                if not differing:
                    return []
                summary = Summary(differing, self.registry.summary(differing)[:MAX_SUMMARY])
                return [Send(peer, _encode(summary))]
            case Summary():
                return self._compare(peer, message)
        return self._push(self.registry.in_dependency_order(message.keys), [peer])

    def _compare(self, peer: bytes, summary: Summary) -> list[Effect]:
        theirs = {key: (lifecycle, version, hash_) for key, lifecycle, version, hash_ in summary.entries}
        buckets = [b for b in summary.buckets if 0 <= b < BUCKETS]
        ours = {key: (lifecycle, version, hash_) for key, lifecycle, version, hash_ in self.registry.summary(buckets)}
        newer_here = [key for key, rank in ours.items() if key not in theirs or theirs[key] < rank]
        newer_there = [key for key, rank in theirs.items() if key not in ours or ours[key] < rank]
        effects = self._push(self.registry.in_dependency_order(newer_here), [peer])
        if newer_there:
            effects.append(Send(peer, _encode(Want(newer_there))))
        return effects

    def _merge(self, peer: bytes, envelopes: list[Envelope], wall: float) -> list[Effect]:
        effects: list[Effect] = []
        fresh: list[Envelope] = []
        for envelope in envelopes:
            merge = self.registry.merge(envelope, wall=wall)
            if merge.verdict is Verdict.NEW and merge.record is not None:
                effects.append(Changed(merge.record))
                fresh.append(envelope)
            elif merge.verdict is Verdict.STALE and merge.record is not None:
                effects += self._push([merge.record.envelope], [peer])
            elif merge.verdict is Verdict.REJECTED:
                effects.append(Refused(peer, merge.reason))
        if self._hub and fresh:
            effects += self._push(fresh, [other for other in self._peers if other != peer])
        return effects

    @staticmethod
    def _push(envelopes: list[Envelope], peers: Iterable[bytes]) -> list[Effect]:
        batches = [envelopes[i : i + PUSH_RECORDS] for i in range(0, len(envelopes), PUSH_RECORDS)]
        encoded = [_encode(Push(batch)) for batch in batches]
        return [Send(peer, message) for peer in peers for message in encoded]


_encode = msgspec.msgpack.encode
