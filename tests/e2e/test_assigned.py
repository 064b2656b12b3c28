"""Nodes that joined without a model take part in `plan` and `apply`: assigned, healed, taken back."""

import json
import signal

import pytest

from tests.conftest import BLUEPRINT, INVENTORY
from tests.e2e.test_idle import idle_members
from tests.e2e.test_join import Contributor, answers, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

JOINED = """\
  given:
    site: b
    kind: joined
    partitions: {cpu: {device: cpu, nodes: 4, memory_per_node: 1GiB}}
"""
BORROWED = """\
  borrowed:
    source: file://%(model)s
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: %(precision)s, context: 128 tok}
    replicas: {min: %(borrowed)s, max: %(borrowed)s}
    place: {pin: [{cluster: given, replicas: %(borrowed)s}]}
trust: {groups"""
WITH_BORROWED = BLUEPRINT.replace("trust: {groups", BORROWED)


@pytest.fixture
def side(fabric_bed):
    fabric_bed.write(INVENTORY + JOINED, replicas=1, borrowed=1)
    fabric_bed.up()
    side = Contributor(fabric_bed)
    side.start_issuer()
    side.token("token", "--uses", "3")
    yield side
    side.clean_up()


def join(side, name, *options):
    before = len(idle_members(side.bed))
    job = side.join(name, "token", "--idle", "--cluster", "given", *options)
    wait_for(lambda: len(idle_members(side.bed)) > before, job)
    return job


def unit(bed, address="replica/borrowed/0"):
    rows = json.loads(bed.run("status", "--json", code=None).stdout)["units"]
    return next((row for row in rows if row["address"] == address), None)


def test_apply_assigns_a_model_to_an_idle_node_and_takes_it_back(side):
    bed = side.bed
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout
    bed.write(INVENTORY + JOINED, WITH_BORROWED)
    assert "FT2004" in bed.run("plan", code=None).stderr, "nobody has joined yet"

    job = join(side, "job")
    (member,) = idle_members(bed)
    planned = bed.run("plan", "--detailed-exitcode", code=2).stdout
    assert "assigned to a node that joined idle" in planned
    bed.run("apply", "--yes")
    assert answers(bed) == "beta"
    assert idle_members(bed) == []
    row = unit(bed)
    assert (row["cluster"], row["state"], row["ready"], row["engine"]) == ("given", "running", True, "ready")
    assert member.session[:8] in row["detail"]
    status = json.loads(bed.run("status", "--json").stdout)
    assert [m["missing"] for m in status["gateway"]["models"]] == [[], []], "its records bear the plan's name"
    again = bed.run("plan", "--detailed-exitcode").stdout
    assert "No changes" in again

    bed.write(INVENTORY + JOINED, BLUEPRINT)
    assert "its node is idle again then" in bed.run("plan").stdout
    bed.run("apply", "--yes")
    assert answers(bed) == ""
    assert [m.session for m in idle_members(bed)] == [member.session], "the node stays, and waits again"
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout
    assert unit(bed) is None
    assert job.poll() is None


def test_a_node_that_leaves_is_followed_by_another_and_one_that_refuses_says_why(side):
    bed, model = side.bed, side.bed.values["model"]
    refusing = join(side, "refusing", "--allow", "hf://nobody/*")
    bed.write(INVENTORY + JOINED, WITH_BORROWED)
    failed = bed.run("apply", "--yes", code=None)
    assert failed.returncode != 0
    assert "FT5105" in failed.stderr
    assert f"the source 'file://{model}' is not allowed here" in failed.stderr
    assert refusing.poll() is None
    assert answers(bed, "tiny"), "what served goes on"

    first = join(side, "first")
    bed.run("apply", "--yes")
    assert answers(bed) == "beta"
    refusing.send_signal(signal.SIGTERM)
    assert refusing.wait(60) == 0
    join(side, "second")
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0
    assert answers(bed) == ""
    drifted = bed.run("reconcile", "--dry-run", code=None)
    assert "replica/borrowed/0 ended: its node" in drifted.stdout + drifted.stderr
    bed.run("reconcile")
    assert answers(bed) == "beta"
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout

    bed.run("destroy", "--yes")
    assert bed.running() == []


def test_without_a_controller_nothing_is_assigned_and_an_accepted_one_is_enough(side):
    bed = side.bed
    job = join(side, "job")
    bed.write(INVENTORY + JOINED, WITH_BORROWED)
    key = bed.folder / "state/t/trust/providers/beta.key"
    key.rename(bed.folder / "beta.key")
    assert "FT6109" in bed.run("plan", "-o", "saved.plan").stdout
    refused = bed.run("apply", "--yes", code=None)
    assert refused.returncode != 0
    assert "FT6109" in refused.stderr
    assert len(idle_members(bed)) == 1
    bed.run("trust", "controller", "beta", "--trust", str(bed.folder / "beta" / "trust"), "-o", "controller")
    assert "controller of beta kept" in bed.run("trust", "accept", "controller").stderr

    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
    left = bed.run("apply", "saved.plan", "--yes", code=None)
    assert left.returncode != 0
    assert "FT5417" in left.stderr, "who was there when it was planned is gone"
    assert answers(bed, "tiny")
    join(side, "again")
    bed.run("apply", "--yes")
    assert answers(bed) == "beta"
