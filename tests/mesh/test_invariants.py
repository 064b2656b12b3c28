"""The twelve invariants of the mesh on random faults: many seeds, the same core as in production.

A seed that fails prints the shortest list of faults that still fails, ready to be pasted into `REPLAYED`.
"""

import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from fabrictool.mesh import detector
from fabrictool.mesh.records import Lifecycle, NodeBody
from tests.mesh.world import Op, World
from tests.seeds import some

ROOT = Path(__file__).parents[2]
GRACE_S = 18.0
"""Shorter than in production, where most of a run would be waiting for it."""
SHORT_S = 12.0
"""Cuts and stalls under the grace period: nobody alive may be evicted for them."""
FAULTS_UNTIL_S = 40.0
QUIET_S = 5 * GRACE_S
"""To find out who is gone takes one grace period; whom only they had seen, another; who may vote, a third."""
BELIEVED_AGAIN_S = 5.0
"""Whoever was away for longer than the grace period is heard by then."""
NODE_FAULTS = ("kill", "power", "start", "restart", "leave", "stall", "clock", "engine", "drain", "renew")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(detector, "GRACE_S", GRACE_S)
    monkeypatch.setattr(detector, "ASK_AGAIN_S", GRACE_S / 2)
    monkeypatch.setattr(detector, "FROZEN_S", GRACE_S / 2)


def faults(rng, names, *, longest=SHORT_S):
    """A script. Whoever was stopped may come back; every cut heals."""
    script = []
    for _ in range(rng.randint(1, 14)):
        at = round(rng.uniform(3.0, FAULTS_UNTIL_S - longest), 3)
        if rng.random() < 0.3:
            node, *others = rng.sample(names, rng.randint(2, len(names)))
            script.append(Op(at, "cut", node, others=tuple(others)))
            script.append(Op(round(at + rng.uniform(0.5, longest), 3), "heal", node, others=tuple(others)))
            continue
        if rng.random() < 0.2:
            node, *others = rng.sample(names, rng.randint(2, len(names)))
            script.append(Op(at, rng.choice(["mute", "deafen"]), node, others=tuple(others)))
            script.append(Op(round(at + rng.uniform(0.5, longest), 3), "clear", node, others=tuple(others)))
            continue
        kind = rng.choice(NODE_FAULTS)
        value = {"stall": rng.choice([1.0, 3.0, 8.0]), "clock": rng.choice([-3600.0, -200.0, 200.0, 3600.0])}.get(
            kind, 0.0
        )
        script.append(Op(at, kind, rng.choice(names), value))
        if kind in ("kill", "power"):
            script.append(Op(round(at + rng.uniform(0.5, 12.0), 3), rng.choice(["start", "restart"]), script[-1].node))
    return sorted(script, key=lambda op: op.at)


def shape(seed):
    rng = random.Random(seed)
    hubs, agents = rng.randint(1, 4), rng.randint(1, 5)
    names = [f"h{i}" for i in range(hubs)] + [f"a{i}" for i in range(agents)]
    size = {"hubs": hubs, "agents": agents, "loss": rng.choice([0.0, 0.001, 0.05])}
    if rng.random() < 0.5:
        size |= {"site_links": True, "sites": rng.randint(1, 3)}
    if rng.random() < 0.5:
        size["choose"] = True
    return size, faults(rng, names)


