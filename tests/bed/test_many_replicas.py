"""Two hundred replicas at once: one connection's worth of commands, and one look a cluster and interval."""

import json
import re

import pytest

COUNT = 200


@pytest.fixture
def many(bed, make_federation):
    fed = make_federation("many")
    cpu = {"device": "cpu", "nodes": COUNT, "memory_per_node": "4 GiB", "walltime": "60m"}
    fed.write(
        {"a": fed.cluster("a", {"normal": cpu}, poll="2 s")},
        {"tiny": {"replicas": {"min": COUNT, "max": COUNT}}},
        gateway=None,
        tenants=None,
    )
    name = bed.maintenance("a", 1, 3600)  # so that no job starts: the machine could not carry two hundred agents
    fed.wait("the nodes are not reserved", lambda: "MAINT" in bed.slurm("a", "sinfo", "-h", "-o", "%T").stdout.upper())
    yield fed
    fed.run("destroy", "--yes", code=None)
    bed.end_maintenance("a", name)


def logins(bed):
    log = next((bed.root / "m/a-login").rglob("sshd-22.out")).read_text()
    return log.count("Accepted publickey for alice")


def calls(bed):
    """RPC → how often the controller was asked by alice's commands."""
    text = bed.slurm("a", "sdiag", root=True).stdout
    by_type = text.partition("by message type")[2].partition("by user")[0]
    return {name: int(count) for name, count in re.findall(r"(REQUEST_\w+)\s+\(\s*\d+\) count:(\d+)", by_type)}


def grown(before, after):
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def test_two_hundred_replicas_cost_three_connections_and_one_batch(bed, many):
    many.run("trust", "init")
    before, connections = calls(bed), logins(bed)
    done = many.run("apply", "--yes", "--no-wait", "--json", timeout=280)
    used, asked = logins(bed) - connections, grown(before, calls(bed))
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sum(event["type"] == "queued" for event in events) == COUNT
    assert bed.slurm("a", "squeue", "-h", "--me", "-t", "PD", "-o", "%k").stdout.count(";dep=many;") == COUNT
    assert used <= 3, used
    assert asked["REQUEST_SUBMIT_BATCH_JOB"] == COUNT
    looks = asked.get("REQUEST_JOB_INFO", 0) + asked.get("REQUEST_JOB_USER_INFO", 0)
    assert looks <= 10, asked

    before, connections = calls(bed), logins(bed)
    assert [a["kind"] for a in many.plan()["actions"]] == ["keep"] * COUNT
    assert logins(bed) - connections == 1
    asked = grown(before, calls(bed))
    assert asked.get("REQUEST_JOB_INFO", 0) + asked.get("REQUEST_JOB_USER_INFO", 0) <= 2, asked

    before, connections = calls(bed), logins(bed)
    many.run("destroy", "--yes", timeout=280)
    assert logins(bed) - connections <= 3
    asked = grown(before, calls(bed))
    assert asked.get("REQUEST_JOB_INFO", 0) + asked.get("REQUEST_JOB_USER_INFO", 0) <= 10, asked
    assert ";dep=many;" not in bed.slurm("a", "squeue", "-h", "--me", "-o", "%k").stdout
