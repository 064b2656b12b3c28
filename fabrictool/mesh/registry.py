"""The G-Map: per key, the join of every record ever seen; replicas that saw the same records are equal.

Invariants (each has a test):

1. order, repetition and batching of merges never change the result;
2. a key's rank never decreases;
3. no record is visible unless its owner's chain and signature were checked;
4. only the owner writes its records; a record of another federation is refused;
5. the digest is equal exactly when the maps are equal (up to hash collisions).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.mesh.identity import IdentityError, IdentityVerifier, VerifiedSession
from fabrictool.mesh.records import (
    MAX_VERSION_STEP,
    Envelope,
    Lifecycle,
    NodeBody,
    Record,
    ServiceBody,
    decode,
    signed_bytes,
)
from fabrictool.mesh.records import RecordError as _RecordError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

BUCKETS = 256
_MODULUS = 1 << 256


class Verdict(enum.Enum):
    """What a merge did."""

    NEW = "new"
    STALE = "stale"
    """Ours is newer: answer the sender with it, so that it learns (memberlist #311)."""
    SAME = "same"
    ORPHAN = "orphan"
    """A service whose node record is not here yet; reconciliation will bring both."""
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Merge:
    """The verdict on one envelope; `record` is what the map now holds for the key, `reason` why it was refused."""

    verdict: Verdict
    record: Record | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that may be routed to, with the node that runs it."""

    node: NodeBody
    service: ServiceBody


class Registry:
    """One replica of the map.

    Digests are sums modulo 2²⁵⁶ of the records' hashes, one a bucket and one over all: cheap to keep, independent of
    order, and not forgeable the way an XOR of short hashes is (mesh.md §5).
    """

    def __init__(self, verifier: IdentityVerifier) -> None:
        self._verifier = verifier
        self._records: dict[bytes, Record] = {}
        self._sessions: dict[bytes, VerifiedSession] = {}
        self._bucket_sums = [0] * BUCKETS

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def get(self, key: bytes) -> Record | None:
        return self._records.get(key)

    def session(self, session: bytes) -> VerifiedSession | None:
        """The checked identity behind a node record."""
        return self._sessions.get(session)

    def merge(self, envelope: Envelope, *, wall: float) -> Merge:
        """Join one envelope into the map; `wall` decides on expiry only, never on order."""
        try:
            record = decode(envelope)
            current = self._records.get(record.key)
            if current is not None and record.hash == current.hash:
                return Merge(Verdict.SAME, current)
            owner = self._owner(record, wall)
        except (_RecordError, IdentityError) as error:
            return Merge(Verdict.REJECTED, reason=str(error))
        if owner is None:
            return Merge(Verdict.ORPHAN, reason="no node record for this service yet")
        if not owner.verify(envelope.signature, signed_bytes(envelope.body)):
            return Merge(Verdict.REJECTED, reason="signature does not verify")
        reason = self._refusal(record, owner, current)
        if reason:
            return Merge(Verdict.REJECTED, reason=reason)
        if current is not None and record.rank < current.rank:
            return Merge(Verdict.STALE, current)
        self._store(record, current)
        if isinstance(record.body, NodeBody):
            self._sessions[record.body.session] = owner
        return Merge(Verdict.NEW, record)

    def serving(self, *, wall: float) -> list[Serving]:
        """Services that are SERVING and accepting on a node that is SERVING, by key."""
        entries = []
        for key in sorted(self._records):
            service = self._records[key].body
            if not isinstance(service, ServiceBody) or service.lifecycle is not Lifecycle.SERVING:
                continue
            node = self._records.get(service.session)
            if node is None or not isinstance(node.body, NodeBody) or node.body.lifecycle is not Lifecycle.SERVING:
                continue
            if service.accepting and not self._expired(service.session, wall):
                entries.append(Serving(node.body, service))
        return entries

    def loading(self, sessions: Container[bytes]) -> set[str]:
        """Models that the engines of these sessions are loading."""
        bodies = [record.body for record in self._records.values()]
        services = [body for body in bodies if isinstance(body, ServiceBody) and body.session in sessions]
        return {service.model for service in services if service.lifecycle is Lifecycle.JOIN}

    def forget_expired(self, *, wall: float, margin: float = 3600.0 + 600.0) -> int:
        """Drop records whose session certificate ended `margin` seconds ago; they can never come back.

        The default is two clock skews and the longest partition that we heal from (mesh.md §5, GC tier 2).
        """
        gone = [s for s, identity in self._sessions.items() if identity.not_after + margin < wall]
        for session in gone:
            for key in [k for k in self._records if k.startswith(session)]:
                self._remove(key)
            del self._sessions[session]
        return len(gone)

    # -- digests and reconciliation ---------------------------------------------------------------------------

    def root(self) -> bytes:
        """8 octets that differ when two maps differ; sent with every heartbeat."""
        return (sum(self._bucket_sums) % _MODULUS).to_bytes(32, "big")[:8]

    def bucket_digests(self) -> list[bytes]:
        """256 digests of 8 octets."""
        return [value.to_bytes(32, "big")[:8] for value in self._bucket_sums]

    def summary(self, buckets: Iterable[int]) -> list[tuple[bytes, int, int, bytes]]:
        """(key, lifecycle, version, hash) of each record in those buckets."""
        wanted = set(buckets)
        return [
            (key, int(record.body.lifecycle), record.body.version, record.hash)
            for key, record in sorted(self._records.items())
            if key[0] in wanted
        ]

    def in_dependency_order(self, keys: Iterable[bytes]) -> list[Envelope]:
        """Envelopes of those keys, node records before the services that lean on them."""
        present = [self._records[key] for key in keys if key in self._records]
        return [record.envelope for record in sorted(present, key=lambda r: (len(r.key), r.key))]

    # -- internals --------------------------------------------------------------------------------------------

    def _owner(self, record: Record, wall: float) -> VerifiedSession | None:
        body = record.body
        if isinstance(body, ServiceBody):
            known = self._sessions.get(body.session)
            if known is not None and self._expired(body.session, wall):
                raise IdentityError.of("FT6005", "the session of this record has expired")
            return known
        return self._verifier.verify(record.envelope.chain, now=wall)

    def _refusal(self, record: Record, owner: VerifiedSession, current: Record | None) -> str:
        body = record.body
        if body.federation != self._verifier.federation:
            return "record of another federation"
        if body.session != owner.session:
            return "only the owner may write its record"
        if isinstance(body, NodeBody) and (body.provider, body.role) != (owner.claims.provider, owner.claims.role):
            return "record claims a provider or role that its certificate does not"
        if body.version > (current.body.version if current is not None else 0) + MAX_VERSION_STEP:
            return "version jumps too far"
        return ""

    def _expired(self, session: bytes, wall: float) -> bool:
        identity = self._sessions.get(session)
        return identity is None or identity.not_after < wall

    def _store(self, record: Record, current: Record | None) -> None:
        if current is not None:
            self._remove(record.key)
        self._records[record.key] = record
        bucket = record.key[0]
        self._bucket_sums[bucket] = (self._bucket_sums[bucket] + int.from_bytes(record.hash, "big")) % _MODULUS

    def _remove(self, key: bytes) -> None:
        record = self._records.pop(key)
        bucket = key[0]
        self._bucket_sums[bucket] = (self._bucket_sums[bucket] - int.from_bytes(record.hash, "big")) % _MODULUS
