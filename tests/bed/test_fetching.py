"""Weights fetched by a job of a real Slurm site from a fake hub: killed, interrupted, gone on with, served from."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import fake_hub
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

LARGE = 48 << 20
PORT = 8497
"""And the next, on the machine of the gateway."""


@pytest.fixture(scope="module")
def from_a_hub(make_federation, bed, shared_model):
    fed = make_federation("fetched")
    large = shared_model.parent / "large.safetensors"
    large.write_bytes(random.Random().randbytes(LARGE))
    large.chmod(0o644)
    # By its text: the machine's user may not see this repository.
    argv = [sys.executable, "-c", Path(fake_hub.__file__).read_text(), fed.gateway, str(PORT), "0.25"]
    hub = bed.machine("ing").popen([*argv, str(shared_model), str(large)], stdout=subprocess.PIPE)
    assert hub.stdout.readline() == "ready\n"
    fed.environment["HF_ENDPOINT"] = f"http://{fed.gateway}:{PORT}"
    (fed.folder / "blueprint.yaml").write_text("")
    source = f"hf://{fake_hub.REPOSITORY}"
    locked = json.loads(fed.run("weights", "lock", "tiny", source, "--json").stdout)
    fed.digest = locked["sha256"]
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    folder = {"weights": "/home/alice/models", "weights_from": "job"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": "60m"}}, **folder),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
    }
    model = {"source": "weights://tiny/tiny.gguf", "replicas": {"min": 1, "max": 1}}
    pinned = {"tiny": {"source": locked["source"], "sha256": fed.digest}}
    fed.write(clusters, {"tiny": model}, weights=pinned)
    fed.run("trust", "init")
    yield fed
    hub.kill()
    hub.wait()
    hub.stdout.close()
    large.unlink()


def stored(fed):
    file = f"/home/alice/models/part-sha256-{fed.digest}/large.safetensors.part"
    return int(fed.bed.machine("a-login").run(["stat", "-c", "%s", file], check=False).stdout or 0)


def jobs(fed):
    """Of those that fetch: the living."""
    listed = fed.bed.slurm("a", "squeue", "-h", "-t", "PD,R,CG", "-o", "%j").stdout.split()
    return [name for name in listed if name.startswith("ft-weights-")]


def begun(fed):
    """A command that stages, in the middle of the large file."""
    before, staging = stored(fed), fed.start("weights", "stage")
    wait_until("part of the file", lambda: stored(fed) > before + (4 << 20) or staging.poll() is not None, within_s=120)
    assert staging.poll() is None, staging.communicate()
    return staging


def test_interrupted_its_job_is_cancelled_and_what_arrived_is_kept(from_a_hub):
    staging = begun(from_a_hub)
    staging.send_signal(signal.SIGINT)
    staging.communicate(timeout=60)
    assert staging.returncode == 130
    wait_until("the end of the job", lambda: not jobs(from_a_hub), within_s=60)
    assert 0 < stored(from_a_hub) < LARGE
    shown = json.loads(from_a_hub.run("weights", "plan", "a", "--json").stdout)["sets"][0]
    assert (shown["condition"], shown["from"]) == ("partial", "job")
    assert shown["missing"] < LARGE


def test_killed_its_job_goes_on_and_the_next_command_awaits_it_and_serves(from_a_hub):
    staging = begun(from_a_hub)
    staging.kill()
    staging.communicate()
    (job,) = jobs(from_a_hub)
    assert "tiny: staged on a" in from_a_hub.run("apply", "--yes", "--stage").stderr
    names = from_a_hub.bed.slurm("a", "sacct", "-n", "-X", "-P", "-o", "JobName").stdout.split()
    assert [name for name in names if name.startswith("ft-weights-")][-1] == job, "no second one was submitted"
    assert from_a_hub.ask("tiny")[0] == "200"
    left = from_a_hub.bed.machine("a-login").run(["ls", "-A", "/home/alice/models"]).stdout.split()
    assert left == [f"sha256-{from_a_hub.digest}"]
