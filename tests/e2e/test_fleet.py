"""Any node answers for the mesh: a gateway and an agent tell the same, also of one that was killed."""

import json
import os
import signal
import time

import msgspec
import pytest

from fabrictool.status.fleet import FleetStatus
from tests.conftest import BLUEPRINT, INVENTORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def members(bed, *arguments):
    printed = json.loads(bed.run("mesh", "members", "--json", *arguments).stdout)
    return msgspec.convert(printed["document"], FleetStatus)


def until(answer, condition, seconds=60):
    """The first answer of which the condition is true."""
    end = time.monotonic() + seconds
    while not condition(view := answer()):
        assert time.monotonic() < end, view
        time.sleep(0.2)
    return view


def essence(view):
    return [(m.session, m.role, m.state, m.accusations, m.services) for m in view.members]


def test_a_gateway_and_an_agent_agree_and_tell_how_an_agent_was_lost(fabric_bed):
    fabric_bed.up()
    units = {address: unit for (address, state), unit in fabric_bed.units().items() if state == "running"}
    agent = units["replica/tiny/0"].status_url
    by_gateway, by_agent = members(fabric_bed), members(fabric_bed, "--url", agent)
    assert (by_gateway.role, by_agent.role) == ("gateway", "agent")
    assert by_gateway.root == by_agent.root
    assert essence(by_gateway) == essence(by_agent)
    assert sorted(m.role for m in by_agent.members) == ["agent", "agent", "gateway"]
    assert "All 3 that answer hold the same records" in fabric_bed.run("mesh", "convergence").stdout

    victim = next(m for m in by_gateway.members if m.services and m.services[0].replica == "tiny/1")
    os.kill(units["replica/tiny/1"].pid, signal.SIGKILL)

    def of_victim(*arguments):
        return next(m for m in members(fabric_bed, *arguments).members if m.session == victim.session)

    seen = until(of_victim, lambda member: member.accusations)
    assert (seen.state, seen.linked, seen.lost_how) == ("suspected", False, "closed")
    assert seen.lost_at is not None
    heard = until(lambda: of_victim("--url", agent), lambda member: member.accusations)
    assert (heard.state, heard.lost_at) == ("suspected", None), "an agent hears of it, and does not know since when"
    assert heard.accusations == seen.accusations
    told = fabric_bed.run("status", "--url", agent).stdout
    complaint = f"{by_gateway.session[:8]} (alpha) suspects it: its end closed the tunnel"
    assert f"{victim.session[:8]} (two/cpu): {complaint}" in told

    os.kill(units["gateway/main"].pid, signal.SIGKILL)
    survivor = members(fabric_bed)
    assert (survivor.session, survivor.role) == (by_agent.session, "agent"), "without a gateway an agent is asked"
    links = until(lambda: members(fabric_bed).links, lambda links: links[0].error)
    assert (links[0].up, "refused" in links[0].error) == (False, True)


def test_agents_of_one_site_keep_the_map_without_any_gateway(fabric_bed):
    fabric_bed.write(
        inventory=INVENTORY.replace("site: b", "site: a"), blueprint=BLUEPRINT.replace("{spread: site}", "{}")
    )
    fabric_bed.up()
    units = {address: unit for (address, state), unit in fabric_bed.units().items() if state == "running"}
    agents = [units[f"replica/tiny/{number}"].status_url for number in (0, 1)]
    os.kill(units["gateway/main"].pid, signal.SIGKILL)

    def site_links(url):
        printed = json.loads(fabric_bed.run("mesh", "paths", "--json", "--url", url).stdout)
        view = msgspec.convert(printed["document"], FleetStatus)
        agents_ = {member.session for member in view.members if member.role == "agent"}
        return [link for link in view.links if link.up and link.peer in agents_]

    links = [until(lambda url=url: site_links(url), bool) for url in agents]
    assert sorted(len([link for link in its if link.address]) for its in links) == [0, 1], "one of the two dials"
    same = until(
        lambda: fabric_bed.run("mesh", "convergence", "--url", agents[0], "--url", agents[1]).stdout,
        lambda text: "All 2 that answer hold the same records" in text,
    )
    assert "agent" in same
    shown = fabric_bed.run("mesh", "paths", "--url", agents[0]).stdout
    assert f"127.0.0.1:{fabric_bed.values['mesh']}" in shown
    os.kill(units["replica/tiny/1"].pid, signal.SIGKILL)
    until(lambda: site_links(agents[0]), lambda left: not left)
