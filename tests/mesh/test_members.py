"""What the mesh does in each trouble by itself, told in the world's small language."""

import msgspec
import pytest

from fabrictool.mesh import detector
from fabrictool.mesh.gossip import Push, Send, encode
from fabrictool.mesh.records import Envelope, Lifecycle, WitnessBody, seal, signed_bytes
from tests.mesh.world import EPOCH, Op, World, _sign

GRACE = detector.GRACE_S


def world_of(**size):
    world = World(3, **({"hubs": 3, "agents": 3, "loss": 0.0} | size))
    world.run_until(5.0)
    assert len(set(world.roots().values())) == 1
    return world


def listed(world, session):
    """Hubs that still list a session among the living."""
    hubs = [node for node in world.nodes.values() if node.hub and node.alive]
    return [h.name for h in hubs if session in {b.session for b in h.member.registry.nodes(wall=h.wall())}]


def routable(world, session):
    """Hubs that would send it a request: it serves, and there is a tunnel."""
    hubs = [node for node in world.nodes.values() if node.hub and node.alive]
    return [h.name for h in hubs if h.member.registry.serving_of(session, wall=h.wall()) and session in h.links]


@pytest.mark.parametrize(("kind", "within_s"), [("kill", 0.05), ("power", 5.0)])
def test_the_dead_are_not_routed_to_at_once_and_not_listed_after_the_grace_period(kind, within_s):
    world = world_of()
    session = world.nodes["a1"].session
    assert routable(world, session) == ["h0", "h1", "h2"]
    world.do(Op(5.0, kind, "a1"))
    world.run_until(5.0 + within_s)
    assert routable(world, session) == []
    world.run_until(5.0 + GRACE - 1)
    assert listed(world, session) == ["h0", "h1", "h2"]
    world.run_until(5.0 + GRACE + 15)
    assert listed(world, session) == []
    assert len(set(world.roots().values())) == 1


@pytest.mark.parametrize(("seconds", "suspected"), [(1.0, False), (3.0, False), (10.0, True), (90.0, True)])
def test_who_only_stood_still_is_back_as_soon_as_it_moves(seconds, suspected):
    world = world_of()
    session = world.nodes["a0"].session
    world.do(Op(5.0, "stall", "a0", seconds))
    world.run_until(5.0 + seconds - 0.1)
    hub = world.nodes["h0"].member
    assert any(witness.suspects for witness in hub.registry.witnesses(session)) is suspected
    world.run_until(5.0 + seconds + 6.0)
    assert routable(world, session) == ["h0", "h1", "h2"]
    assert listed(world, session) == ["h0", "h1", "h2"]
    assert not any(witness.suspects for witness in hub.registry.witnesses(session))


def test_a_hub_that_stood_still_accuses_nobody():
    world = world_of()
    world.do(Op(5.0, "stall", "h0", 20.0))
    world.run_until(60.0)
    assert [c for c in said_by(world, "h0") if c.suspects] == []


def said_by(world, name):
    session = world.nodes[name].session
    return [
        record.body
        for record in world.nodes[name].member.registry
        if isinstance(record.body, WitnessBody) and record.body.session == session
    ]


def test_while_one_hub_holds_the_tunnel_the_others_say_nothing():
    world = world_of()
    world.do(Op(5.0, "cut", "a0", others=("h0", "h1")))
    world.run_until(5.0 + 3 * GRACE)
    assert listed(world, world.nodes["a0"].session) == ["h0", "h1", "h2"]
    assert said_by(world, "h0") == said_by(world, "h1") == []


def test_a_lone_hub_does_not_evict_the_rest():
    world = world_of(hubs=4)
    others = tuple(name for name in world.nodes if name != "h0")
    world.do(Op(5.0, "cut", "h0", others=others))
    world.run_until(5.0 + 4 * GRACE)
    for name in others:
        assert "h0" in listed(world, world.nodes[name].session), "linked with nobody, it knows nothing of them"
        assert not [w for w in world.hubs[0].member.registry.witnesses(world.nodes[name].session) if w.suspects]
    world.do(Op(world.now, "heal", "h0", others=others))
    world.run_until(world.now + 10.0)
    for node in world.nodes.values():
        assert listed(world, node.session) == ["h0", "h1", "h2", "h3"], "who is heard again is back"
    assert len(set(world.roots().values())) == 1


def test_a_run_in_the_folder_of_a_killed_one_is_no_black_hole():
    world = world_of()
    agent = world.nodes["a0"]
    world.do(Op(5.0, "engine", "a0"))  # another start, so that the killed run's versions are well ahead
    world.run_until(6.0)
    former = {s.service for s in agent.member.registry.services_of(agent.session)}
    world.do(Op(6.0, "kill", "a0"))
    world.run_until(8.0)
    world.do(Op(8.0, "restart", "a0"))
    world.run_until(12.0)
    for name in ("h0", "h1", "h2"):
        registry = world.nodes[name].member.registry
        (serving,) = registry.serving_of(agent.session, wall=world.nodes[name].wall())
        assert serving.service.service not in former, "only the engine that runs"
    assert len(set(world.roots().values())) == 1


