"""A thousand nodes and ten thousand: the mesh's own core on virtual time (`tests/mesh/large.py`), with the time that
messages cost on the wire and on the processor.

16 hubs of four providers, all linked to each other; an agent has tunnels to two, one of its own provider and one of
another. Every link is a wide one: 4 to 15 ms one way, and one segment in a thousand is lost.
"""

import random
import resource
import time

from fabrictool.mesh.records import Lifecycle
from tests.bench.mesh_faults import summary
from tests.mesh.large import Costs, LargeWorld
from tests.mesh.weather import Weather
from tests.mesh.world import Op

COSTS = Costs(receive=45e-6, merge=190e-6, send=25e-6)
"""Of one core of the machine that the docs' figures are from: a beat costs both ends 70 µs, a signature 142 µs, and the
rest of a merge 50 µs.
"""
HUBS = 16
WRITES = {1_000: 100, 10_000: 40}
PARTITION_S = 60.0
UPDATES_S = 0.5
SECONDS_A_WRITE = 1.0


def on_a_wan(nodes, seed=1):
    """Milliseconds from a write until a node has it: of all nodes and writes, and of the last node of each write."""
    began = time.process_time()
    world = LargeWorld(seed, hubs=HUBS, agents=nodes - HUBS, costs=COSTS, layered=True)
    world.run_until(2.0)
    delays, lasts = [], []
    for _ in range(WRITES[nodes]):
        world.changes.clear()
        begin, node = world.now, world.nodes[f"a{world.rng.randrange(nodes - HUBS)}"]
        node.publish_node(Lifecycle.SERVING)
        world.run_until(begin + SECONDS_A_WRITE)
        came = [1000 * (at - begin) for at, _, _ in world.changes]
        assert len(came) == nodes, "somebody has not got it, or twice"
        delays += came
        lasts.append(max(came))
    last = summary(lasts)
    return summary(delays) | {
        "last_p50_ms": last["p50_ms"], "writes": len(lasts), "nodes": nodes, "hubs": HUBS,
        "late": sum(delay > 150 for delay in delays), "cpu_s": round(time.process_time() - began, 1),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def partition_healed(nodes, seed=3):
    """Two sites of four are cut off from the others, and two records a second change; until all have the same again."""
    world = LargeWorld(seed, hubs=HUBS, agents=nodes - HUBS, costs=COSTS, services=True)
    world.run_until(2.0)
    halves = [], []
    for node in world.nodes.values():
        halves[node.provider in ("gamma", "delta")].append(node.name)
    for name in halves[0]:
        world.do(Op(world.now, "cut", name, others=tuple(halves[1])))
    end = world.now + PARTITION_S
    while world.now < end:
        world.run_until(world.now + UPDATES_S)
        world.nodes[f"a{world.rng.randrange(nodes - HUBS)}"].publish_node(Lifecycle.SERVING)
    for name in halves[0]:
        world.do(Op(world.now, "heal", name, others=tuple(halves[1])))
    begin, octets = world.now, world.octets
    assert len(set(world.roots().values())) > 1
    while len(set(world.roots().values())) > 1:
        assert world.now < begin + 60.0, "they do not come to agree"
        world.run_until(world.now + 0.01)
    took = world.now - begin
    world.run_until(begin + 10.0)
    assert len(set(world.roots().values())) == 1
    return {
        "nodes": nodes, "max_ms": round(1000 * took), "octets_a_node": round((world.octets - octets) / nodes),
        "evicted": sum(hub.member.registry.evicted(session) for hub in world.hubs for session in world.identity.of),
    }  # fmt: skip


def false_evictions(node_hours, seed, hours=250.0):
    """Meshes of 2 to 4 hubs and 3 to 8 agents, each for `hours`, until it is enough; see `tests/mesh/weather.py`.

    In half of them agents keep to two hubs.
    """
    rng, began = random.Random(seed), time.process_time()
    row = {"node_hours": 0, "false_evictions": 0, "false_votes": 0, "faults": 0, "played_hours": 0.0}
    contradicted = []
    while row["node_hours"] < node_hours:
        world = Weather(
            rng.randrange(10**9), hubs=rng.randint(2, 4), agents=rng.randint(3, 8), choose=rng.random() < 0.5
        )
        world.live(hours)
        row["node_hours"] += round(world.node_hours())
        row["false_evictions"] += len(world.false_evictions)
        row["false_votes"] += len(world.false_votes)
        row["faults"] += world.faults
        row["played_hours"] += (world.now - world.skipped) / 3600.0
        contradicted += world.contradicted_s.values()
    return row | {
        "played_hours": round(row["played_hours"]), "contradicted": len(contradicted),
        "longest_s": max(contradicted, default=0.0), "seed": seed, "cpu_s": round(time.process_time() - began),
    }  # fmt: skip
