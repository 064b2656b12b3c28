"""What `make bench-mesh` measures on virtual time is the same mesh, and costs what it says."""

import pytest

from fabrictool.mesh import detector
from fabrictool.mesh.detector import AskNeighbour, Detector
from fabrictool.mesh.records import Lifecycle
from tests.mesh.large import Costs, LargeWorld


def written(world, writes=5):
    """Milliseconds until each node has a write; of several."""
    delays = []
    for number in range(writes):
        world.run_until(world.now + 2.0)
        world.changes.clear()
        begin = world.now
        world.nodes[f"a{number}"].publish_node(Lifecycle.SERVING)
        world.run_until(begin + 1.0)
        delays += [1000 * (at - begin) for at, _, _ in world.changes]
    return delays


def test_every_node_has_a_write_once_and_at_once():
    world = LargeWorld(1, hubs=8, agents=192, loss=0.0)
    delays = written(world)
    assert len(delays) == 5 * 200
    assert max(delays) <= 3 * 15.0, "from an agent to its hub, to a hub, to an agent"


def test_a_replica_that_shares_is_no_other_than_one_that_does_not():
    shared, own = (LargeWorld(2, hubs=4, agents=60, layered=layered) for layered in (True, False))
    assert written(shared) == written(own)
    assert shared.trace.digest() == own.trace.digest()
    assert shared.octets == own.octets
    assert set(shared.roots().values()) == set(own.roots().values())


def test_what_a_message_costs_comes_one_after_the_other():
    """A hub has 49 neighbours to tell, beside its beats."""
    for send_s in (0.001, 0.01):
        delays = written(LargeWorld(3, hubs=1, agents=50, loss=0.0, costs=Costs(send=send_s)))
        assert 49 * 1000 * send_s <= max(delays) <= 110 * 1000 * send_s + 45.0, "all of its beats may be due just then"


@pytest.mark.parametrize("dials", [1, 2])
def test_hubs_that_hold_some_agents_ask_nobody_for_the_others(dials):
    """Every half a minute for ever it would be a message a hub, an agent and a hub."""
    world = LargeWorld(4, hubs=6, agents=24, dials=dials, loss=0.0)
    world.run_until(5.0)
    before = world.octets
    assert before > 0, "they told whom they hold"
    world.run_until(3 * detector.GRACE_S + detector.ASK_AGAIN_S)
    assert world.octets == before


def test_of_a_hub_that_dies_its_agents_are_asked_for_again():
    """A hub's word that it holds a session is worth nothing once it is gone."""
    world = LargeWorld(5, hubs=3, agents=9, dials=1, providers=("alpha", "beta", "gamma"), loss=0.0)
    world.run_until(2 * detector.GRACE_S)
    hub = world.nodes["h1"]
    lost = [node for node in world.nodes.values() if not node.hub and world.dialled[node.name] == [hub]]
    assert lost
    for node in [hub, *lost]:
        world._stop(node.name, closes=False)
    world.run_until(world.now + 4 * detector.GRACE_S)
    for node in lost:
        for other in ("h0", "h2"):
            assert world.nodes[other].member.registry.evicted(node.session)


def test_of_many_that_vanish_at_once_a_hub_asks_for_some_in_each_beat():
    vanished, hub = [number.to_bytes(16, "big") for number in range(500)], b"h" * 16
    looked = Detector()
    looked.link_up(hub)
    looked.expected(vanished, 0.0)
    asked = []
    for beat in range(20):
        effects = looked.tick(detector.GRACE_S + beat, 1.0, [hub])
        asks = [effect.suspect for effect in effects if isinstance(effect, AskNeighbour)]
        assert len(asks) <= detector.ASKED_IN_A_BEAT
        asked += asks
        for suspect in asks:
            looked.answered(hub, suspect, "alive")
    assert sorted(asked) == vanished


@pytest.mark.parametrize(("apart_s", "muted"), [(0.5, False), (2.9, True)])
def test_many_refutations_at_once_are_one_mistake_and_a_steady_stream_is_many(apart_s, muted):
    """Six at once are one interruption; six that follow each other for seconds are a bad accuser."""
    accuser, suspects = Detector(), [number.to_bytes(16, "big") for number in range(6)]
    for suspect in suspects:
        accuser.link_up(suspect)
        accuser.link_down(suspect, "closed", 0.0)
    accuser.tick(4.0, 1.0, ())
    assert not accuser.unaccused
    for number, suspect in enumerate(suspects):
        accuser.refuted(suspect, 5.0 + number * apart_s)
    assert bool(accuser.silent(20.0)) is muted
