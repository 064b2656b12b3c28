"""Weights staged over SSH on a real Slurm site: broken off, gone on with, damaged, mended, served from."""

import json
import random
import re
import time

import pytest

pytestmark = pytest.mark.timeout(600)

LARGE = 160 << 20
"""Five parts of an upload."""


FLIP = """
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(4000)
    octet = file.read(1)[0]
    file.seek(4000)
    file.write(bytes([octet ^ 1]))
"""


@pytest.fixture(scope="module")
def pinned(make_federation):
    fed = make_federation("weights")
    files = fed.folder / "files"
    files.mkdir()
    (files / "tiny.gguf").write_bytes(fed.model.read_bytes())
    (files / "large.bin").write_bytes(random.Random().randbytes(LARGE))
    (fed.folder / "blueprint.yaml").write_text("")
    fed.digest = json.loads(fed.run("weights", "lock", "tiny", str(files), "--json").stdout)["sha256"]
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": "60m"}}, weights="/home/alice/models"),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
    }
    model = {"source": "weights://tiny/tiny.gguf", "replicas": {"min": 1, "max": 1}}
    fed.write(clusters, {"tiny": model}, weights={"tiny": {"source": "files", "sha256": fed.digest}})
    fed.run("trust", "init")
    return fed


def at_site(fed, *argv):
    return fed.bed.machine("a-login").run(argv, check=False).stdout


def jobs(fed):
    """As the controller knows them: the accounting hears of a job later, and on a busy machine seconds later."""
    return set(fed.bed.slurm("a", "squeue", "-h", "-t", "all", "-o", "%A").stdout.split())


def test_killed_in_the_middle_it_goes_on_and_is_served_from(pinned):
    part = f"/home/alice/models/part-sha256-{pinned.digest}/large.bin.part"
    staging = pinned.start("weights", "stage")
    deadline = time.monotonic() + 120
    while int(at_site(pinned, "stat", "-c", "%s", part) or 0) < LARGE // 5:
        assert staging.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    staging.kill()
    staging.communicate()
    stored = int(at_site(pinned, "stat", "-c", "%s", part))
    assert stored < LARGE
    assert "in part only" in pinned.run("apply", "--yes", code=4).stderr
    shown = json.loads(pinned.run("weights", "plan", "--json").stdout)["sets"]
    assert shown[0]["condition"] == "partial"
    assert shown[0]["missing"] <= LARGE - stored + (1 << 20)
    assert "tiny: staged on a" in pinned.run("weights", "stage").stderr
    pinned.run("apply", "--yes")
    assert pinned.ask("tiny")[0] == "200"
    assert re.search(r"a +tiny +sha256-\w+ +\d+ MiB +whole +1", pinned.run("weights", "list").stdout)


def test_a_damaged_file_is_caught_before_a_job_starts_and_mended(pinned):
    pinned.run("destroy", "--yes")
    file = f"/home/alice/models/sha256-{pinned.digest}/tiny.gguf"
    pinned.bed.machine("a-login").run(["python3", "-c", FLIP, file])
    before = jobs(pinned)
    refused = pinned.run("apply", "--yes", code=4).stderr
    assert "FT5605" in refused
    assert "tiny.gguf" in refused
    assert jobs(pinned) <= before, "a job was submitted"
    assert "tiny on a: damaged: tiny.gguf" in pinned.run("weights", "verify", code=1).stdout
    pinned.run("weights", "stage")
    pinned.run("apply", "--yes")
    assert pinned.ask("tiny")[0] == "200"
