"""More hubs than an agent keeps tunnels to: gateways reach the others' agents by them, and a hub needs no clients."""

import json
import os
import signal
import socket

import pytest

from tests.e2e.test_gateways import EAST, ONE, REPLICAS, WEST, ask, pids, providers, steady_load, until
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SOUTH = "  south: {cluster: two, listen: 127.0.0.1:%(south)s, mesh: 127.0.0.1:%(south_mesh)s}\n"
CORE = "  core: {cluster: two, mesh: 127.0.0.1:%(core)s}\n"


@pytest.fixture
def bed(fabric_bed):
    """With ports for all of them."""
    names = ("west", "west_mesh", "south", "south_mesh", "core")
    fabric_bed.write(**{name: free_port() for name in names})
    return fabric_bed


def gateways(*entries):
    return ONE.replace(EAST, "".join(entries))


def by_hubs(bed, name):
    """Of a gateway's nodes, those that it reaches by a hub."""
    document = json.loads(bed.run("status", "--json").stdout)["gateways"][name]
    return [node["node"] for node in document["nodes"] if node["role"] == "agent" and node["by"]]


def test_three_gateways_answer_for_agents_that_keep_tunnels_to_two(bed):
    names = ("listen", "west", "south")
    bed.write(blueprint=gateways(EAST, WEST, SOUTH))
    bed.up()
    addresses = [bed.values[name] for name in names]
    for port in addresses:
        until(lambda port=port: providers(port) == {"alpha", "beta"})
    until(lambda: sum(len(by_hubs(bed, name)) for name in ("east", "west", "south")) == 2)
    links = json.loads(bed.run("status", "--json").stdout)["units"]
    assert [unit["links"] for unit in links if unit["address"] in REPLICAS] == [2, 2], "no more than enough"
    with steady_load(addresses) as (answers, failures):
        for name in ("east", "west", "south"):
            enough = len(answers) + 20
            until(lambda enough=enough: len(answers) > enough)
            os.kill(pids(bed)[f"gateway/{name}"], signal.SIGKILL)
            enough = len(answers) + 20
            until(lambda enough=enough: len(answers) > enough)
            bed.run("reconcile")
    assert failures == []
    assert set(answers) == {"alpha", "beta"}
    for port in addresses:
        until(lambda port=port: providers(port) == {"alpha", "beta"})


def test_a_hub_has_no_clients_and_knows_no_keys(bed):
    bed.write(blueprint=gateways(EAST, CORE))
    bed.up()
    until(lambda: providers(bed.values["listen"]) == {"alpha", "beta"})
    [unit] = [unit for (address, _), unit in bed.units().items() if address == "gateway/core"]
    folder = next((bed.folder / "state").rglob(f"{unit.operation}/process.json")).parent
    assert not list(folder.rglob("keys.json"))
    assert b"tester" not in (folder / "spec.json").read_bytes()
    with socket.create_connection(("127.0.0.1", bed.values["core"])):
        """Agents and gateways find it."""
    table = bed.run("status").stdout
    assert f"a hub, agents 127.0.0.1:{bed.values['core']}" in table
    assert "http:///" not in table
    document = json.loads(bed.run("status", "--json").stdout)
    assert list(document["gateways"]) == ["east"]
    assert [row["links"] for row in document["units"] if row["address"] in REPLICAS] == [2, 2]
    # Without the hub the gateway goes on, and without the gateway the hub is no way in.
    with steady_load([bed.values["listen"]]) as (answers, failures):
        os.kill(pids(bed)["gateway/core"], signal.SIGKILL)
        enough = len(answers) + 20
        until(lambda: len(answers) > enough)
        bed.run("reconcile")
    assert failures == []
    plan = bed.run("plan").stdout
    assert "No changes" in plan, plan
    assert " hub " in bed.run("mesh", "members").stdout
    # A gateway that no agent dials, for it has two hubs already, asks them by those.
    bed.write(blueprint=gateways(EAST, CORE, WEST))
    bed.run("apply", "--yes")
    assert ask(bed.values["west"], "alpha")["provider"] == "alpha"


def test_a_fabric_of_hubs_alone_is_refused(bed):
    bed.write(blueprint=gateways(CORE))
    refused = bed.run("validate", code=65)
    assert "FT1246" in refused.stdout + refused.stderr
