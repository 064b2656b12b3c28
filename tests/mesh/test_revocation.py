"""Taking certificates back: who may, whom it concerns, and that nobody listens to them any more."""

import time

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.identity import IdentityVerifier, create_root, fingerprint, issue_provider, issue_session
from fabrictool.mesh.records import RecordError
from fabrictool.mesh.registry import FORGET_MARGIN_S, Registry, Verdict
from fabrictool.mesh.revocation import read_revocation, revoke
from fabrictool.state.truststore import TrustStore
from tests.mesh.signed_records import NOW, PROVIDERS, ROOT, SESSIONS, fresh, node, sealed, service
from tests.mesh.test_registry import witness
from tests.mesh.test_transport import joined, listening, node_body, until

ALPHA, BETA, ALPHA_AGAIN = SESSIONS


def session_of(owner):
    return bytes.fromhex(owner.claims.session)


def taken(registry, text, wall=NOW):
    return registry.merge(read_revocation(text)[0], wall=wall)


def filled():
    registry = fresh()
    for owner in SESSIONS:
        registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
        registry.merge(sealed(owner, service(owner)).envelope, wall=NOW)
    return registry


def routable(registry):
    return {entry.node.session for entry in registry.serving(wall=NOW)}


@pytest.mark.parametrize(
    ("signer", "subject", "cut_off"),
    [
        (ROOT, session_of(ALPHA), (ALPHA,)),
        (ROOT, fingerprint(PROVIDERS["alpha"].chain[0]), (ALPHA, ALPHA_AGAIN)),
        (PROVIDERS["alpha"], session_of(ALPHA), (ALPHA,)),
        (PROVIDERS["beta"], session_of(ALPHA), ()),
        (PROVIDERS["beta"], fingerprint(PROVIDERS["alpha"].chain[0]), ()),
    ],
    ids=["root-session", "root-provider", "own-provider", "another-provider", "another-providers-certificate"],
)
def test_whom_a_revocation_concerns(signer, subject, cut_off):
    registry = filled()
    assert taken(registry, revoke(signer, subject, now=NOW, until=NOW + 1000)).verdict is Verdict.NEW
    assert routable(registry) == {session_of(owner) for owner in SESSIONS if owner not in cut_off}
    for owner in SESSIONS:
        assert registry.revoked(registry.session(session_of(owner))) is (owner in cut_off)


def test_it_does_not_matter_what_came_first():
    text = revoke(ROOT, session_of(ALPHA), now=NOW, until=NOW + 1000)
    registry = fresh()
    taken(registry, text)
    for owner in SESSIONS:
        registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
        registry.merge(sealed(owner, service(owner)).envelope, wall=NOW)
    other = filled()
    taken(other, text)
    assert routable(registry) == routable(other) == {session_of(BETA), session_of(ALPHA_AGAIN)}
    assert registry.root() == other.root()


def test_nobody_stands_in_the_place_of_who_may():
    """A provider that may not revoke a session says so again and again, until its record's hash is the greatest."""
    registry = filled()
    taken(registry, revoke(ROOT, session_of(ALPHA), now=NOW, until=NOW + 1000))
    for attempt in range(20):
        taken(registry, revoke(PROVIDERS["beta"], session_of(ALPHA), now=NOW + attempt, until=NOW + 1000))
    assert registry.revoked(registry.session(session_of(ALPHA)))


def test_a_session_cannot_revoke_and_nobody_forges():
    registry = filled()
    envelope, body = read_revocation(revoke(ROOT, session_of(ALPHA), now=NOW, until=NOW + 1000))
    stranger = create_root("other", now=NOW)
    foreign = issue_provider(stranger, "alpha", now=NOW)
    forgeries = [
        msgspec.structs.replace(envelope, signature=BETA.sign(envelope.body)),
        msgspec.structs.replace(envelope, body=envelope.body.replace(body.session, session_of(BETA))),
        *(read_revocation(revoke(s, session_of(ALPHA), now=NOW, until=NOW + 9))[0] for s in (stranger, foreign, BETA)),
    ]
    for forgery in forgeries:
        assert registry.merge(forgery, wall=NOW).verdict is Verdict.REJECTED
    assert len(routable(registry)) == 3


def test_it_is_forgotten_when_what_it_revoked_has_ended():
    registry = filled()
    taken(registry, revoke(ROOT, session_of(ALPHA), now=NOW, until=NOW + 1000))
    registry.forget_expired(wall=NOW + 1000 + FORGET_MARGIN_S - 1)
    assert registry.revoked(registry.session(session_of(ALPHA)))
    registry.forget_expired(wall=NOW + 1000 + FORGET_MARGIN_S + 1)
    assert not registry.revoked(registry.session(session_of(ALPHA)))


