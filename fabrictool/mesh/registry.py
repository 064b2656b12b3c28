"""The G-Map: per key, the join of every record ever seen; replicas that saw the same records are equal.

Invariants (each has a test):

1. order, repetition and batching of merges never change the result;
2. a key's rank never decreases;
3. no record is visible unless its owner's chain and signature were checked;
4. only the owner writes its records, and its provider's controllers what it is assigned; a record of another
   federation is refused;
5. the digest is equal exactly when the maps are equal (up to hash collisions);
6. a session that enough hubs voted to evict is not routable until its owner itself speaks again;
7. what one owner or one provider may store is bounded;
8. who was revoked is neither routable nor counted, whatever it signs.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.mesh.assignments import check_assignment
from fabrictool.mesh.digests import Digests
from fabrictool.mesh.identity import CLOCK_SKEW_S, Authority, IdentityError, IdentityVerifier, VerifiedSession
from fabrictool.mesh.records import (
    MAX_VERSION_STEP,
    AssignmentBody,
    Envelope,
    Lifecycle,
    NodeBody,
    Record,
    RevocationBody,
    ServiceBody,
    WitnessBody,
    assignment_key,
    decode,
    signed_bytes,
)
from fabrictool.mesh.records import RecordError as _RecordError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, KeysView

    from fabrictool.mesh.records import Body

SESSION_SERVICES = 256
"""Engine starts that one session may record. A job of a day whose engine fails every ten minutes stays under it."""
PROVIDER_SESSIONS = 10_000
"""Sessions of one provider, ended ones too until they are forgotten: a day's worth of a large site's jobs."""
SESSION_WITNESSES = 10_000
"""Sessions that one hub may speak of."""
REVOCATIONS = 10_000
"""Of one provider, or of the root."""
REFUSALS_KEPT = 4096
REFUSED_FOR_S = 300.0
"""A clock that was set right, or a version that came nearer, may make a record good."""
FORGET_MARGIN_S = 3600.0 + 600.0
"""Two clock skews and the longest partition that we heal from (mesh.md §5, GC tier 2)."""


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
    repeated: bool = False
    """Refused before, for the same reason."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that may be routed to, with the node that runs it."""

    node: NodeBody
    service: ServiceBody