def test_a_run_whose_session_has_left_hears_that_it_is_over():
    world = world_of()
    agent = world.nodes["a0"]
    number = agent.number
    world.do(Op(5.0, "leave", "a0"))
    world.run_until(8.0)
    agent.start(number)
    world.run_until(12.0)
    assert set(agent.ended) == {"a former run with this identity has left"}
    assert routable(world, agent.session) == []


def test_a_mass_restart_of_all_nodes_converges():
    world = world_of(agents=8)
    for index, name in enumerate(list(world.nodes)):
        world.do(Op(5.0, "power", name))
        world.run_until(world.now + 0.05)
        world.do(Op(5.0 + index, "start", name))
    world.run_until(world.now + 10.0)
    assert len(set(world.roots().values())) == 1
    for node in world.nodes.values():
        if not node.hub:
            assert routable(world, node.session) == ["h0", "h1", "h2"]
    world.run_until(world.now + 3 * GRACE)
    dead = set(world.died)
    assert len(dead) == 11
    assert all(listed(world, session) == [] for session in dead), "and the former runs are gone"


def test_a_stale_replica_that_returns_after_the_end_resurrects_nobody():
    world = world_of(hubs=2, agents=2)
    session = world.nodes["a1"].session
    world.do(Op(5.0, "cut", "a0", others=("h0", "h1")))
    world.do(Op(5.0, "leave", "a1"))
    world.run_until(10.0)
    world.nodes["a0"].member.registry.forget_expired = lambda *, wall: []  # it sleeps over all of it
    for node in world.nodes.values():
        node.skew += 29 * 3600.0 if node.name != "a0" else 0.0
    world.do(Op(10.0, "heal", "a0", others=("h0", "h1")))
    world.run_until(40.0)
    for name in ("h0", "h1"):
        assert world.nodes[name].member.registry.node(session) is None


# -- one byzantine member -----------------------------------------------------------------------------------------


def attack(world, attacker, envelope):
    """The attacker sends an envelope to all hubs, as its own tunnels let it."""
    node = world.nodes[attacker]
    for hub in ("h0", "h1", "h2"):
        node.send(Send(world.nodes[hub].session, encode(Push([envelope]))))
    world.run_until(world.now + 3.0)


def own_node(world, name):
    record = world.nodes[name].member.registry.get(world.nodes[name].session)
    return record.body, record.envelope


def forgeries(world):
    body, envelope = own_node(world, "a1")
    issued = world.identity.issued[world.nodes["a0"].number]
    last = msgspec.structs.replace(body, lifecycle=Lifecycle.LEFT, version=body.version + 1)
    yield "left-by-another", seal(last, lambda m: _sign(issued.secret, m), envelope.chain).envelope
    yield (
        "left-with-own-chain",
        seal(last, lambda m: _sign(issued.secret, m), world.identity.chain(world.nodes["a0"].number)).envelope,
    )
    yield "altered", msgspec.structs.replace(envelope, body=envelope.body.replace(b"a1", b"a9"))
    accusation = WitnessBody(
        federation=body.federation, session=issued.session, suspect=body.session, lifecycle=Lifecycle.JOIN, version=1,
        seen=body.version, until=EPOCH + 10**5, suspects=True, votes=True,
    )  # fmt: skip
    yield "an-agents-vote", seal(accusation, lambda m: _sign(issued.secret, m)).envelope
    foreign = msgspec.structs.replace(body, federation="0" * 32, session=issued.session, version=9)
    yield (
        "another-federation",
        seal(foreign, lambda m: _sign(issued.secret, m), own_node(world, "a0")[1].chain).envelope,
    )
    jump = msgspec.structs.replace(own_node(world, "a0")[0], version=2**32 - 1)
    yield "version-jump", seal(jump, lambda m: _sign(issued.secret, m), own_node(world, "a0")[1].chain).envelope
    yield "junk", Envelope(b"\x00" * 100, b"x" * 64)


@pytest.mark.parametrize("number", range(7))
def test_one_member_cannot_change_anothers_record_or_evict_it(number):
    world = world_of()
    name, envelope = list(forgeries(world))[number]
    before = world.roots()
    attack(world, "a0", envelope)
    assert world.roots() == before, name
    assert {refusal[0] for refusal in world.refusals} == {"h0", "h1", "h2"}, "each hub says that it refused"
    refusals = len(world.refusals)
    attack(world, "a0", envelope)
    if name != "junk":
        assert len(world.refusals) == refusals, "once"


