"""How fast news spread in the mesh and what silence costs: real sockets and TLS on loopback, and a simulated WAN.

    make bench-mesh [JSON=FILE]

On loopback two hubs share this process with the agents, so CPU time is shared too: a real mesh has a core a node, and
round trips. What others publish stands beside ours; where we lose, the table says so.
"""

import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fabrictool.base.clock import SystemClock
from fabrictool.mesh.identity import create_root, issue_provider, issue_session
from fabrictool.mesh.records import Lifecycle, NodeBody
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.tls import IdentityFiles
from tests.bench.mesh_faults import (
    false_evictions,
    hub_returns,
    not_routed,
    on_an_idle_tunnel,
    partition_healed,
    revoked_everywhere,
    summary,
)
from tests.mesh.world import World

SIZES = (8, 32, 128)
WRITES = 30
IDLE_S = 5.0
WRITERS, EVERY_S, ROUNDS = 10, 3.0, 2
FALSE_HOURS = 8
MUST = {
    "kill -9 of an agent, not routed to": "1 s",
    "power loss of an agent, not routed to": "5 s",
    "partition of 60 s healed, all replicas alike": "5 s at 1,000 nodes: more than are played here",
    "revocation effective on the other hub": "30 s",
    "tunnel adds to the first octet": "p50 1.5, p99 5 ms",
    "evicted though alive (nobody died)": "0 in 10^6 node-hours: far more than are played here",
}
PUBLISHED = {
    "convergence, 128 agents": "OpenTela 7-13 / 1,000 / 10,000 ms (cluster); memberlist 390 / 550 / 700 ms (model)",
    "idle, octets/s a node": "OpenTela 1,000 at 10 and 8,000 at 50 nodes",
    "agent kill -9, not routed to": "OpenTela 30-90 s (its code); memberlist 9.7 s",
    "partition healed": "memberlist 30 s (push/pull)",
    "10 writers every 3 s, octets/s a node": "OpenTela 40,000; random push 18,000",
}


class Listener:
    """Tells when a version of the watched record comes."""

    def __init__(self, seen):
        self._seen = seen

    def record_changed(self, record):
        self._seen(record)

    def session_ended(self, reason): ...
    def tail_heard(self, session, service, text): ...
    def link_changed(self, session, *, up, reason): ...
    def load_reported(self, session, load): ...

    def load(self, peer):
        return ()

    def stream_opened(self, stream, head, peer):
        return None


class Mesh:
    """Hubs of two providers and agents on both, in this process."""

    def __init__(self, folder, agents):
        now = time.time()
        self.root = create_root("bench", now=now)
        self.providers = [issue_provider(self.root, name, now=now) for name in ("alpha", "beta")]
        self.folder, self.arrivals = folder, {}
        self.hubs = [self._node(f"h{i}", "gateway", self.providers[i]) for i in range(2)]
        self.agents = [self._node(f"a{i}", "agent", self.providers[i % 2]) for i in range(agents)]
        self.everyone = [*self.hubs, *self.agents]

    def _node(self, name, role, provider):
        files = IdentityFiles(self.folder / name)
        files.folder.mkdir()
        files.write(issue_session(provider, role, now=time.time()), self.root)
        listener = Listener(lambda record: self._arrived(name, record))
        return MeshNode(files, listener, SystemClock(), hub=role == "gateway")

    def _arrived(self, name, record):
        self.arrivals.setdefault((record.key, record.body.version), {})[name] = time.perf_counter()

    async def up(self):
        self.ports = ports = [await hub.listen("127.0.0.1", 0) for hub in self.hubs]
        self.hubs[1].dial([("127.0.0.1", ports[0])])
        for agent in self.agents:
            agent.dial([("127.0.0.1", port) for port in ports])
        for node in self.everyone:
            node.publish(body_of(node))
        await until(lambda: len(self.hubs[0].registry) == len(self.everyone))
        await until(lambda: len({node.registry.root() for node in self.everyone}) == 1)

    async def spread(self, node):
        """Seconds until the last node has a write of `node`."""
        key = node.session
        version = node.registry.get(key).body.version + 1
        begin = time.perf_counter()
        node.publish(body_of(node))
        await until(lambda: len(self.arrivals.get((key, version), ())) == len(self.everyone))
        return max(self.arrivals.pop((key, version)).values()) - begin

    def octets(self):
        """Written to all sockets, in frames: without TLS and TCP/IP."""
        return sum(node.tunnel(peer).sent_octets for node in self.everyone for peer in node.neighbours)

    async def first_hub_again(self):
        """In the folder of its former run."""
        hub = MeshNode(IdentityFiles(self.folder / "h0"), Listener(lambda record: None), SystemClock(), hub=True)
        await hub.listen("127.0.0.1", self.ports[0])
        hub.publish(body_of(hub))
        return hub

    async def down(self):
        for node in reversed(self.everyone):
            await node.close()


