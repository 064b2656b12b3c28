"""What a node tells of the mesh: its registry, its detector and its links, as a document."""

import asyncio
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest

from fabrictool.clusters.joined_facts import JoinedNodes
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.mesh.assignments import sign_assignment
from fabrictool.mesh.fleet import View, fleet_of, records_of
from fabrictool.mesh.identity import IdentityVerifier, certify, issue_session
from fabrictool.mesh.member import Member
from fabrictool.mesh.records import (
    AssignedUnit,
    AssignmentBody,
    Lifecycle,
    NodeHardware,
    NodeLink,
    WitnessBody,
    seal,
    with_assignment,
    with_note,
)
from fabrictool.mesh.revocation import read_revocation, revoke
from fabrictool.mesh.transport import views
from fabrictool.mesh.transport.views import fleet_status, views_of
from fabrictool.status.fleet import FleetStatus, RecordsStatus, engines_shown, read_query
from fabrictool.status.pages import serve_status
from tests.mesh.signed_records import NOW, PROVIDERS, ROOT, VERIFIER, node, sealed, service
from tests.mesh.test_transport import linked, node_body, service_body, until

HUBS = [issue_session(PROVIDERS[name], "gateway", now=NOW) for name in ("alpha", "beta")]
AGENT = issue_session(PROVIDERS["gamma"], "agent", now=NOW)
CONTROLLER = issue_session(PROVIDERS["gamma"], "controller", now=NOW, seconds=30 * 86400.0)


def id_of(owner):
    return bytes.fromhex(owner.claims.session)


def hub_node(owner):
    return node(owner, role="gateway")


def witness(hub, suspect, seen, **changes):
    body = WitnessBody(
        federation=VERIFIER.federation, session=id_of(hub), suspect=id_of(suspect), lifecycle=Lifecycle.JOIN,
        version=1, seen=seen, until=NOW + 3600, suspects=True, evidence=("closed", "other-hub"),
    )  # fmt: skip
    return msgspec.structs.replace(body, **changes)


@pytest.fixture
def member():
    """The first hub, with two others on record."""
    hub = HUBS[0]
    member = Member(IdentityVerifier(ROOT.chain[0]), session=id_of(hub), sign=hub.sign, chain=hub.chain, hub=True)
    member.publish(hub_node(hub), wall=NOW)
    for owner, body in ((HUBS[1], hub_node(HUBS[1])), (AGENT, node(AGENT, hardware=NodeHardware("gh200", 4, 384)))):
        member.registry.merge(sealed(owner, body).envelope, wall=NOW)
    return member


def say(member, owner, body):
    assert member.registry.merge(sealed(owner, body).envelope, wall=NOW).record is not None


def view(member, now=100.0, *, hub=True, wall=NOW):
    return View(member, VERIFIER.federation, hub, now=now, wall=wall)


def document(member, *, tunnels=(), **options):
    made = fleet_of(view(member, **options), linked=tunnels, links=[], refused_records=3, vain_repairs=1)
    assert msgspec.json.decode(msgspec.json.encode(made), type=FleetStatus) == made
    return made


def row(shown, owner):
    return next(member for member in shown.members if member.session == owner.claims.session)


def test_a_member_that_is_linked_has_its_hardware_and_its_services(member):
    say(member, AGENT, service(AGENT, 1))
    shown = document(member, tunnels=[id_of(AGENT)])
    assert (shown.session, shown.role, shown.records) == (HUBS[0].claims.session, "gateway", 4)
    assert (shown.refused_records, shown.vain_repairs) == (3, 1)
    assert shown.root == member.registry.root().hex()
    agent = row(shown, AGENT)
    assert (agent.state, agent.linked, agent.provider) == ("serving", True, "gamma")
    assert (agent.device, agent.devices, agent.memory) == ("gh200", 4, 384)
    assert [(s.replica, s.lifecycle) for s in agent.services] == [("m/1", "SERVING")]
    assert row(shown, HUBS[0]).linked, "who shows it is there"
    assert not row(shown, HUBS[1]).linked
    assert row(shown, HUBS[1]).state == "serving", "who never came to this hub may be linked to another"


def test_a_lost_tunnel_says_since_when_in_wall_seconds_and_how(member):
    member.link_up(id_of(AGENT), wall=NOW)
    member.link_down(id_of(AGENT), "silent", now=88.0)
    lost = row(document(member, now=100.0), AGENT)
    assert (lost.state, lost.lost_at, lost.lost_how) == ("lost", NOW - 12, "silent")
    again = row(document(member, tunnels=[id_of(AGENT)]), AGENT)
    assert (again.state, again.lost_at) == ("serving", None)