class Registry:
    """One replica of the map."""

    def __init__(self, verifier: IdentityVerifier) -> None:
        self._verifier = verifier
        self._records: dict[bytes, Record] = {}
        self._sessions: dict[bytes, VerifiedSession] = {}
        self._keys_of: dict[bytes, set[bytes]] = {}
        """Session → keys of its services and witnesses, and of what it is assigned."""
        self._controllers: dict[bytes, VerifiedSession] = {}
        """Session → who signed what it is assigned."""
        self._sessions_of: dict[str, set[bytes]] = {}
        """Provider → sessions."""
        self._votes: dict[bytes, dict[bytes, int]] = {}
        """Session → hub that votes to evict it → the session's version that the vote is about."""
        self._hub_sessions: set[bytes] = set()
        self._revocations: dict[bytes, set[str]] = {}
        """Session, or fingerprint of a provider's certificate → who revoked it: providers, and "" for the root."""
        self._refusals: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Digest of an envelope that was refused → why, and when: it is not checked again for a while."""
        self._ends: list[tuple[float, bytes]] = []
        """A heap of (wall time, key): when what a record hangs on ends. An entry may be out of date."""
        self._digests = Digests()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def get(self, key: bytes) -> Record | None:
        return self._records.get(key)

    def node(self, session: bytes) -> NodeBody | None:
        """What a session says of itself."""
        record = self._records.get(session)
        return record.body if record is not None and isinstance(record.body, NodeBody) else None

    @property
    def sessions(self) -> KeysView[bytes]:
        """All that have a node record, whatever it says."""
        return self._sessions.keys()

    def session(self, session: bytes) -> VerifiedSession | None:
        """The checked identity behind a node record."""
        return self._sessions.get(session)

    def assignment(self, session: bytes) -> AssignmentBody | None:
        """What a session is told to serve; None: nothing that counts."""
        record, signer = self._records.get(assignment_key(session)), self._controllers.get(session)
        if record is None or signer is None or self.revoked(signer):
            return None
        return record.body if isinstance(record.body, AssignmentBody) else None

    def hubs(self, *, wall: float) -> list[NodeBody]:
        """Gateways that have neither left, nor been evicted, nor expired, by session."""
        bodies = (self.node(session) for session in sorted(self._hub_sessions))
        return [body for body in bodies if body is not None and self._lives(body, wall)]

    def nodes(self, *, wall: float) -> list[NodeBody]:
        """All sessions that have neither left, nor been evicted, nor expired."""
        bodies = (self.node(session) for session in self._sessions)
        return [body for body in bodies if body is not None and self._lives(body, wall)]

    def witnesses(self, suspect: bytes) -> list[WitnessBody]:
        """What hubs say of a session, by hub."""
        records = (self._records.get(hub + b"\0" + suspect) for hub in sorted(self._hub_sessions))
        return [record.body for record in records if record is not None and isinstance(record.body, WitnessBody)]

    def evicted(self, session: bytes) -> bool:
        """Whether enough hubs vote against its newest version: two providers', or its own one's, or the only one's
        that has a hub which nobody voted out. A hub that is voted out has no vote: cut off alone it votes against all.

        Its owner may speak again, with a newer version, and is back: whoever loads weights for ten minutes must not
        lose them to a cut of two. Nobody else can.
        """
        if not self._votes.get(session):
            return False
        hubs = {hub for hub in self._hub_sessions if self._votes_count(hub)}
        dead = {hub for hub in hubs - {session} if self._voted_out(hub, hubs)}
        return self._voted_out(session, hubs - dead, dead)

    def revoked(self, identity: VerifiedSession) -> bool:
        """Whether the root or its own provider revoked this session, or the root its provider's certificate."""
        if not self._revocations:
            return False
        may = {"", identity.claims.provider}
        return any(may & self._revocations.get(subject, set()) for subject in (identity.session, identity.issuer))

    def merge(self, envelope: Envelope, *, wall: float) -> Merge:
        """Join one envelope into the map; `wall` decides on expiry only, never on order."""
        try:
            record = decode(envelope)
        except _RecordError as error:
            return Merge(Verdict.REJECTED, reason=str(error))
        current = self._records.get(record.key)
        if current is not None and record.hash == current.hash:
            return Merge(Verdict.SAME, current)
        digest = _digest(envelope)
        reason, at = self._refusals.get(digest, ("", 0.0))
        if reason and 0 <= wall - at < REFUSED_FOR_S:
            return Merge(Verdict.REJECTED, reason=reason, repeated=True)
        try:
            owner = self._owner(record, wall)
        except (IdentityError, _RecordError) as error:
            return self._refuse(digest, str(error), wall)
        if owner is None:
            return Merge(Verdict.ORPHAN, reason="the node record that it depends on is not here yet")
        if not owner.verify(envelope.signature, signed_bytes(envelope.body)):
            return self._refuse(digest, "signature does not verify", wall)
        reason = self._refusal(record, owner, current)
        if reason:
            return self._refuse(digest, reason, wall)
        if current is not None and record.rank < current.rank:
            return Merge(Verdict.STALE, current)
        if isinstance(record.body, NodeBody) and not envelope.chain and current is not None:
            whole = Envelope(envelope.body, envelope.signature, current.envelope.chain)
            record = Record(record.key, record.body, whole, record.hash)
        self._store(record, current, owner)
        return Merge(Verdict.NEW, record)

    def serving(self, *, wall: float) -> list[Serving]:
        """Services that are SERVING and accepting on a node that is SERVING, by key."""
        return [entry for session in sorted(self._sessions) for entry in self.serving_of(session, wall=wall)]

    def serving_of(self, session: bytes, *, wall: float, linked: bool = False) -> list[Serving]:
        """One session's part of `serving`. Who is `linked` to it does not care for votes."""
        node = self.node(session)
        if node is None or node.lifecycle is not Lifecycle.SERVING or not self._counts(node, wall):
            return []
        if self.evicted(session) and not linked:
            return []
        bodies = (self._records[key].body for key in sorted(self._keys_of.get(session, ())))
        services = (body for body in bodies if isinstance(body, ServiceBody))
        return [Serving(node, s) for s in services if s.lifecycle is Lifecycle.SERVING and s.accepting]

    def services_of(self, session: bytes) -> list[ServiceBody]:
        """All engine starts of a session that are on record, by key."""
        bodies = (self._records[key].body for key in sorted(self._keys_of.get(session, ())))
        return [body for body in bodies if isinstance(body, ServiceBody)]

    def loading(self, sessions: Iterable[bytes]) -> set[str]:
        """Models and adapters that the engines of these sessions are loading."""
        services = (service for session in sessions for service in self.services_of(session))
        joining = [service for service in services if service.lifecycle is Lifecycle.JOIN]
        return {name for service in joining for name in (service.model, *service.adapters)}

    def lives(self, session: bytes, *, wall: float) -> bool:
        """Whether a session is on record and has neither left, nor been evicted, nor expired."""
        node = self.node(session)
        return node is not None and self._lives(node, wall)

    def forget_expired(self, *, wall: float, margin: float = FORGET_MARGIN_S) -> list[bytes]:
        """Drop records whose session certificate ended `margin` seconds ago, and what was said of such; returns these.

        They can never come back, for such a certificate proves nothing. All replicas do this, so that none holds what
        another would refuse.
        """
        gone: list[bytes] = []
        while self._ends and self._ends[0][0] + margin < wall:
            _, key = heapq.heappop(self._ends)
            record = self._records.get(key)
            if record is None or not self._end_of(record) + margin < wall:
                continue
            if isinstance(record.body, NodeBody):
                gone.append(key)
                self._forget_session(key)
            else:
                self._forget_word(record)
        return gone

    # -- digests and reconciliation ---------------------------------------------------------------------------

    def root(self) -> bytes:
        """8 octets that differ when two maps differ; sent with every heartbeat."""
        return self._digests.root()

    def bucket_digests(self) -> list[bytes]:
        """256 digests of 8 octets."""
        return self._digests.buckets()

    def summary(self, buckets: Iterable[int]) -> list[tuple[bytes, int, int, bytes]]:
        """(key, lifecycle, version, hash) of each record in those buckets."""
        records = (self._records[key] for key in self._digests.keys(buckets))
        return [(r.key, int(r.body.lifecycle), r.body.version, r.hash) for r in records]

    # -- internals --------------------------------------------------------------------------------------------

    def _owner(self, record: Record, wall: float) -> VerifiedSession | Authority | None:
        """Who must have signed; None where we do not know them yet."""
        body = record.body
        if isinstance(body, RevocationBody):
            return self._verifier.authority(record.envelope.chain, body.provider, now=wall)
        known = self._sessions.get(body.session)
        if not isinstance(body, NodeBody) or not record.envelope.chain:
            if isinstance(body, NodeBody) and known is not None and body.certificate not in (b"", known.certificate):
                return None  # it was renewed, and its chain comes with a repair
            if known is not None and self._expired(body.session, wall):
                raise IdentityError.of("FT6005", "the session of this record has expired")
            if known is None or not isinstance(body, AssignmentBody):
                return known
        signer = self._verifier.verify(record.envelope.chain, now=wall)
        if isinstance(body, AssignmentBody) and known is not None:
            check_assignment(body, signer, known)
        return signer

    def _refuse(self, digest: bytes, reason: str, wall: float) -> Merge:
        self._refusals[digest] = reason, wall
        if len(self._refusals) > REFUSALS_KEPT:
            self._refusals.popitem(last=False)
        return Merge(Verdict.REJECTED, reason=reason)

    def _refusal(self, record: Record, owner: VerifiedSession | Authority, current: Record | None) -> str:
        body = record.body
        if body.federation != self._verifier.federation:
            return "record of another federation"
        if isinstance(owner, Authority):
            return self._revocation_refusal(body, owner)
        if body.session != owner.session and not isinstance(body, AssignmentBody):
            return "only the owner may write its record"
        if isinstance(body, NodeBody) and (body.provider, body.role) != (owner.claims.provider, owner.claims.role):
            return "record claims a provider or role that its certificate does not"
        if isinstance(body, NodeBody) and body.certificate not in (b"", owner.certificate):
            return "record does not go with this certificate"
        if isinstance(body, ServiceBody) and owner.models and body.model not in owner.models:
            return "its certificate does not name this model"
        subject = self.node(body.session) if isinstance(body, AssignmentBody) and current is None else None
        if subject is not None and body.version < subject.heard:
            return "the session has heard a newer assignment"
        if isinstance(body, WitnessBody) and owner.claims.role != "gateway":
            return "only a hub may say that another is gone"
        if body.version > (current.body.version if current is not None else 0) + MAX_VERSION_STEP:
            return "version jumps too far"
        return "" if current is not None else self._over_quota(body, owner)

    def _revocation_refusal(self, body: Body, owner: Authority) -> str:
        """Its signer's certificate bounds how long it is kept, a quota how many."""
        if not isinstance(body, RevocationBody) or not body.until <= owner.not_after + CLOCK_SKEW_S:
            return "a revocation counts no longer than its signer's certificate"
        held = sum(owner.provider in who for who in self._revocations.values())
        return f"{REVOCATIONS} revocations of one signer already" if held >= REVOCATIONS else ""

    def _over_quota(self, body: Body, owner: VerifiedSession) -> str:
        """Why there is no room for one more record of this owner; a member may fill its own part, never the map."""
        if isinstance(body, NodeBody):
            full = len(self._sessions_of.get(owner.claims.provider, ())) >= PROVIDER_SESSIONS
            return f"provider {owner.claims.provider} has {PROVIDER_SESSIONS} sessions already" if full else ""
        if isinstance(body, AssignmentBody):
            return ""  # a session has one
        kind, most = (
            (ServiceBody, SESSION_SERVICES) if isinstance(body, ServiceBody) else (WitnessBody, SESSION_WITNESSES)
        )
        held = sum(isinstance(self._records[key].body, kind) for key in self._keys_of.get(body.session, ()))
        return f"the session has {most} records of this kind already" if held >= most else ""

    def _expired(self, session: bytes, wall: float) -> bool:
        identity = self._sessions.get(session)
        return identity is None or identity.not_after < wall

    def _lives(self, node: NodeBody, wall: float) -> bool:
        """Whether it counts, and nobody evicted it."""
        return self._counts(node, wall) and not self.evicted(node.session)

    def _counts(self, node: NodeBody, wall: float) -> bool:
        """Whether it has neither left, nor expired, nor been revoked."""
        return node.lifecycle < Lifecycle.DOWN and not self._expired(node.session, wall) and not self._barred(node)

    def _barred(self, node: NodeBody) -> bool:
        return self.revoked(self._sessions[node.session])

    def _votes_count(self, hub: bytes) -> bool:
        """Whether a hub has neither left nor been revoked."""
        node = self.node(hub)
        return node is not None and node.lifecycle < Lifecycle.DOWN and not self._barred(node)

    def _voted_out(self, session: bytes, hubs: set[bytes], dead: Collection[bytes] = ()) -> bool:
        """Whether the votes, but for those of the dead, are enough where these hubs could vote. Whether one of those is
        out itself is not asked again: two that vote against each other would ask for ever.
        """
        votes, node = self._votes.get(session), self.node(session)
        if not votes or node is None:
            return False
        newest = {hub for hub, seen in votes.items() if seen == node.version}
        voters = [self._sessions[hub] for hub in newest.difference(dead) if hub in self._sessions]
        providers = {voter.claims.provider for voter in voters if not self.revoked(voter)}
        with_hubs = {self._sessions[hub].claims.provider for hub in hubs - {session}}
        return node.provider in providers or len(providers) >= min(2, len(with_hubs)) > 0

    def _store(self, record: Record, current: Record | None, owner: VerifiedSession | Authority) -> None:
        ended = None if current is None else self._end_of(current)
        if current is not None:
            self._remove(record.key)
        self._records[record.key] = record
        self._digests.add(record.key, record.hash)
        body = record.body
        if isinstance(owner, Authority):
            self._revocations.setdefault(body.session, set()).add(owner.provider)
        elif isinstance(body, NodeBody):
            self._sessions[body.session] = owner
            signer = self._controllers.get(body.session)
            if signer is not None and (signer.not_after < owner.not_after or self._is_past(body)):
                self._unassign(body.session)  # it was renewed, or heard another one: who comes now would refuse this
            self._sessions_of.setdefault(owner.claims.provider, set()).add(body.session)
        else:
            self._keys_of.setdefault(body.session, set()).add(record.key)
            if isinstance(body, AssignmentBody):
                self._controllers[body.session] = owner
        ends = self._end_of(record)
        if ends not in (ended, math.inf) and not math.isnan(ends):  # what has no place in an order would stop the heap
            heapq.heappush(self._ends, (ends, record.key))
        if isinstance(body, NodeBody) and body.role == "gateway":
            self._hub_sessions.add(body.session)
        elif isinstance(body, WitnessBody) and body.votes:
            self._votes.setdefault(body.suspect, {})[body.session] = body.seen
        elif isinstance(body, WitnessBody):
            self._votes.get(body.suspect, {}).pop(body.session, None)

    def _is_past(self, node: NodeBody) -> bool:
        """Whether its assignment is older than one that it has heard."""
        return self._records[assignment_key(node.session)].body.version < node.heard

    def _unassign(self, session: bytes) -> None:
        del self._controllers[session]
        self._keys_of[session].discard(assignment_key(session))
        self._remove(assignment_key(session))

    def _end_of(self, record: Record) -> float:
        """Wall time after which it may be forgotten; a service or an assignment goes with its session."""
        body = record.body
        if isinstance(body, RevocationBody | WitnessBody):
            return body.until
        return self._sessions[body.session].not_after if isinstance(body, NodeBody) else math.inf

    def _forget_session(self, session: bytes) -> None:
        """With all that it wrote."""
        for key in [session, *self._keys_of.pop(session, ())]:
            self._remove(key)
        self._sessions_of[self._sessions.pop(session).claims.provider].discard(session)
        self._votes.pop(session, None)
        self._controllers.pop(session, None)
        self._hub_sessions.discard(session)

    def _forget_word(self, record: Record) -> None:
        """A revocation, or what a hub said of a session."""
        body = record.body
        self._remove(record.key)
        if isinstance(body, RevocationBody):
            self._revocations[body.session].discard(body.provider)
        elif isinstance(body, WitnessBody):
            self._keys_of[body.session].discard(record.key)
            self._votes.pop(body.suspect, None)

    def _remove(self, key: bytes) -> None:
        self._digests.remove(key, self._records.pop(key).hash)


def _digest(envelope: Envelope) -> bytes:
    """Of all of it: a body must not be refused because somebody else sent it with a chain or signature of their own."""
    hasher = hashlib.blake2b(envelope.body, digest_size=16)
    for part in (envelope.signature, *envelope.chain):
        hasher.update(part)
    return hasher.digest()
