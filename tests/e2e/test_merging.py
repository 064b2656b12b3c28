"""A replica of two base engines that merge, from the plan to its answer: real processes of the reference engine."""

import json
from pathlib import Path

import pytest

from fabrictool.engines.reference.shared_sum import ORDERED
from tests.conftest import BLUEPRINT, INVENTORY
from tests.e2e.test_apply import ask, children

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ORDERED, reason="replicas merge on x86-64 only"),
]

TWO_DEVICES = INVENTORY.replace("nodes: 1, memory", "nodes: 1, devices_per_node: 2, memory")


def merging(number):
    return BLUEPRINT.replace("    place: {spread: site}", f"    parallelism: {{dp: {number}}}")


def engine_of(pid):
    """The command line of an agent's engine."""
    lines = [Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0") for child in children(pid)]
    (line,) = [line for line in lines if "fabrictool.engines.reference" in line]
    return line


def test_two_base_engines_are_started_serve_and_are_replaced_by_a_single_one(fabric_bed):
    bed = fabric_bed
    bed.write(TWO_DEVICES, merging(2), replicas=1)
    assert "2 merging engines of 1×cpu" in bed.run("plan", "--assume-empty").stdout
    bed.up()
    assert ask(bed)["usage"]["completion_tokens"] <= 2
    agent = bed.units()["replica/tiny/0", "running"]
    line = engine_of(agent.pid)
    assert line[line.index("--replicas") + 1] == "2"
    nodes = json.loads(bed.run("status", "--json").stdout)["gateway"]["nodes"]
    assert [(service["tp"], service["dp"]) for node in nodes for service in node["services"]] == [(1, 2)]
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout

    bed.write(TWO_DEVICES, merging(1))
    assert "Plan: 1 create, 1 update, 0 replace, 1 delete" in bed.run("plan", "--detailed-exitcode", code=2).stdout
    bed.run("apply", "--yes")
    assert ask(bed)["usage"]["completion_tokens"] <= 2
    agent = bed.units()["replica/tiny/1", "running"]
    assert "--replicas" not in engine_of(agent.pid)
