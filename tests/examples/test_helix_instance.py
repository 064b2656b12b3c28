"""Helix's three files: what is read, what it becomes, and what is said of mistakes."""

import pytest

from examples.helix.instance import (
    HelixCluster,
    HelixNode,
    Profile,
    Wire,
    documents,
    read_cluster,
    read_layout,
    read_profiles,
)
from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.blueprint import Blueprint
from fabrictool.domain.inventory import Inventory
from fabrictool.planner.build import build_problem
from fabrictool.planner.solvers.exact import ExactSolver

CLUSTER = """\
# made up
[NodeNames]
total_compute_nodes=4
[SourceNode]
connected_nodes=[0]
[ComputeNode-0]
type=A100
connected_nodes=['source', 1]
[ComputeNode-1]
type=A100
[ComputeNode-2]
type=T4
[ComputeNode-3]
type=L4x2
[Link-source-0]
bandwidth=14.2 * mbps
latency=55 * MilliSec
[Link-0-1]
bandwidth=1300 * mbps
latency=1 * MilliSec
[Link-0-2]
bandwidth=10 * mbps
latency=40 * MilliSec
[Link-1-2]
bandwidth=14 * mbps
latency=60 * MilliSec
[Link-2-3]
bandwidth=130 * mbps
latency=1 * MilliSec
"""
PROFILES = """\
[SourceNode]
vram_size = -1
[T4]
vram_size = 16 * GB
[L4x2]
vram_size = 48 * GB
[A100]
disk_speed = 1 * gbps
vram_size = 40 * GB
"""
LAYOUT = """\
[Settings]
offset=2
[Solution]
compute_node_2=[0, 1, 2]
compute_node_4=[3]
"""


def test_a_cluster_is_read():
    cluster = read_cluster("c.ini", CLUSTER)
    assert cluster.nodes == (HelixNode(0, "A100"), HelixNode(1, "A100"), HelixNode(2, "T4"), HelixNode(3, "L4x2"))
    assert cluster.wires[0] == Wire((0, 1), 1.3e9, 1e-3)
    assert len(cluster.wires) == 4, "none to the coordinator"
    assert [[node.number for node in region] for region in cluster.regions] == [[0, 1], [2, 3]]


def test_regions_are_joined_through_others():
    nodes = tuple(HelixNode(i, "T4") for i in range(5))
    cluster = HelixCluster(nodes, (Wire((3, 4), 1e9, 1e-3), Wire((1, 3), 1e9, 1e-3), Wire((0, 2), 1e9, 1e-3)))
    assert [[node.number for node in region] for region in cluster.regions] == [[0, 2], [1, 3, 4]]


def test_profiles_and_layout_are_read():
    assert read_profiles("m.ini", PROFILES) == {
        "T4": Profile(1, 16e9), "L4x2": Profile(2, 48e9), "A100": Profile(1, 40e9),
    }  # fmt: skip
    assert read_layout("l.ini", LAYOUT, read_cluster("c.ini", CLUSTER)) == {0: (0, 2), 2: (3, 3)}


def made():
    cluster = read_cluster("c.ini", CLUSTER)
    return documents(cluster, read_profiles("m.ini", PROFILES), read_layout("l.ini", LAYOUT, cluster))


def test_the_documents_are_ours():
    found = made()
    inventory = Inventory.model_validate(found.inventory)
    partitions = {name: cluster.partitions["gpu"] for name, cluster in inventory.clusters.items()}
    assert {name: (p.device, p.devices_per_node, p.nodes, p.network) for name, p in partitions.items()} == {
        "region-0-a100": ("a100-40g", 1, 2, "ethernet-10g"),
        "region-1-t4": ("t4", 1, 1, "ethernet-1g"),
        "region-1-l4x2": ("l4", 2, 1, "ethernet-1g"),
    }
    (link,) = inventory.links
    assert set(link.between) == {"region-0", "region-1"}
    assert (float(link.bandwidth), float(link.latency)) == pytest.approx((12e6, 0.05))
    assert found.layers == {"region-0-a100": [[0, 2]], "region-1-t4": [[3, 3]], "region-1-l4x2": []}
    assert Blueprint.model_validate(found.blueprint).models["llama-2-70b"].replicas.max == 5