def test_a_revoked_hubs_vote_does_not_count():
    hub, registry = issue_session(PROVIDERS["beta"], "gateway", now=NOW), filled()
    registry.merge(sealed(hub, node(hub, role="gateway")).envelope, wall=NOW)
    registry.merge(sealed(hub, witness(hub, ALPHA)).envelope, wall=NOW)
    assert registry.evicted(session_of(ALPHA))
    taken(registry, revoke(ROOT, session_of(hub), now=NOW, until=NOW + 1000))
    assert not registry.evicted(session_of(ALPHA))


@pytest.mark.parametrize("text", ["", "!", "AAAA", "kw=="])
def test_what_is_no_revocation(text):
    with pytest.raises(RecordError) as error:
        read_revocation(text)
    assert error.value.problems[0].code == "FT6102"


def test_the_trust_store_revokes_and_lets_in_again(tmp_path):
    store = TrustStore(tmp_path / "trust")
    now = time.time()
    store.init("f", now=now)
    store.issue("alpha", now=now)
    assert store.revocations(now=now) == ()
    (revoked,) = store.revoke("alpha", now=now)
    assert [(row["id"], row["provider"]) for row in store.revoked(now=now)] == [(revoked, "alpha")]
    with pytest.raises(FabrictoolError) as error:
        store.session_files("alpha", "agent", now=now, seconds=60.0)
    assert error.value.problems[0].code == "FT6007"
    store.issue("alpha", now=now)
    assert store.session_files("alpha", "agent", now=now, seconds=60.0)
    store.revoke("ab" * 16, now=now)
    assert len(store.revocations(now=now)) == 2
    assert store.revocations(now=now + 91 * 86400) == (), "no session outlasts its provider's certificate"
    for name in ("gamma", "ab", "zz" * 16):
        with pytest.raises(FabrictoolError):
            store.revoke(name, now=now)


def test_all_certificates_of_a_provider_are_revoked_and_not_only_its_newest(tmp_path):
    store = TrustStore(tmp_path / "trust")
    now = time.time()
    store.init("f", now=now)
    sessions = []
    for _ in range(3):
        provider = store.issue("alpha", now=now)
        sessions.append(issue_session(provider, "agent", now=now))
    other = issue_session(store.issue("beta", now=now), "agent", now=now)
    assert len(store.revoke("alpha", now=now)) == 3
    verifier = IdentityVerifier(store.root().chain[0])
    registry = Registry(verifier)
    for text in store.revocations(now=now):
        assert taken(registry, text, now).verdict is Verdict.NEW
    assert all(registry.revoked(verifier.verify(session.chain, now=now)) for session in sessions)
    assert not registry.revoked(verifier.verify(other.chain, now=now))
    later = issue_session(store.issue("alpha", now=now), "agent", now=now)
    assert not registry.revoked(verifier.verify(later.chain, now=now))


def test_a_provider_cannot_fill_the_map_with_revocations(monkeypatch):
    monkeypatch.setattr("fabrictool.mesh.registry.REVOCATIONS", 3)
    registry = filled()
    verdicts = [
        taken(registry, revoke(PROVIDERS["beta"], bytes([n]) * 16, now=NOW, until=NOW + 9)).verdict for n in range(5)
    ]
    assert verdicts == [Verdict.NEW] * 3 + [Verdict.REJECTED] * 2
    assert taken(registry, revoke(ROOT, b"x" * 16, now=NOW, until=NOW + 9)).verdict is Verdict.NEW
    for end in (NOW + 400 * 86400, 1e300, float("inf"), float("nan")):
        text = revoke(PROVIDERS["alpha"], b"y" * 16, now=NOW, until=end)
        assert taken(registry, text).verdict is Verdict.REJECTED, "for ever"


@pytest.mark.asyncio
async def test_a_revoked_node_is_told_and_cut_off_and_not_let_in_again(federation):
    hub, _, port = await listening(federation)
    [(agent, listener), (other, _)] = await joined(federation, hub, port, "agent", "other")
    for member in (agent, other):
        member.publish(node_body(member))
    await until(lambda: len(hub.registry) == 2)
    now = time.time()
    hub.take(read_revocation(revoke(federation.root, agent.session, now=now, until=now + 1000))[0])
    await until(lambda: agent.session not in hub.neighbours)
    await until(lambda: listener.ended == ["it was revoked"])
    assert other.session in hub.neighbours
    await until(lambda: other.registry.revoked(hub.registry.session(agent.session)))
    again, _ = federation.node("again")
    text = revoke(federation.providers["alpha"], again.session, now=now, until=now + 1000)
    hub.take(read_revocation(text)[0])
    attempts = []
    verify = hub.verify
    hub.verify = lambda chain, expected: attempts.append(chain) or verify(chain, expected)
    again.dial([("127.0.0.1", port)])
    await until(lambda: attempts.count(again.chain) > 2)
    assert again.session not in hub.neighbours
    for member in (agent, other, again, hub):
        await member.close()
