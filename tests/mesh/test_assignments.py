"""Who may tell a session what to serve, for how long that counts, and what a node of an earlier release makes of it."""

import itertools
import random

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh import records
from fabrictool.mesh.assignments import check_assignment, sign_assignment
from fabrictool.mesh.gossip import Gossip, Push, Refused
from fabrictool.mesh.identity import IdentityError, IdentityVerifier, certify, issue_session
from fabrictool.mesh.records import (
    AssignmentBody,
    Lifecycle,
    NodeBody,
    RecordError,
    RevocationBody,
    ServiceBody,
    WitnessBody,
    assignment_key,
    seal,
)
from fabrictool.mesh.registry import FORGET_MARGIN_S, Verdict
from fabrictool.mesh.revocation import read_revocation, revoke
from tests.mesh.signed_records import NOW, PROVIDERS, ROOT, SESSIONS, VERIFIER, fresh, node, sealed, service
from tests.seeds import seeds

AGENT, STRANGER, _ = SESSIONS
DAY = 86400.0


def controller(provider="alpha", **options):
    return issue_session(PROVIDERS[provider], "controller", now=NOW, **({"seconds": 30 * DAY} | options))


CONTROLLER = controller()


def id_of(owner):
    return bytes.fromhex(owner.claims.session)


def body(by=CONTROLLER, subject=AGENT, version=1, **changes):
    wanted = {"model": "m", "engine": "reference", "source": "file:///m.gguf"} | changes
    return AssignmentBody(VERIFIER.federation, id_of(subject), id_of(by), version, **wanted)


def envelope(by=CONTROLLER, **changes):
    return sign_assignment(by, body(by, **changes)).envelope


@pytest.fixture
def registry():
    registry = fresh()
    for owner in (AGENT, STRANGER):
        registry.merge(sealed(owner, node(owner)).envelope, wall=NOW)
    return registry


def test_the_last_word_of_its_controllers_counts_in_whatever_order_it_comes(registry):
    other = controller()
    said = [envelope(version=1), envelope(other, version=2, model="n"), envelope(version=3, model="")]
    for order in itertools.permutations(said):
        copy = fresh()
        copy.merge(sealed(AGENT, node(AGENT)).envelope, wall=NOW)
        for one in order:
            copy.merge(one, wall=NOW)
        assert (copy.assignment(id_of(AGENT)).version, copy.assignment(id_of(AGENT)).model) == (3, "")
        assert copy.get(assignment_key(id_of(AGENT))).envelope == said[-1]
    assert registry.assignment(id_of(AGENT)) is None


def refused(registry, one):
    root = registry.root()
    merge = registry.merge(one, wall=NOW)
    assert (merge.verdict, registry.root(), registry.assignment(id_of(AGENT))) == (Verdict.REJECTED, root, None)
    assert registry.merge(one, wall=NOW).repeated
    return merge.reason


@pytest.mark.parametrize(
    ("by", "code"),
    [
        (controller("beta"), "FT6103"),
        (AGENT, "FT6103"),
        (SESSIONS[2], "FT6103"),
        (issue_session(PROVIDERS["alpha"], "gateway", now=NOW, seconds=30 * DAY), "FT6103"),
        (issue_session(PROVIDERS["alpha"], "issuer", now=NOW, seconds=30 * DAY), "FT6003"),
        (PROVIDERS["alpha"], "FT6003"),
        (ROOT, "FT6003"),
        (controller(seconds=3600), "FT6105"),
    ],
    ids=["another-provider", "itself", "another-agent", "gateway", "issuer", "provider", "root", "ends-too-soon"],
)
def test_nobody_else_is_listened_to(registry, by, code):
    claimed = body(CONTROLLER) if by is PROVIDERS["alpha"] or by is ROOT else body(by)
    assert refused(registry, seal(claimed, by.sign, by.chain).envelope).startswith(code)


def test_a_word_put_into_a_controllers_mouth_is_refused(registry):
    foreign = controller("beta")
    borrowed = seal(body(), foreign.sign, CONTROLLER.chain).envelope
    assert "signature" in refused(registry, borrowed)
    in_the_name_of_another = seal(body(controller()), CONTROLLER.sign, CONTROLLER.chain).envelope
    assert refused(registry, in_the_name_of_another).startswith("FT6103")
    good = envelope()
    moved = msgspec.structs.replace(good, body=good.body.replace(id_of(AGENT), id_of(SESSIONS[2])))
    registry.merge(sealed(SESSIONS[2], node(SESSIONS[2])).envelope, wall=NOW)
    assert "signature" in refused(registry, moved)
    assert refused(registry, envelope(version=2**17)) == "version jumps too far"