def test_a_suspicion_is_about_a_version_and_a_newer_one_refutes_it(member):
    say(member, HUBS[1], witness(HUBS[1], AGENT, seen=1))
    shown = row(document(member), AGENT)
    assert shown.state == "suspected"
    (accusation,) = shown.accusations
    assert (accusation.hub, accusation.provider) == (HUBS[1].claims.session, "beta")
    assert (accusation.evidence, accusation.votes, accusation.stands) == (["closed", "other-hub"], False, True)
    say(member, AGENT, node(AGENT, version=2))
    shown = row(document(member), AGENT)
    assert (shown.state, shown.accusations[0].stands) == ("serving", False)
    say(member, HUBS[1], witness(HUBS[1], AGENT, seen=1, version=2, suspects=False, evidence=()))
    assert row(document(member), AGENT).accusations == []


def test_two_votes_evict_and_an_agent_tells_the_same(member):
    for hub in HUBS:
        say(member, hub, witness(hub, AGENT, seen=1, votes=True))
    for seen_by_hub in (True, False):
        shown = row(document(member, hub=seen_by_hub), AGENT)
        assert (shown.state, shown.lifecycle) == ("evicted", "SERVING")
        assert [a.votes for a in shown.accusations] == [True, True]


def test_who_left_and_whose_certificate_ended_is_over(member):
    ends = row(document(member), AGENT).certificate_ends_at
    assert row(document(member, wall=ends + 1), AGENT).state == "expired"
    say(member, AGENT, node(AGENT, version=2, lifecycle=Lifecycle.LEFT))
    assert row(document(member), AGENT).state == "left"


def test_who_was_revoked_is_over_and_its_revocation_is_on_record(member):
    text = revoke(PROVIDERS["gamma"], id_of(AGENT), now=NOW, until=NOW + 500)
    member.take(read_revocation(text)[0], now=0.0, wall=NOW)
    assert row(document(member), AGENT).state == "revoked"
    (record,) = (r for r in records_of(view(member)).rows if r.record == "revocation")
    assert (record.owner, record.provider, record.about) == ("", "gamma", AGENT.claims.session)
    assert record.not_after == NOW + 500


def test_of_a_dead_engine_the_reason_is_shown_and_not_its_log(member):
    say(member, AGENT, service(AGENT, 1, lifecycle=Lifecycle.DOWN, note="out of memory\nsecret prompt in a log"))
    shown = document(member)
    assert row(shown, AGENT).services[0].note == "out of memory"
    assert b"secret prompt" not in msgspec.json.encode(shown)


def test_records_have_their_owner_their_size_and_their_end(member):
    say(member, AGENT, service(AGENT, 1))
    say(member, HUBS[1], witness(HUBS[1], AGENT, seen=1))
    shown = records_of(view(member))
    assert msgspec.json.decode(msgspec.json.encode(shown), type=RecordsStatus) == shown
    assert [r.key for r in shown.rows] == sorted(record.key.hex() for record in member.registry)
    by_kind = {r.record: r for r in shown.rows if r.owner != HUBS[0].claims.session}
    assert by_kind["service"].about == "m/1"
    assert by_kind["witness"].about == AGENT.claims.session
    assert by_kind["witness"].not_after == NOW + 3600, "what is said ends with its subject"
    whole = next(r for r in shown.rows if r.record == "node")
    assert whole.octets > by_kind["service"].octets, "a node's record carries its chain"


@pytest.mark.asyncio
async def test_a_gateway_and_an_agent_tell_the_same_of_the_members(federation):
    hub, _, ((agent, _), (other, _)) = await linked(federation, "a", "b")
    hub.publish(node_body(hub))
    for node_ in (agent, other):
        node_.publish(node_body(node_))
        node_.publish(service_body(node_))
    await until(lambda: hub.registry.root() == agent.registry.root() == other.registry.root() and len(hub.registry) > 4)
    pages = [await views_of(seer)["/fleet"]({}) for seer in (hub, agent)]
    seen_by_hub, seen_by_agent = (msgspec.json.decode(page, type=FleetStatus) for page in pages)
    assert seen_by_hub.root == seen_by_agent.root
    assert [(m.session, m.state, m.services) for m in seen_by_hub.members] == [
        (m.session, m.state, m.services) for m in seen_by_agent.members
    ]
    (link,) = seen_by_agent.links
    assert (link.peer, link.up, link.path, link.failures, link.error) == (hub.session.hex(), True, "direct", {}, "")
    assert link.sent_octets > 0
    assert 0 <= link.silent_s < 10
    assert {(link.peer, link.address, link.path) for link in seen_by_hub.links} == {
        (agent.session.hex(), "", ""), (other.session.hex(), "", "")
    }  # fmt: skip
    records = msgspec.json.decode(await views_of(agent)["/records"]({}), type=RecordsStatus)
    assert len(records.rows) == seen_by_agent.records == 5
    await other.close()
    await until(lambda: len(fleet_status(hub).links) == 1)
    gone = next(m for m in fleet_status(hub).members if m.session == other.session.hex())
    assert (gone.state, gone.lost_how, gone.linked) == ("lost", "closed", False)
    assert 0 <= fleet_status(hub).at - gone.lost_at < 60
    for node_ in (agent, hub):
        await node_.close()