def played(seed, size, script):
    world = World(seed, **size)
    for op in script:
        world.run_until(op.at)
        world.do(op)
        check_now(world)
    world.heal(set(world.cut))
    world.hear_again(set(world.muted))
    for step in range(int(QUIET_S // 10)):
        world.run_until(max(FAULTS_UNTIL_S, script[-1].at if script else 0.0) + 10.0 * (step + 1))
        check_now(world)
    return world


def check_now(world):
    """4 and 5: who left or was evicted is not routable; who lives and can be heard is evicted by nobody."""
    living = world.check()
    for node in living.values():
        if node.hub:
            heard = {node.session, *linked_hubs(world, node)}
            for session, other in living.items():
                if other.now_stalled():
                    continue  # nobody can hear it, for longer than the grace period perhaps
                if heard & {session, *linked_hubs(world, other)}:
                    assert not node.member.registry.evicted(session), f"{other.name} lives, {node.name} evicted it"


def linked_hubs(world, node):
    """Hubs that a node has been linked with for long enough to have heard all that they know."""
    links = [link for link in node.links.values() if link.other(node).hub]
    return {link.peer(node) for link in links if world.now - link.since > BELIEVED_AGAIN_S}


def check_end(world):
    """What must be so long after the last fault."""
    living = {node.session: node for node in world.nodes.values() if node.alive}
    hubs = [node for node in living.values() if node.hub]
    if not hubs:
        sites = {}
        for node in living.values():
            if world.site_links and any(node.member.sites.behind(node.session)):  # who came after all hubs met nobody
                sites.setdefault(node.provider, {})[node.name] = node.member.registry.root()
        for roots in sites.values():
            assert len(set(roots.values())) == 1, roots
        return  # one site cannot reach another
    assert len(set(world.roots().values())) == 1, world.roots()  # 1
    for hub in hubs:
        registry = hub.member.registry
        for session, node in living.items():  # 7: whoever was suspected is believed again
            newest = registry.node(session).version
            standing = [w for w in registry.witnesses(session) if w.suspects and w.seen >= newest]
            assert not standing, f"{node.name} is suspected, says {hub.name}"
        others = {body.session for body in registry.hubs(wall=hub.wall())} - {hub.session}
        for session in world.died.keys() - living.keys() if hub.links or not others else ():  # 6, but who is alone
            shown = registry.node(session)
            if shown is not None and shown.lifecycle is not Lifecycle.LEFT and may_vote(registry, hubs, shown):
                assert registry.evicted(session), f"{shown.node} is dead, and {hub.name} lists it"
        lost = hub.member.detector.lost  # 9
        assert set(lost) <= set(world.died) | set(registry_sessions(registry))
    check_links(world, living, hubs)
    before = world.octets  # 8: silence costs beats and nothing else
    world.run_until(world.now + 20.0)
    assert world.octets == before
    assert world.vain == []
    for hub in hubs:  # 9 again: it would speak to those that it is linked to, and to nobody else
        hub.member.publish(hub.member.registry.node(hub.session), wall=hub.wall())
        assert {send.peer for send in hub.member.flush()} == set(hub.links)


def check_links(world, living, hubs):
    """Each hub knows by whom it could reach each agent; who chooses among hubs has enough, and no more."""
    for hub in hubs:
        for session in {*living, *world.died}:
            agent = living.get(session)
            links = () if agent is None or agent.hub else agent.links
            holding = sorted(other.session for other in hubs if other.session in hub.links and other.session in links)
            assert hub.member.holders.of(session) == holding
    for node in living.values():
        if world.choose and not node.hub:
            linked = [node.world.running(session) for session in node.links]
            providers = [other.provider for other in linked if other.hub]
            assert len(providers) == min(2, len(hubs)), f"{node.name} has links to {len(providers)} hubs"
            assert len(set(providers)) == min(2, len({hub.provider for hub in hubs}))


def may_vote(registry, hubs, dead):
    """Whether those that are left are enough to evict it."""
    voters = {hub.provider for hub in hubs}
    bodies = [record.body for record in registry if isinstance(record.body, NodeBody)]
    with_hubs = {body.provider for body in bodies if body.role == "gateway" and body.session != dead.session}
    return dead.provider in voters or len(voters) >= min(2, len(with_hubs))


def registry_sessions(registry):
    return {record.body.session for record in registry}


def fails(seed, size, script):
    try:
        check_end(played(seed, size, script))
    except AssertionError as error:
        return str(error) or "an assertion"
    return ""


def shortened(seed, size, script):
    """Without each fault that the failure does not need."""
    for op in list(script):
        rest = [other for other in script if other is not op]
        if fails(seed, size, rest):
            script = rest
    return script


BATCH = 100
LONG = pytest.mark.long
BATCHES = some(range(1000), 2)
"""Two hundred seeds in each run, a hundred thousand in `make test-long`. One in ten is always the same."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", BATCHES, ids="batch{}".format)
def test_the_invariants_hold_whatever_fails(batch):
    drawn = random.SystemRandom().sample(range(10**6, 10**9), BATCH - BATCH // 10)
    for seed in (*range(batch * BATCH // 10, (batch + 1) * BATCH // 10), *drawn):
        size, script = shape(seed)
        if reason := fails(seed, size, script):
            shortest = shortened(seed, size, script)
            lines = ",\n        ".join(map(str, shortest))
            pytest.fail(f"{reason}\n    ({seed}, {size},\n    [\n        {lines},\n    ]),")


SLOT_S = 8.0
"""Between two steps of a small script; more than twice this is over the grace period."""
STEPS = {
    "nothing": [],
    "power of c": [("power", "h2", 0.0, ())],
    "kill of c": [("kill", "h2", 0.0, ())],
    "c again, same session": [("restart", "h2", 0.0, ())],
    "c again, new session": [("start", "h2", 0.0, ())],
    "c leaves": [("leave", "h2", 0.0, ())],
    "c stalls": [("stall", "h2", 2.5 * SLOT_S, ())],
    "a and c cut": [("cut", "h0", 0.0, ("h2",))],
    "c cut off": [("cut", "h2", 0.0, ("h0", "h1"))],
    "a cut off": [("cut", "h0", 0.0, ("h1", "h2"))],
    "a does not hear c": [("mute", "h2", 0.0, ("h0",))],
    "nobody hears c": [("mute", "h2", 0.0, ("h0", "h1"))],
    "c hears nobody": [("deafen", "h2", 0.0, ("h0", "h1"))],
    "all healed": [
        *(("heal", "h0", 0.0, ("h1", "h2")), ("heal", "h1", 0.0, ("h2",))),
        *(("clear", "h2", 0.0, ("h0", "h1")), ("clear", "h0", 0.0, ("h1",))),
    ],
}
"""What can befall three hubs of three providers, of which c has up to as many sessions as it is started."""


def small_scripts(length):
    """Every sequence of that many steps that begins with a fault."""
    names = [name for name in STEPS if length < 5 or "hear" not in name]  # of five there are half a million with these
    for steps in product(names, repeat=length):
        if steps[0] != "nothing":
            yield steps


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "length",
    [1, 2, pytest.param(3, marks=pytest.mark.extended), pytest.param(4, marks=LONG), pytest.param(5, marks=LONG)],
)
def test_every_short_script_of_three_hubs_ends_well(length):
    for steps in small_scripts(length):
        script = [
            Op(3.0 + SLOT_S * slot, kind, node, value, others)
            for slot, step in enumerate(steps)
            for kind, node, value, others in STEPS[step]
        ]
        assert not fails(1, {"hubs": 3, "agents": 0, "loss": 0.0}, script), steps


def test_the_same_seed_gives_the_same_run():
    size, script = shape(11)
    assert played(11, size, script).trace.digest() == played(11, size, script).trace.digest()
    assert played(11, size, script).trace.digest() != played(12, size, script).trace.digest()


def test_the_same_seed_gives_the_same_run_in_every_process():
    """Sets of octets are walked in another order in each process: no decision may hang on that."""
    program = (
        "from tests.mesh.test_invariants import played, shape\n"
        "print([played(seed, *shape(seed)).trace.hexdigest() for seed in range(15)])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": str(number)}, cwd=ROOT, check=True,
            capture_output=True,
        ).stdout
        for number in (1, 2)
    }  # fmt: skip
    assert len(runs) == 1