def test_only_agents_are_assigned_anything_and_only_what_their_certificates_name():
    gateway = issue_session(PROVIDERS["alpha"], "gateway", now=NOW)
    bound = issue_session(PROVIDERS["alpha"], "agent", now=NOW, models=("a", "b"))
    registry = fresh()
    registry.merge(sealed(gateway, node(gateway, role="gateway")).envelope, wall=NOW)
    registry.merge(sealed(bound, node(bound)).envelope, wall=NOW)
    assert registry.merge(envelope(subject=gateway), wall=NOW).reason.startswith("FT6104")
    assert registry.merge(envelope(subject=bound, model="c"), wall=NOW).reason.startswith("FT6104")
    assert registry.merge(envelope(subject=bound, model="b"), wall=NOW).verdict is Verdict.NEW
    assert registry.merge(envelope(subject=bound, version=2, model=""), wall=NOW).verdict is Verdict.NEW


def test_a_controller_speaks_for_no_node_no_service_and_no_hub(registry):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(node(CONTROLLER, role="controller")), NodeBody)
    for said in (node(CONTROLLER), node(CONTROLLER, role="gateway")):
        assert registry.merge(sealed(CONTROLLER, said).envelope, wall=NOW).verdict is Verdict.REJECTED
    assert registry.merge(sealed(CONTROLLER, service(CONTROLLER)).envelope, wall=NOW).verdict is Verdict.ORPHAN


def test_it_waits_for_its_subject_and_is_forgotten_with_it(registry):
    assert fresh().merge(envelope(), wall=NOW).verdict is Verdict.ORPHAN
    registry.merge(envelope(), wall=NOW)
    root, ends = fresh().root(), registry.session(id_of(AGENT)).not_after
    assert registry.merge(envelope(version=2), wall=ends + 1).reason.startswith("FT6005")
    registry.forget_expired(wall=ends + FORGET_MARGIN_S + 1)
    assert (len(registry), registry.root(), registry.assignment(id_of(AGENT))) == (0, root, None)


def test_what_a_revoked_controller_said_does_not_count(registry):
    registry.merge(envelope(), wall=NOW)
    registry.merge(read_revocation(revoke(PROVIDERS["alpha"], id_of(CONTROLLER), now=NOW, until=NOW + 9))[0], wall=NOW)
    assert registry.assignment(id_of(AGENT)) is None
    registry.merge(envelope(controller(), version=2, model="n"), wall=NOW)
    assert registry.assignment(id_of(AGENT)).model == "n"


def test_a_session_that_is_renewed_beyond_its_controller_is_in_one_state_everywhere():
    """Whether the renewal or the assignment came first."""
    brief = controller(seconds=2 * DAY)
    longer = certify(PROVIDERS["alpha"], AGENT.key.public_key(), "agent", now=NOW, seconds=3 * DAY)
    renewed = seal(node(AGENT, version=2), AGENT.sign, longer).envelope
    said = [sealed(AGENT, node(AGENT)).envelope, envelope(brief), renewed]
    maps = [fresh(), fresh()]
    for registry, order in zip(maps, (said, [said[0], renewed, said[1]]), strict=True):
        for one in order:
            registry.merge(one, wall=NOW)
    assert [registry.assignment(id_of(AGENT)) for registry in maps] == [None, None]
    assert maps[0].root() == maps[1].root()
    assert [registry.merge(envelope(version=2), wall=NOW).verdict for registry in maps] == [Verdict.NEW] * 2