@pytest.mark.asyncio
async def test_an_address_where_nobody_answers_is_shown_with_the_reason(federation):
    agent, _ = federation.node("a")
    agent.dial([("127.0.0.1", 1)])
    await until(lambda: fleet_status(agent).links[0].error)
    (link,) = fleet_status(agent).links
    assert (link.peer, link.address, link.up, link.path, link.sent_octets) == ("", "127.0.0.1:1", False, "", None)
    assert "refused" in link.error
    assert "refused" in link.failures["direct"]
    await agent.close()


@pytest.mark.asyncio
async def test_documents_are_made_in_slices_and_others_get_their_turn_between(member, monkeypatch):
    monkeypatch.setattr(views, "SLICE", 1)
    say(member, AGENT, service(AGENT, 1))
    node_ = SimpleNamespace(
        view=view(member), neighbours=[id_of(AGENT)], hub_links=SimpleNamespace(routes={}), refused_records=3,
        site_addresses={}, vain_repairs=1, relays=SimpleNamespace(opened=[]), tunnel=lambda _: None,
    )  # fmt: skip
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    shown = document(member, tunnels=[id_of(AGENT)])
    page = await views_of(node_)["/fleet"]({})
    assert msgspec.json.decode(page, type=FleetStatus).members == shown.members
    assert turns >= len(shown.members) == 3
    turns = 0
    page = await views_of(node_)["/records"]({})
    assert msgspec.json.decode(page, type=RecordsStatus) == records_of(view(member))
    assert turns >= 4
    task.cancel()


HARDWARE = NodeHardware("a100-80g", 2, 160 << 30, "550", (70 << 30, 30 << 30), (NodeLink("nvlink", 200_000, 12),))


def assigned(model, version=1):
    body = AssignmentBody(VERIFIER.federation, id_of(AGENT), id_of(CONTROLLER), version, model, engine="reference")
    return sign_assignment(CONTROLLER, body).envelope


def test_a_member_is_idle_while_nothing_is_assigned_to_it_and_nothing_runs(member):
    say(member, AGENT, node(AGENT, version=2, hardware=HARDWARE, assignable=True))
    shown = row(document(member), AGENT)
    assert (shown.idle, shown.assignable, shown.assignment, shown.driver) == (True, True, None, "550")
    assert (shown.free, shown.node_links[0].kind, shown.node_links[0].count) == ([70 << 30, 30 << 30], "nvlink", 12)
    member.registry.merge(assigned("m"), wall=NOW)
    told = row(document(member), AGENT)
    assert (told.idle, told.assignment.model, told.assignment.by) == (False, "m", CONTROLLER.claims.session)
    by_kind = {r.record: r for r in records_of(view(member)).rows}
    assert (by_kind["assignment"].owner, by_kind["assignment"].about) == (CONTROLLER.claims.session, "m")
    say(member, AGENT, service(AGENT, 1, assigned=1))
    member.registry.merge(assigned("", 2), wall=NOW)
    assert not row(document(member), AGENT).idle, "its engine still runs"
    say(member, AGENT, service(AGENT, 1, version=2, lifecycle=Lifecycle.DOWN))
    assert row(document(member), AGENT).idle
    assert engines_shown(row(document(member), AGENT)) == [], "what it was assigned before is over"
    member.registry.merge(assigned("m", 3), wall=NOW)
    say(member, AGENT, service(AGENT, 3, lifecycle=Lifecycle.DOWN, assigned=3, given_up=True, note="no"))
    say(member, AGENT, service(AGENT, 9, lifecycle=Lifecycle.DOWN, assigned=3, note="restart"))
    assert [s.note for s in engines_shown(row(document(member), AGENT))] == ["no"], "the last word, not the last key"
    say(member, AGENT, node(AGENT, version=3, lifecycle=Lifecycle.LEFT, assignable=True))
    assert not row(document(member), AGENT).idle