def test_the_documents_can_be_planned():
    text = CLUSTER.replace("total_compute_nodes=4", "total_compute_nodes=8")
    text += "".join(
        f"[ComputeNode-{i}]\ntype=A100\n[Link-0-{i}]\nbandwidth=1250*mbps\nlatency=1*MilliSec\n" for i in range(4, 8)
    )
    cluster = read_cluster("c.ini", text)
    found = documents(cluster, read_profiles("m.ini", PROFILES), {})
    problem, _ = build_problem(
        Blueprint.model_validate(found.blueprint), Inventory.model_validate(found.inventory),
        usable=list(found.inventory["clusters"]), unseen=(), current={},
    )  # fmt: skip
    *_, solution = ExactSolver().solve(problem, deadline_s=10, seed=0)
    used = {problem.options[i].pool.cluster: problem.options[i].pp for i in solution.counts}
    assert list(used) == ["region-0-a100"]
    assert used["region-0-a100"] in (4, 6)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("# made up", "stray", 1, "neither a section"),
        ("# made up", "stray = 1", 1, "neither a section"),
        ("type=T4", "", 11, "[ComputeNode-2] lacks type"),
        ("14 * mbps", "14 * furlongs", 25, "14 * furlongs"),
        ("14 * mbps", "-1", 25, "'-1' is not a positive number"),
        ("14 * mbps", "", 25, "'' is not a positive number"),
        ("latency=60 * MilliSec\n", "", 24, "[Link-1-2] lacks latency"),
        ("nodes=4", "nodes=7", 3, "7 nodes are announced, and 4 described"),
        ("[Link-2-3]", "[Link-2-9]", 27, "not described"),
    ],
)
def test_mistakes_in_a_cluster_have_a_place(old, new, line, words):
    assert old in CLUSTER
    with pytest.raises(InvalidInputError) as caught:
        read_cluster("c.ini", CLUSTER.replace(old, new, 1))
    (problem,) = caught.value.problems
    assert (problem.code, problem.place.file, problem.place.line) == ("FT2025", "c.ini", line)
    assert words in problem.message
    assert problem.hint


def test_all_mistakes_are_said_at_once():
    with pytest.raises(InvalidInputError) as caught:
        read_cluster("c.ini", CLUSTER.replace("type=T4", "").replace("nodes=4", "nodes=x"))
    assert [problem.place.line for problem in caught.value.problems] == [3, 11]
    with pytest.raises(InvalidInputError, match="lacks total_compute_nodes"):
        read_cluster("c.ini", "")
    with pytest.raises(InvalidInputError, match="vram_size"):
        read_profiles("m.ini", PROFILES.replace("48 * GB", "48"[:0]))


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("offset=2", "offset=two", 2, "not a whole number"),
        ("[3]", "[3, 5]", 5, "layers do not follow each other"),
        ("[3]", "3", 5, "layers do not follow each other"),
        ("node_4", "node_9", 5, "not a node of the cluster"),
        ("node_4", "node_1", 5, "not a node of the cluster"),
        ("compute_node_4", "four", 5, "not a node of the cluster"),
    ],
)
def test_mistakes_in_a_layout_have_a_place(old, new, line, words):
    with pytest.raises(InvalidInputError) as caught:
        read_layout("l.ini", LAYOUT.replace(old, new, 1), read_cluster("c.ini", CLUSTER))
    assert (caught.value.problems[0].code, caught.value.problems[0].place.line) == ("FT2025", line)
    assert words in caught.value.problems[0].message


def test_a_layout_of_nothing_is_none():
    with pytest.raises(InvalidInputError, match="no node has layers"):
        read_layout("l.ini", "[Settings]\noffset=2\n", read_cluster("c.ini", CLUSTER))


def test_machines_have_to_be_in_profiles_and_catalogue():
    cluster = read_cluster("c.ini", CLUSTER)
    profiles = read_profiles("m.ini", PROFILES)
    with pytest.raises(InvalidInputError, match="FT2026: no machine profile is called T4"):
        documents(cluster, {name: one for name, one in profiles.items() if name != "T4"}, {})
    with pytest.raises(InvalidInputError, match="no device of the catalogue is a T4"):
        documents(cluster, profiles | {"T4": Profile(1, 17e9)}, {})