def test_a_word_that_was_taken_back_does_not_come_back_when_the_session_is_renewed():
    """The controller that took it back ends before the renewed session; the one that had said it does not."""
    brief = controller(seconds=2 * DAY)
    longer = certify(PROVIDERS["alpha"], AGENT.key.public_key(), "agent", now=NOW, seconds=3 * DAY)
    said, taken_back = envelope(version=1), envelope(brief, version=2, model="")
    renewed = seal(node(AGENT, version=2, heard=2), AGENT.sign, longer).envelope
    first = sealed(AGENT, node(AGENT)).envelope
    roots = set()
    for order in itertools.permutations((said, taken_back, renewed)):
        registry = fresh()
        for one in (first, *order, said, taken_back, said):
            registry.merge(one, wall=NOW)
        assert registry.assignment(id_of(AGENT)) is None
        roots.add(registry.root())
        assert registry.merge(envelope(version=3), wall=NOW).verdict is Verdict.NEW
    assert len(roots) == 1


def exchange(maps):
    """As repairs do it, until nothing is new."""
    moved = True
    while moved:
        moved = False
        for giver, taker in itertools.permutations(maps, 2):
            for record in sorted(giver, key=lambda record: len(record.key)):
                moved |= taker.merge(record.envelope, wall=NOW).verdict is Verdict.NEW


@seeds(20, drawn=20, long=1000)
def test_three_maps_agree_in_the_end_whatever_came_first_and_where(seed):
    rng = random.Random(seed)
    chains = [certify(PROVIDERS["alpha"], AGENT.key.public_key(), "agent", now=NOW, seconds=d * DAY) for d in (1, 3)]
    said = [seal(node(AGENT, version=n), AGENT.sign, chains[n // 3]).envelope for n in range(1, 5)]
    speakers = [controller(seconds=2 * DAY), controller(), controller("beta"), controller()]
    for version in range(1, 6):
        by = rng.choice(speakers)
        said.append(envelope(by, version=version, model=rng.choice(["a", "b", ""])))
    said.append(read_revocation(revoke(ROOT, id_of(speakers[1]), now=NOW, until=NOW + 9))[0])
    maps = [fresh() for _ in range(3)]
    for registry in maps:
        for one in rng.sample(said, rng.randint(0, len(said))):
            registry.merge(one, wall=NOW)
    for one in said:
        rng.choice(maps).merge(one, wall=NOW)
    exchange(maps)
    assert len({registry.root() for registry in maps}) == 1
    shown = [registry.assignment(id_of(AGENT)) for registry in maps]
    assert shown[0] == shown[1] == shown[2]
    assert shown[0] is None or shown[0].by not in (id_of(speakers[1]), id_of(speakers[2]))


def test_the_longest_fits_into_a_record():
    longest = body(model="m" * 200, engine="e" * 200, source="s" * 500, precision="p" * 200, context=2**31)
    assert len(sign_assignment(CONTROLLER, longest).envelope.body) < records.MAX_BODY_OCTETS


def test_a_controller_can_check_before_it_says_anything(registry):
    subject = registry.session(id_of(AGENT))
    check_assignment(body(), VERIFIER.verify(CONTROLLER.chain, now=NOW), subject)
    with pytest.raises(RecordError, match="FT6103"):
        foreign = controller("beta")
        check_assignment(body(foreign), VERIFIER.verify(foreign.chain, now=NOW), subject)


def test_a_node_that_does_not_know_the_kind_refuses_it_and_nothing_else(registry, monkeypatch):
    """As a release before this one decodes it: the neighbour's other records are merged, and it is not asked again."""
    hub = Gossip(registry, me=id_of(AGENT), hub=True)
    hub.link_up(b"p" * 16)
    batch = [envelope(), sealed(STRANGER, service(STRANGER)).envelope]
    former = NodeBody | ServiceBody | WitnessBody | RevocationBody
    monkeypatch.setattr(records, "_decoder", msgspec.msgpack.Decoder(former))
    effects = hub.received(b"p" * 16, Push(batch), wall=NOW)
    assert [type(effect) for effect in effects].count(Refused) == 1
    assert registry.serving(wall=NOW)[0].node.session == id_of(STRANGER)
    with pytest.raises(IdentityError, match="FT6003"):
        IdentityVerifier(ROOT.chain[0], ("agent", "gateway")).verify(CONTROLLER.chain, now=NOW)


def test_unknown_lifecycles_cannot_be_claimed():
    """Nobody ends the matter for good: the lifecycle is no field."""
    assert body().lifecycle is Lifecycle.JOIN
    assert "lifecycle" not in msgspec.to_builtins(body())
    with pytest.raises(FabrictoolError, match="FT6102"):
        records.decode(records.Envelope(b"\x81\xa4type\xa1a", bytes(64)))
