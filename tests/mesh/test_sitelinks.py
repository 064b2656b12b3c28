"""Agents of one site know of each other without any gateway, and lead a new one to all of them."""

import asyncio

import pytest

from fabrictool.domain.specs import HostPort
from fabrictool.mesh.detector import GRACE_S
from fabrictool.mesh.records import Lifecycle
from fabrictool.mesh.sites import SITE_LINKS, Sites
from fabrictool.mesh.transport import door, sitelinks
from fabrictool.mesh.transport.sitelinks import own_address
from fabrictool.mesh.transport.views import links_of
from tests.mesh.signed_records import SESSIONS, node
from tests.mesh.test_transport import listening, node_body, service_body, until
from tests.mesh.world import Op, World


async def at_site(federation, hub_ports, count, provider="alpha", site="here"):
    """Agents that listen, each with a service."""
    nodes = []
    for number in range(count):
        agent, listener = federation.node(f"{provider}-{site}-{number}", provider=provider)
        port = await agent.listen("127.0.0.1", 0)
        agent.publish(node_body(agent, site=site, addresses=(f"127.0.0.1:{port}",)))
        agent.publish(service_body(agent))
        agent.dial([("127.0.0.1", hub) for hub in hub_ports])
        agent.link_site()
        nodes.append((agent, listener))
    return nodes


def site_neighbours(agent):
    hubs = {tunnel.peer.session for tunnel in agent.hub_tunnels}
    return set(agent.neighbours) - hubs


def address_of(agent):
    (address,) = agent.registry.node(agent.session).addresses
    host, _, port = address.rpartition(":")
    return HostPort(host, int(port))


def agree(nodes):
    return len({node.registry.root() for node in nodes}) == 1


@pytest.mark.asyncio
async def test_agents_of_a_site_are_linked_and_of_another_site_or_provider_not(federation):
    hub, _, port = await listening(federation)
    here = [agent for agent, _ in await at_site(federation, [port], 6)]
    elsewhere = [agent for agent, _ in await at_site(federation, [port], 2, site="there")]
    (other,) = [agent for agent, _ in await at_site(federation, [port], 1, provider="beta")]
    everybody = [*here, *elsewhere, other]
    sessions = {agent.session for agent in here}
    await until(lambda: all(len(site_neighbours(agent)) >= SITE_LINKS for agent in here))
    await until(lambda: all(len(site_neighbours(agent)) == 1 for agent in elsewhere))
    assert all(site_neighbours(agent) <= sessions for agent in here)

    def links():
        return [link for agent in here for link in links_of(agent) if bytes.fromhex(link.peer) in sessions]

    await until(lambda: sum(bool(link.address) for link in links()) * 2 == len(links()))  # of two the first dials
    assert {link.address for link in links() if link.address} <= {str(address_of(agent)) for agent in here}
    assert site_neighbours(other) == set()
    await until(lambda: agree([hub, *everybody]))
    for agent in [hub, *everybody]:
        await agent.close()


@pytest.mark.asyncio
async def test_without_any_gateway_agents_keep_the_registry_and_a_new_one_finds_them_all(federation):
    hub, _, port = await listening(federation)
    nodes = await at_site(federation, [port], 5)
    agents = [agent for agent, _ in nodes]
    await until(lambda: agree([hub, *agents]) and len(hub.registry) == 10)
    await until(lambda: all(len(site_neighbours(agent)) >= SITE_LINKS for agent in agents))
    await hub.close()
    await until(lambda: not any(agent.hub_tunnels for agent in agents))
    agents[0].publish(service_body(agents[0], service=b"t" * 16))
    await until(lambda: all(len(agent.registry) == 11 for agent in agents), 2.0)

    again, _ = federation.node("again", role="gateway")
    mesh_port = await again.listen("127.0.0.1", 0)
    again.publish(node_body(again, site="elsewhere", addresses=(f"127.0.0.1:{mesh_port}",)))
    again.seek([HostPort("127.0.0.1", 1), address_of(agents[3])])
    await until(lambda: set(again.neighbours) == {agent.session for agent in agents})
    await until(lambda: agree([again, *agents]))
    assert len(again.registry) == 12
    for agent in [again, *agents]:
        await agent.close()


@pytest.mark.asyncio
async def test_an_agent_that_lost_its_gateways_is_heard_of_through_one_that_has_not(federation):
    hub, _, port = await listening(federation)
    nodes = await at_site(federation, [port], 3)
    cut_off, _ = federation.node("cut-off")
    listens = await cut_off.listen("127.0.0.1", 0)
    agents = [agent for agent, _ in nodes]
    await until(lambda: agree([hub, *agents]) and len(hub.registry) == 6)
    record = node_body(cut_off, addresses=(f"127.0.0.1:{listens}",))
    cut_off.publish(record)
    cut_off.link_site()
    cut_off.seek([address_of(agents[0])])
    cut_off.publish(service_body(cut_off))
    await until(lambda: len(hub.registry) == 8)
    for version in range(3):
        cut_off.publish(service_body(cut_off, service=bytes([version]) * 16))
    await until(lambda: len(hub.registry) == 11, 2.0)
    hub.publish(node_body(hub))
    await until(lambda: cut_off.registry.node(hub.session) is not None)
    for agent in [hub, cut_off, *agents]:
        await agent.close()


