"""`spread: node` on a real Slurm, which puts small jobs on one node as long as it has room."""

import pytest

pytestmark = pytest.mark.timeout(600)

REPLICAS = ("replica/tiny/0", "replica/tiny/1")


@pytest.fixture(scope="module")
def fed(make_federation):
    return make_federation("apart")


def write(fed, place):
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB", "job": {"cpus_per_device": 1}}
    clusters = {
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}}, kind="ssh"),
    }
    model = {"replicas": {"min": 2, "max": 2}, "place": place | {"pin": [{"cluster": "b", "replicas": 2}]}}
    fed.write(clusters, {"tiny": model}, client_port=8102, mesh_port=8502)


def jobs(fed):
    """Replica → state, node and excluded nodes of its job, by Slurm's own words."""
    lines = fed.bed.slurm("b", "squeue", "-h", "-t", "PD,R", "-o", "%T|%N|%x|%A|%k").stdout.splitlines()
    mine = [line.split("|") for line in lines if f";dep={fed.name};" in line]
    return {comment.split("rep=")[1].split(";")[0]: tuple(rest) for *rest, comment in mine}


def nodes_of(fed):
    return {replica: node for replica, (state, node, *_) in jobs(fed).items() if state == "RUNNING"}


def all_apart(fed):
    nodes = nodes_of(fed)
    return len(jobs(fed)) == len(nodes) == len(set(nodes.values())) == 2


def kinds(plan):
    return sorted(action["kind"] for action in plan["actions"] if action["address"] in REPLICAS)


def test_replicas_that_would_share_a_node_are_on_two(fed):
    write(fed, {})
    assert any("`place: {spread: node}`" in text for text in (fed.run("trust", "init"), fed.plan())[1]["warnings"])
    fed.run("apply", "--yes")
    before = nodes_of(fed)
    assert before.keys() == set(REPLICAS)
    assert len(set(before.values())) == 1, "without the rule Slurm packs them"

    write(fed, {"spread": "node"})
    assert kinds(fed.plan()) == ["replace", "update"], "one of them stays"
    fed.run("apply", "--yes")
    fed.wait("they are apart", lambda: all_apart(fed))
    after = nodes_of(fed)
    print("before:", before, "after:", after, "jobs:", jobs(fed))
    assert after[REPLICAS[0]] == before[REPLICAS[0]]
    assert jobs(fed)[REPLICAS[1]][2] == before[REPLICAS[1]], "what its job leaves out"
    assert kinds(fed.plan()) == ["keep", "keep"]
    fed.wait("all serve", lambda: fed.status()["good"])


def test_one_that_is_lost_waits_for_its_own_node_and_goes_nowhere_else(fed):
    bed, node = fed.bed, nodes_of(fed)[REPLICAS[1]]
    bed.slurm("b", "scontrol", "update", f"nodename={node}", "state=drain", "reason=test", root=True)
    try:
        bed.slurm("b", "scancel", jobs(fed)[REPLICAS[1]][3], root=True)
        fed.wait("it is gone", lambda: REPLICAS[1] not in jobs(fed))
        warned = fed.plan()["warnings"]
        print(warned)
        assert any(f"{REPLICAS[1]} waits until a node is back: part" in text and node in text for text in warned)
        fed.run("reconcile", code=None)
        fed.wait("its job waits", lambda: jobs(fed).get(REPLICAS[1], ("",))[0] == "PENDING")
        print("jobs:", jobs(fed))
        assert nodes_of(fed).keys() == {REPLICAS[0]}
    finally:
        bed.slurm("b", "scontrol", "update", f"nodename={node}", "state=resume", root=True)
    fed.wait("they are apart again", lambda: all_apart(fed))
    assert nodes_of(fed)[REPLICAS[1]] == node
