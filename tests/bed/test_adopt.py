"""A server that somebody started in a job of their own: taken under the mesh, and let go again."""

import json
import sys

import pytest

pytestmark = pytest.mark.timeout(600)

PORT = 8123
JOB = f"""#!/bin/sh
#SBATCH --job-name=mine --time=30 --ntasks=1
exec {sys.executable} -m fabrictool.engines.reference --model %s --served-name borrowed --context 128 --port {PORT}
"""
URL = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def fed(make_federation):
    fed = make_federation("adopting")
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB"}
    clusters = {
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
    }
    fed.write(clusters, {"tiny": {"replicas": {"min": 1, "max": 1}}})
    fed.up()
    return fed


@pytest.fixture
def job(fed):
    """Somebody's job, with a server in it."""
    submitted = fed.bed.ssh("b-login", "sbatch --parsable --chdir=/tmp", stdin=JOB % fed.model)
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.strip()
    fed.wait("their job to run", lambda: fed.bed.job_state("b", number) == "RUNNING")
    yield number
    fed.bed.slurm("b", "scancel", number)


def test_a_server_in_a_job_is_adopted_and_released_and_the_job_goes_on(fed, job):
    adopted = json.loads(fed.run("adopt", "b", job, "--url", URL, "--json").stdout)
    assert (adopted["job"], adopted["ready"]) == (job, True)
    assert fed.ask("borrowed")[0] == "200"
    fed.wait("the gateway to have said so", lambda: "borrowed" in fed.run("status").stdout)
    assert f"joined/{adopted['session'][:8]}" in fed.run("mesh", "members").stdout
    assert "No changes" in fed.run("plan").stdout, "it belongs to its job"
    again = fed.run("adopt", "b", job, "--url", URL, code=None)
    assert again.returncode == 1
    assert "FT5423" in again.stderr
    assert f"the agent in job {job} leaves" in fed.run("adopt", "b", job, "--release").stdout
    fed.wait("the agent to leave", lambda: fed.ask("borrowed")[0] in ("404", "503"))
    keys = fed.bed.ssh("b-login", "find .fabrictool/adopted -name session.key")
    fed.wait("its key to be gone", lambda: not keys.stdout.split())
    assert fed.bed.job_state("b", job) == "RUNNING"
    assert "FT5422" in fed.run("adopt", "b", job, "--release", code=1).stderr
    fed.run("adopt", "b", job, "--url", URL, "--model", "borrowed")
    assert fed.ask("borrowed")[0] == "200", "a second time"


def test_what_cannot_be_adopted_is_said(fed, job):
    assert "FT5419" in fed.run("adopt", "b", "999999", code=65).stderr
    assert "FT5418" in fed.run("adopt", "ing", job, code=65).stderr
    assert "FT5341" in fed.run("adopt", "nowhere", job, code=64).stderr
    assert "FT6414" in fed.run("adopt", "b", job, "--url", "http://10.0.0.1:80", code=None).stderr
    wrong = fed.run("adopt", "b", job, "--url", URL, "--model", "another", "--wait", "20s", code=None)
    assert wrong.returncode == 1
    assert "it serves borrowed, not another" in wrong.stderr
    fed.run("adopt", "b", job, "--release", code=None)
