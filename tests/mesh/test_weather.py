"""Weeks of a small mesh in which faults come at stated rates: nobody alive and in reach is evicted."""

import random
from collections import deque

import msgspec
import pytest

from fabrictool.mesh.records import WitnessBody
from tests.mesh.weather import RATES, Weather
from tests.mesh.world import FEDERATION

HOURS = 250.0
CONTRADICTED_S = 15.0
"""Two ways through a hub that is as slow as they come, and the beat in which an answer goes out."""
TIMERS = {"_ticked_at"}
"""What calm time moves."""
OUTSIDE = {"_verifier", "_sign", "registry", "_arrivals"}
"""Not of the member itself; its registry is looked at as a member's own."""


def state_of(thing):
    """All that a member's decisions can hang on, as plain values."""
    match thing:
        case dict():
            return {key: state_of(value) for key, value in thing.items()}
        case list() | tuple() | deque():
            return [state_of(item) for item in thing]
        case set() | frozenset():
            return {state_of(item) if not isinstance(item, bytes) else item for item in thing}
        case None | bytes() | str() | int() | float():
            return thing
        case msgspec.Struct():
            return repr(thing)
    names = getattr(thing, "__slots__", None) or vars(thing)
    return {name: state_of(getattr(thing, name)) for name in names if name not in TIMERS | OUTSIDE}


def states(world):
    return {
        name: [state_of(node.member), state_of(node.member.registry)]
        for name, node in world.nodes.items()
    }  # fmt: skip


def rested(world):
    """Until it is calm, and the last of the timers that a fault starts has run out."""
    while not world.calm() or world.now < world.ends + 900.0:
        world.run_until(world.now + 1.0)


@pytest.mark.parametrize("kind", RATES)
def test_calm_time_changes_nothing_in_any_member(kind):
    world = Weather(5, hubs=3, agents=4)
    world.run_until(5.0)
    targets = {"site": "beta", "paths": "a1", "one-way": "a3", "stall": "a2", "agent-crash": "a3", "clock": "a0"}
    world.strike(kind, targets.get(kind, "h1"))
    rested(world)
    world.loss = 0.0
    before, octets = states(world), world.octets
    world.run_until(world.now + 300.0)
    assert states(world) == before
    assert world.octets == octets
    assert world.calm()
    world.skip(1000.0)
    assert states(world) == before
    world.run_until(world.now + 300.0)
    assert states(world) == before, "who was skipped over goes on as before"


def test_a_member_that_something_befell_is_seen_to_differ():
    world = Weather(5)
    world.run_until(5.0)
    before = states(world)
    world.strike("agent-crash", "a1")
    world.run_until(10.0)
    after = states(world)
    assert {name for name in before if before[name] != after[name]} >= {"h0", "h1", "h2"}


def test_a_false_eviction_is_found():
    world = Weather(6)
    world.run_until(100.0)
    world.look()
    hub, agent = world.nodes["h0"], world.nodes["a0"]
    assert hub.provider == agent.provider
    hub.perform(hub.member.publish(WitnessBody(
        federation=FEDERATION, session=hub.session, suspect=agent.session, lifecycle=0, version=1,
        seen=hub.member.registry.node(agent.session).version, until=world.session_ends(), suspects=True, votes=True,
    ), wall=hub.wall()))  # fmt: skip
    world.look()
    assert [(where, who) for _, where, who, _ in world.false_votes] == [("h0", "a0")]
    assert world.false_evictions == [], "there is a tunnel"
    assert [where for where, *_ in world.contradicted_s] == ["h0"]
    del hub.links[agent.session]
    world.evictions.clear()
    world.look()
    assert [(where, who) for _, where, who, _ in world.false_evictions] == [("h0", "a0")]


def lived(seed):
    rng = random.Random(seed)
    world = Weather(seed, hubs=rng.randint(2, 4), agents=rng.randint(3, 8), choose=rng.random() < 0.5)
    world.live(HOURS)
    return world


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "count"), [(0, 3), *(pytest.param(i, 40, marks=pytest.mark.long) for i in range(1, 13))]
)
def test_nobody_alive_and_in_reach_is_evicted(number, count):
    drawn = random.SystemRandom().sample(range(10**6, 10**9), count)
    for seed in drawn if number else range(count):
        world = lived(seed)
        assert world.faults > 10
        for at, hub, node, together in world.false_votes + world.false_evictions:
            near = [told for told in world.script if at - 900 < told[0] <= at]
            pytest.fail(f"seed {seed}: {hub} is against {node}, in reach for {together} s, at {at}, after {near}")
        assert all(lasted <= CONTRADICTED_S for lasted in world.contradicted_s.values()), world.contradicted_s