def test_a_session_that_outlives_its_controller_is_not_forgotten_by_the_plan(member):
    """Every replica drops the assignment when its subject is renewed beyond the signer; the engine serves on."""
    day, said = 86400.0, AssignedUnit("m/0", "replica-m-0-g1-00000000", "abcdef01", "cpu")
    brief = issue_session(PROVIDERS["gamma"], "controller", now=NOW, seconds=2 * day)
    body = AssignmentBody(
        VERIFIER.federation, id_of(AGENT), id_of(brief), 1, "m", "file:///m", "reference", "q4", 64, 2, 8, unit=said
    )
    about = {"hardware": HARDWARE, "assignable": True, "heard": 1, "follows": True}
    say(member, AGENT, node(AGENT, version=2, **about))
    member.registry.merge(sign_assignment(brief, body).envelope, wall=NOW)
    start = service(AGENT, 1, replica="m/0", precision="q4", context=64, tp=2)
    say(member, AGENT, with_assignment(start, body))
    describe = {"site": "s", "kind": "joined", "partitions": {"cpu": {"device": "a100-80g", "nodes": 1}}}
    nodes = JoinedNodes("c", "test", "gamma", ClusterSpec(**describe))
    before = row(document(member), AGENT)

    longer = certify(PROVIDERS["gamma"], AGENT.key.public_key(), "agent", now=NOW, seconds=3 * day)
    renewed = seal(node(AGENT, version=3, **about), AGENT.sign, longer)
    assert member.registry.merge(renewed.envelope, wall=NOW).record is not None
    assert member.registry.assignment(id_of(AGENT)) is None
    shown = row(document(member), AGENT)
    assert shown.assignment == msgspec.structs.replace(before.assignment, by="")
    units = [nodes.units([seen])[0] for seen in (before, shown)]
    assert [(u.operation, u.state, u.ready) for u in units] == [("replica-m-0-g1-00000000", "running", True)] * 2
    assert units[0].spec_digest == units[1].spec_digest
    assert (nodes.idle([shown]), nodes.bearing([shown], [said.operation])) == ({"cpu": 0}, [shown])

    say(member, AGENT, with_assignment(service(AGENT, 1, version=2, lifecycle=Lifecycle.DOWN), body))
    assert not row(document(member), AGENT).idle, "it will start another one"
    over = node(AGENT, version=4, **(about | {"follows": False}))
    member.registry.merge(seal(over, AGENT.sign, longer).envelope, wall=NOW)
    shown = row(document(member), AGENT)
    assert (shown.assignment, shown.idle, nodes.units([shown])) == (None, True, ())


def test_names_without_end_leave_room_for_a_note():
    unit = AssignedUnit("m" * 200, "o" * 200, "l" * 200, "p" * 200)
    body = AssignmentBody("", id_of(AGENT), id_of(CONTROLLER), 2**32 - 1, "m", "s" * 500, unit=unit)
    start = service(AGENT, federation="f" * 200, replica="m" * 200, model="m" * 200, engine="e" * 200)
    follows = with_assignment(start, body)
    assert (follows.assigned, follows.unit) == (body.version, None)
    assert seal(with_note(follows, "why" * 300), AGENT.sign)
    assert with_assignment(service(AGENT), body).unit == unit


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ({}, True),
        ({"device": "A100"}, True),
        ({"device": "h100"}, False),
        ({"free": "70GiB"}, True),
        ({"free": "71GiB"}, False),
        ({"free": "30GiB", "devices": "2"}, True),
        ({"free": "31GiB", "devices": "2"}, False),
        ({"devices": "3"}, False),
        ({"model": "m"}, True),
        ({"model": "other"}, False),
        ({"provider": "gamma", "device": "a100"}, True),
        ({"provider": "alpha"}, False),
        ({"idle": "true"}, False),
    ],
)
def test_the_fleet_is_asked_for_models_and_for_devices_with_so_much_free(member, words, meant):
    say(member, AGENT, node(AGENT, version=2, hardware=HARDWARE, assignable=True))
    say(member, AGENT, service(AGENT, 1))
    assert read_query(words).wants(row(document(member), AGENT)) is meant


def test_who_does_not_say_what_is_free_is_not_meant(member):
    assert not read_query({"free": "1B"}).wants(row(document(member), AGENT))
    assert read_query({"device": "gh200", "devices": "4"}).wants(row(document(member), AGENT))


@pytest.mark.asyncio
async def test_the_page_answers_for_some_and_says_what_it_does_not_understand(federation):
    node_, _ = federation.node("a")
    node_.publish(node_body(node_, hardware=HARDWARE))
    own = SimpleNamespace()
    pages = await serve_status(lambda: own, views=views_of(node_))
    url = f"http://127.0.0.1:{pages.addresses[0][1]}/fleet"
    async with aiohttp.ClientSession() as http:
        for words, count in (("?device=a100&free=40GiB", 1), ("?device=a100&free=80GiB", 0), ("", 1)):
            async with http.get(url + words) as answer:
                assert len(msgspec.json.decode(await answer.read(), type=FleetStatus).members) == count, words
        for words in ("?free=lots", "?colour=blue", "?devices=many"):
            async with http.get(url + words) as answer:
                assert (answer.status, "FT5205" in await answer.text()) == (400, True)
    await pages.cleanup()
    await node_.close()
