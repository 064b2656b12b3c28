"""A site whose firewall lets its nodes reach a hub of another institution, and not the gateway that clients ask."""

import json
import sys

import pytest

from tests.bed.test_paths import REACH

pytestmark = pytest.mark.timeout(900)

CLIENTS, MESH, HUB = 8081, 8503, 8504
NO_WAY = """
table inet ftrelay {{
  chain forward_relay {{ type filter hook forward priority -1; ip daddr {gateway} tcp dport {mesh} counter drop
  }}
}}
"""


@pytest.fixture(scope="module")
def relayed(bed, make_federation):
    fed = make_federation("relayed")
    gateway, hub = bed.address("ing"), bed.address("host")
    bed.machine("a-gw").run(["nft", NO_WAY.format(gateway=gateway, mesh=MESH)])
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": "60m"}}),
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
        "host": fed.cluster("host", {"cpu": cpu}, kind="ssh"),
    }
    gateways = {
        "east": {"cluster": "ing", "listen": f"{gateway}:{CLIENTS}", "mesh": f"{gateway}:{MESH}"},
        "core": {"cluster": "host", "mesh": f"{hub}:{HUB}"},
    }
    pins = [{"cluster": name, "replicas": 1} for name in ("a", "b")]
    model = {"replicas": {"min": 2, "max": 2}, "place": {"pin": pins}}
    fed.write(clusters, {"tiny": model}, gateway=None, gateways=gateways)
    fed.gateway, fed.client_port = gateway, CLIENTS
    fed.up()
    yield fed
    bed.machine("a-gw").run(["nft", "delete table inet ftrelay"])


def answer_of(fed, site):
    return fed.ask("tiny", machine="op", **{"x-fabric-providers": f"p-{site}"})[0]


def nodes_by_hub(fed):
    nodes = json.loads(fed.run("status", "--json", code=None).stdout)["gateways"]["east"]["nodes"]
    return {node["cluster"] for node in nodes if node["role"] == "agent" and node["by"]}


def test_the_gateway_asks_what_it_cannot_be_reached_from(bed, relayed):
    argv = [sys.executable, "-c", REACH, bed.address("ing"), str(MESH)]
    assert bed.machine("a-n1").run(argv, check=False).returncode != 0
    for site in "ab":
        relayed.wait(f"site {site} does not answer", lambda site=site: answer_of(relayed, site) == "200")
    assert nodes_by_hub(relayed) == {"a"}


def test_without_the_hub_the_others_answer_and_with_it_all(bed, relayed):
    before = {name: unit["operation"] for name, unit in relayed.units().items() if name.startswith("replica/")}
    bed.machine("host").run(["pkill", "-KILL", "-f", "fabrictool[.]gateway"])
    relayed.wait("nobody noticed", lambda: answer_of(relayed, "a") == "503")
    assert answer_of(relayed, "b") == "200"
    relayed.run("reconcile")
    relayed.wait("site a does not answer", lambda: answer_of(relayed, "a") == "200")
    after = {name: unit["operation"] for name, unit in relayed.units().items() if name.startswith("replica/")}
    assert after == before
