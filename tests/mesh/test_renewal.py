"""A session gets another certificate for its key while it runs, and nobody notices but the clock."""

import asyncio
import time
from dataclasses import replace

import pytest

from fabrictool.mesh.framing import StreamHead
from fabrictool.mesh.identity import IdentityError, certify, describe_chain, fingerprint, issue_session
from fabrictool.mesh.records import Envelope, seal
from fabrictool.mesh.registry import Verdict
from tests.mesh.signed_records import NOW, PROVIDERS, SESSIONS, fresh, node, sealed
from tests.mesh.test_transport import Collect, Echo, listening, node_body, service_body, until
from tests.mesh.world import DAY, EPOCH, Op, World


def renewed(federation, mesh_node, name, provider="alpha", seconds=3600.0):
    """Another certificate in the node's folder."""
    credential = mesh_node.credential
    chain = certify(
        federation.providers[provider], credential.key.public_key(), credential.claims.role, now=time.time(),
        seconds=seconds, began_at=time.time() - 100.0,
    )  # fmt: skip
    path = federation.folder / name / "session.crt"
    path.write_bytes(replace(credential, chain=chain).chain_pem())
    return path


@pytest.mark.asyncio
async def test_links_records_and_open_requests_outlast_the_first_certificate(federation):
    hub, _, port = await listening(federation)
    agents = {}
    for name in ("renews", "ends"):
        agent, listener = federation.node(name, seconds=4.0)
        agent.dial([("127.0.0.1", port)])
        agent.publish(node_body(agent))
        agent.publish(service_body(agent))
        listener.accept = lambda stream, head, peer: Echo()
        agents[name] = agent, listener
    renews, ends = agents["renews"][0], agents["ends"][0]
    await until(lambda: len(hub.registry) == 4 and len(hub.neighbours) == 2)
    first = hub.registry.session(renews.session).not_after
    open_request = Collect()
    tunnel = hub.tunnel(renews.session)
    stream = tunnel.open_stream(StreamHead(b"s" * 16, "POST", "/v1/x", (), 0), open_request)
    renewed(federation, renews, "renews")
    await renews.renew()
    await until(lambda: hub.registry.session(renews.session).not_after > first + 1000)
    await until(lambda: ends.registry.session(renews.session).not_after > first + 1000)
    await until(lambda: hub.neighbours == [renews.session], 15.0)
    assert time.time() > first
    assert hub.tunnel(renews.session) is tunnel
    stream.write(b"still here")
    await until(lambda: open_request.data == b"still here")
    assert [s.node.session for s in hub.registry.serving(wall=time.time())] == [renews.session]
    late, _, late_port = await late_hub(federation)
    renews.dial([("127.0.0.1", late_port)])
    await until(lambda: late.registry.session(renews.session) is not None)
    assert late.registry.session(renews.session).not_after > first + 1000
    for each in (hub, late, renews, ends):
        await each.close()


async def late_hub(federation):
    hub, listener = federation.node("late", role="gateway", provider="beta")
    return hub, listener, await hub.listen("127.0.0.1", 0)


@pytest.mark.asyncio
async def test_a_gateway_that_listens_shows_its_new_certificate_to_whoever_comes(federation):
    hub, _ = federation.node("hub", role="gateway", seconds=3.0)
    port = await hub.listen("127.0.0.1", 0)
    hub.publish(node_body(hub))
    first = hub.registry.session(hub.session).not_after
    path = renewed(federation, hub, "hub")
    await hub.renew()
    await asyncio.sleep(max(0.0, first - time.time()) + 0.5)
    agent, _ = federation.node("agent")
    agent.dial([("127.0.0.1", port)])
    await until(lambda: agent.registry.session(hub.session) is not None)
    assert agent.registry.session(hub.session).not_after == pytest.approx(describe_chain(path.read_bytes()).end)
    for each in (hub, agent):
        await each.close()


@pytest.mark.asyncio
async def test_what_is_no_certificate_of_this_session_is_not_taken(federation):
    agent, _ = federation.node("agent")
    other = issue_session(federation.providers["alpha"], "agent", now=time.time())
    path = federation.folder / "agent" / "session.crt"
    before, kept = agent.chain, path.read_bytes()
    for text in (other.chain_pem(), b"rubbish"):
        path.write_bytes(text)
        with pytest.raises(IdentityError, match=r"FT600[23]"):
            await agent.renew()
        assert agent.chain == before
    path.write_bytes(kept)
    await agent.renew()


def test_a_record_counts_with_the_certificate_that_it_names_and_with_no_other():
    owner = SESSIONS[0]
    key = owner.key.public_key()
    later = certify(PROVIDERS["alpha"], key, "agent", now=NOW + 100.0, seconds=50 * 3600.0, began_at=NOW)
    registry = fresh()
    assert registry.merge(sealed(owner, named(owner, owner.chain)).envelope, wall=NOW).verdict is Verdict.NEW
    before = registry.session(bytes.fromhex(owner.claims.session)).not_after
    body = named(owner, later, version=2)
    bare = seal(body, owner.sign).envelope
    assert registry.merge(bare, wall=NOW).verdict is Verdict.ORPHAN, "its chain has to come first"
    swapped = Envelope(bare.body, bare.signature, owner.chain)
    assert "does not go with" in registry.merge(swapped, wall=NOW).reason
    whole = Envelope(bare.body, bare.signature, later)
    assert registry.merge(whole, wall=NOW).verdict is Verdict.NEW
    assert registry.session(body.session).not_after > before + 3600
    again = seal(named(owner, later, version=3), owner.sign).envelope
    assert registry.merge(again, wall=NOW).verdict is Verdict.NEW
    former = seal(named(owner, owner.chain, version=4), owner.sign).envelope
    assert registry.merge(former, wall=NOW).verdict is Verdict.ORPHAN


def named(owner, chain, **changes):
    return node(owner, certificate=fingerprint(chain[0]), **changes)


def test_who_is_renewed_outlasts_who_is_not_on_every_replica():
    world = World(5, hubs=2, agents=3, loss=0.0)
    world.run_until(5.0)
    for name in ("h0", "h1", "a0"):
        world.do(Op(5.0, "renew", name))
    world.run_until(10.0)
    for node_ in world.nodes.values():
        registry = node_.member.registry
        assert registry.session(world.nodes["a0"].session).not_after == EPOCH + DAY + 5.0
        assert {entry.node.node for entry in registry.serving(wall=EPOCH + DAY + 3.0)} == {"a0"}
        assert registry.serving(wall=EPOCH + DAY + 7.0) == []
    assert len(set(world.roots().values())) == 1