async def until(condition):
    """Nothing tells of it, so it is looked at again and again; when things happened is noted by themselves."""
    while not condition():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.002)


def body_of(node):
    claims = node.credential.claims
    return NodeBody(
        federation=node.federation, session=node.session, lifecycle=Lifecycle.SERVING, version=1, role=claims.role,
        fabric="bench", provider=claims.provider, site="s", cluster="c", node="n",
    )  # fmt: skip


async def on_loopback(agents):
    """One row of measured values."""
    with tempfile.TemporaryDirectory() as folder:
        mesh = Mesh(Path(folder), agents)
        begin = time.perf_counter()
        await mesh.up()
        joined = time.perf_counter() - begin
        times = []
        for number in range(WRITES):
            times.append(1000 * await mesh.spread(mesh.agents[number % agents]))
            await asyncio.sleep(0.02)
        await asyncio.sleep(2.0)
        before = mesh.octets()
        await asyncio.sleep(IDLE_S)
        idle = (mesh.octets() - before) / IDLE_S / len(mesh.everyone)
        before, begin = mesh.octets(), time.perf_counter()
        for _ in range(ROUNDS):
            for agent in mesh.agents[:WRITERS]:
                agent.publish(body_of(agent))
            await asyncio.sleep(EVERY_S)
        churn = (mesh.octets() - before) / (time.perf_counter() - begin) / len(mesh.everyone)
        back = await hub_returns(mesh, mesh.first_hub_again)
        await mesh.down()
    return summary(times) | {
        "agents": agents, "join_s": round(joined, 2), "idle_octets_s": round(idle), "churn_octets_s": round(churn),
        "hub_back_ms": back["max_ms"],
    }  # fmt: skip


async def revocations(agents=32):
    with tempfile.TemporaryDirectory() as folder:
        mesh = Mesh(Path(folder), agents)
        await mesh.up()
        row = await revoked_everywhere(mesh)
        await mesh.down()
    return row


def on_a_simulated_wan(agents, hubs=4, writes=20):
    """Virtual time: one-way 0.1-15 ms, 0.1 % of the messages 200 ms late; no time for computing."""
    world = World(1, hubs=hubs, agents=agents)
    world.run_until(5.0)
    times = []
    for number in range(writes):
        world.changes.clear()
        begin, node = world.now, world.nodes[f"a{number % agents}"]
        node.publish_node(Lifecycle.SERVING)
        world.run_until(begin + 1.5)
        last = {name: at for at, name, _ in world.changes}
        assert len(last) == len(world.nodes)
        times.append(1000 * (max(last.values()) - begin))
    return summary(times) | {"agents": agents, "hubs": hubs}


def main(argv=None):
    """Print the tables; the first argument may be a file for the figures in JSON."""
    logging.disable(logging.WARNING)
    loopback = [asyncio.run(on_loopback(size)) for size in SIZES]
    print("loopback, TLS, two hubs: until the last node has a write; octets of frames, without TLS and TCP/IP;")
    print("hub back: both hubs die and one starts again, until it has a tunnel with every agent")
    heads = ("p50 ms", "p95 ms", "max ms", "all joined s", "idle B/s/node", "churn B/s/node", "hub back ms")
    print(f"{'agents':>7} " + " ".join(f"{head:>14}" for head in heads))
    for row in loopback:
        fields = ("p50_ms", "p95_ms", "max_ms", "join_s", "idle_octets_s", "churn_octets_s", "hub_back_ms")
        print(f"{row['agents']:7} " + " ".join(f"{row[field]:14}" for field in fields), flush=True)
    wan = [on_a_simulated_wan(size) for size in (32, 128)]
    print("\nsimulated WAN, four hubs: until the last node has a write, ms")
    for row in wan:
        print(f"{row['agents']:7} {row['p50_ms']:8} {row['p95_ms']:8} {row['max_ms']:8}")
    faults = {
        "kill -9 of an agent, not routed to": not_routed("kill"),
        "power loss of an agent, not routed to": not_routed("power"),
        "partition of 60 s healed, all replicas alike": partition_healed(126),
        "revocation effective on the other hub": asyncio.run(revocations()),
        "tunnel adds to the first octet": on_an_idle_tunnel(),
        "evicted though alive (nobody died)": false_evictions(FALSE_HOURS),
    }
    print("\nfaults (the first three and the last on virtual time, the others on sockets of this machine)")
    for what, row in faults.items():
        figures = ", ".join(f"{name} {value}" for name, value in row.items())
        print(f"  {what:48} {figures:60} must {MUST[what]}", flush=True)
    print("\npublished by others:")
    for what, figures in PUBLISHED.items():
        print(f"  {what}: {figures}")
    if argv:
        Path(argv[0]).write_text(json.dumps({"loopback": loopback, "wan": wan, "faults": faults}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