@pytest.mark.asyncio
async def test_neither_another_providers_agent_nor_one_that_answers_for_another_becomes_a_neighbour(federation, caplog):
    hub, _, port = await listening(federation)
    ((agent, listener),) = await at_site(federation, [port], 1)
    stranger, _ = federation.node("stranger", provider="beta")
    stranger.seek([address_of(agent)])
    impostor, _ = federation.node("impostor")
    theirs = await impostor.listen("127.0.0.1", 0)
    liar, _ = federation.node("liar")
    liar.dial([("127.0.0.1", port)])
    liar.publish(node_body(liar, addresses=(f"127.0.0.1:{theirs}",)))
    await until(lambda: agent.registry.node(liar.session) is not None)
    await until(lambda: all(words in caplog.text for words in ("answers where", "another provider")), 20.0)
    # Each hears the agent's hello a moment before the agent refuses it.
    await until(lambda: not stranger.neighbours and not impostor.neighbours)
    await asyncio.sleep(2 * sitelinks.PAUSE_FIRST_S)
    assert site_neighbours(agent) == set()
    assert {session for session, up, _ in listener.links if up} == {hub.session}
    for each in (hub, agent, stranger, impostor, liar):
        await each.close()


@pytest.mark.asyncio
async def test_a_node_knows_by_which_address_it_reaches_the_gateways():
    assert await own_address([HostPort("no.such.host.invalid", 1), HostPort("127.0.0.1", 9)]) == "127.0.0.1"
    found = await own_address([HostPort("no.such.host.invalid", 1)])
    assert found.count(".") == 3, "by the way to anywhere"


def test_a_ring_changes_as_agents_come_and_go():
    sites = Sites()
    names = [bytes([n]) * 16 for n in (10, 20, 30, 40, 50, 60)]

    def say(session, lifecycle=Lifecycle.SERVING, site="s", addresses=("h:1",)):
        sites.heard(node(SESSIONS[0], session=session, lifecycle=lifecycle, site=site, addresses=addresses))

    for name in reversed(names):
        say(name)
        say(name)
    assert list(sites.behind(names[4])) == [names[5], *names[:4]]
    assert sites.around(names[0], bool) == {names[4], names[5], names[1], names[2]}
    dead = {names[1], names[5], names[4]}
    assert sites.around(names[0], lambda s: s not in dead) == {names[2], names[3]}, "who died is no neighbour"
    say(names[5], Lifecycle.LEFT)
    say(names[0], site="elsewhere")
    assert list(sites.behind(names[4])) == names[1:4]
    say(names[1], addresses=())
    assert list(sites.behind(names[4])) == names[2:4]
    assert list(sites.behind(names[1])) == []
    assert list(sites.behind(names[0])) == []
    sites.forget(names)
    assert list(sites.behind(names[4])) == []
    assert sites.around(names[4], bool) == set()


def evicted(world, name):
    hub = world.hubs[0].member.registry
    return hub.evicted(world.nodes[name].session), bool(hub.witnesses(world.nodes[name].session))


def test_who_is_cut_off_from_the_gateway_and_not_from_its_site_is_suspected_by_nobody():
    world = World(7, hubs=1, agents=4, sites=1, site_links=True, loss=0.0)
    world.run_until(5.0)
    world.do(Op(5.0, "cut", "a0", others=("h0",)))
    world.run_until(5.0 + 3 * GRACE_S)
    assert evicted(world, "a0") == (False, False)
    world.nodes["a0"].publish_service(Lifecycle.SERVING, accepting=False)
    world.run_until(world.now + 2.0)
    assert len(set(world.roots().values())) == 1, "the others speak for it"
    world.do(Op(world.now, "cut", "a0", others=("a1", "a2", "a3")))
    world.run_until(world.now + 3 * GRACE_S)
    assert evicted(world, "a0") == (True, True)
    world.do(Op(world.now, "heal", "a0", others=("a2",)))
    world.run_until(world.now + 20.0)
    assert evicted(world, "a0")[0] is False, "it heard of it from a neighbour, and spoke again"


def test_a_site_without_any_hub_hears_at_once_and_one_with_a_hub_pays_no_more_for_it():
    octets = {}
    for linked in (False, True):
        world = World(8, hubs=2, agents=6, sites=1, site_links=linked, loss=0.0)
        world.run_until(10.0)
        before = world.octets
        world.nodes["a0"].publish_service(Lifecycle.SERVING, accepting=False)
        world.run_until(12.0)
        octets[linked] = world.octets - before
    assert octets[True] == octets[False], "hubs bring it; nobody else sends it"
    for hub in ("h0", "h1"):
        world.do(Op(12.0, "power", hub))
    world.run_until(20.0)
    world.nodes["a0"].publish_service(Lifecycle.DOWN)
    world.run_until(20.2)
    assert len(set(world.roots().values())) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio leaves it to the collector
@pytest.mark.asyncio
async def test_strangers_at_an_agents_door_are_few_and_a_neighbour_comes_in_when_they_are_gone(federation, monkeypatch):
    monkeypatch.setattr(door, "STRANGER_S", 60.0)  # on a busy machine it takes seconds until all have come
    agent, _ = federation.node("agent")
    port = await agent.listen("127.0.0.1", 0)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * door.STRANGERS_MAX)]
    await until(lambda: sum(reader.at_eof() for reader, _ in silent) >= door.STRANGERS_MAX)
    assert len(agent._door._strangers) == door.STRANGERS_MAX
    monkeypatch.setattr(door, "STRANGER_S", 0.0)
    neighbour, _ = federation.node("neighbour")
    neighbour.seek([HostPort("127.0.0.1", port)])
    await until(lambda: neighbour.neighbours == [agent.session])
    for _, writer in silent:
        writer.close()
    for each in (agent, neighbour):
        await each.close()
