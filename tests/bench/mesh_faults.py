"""What faults cost in the mesh: on virtual time with the production core, and on real sockets where computing counts.

Called by `tests/bench/mesh.py`; every function returns one row.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from fabrictool.mesh.revocation import read_revocation, revoke
from tests.bench.tunnel import Answer, Sink, head, identities, linked
from tests.mesh.conftest import Federation
from tests.mesh.world import Op, World

STEP_S = 0.002


def summary(times_ms):
    times = sorted(times_ms)
    return {
        "p50_ms": round(statistics.median(times), 2),
        "p95_ms": round(times[int(0.95 * (len(times) - 1))], 2),
        "max_ms": round(times[-1], 2),
        "n": len(times),
    }


def until(world, condition, within_s=120.0, step_s=STEP_S):
    """Virtual milliseconds until it is so."""
    begin = world.now
    while not condition():
        assert world.now - begin < within_s, "it does not come to pass"
        world.run_until(world.now + step_s)
    return 1000 * (world.now - begin)


def not_routed(kind, trials=40):
    """An agent dies; until no hub would send it a request: it has no tunnel with it, and no other hub says it has."""
    world = World(2, hubs=2, agents=8)
    world.run_until(5.0)
    times = []
    for number in range(trials):
        node = world.nodes[f"a{number % 8}"]
        world.run_until(world.now + world.rng.uniform(2.0, 4.0))
        session = node.session
        world.do(Op(world.now, kind, node.name))
        times.append(
            until(world, lambda s=session: not any(s in hub.links or hub.member.holders.of(s) for hub in world.hubs))
        )
        world.do(Op(world.now, "start", node.name))
    return summary(times)


async def added_ttft(tunnel, requests=400):
    """Milliseconds from opening a stream of 2 kB until the first octet of the answer, through the tunnel and over a new
    connection on loopback without it."""
    through, direct = [], []
    server = await asyncio.get_running_loop().create_server(lambda: Sink(2000), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for _ in range(requests):
        answer, sent = Answer(), time.perf_counter()
        stream = tunnel.open_stream(head(2000), answer)
        stream.write(bytes(2000))
        stream.write_eof()
        through.append(1000 * (await answer.came - sent))
        stream.close()
        sent = time.perf_counter()
        transport, answer = await asyncio.get_running_loop().create_connection(Answer, "127.0.0.1", port)
        transport.write(bytes(2000))
        direct.append(1000 * (await answer.came - sent))
        transport.abort()
    server.close()
    added = sorted(t - statistics.median(direct) for t in through)
    return {
        "p50_ms": round(statistics.median(added), 2), "p99_ms": round(added[int(0.99 * (requests - 1))], 2),
        "direct_p50_ms": round(statistics.median(direct), 2), "n": requests,
    }  # fmt: skip


def on_an_idle_tunnel():
    async def measure(files):
        owner, tunnel, stop = await linked(files, slow=False)
        owner.accept = lambda h: Sink(h.length)
        row = await added_ttft(tunnel)
        await stop()
        return row

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(identities(Path(folder))))


def on_a_relayed_tunnel():
    """With a hub between, that cannot read it; and what the first request takes to open it."""

    async def measure(federation):
        gateway, _ = federation.node("gateway", role="gateway")
        hub, _ = federation.node("hub", role="gateway", provider="beta")
        agent, heard = federation.node("agent", provider="beta")
        heard.accept = lambda stream, head, peer: Sink(head.length)
        port = await hub.listen("127.0.0.1", 0)
        for node in (gateway, agent):
            node.dial([("127.0.0.1", port)])
        while not gateway.reaches(agent.session):  # noqa: ASYNC110 - a benchmark may poll
            await asyncio.sleep(0.005)
        begin = time.perf_counter()
        tunnel = await gateway.relays.reach(agent.session)
        opened = 1000 * (time.perf_counter() - begin)
        row = await added_ttft(tunnel)
        for node in (gateway, agent, hub):
            await node.close()
        return row | {"opened_ms": round(opened, 1)}

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(Federation(Path(folder))))


async def revoked_everywhere(mesh, trials=20):
    """One hub hears of a revocation; until the other one counts the session as revoked."""
    times = []
    for agent in mesh.agents[:trials]:
        now = time.time()
        text = revoke(mesh.root, agent.session, now=now, until=now + 1000)
        identity, begin = mesh.hubs[1].registry.session(agent.session), time.perf_counter()
        mesh.hubs[0].take(read_revocation(text)[0])
        while not mesh.hubs[1].registry.revoked(identity):  # noqa: ASYNC110 - a benchmark may poll
            await asyncio.sleep(0.0005)
        times.append(1000 * (time.perf_counter() - begin))
        await asyncio.sleep(0.05)
    return summary(times)


async def hub_returns(mesh, restarted):
    """The hubs' processes end without a word and one starts again at once; until it has a tunnel with every agent.

    `restarted` starts a hub with the identity and at the port of the first.
    """
    agents = mesh.sessions
    for hub in mesh.hubs:
        await hub.close()
    begin = time.perf_counter()
    hub = await restarted()
    while not agents <= set(hub.neighbours):  # noqa: ASYNC110 - a benchmark may poll
        await asyncio.sleep(0.005)
    took = time.perf_counter() - begin
    mesh.hubs[:] = [hub]
    mesh.everyone[:] = [hub, *mesh.agents]
    return {"agents": len(agents), "max_ms": round(1000 * took)}