def test_a_replayed_record_changes_nothing():
    world = world_of()
    _, old = own_node(world, "a1")
    world.do(Op(5.0, "leave", "a1"))
    world.run_until(9.0)
    before = world.roots()
    attack(world, "a0", old)
    assert world.roots() == before
    assert routable(world, world.nodes["a1"].session) == []


def test_a_byzantine_hub_evicts_nobody_alone():
    world = world_of()
    suspect = world.nodes["a1"]  # of beta; h0 is of alpha
    hub = world.nodes["h0"]
    assert suspect.provider != hub.provider
    issued = world.identity.issued[hub.number]
    vote = WitnessBody(
        federation=world.identity.federation, session=hub.session, suspect=suspect.session, lifecycle=Lifecycle.JOIN,
        version=1, seen=10**4, until=EPOCH + 10**5, suspects=True, votes=True,
    )  # fmt: skip
    envelope = seal(vote, lambda m: _sign(issued.secret, m)).envelope
    assert issued.verify(envelope.signature, signed_bytes(envelope.body))
    for other in ("h1", "h2"):
        hub.send(Send(world.nodes[other].session, encode(Push([envelope]))))
    world.run_until(5.0 + 3 * GRACE)
    assert set(listed(world, suspect.session)) >= {"h1", "h2"}
    assert set(routable(world, suspect.session)) >= {"h1", "h2"}
    assert isinstance(world.nodes["h1"].member.registry.get(envelope_key(vote)).body, WitnessBody), "it was heard"


def envelope_key(vote):
    return vote.session + b"\0" + vote.suspect


def test_one_member_that_floods_costs_its_own_room_alone(monkeypatch):
    monkeypatch.setattr("fabrictool.mesh.registry.SESSION_SERVICES", 50)
    world = world_of()
    agent = world.nodes["a0"]
    issued = world.identity.issued[agent.number]
    (own,) = agent.member.registry.services_of(agent.session)
    for number in range(200):
        body = msgspec.structs.replace(own, service=(1000 + number).to_bytes(16, "big"))
        attack(world, "a0", seal(body, lambda m: _sign(issued.secret, m)).envelope)
    for name in ("h0", "h1", "h2"):
        registry = world.nodes[name].member.registry
        assert len(registry.services_of(agent.session)) == 50
        assert len(registry.serving_of(world.nodes["a1"].session, wall=world.nodes[name].wall())) == 1
    repaired = world.octets
    world.run_until(world.now + 300.0)
    assert world.octets - repaired < 50_000, "what is refused is not offered again and again"


def test_a_hub_that_lies_about_what_it_saw_is_not_counted():
    world = world_of(hubs=1, agents=1)
    suspect, hub = world.nodes["a0"], world.nodes["h0"]
    issued = world.identity.issued[hub.number]
    for seen in (2**32 - 1, 0):
        vote = WitnessBody(
            federation=world.identity.federation, session=hub.session, suspect=suspect.session,
            lifecycle=Lifecycle.JOIN, version=1 + seen % 2, seen=seen, until=EPOCH + 10**5, suspects=True, votes=True,
        )  # fmt: skip
        envelope = seal(vote, lambda m: _sign(issued.secret, m)).envelope
        assert suspect.member.registry.merge(envelope, wall=EPOCH).record is not None
        assert not suspect.member.registry.evicted(suspect.session), seen


def test_two_processes_with_one_key_do_not_speak_over_each_other_at_the_networks_speed():
    world = world_of(hubs=2, agents=1)
    agent = world.nodes["a0"]
    number, version = agent.number, agent.member.registry.node(agent.session).version
    twin = world.add("twin", agent.provider, hub=False)
    twin.start(number)
    world.run_until(65.0)
    spoken = world.nodes["h0"].member.registry.node(agent.session).version - version
    assert spoken < 4 * 60, "a few a beat"
    world.run_until(200.0)
    assert "another process uses this identity" in " ".join([*agent.ended, *twin.ended])


def test_a_repair_of_more_than_one_message_sends_only_what_is_missing(monkeypatch):
    monkeypatch.setattr("fabrictool.mesh.gossip.MAX_SUMMARY", 8)
    world = world_of(hubs=2, agents=6)
    for _ in range(20):
        for index in range(6):
            world.do(Op(world.now, "engine", f"a{index}"))
        world.run_until(world.now + 1.0)
    world.do(Op(world.now, "cut", "h0", others=("h1",)))
    world.run_until(world.now + 10.0)
    before = world.octets
    world.do(Op(world.now, "heal", "h0", others=("h1",)))
    world.run_until(world.now + 10.0)
    assert len(set(world.roots().values())) == 1
    assert world.octets - before < 40_000, "some hundred records were there on both sides"
