"""Jobs that end when nobody asks for what they serve, and are submitted again, into a queue that others fill, too."""

import json
import signal
import sys

import pytest

from tests.bed.federation import KEY

pytestmark = pytest.mark.timeout(600)

REPLICA = "replica/tiny/0"
ASK = """
import json, sys, urllib.request
body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
headers = {"authorization": "Bearer " + sys.argv[2], "content-type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(), headers)
try:
    with urllib.request.urlopen(request, timeout=120) as answer:
        print(json.dumps([answer.status, None, ""]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.headers["retry-after"], json.load(error)["error"]["fabric_code"]]))
"""
FULL_MINUTES = 4


@pytest.fixture(scope="module")
def fed(make_federation):
    fed = make_federation("dormant")
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
    }
    fed.write(clusters, {"tiny": {"replicas": {"min": 0, "max": 1, "idle_after": "15s", "hold": "90s"}}})
    fed.up()
    return fed


@pytest.fixture
def full_queue(fed):
    """Other people's jobs on every node of the partition, which may run for minutes."""
    script = "#!/bin/bash\nsleep 600\n"
    options = ["--exclusive", "-N2", "-p", "normal", f"--time={FULL_MINUTES}", "--parsable"]
    submitted = fed.bed.ssh("b-login", "sbatch", *options, stdin=script)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    fed.wait("their job to run", lambda: fed.bed.job_state("b", job) == "RUNNING")
    yield job
    fed.bed.slurm("b", "scancel", job)


def ask(fed):
    """Status, retry-after and code."""
    argv = [sys.executable, "-c", ASK, f"http://{fed.gateway}:{fed.client_port}", KEY]
    done = fed.bed.machine("ing").run(argv, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until_dormant(fed):
    fed.wait("the job to end", lambda: fed.units()[REPLICA]["state"] == "dormant", within_s=90)


def test_the_job_ends_and_a_request_brings_it_back(fed):
    assert ask(fed)[0] == 200
    job = fed.units()[REPLICA]["job"]
    until_dormant(fed)
    fed.wait("the allocation to be free", lambda: fed.bed.job_state("b", job) == "COMPLETED")
    watching = fed.start("reconcile", "--watch", "--interval", "2s")
    try:
        assert ask(fed) == [200, None, ""]
        assert fed.units()[REPLICA]["job"] not in ("", job)
    finally:
        watching.send_signal(signal.SIGINT)
        output = watching.communicate(timeout=60)
    assert watching.returncode == 0, output


def test_while_others_have_the_nodes_a_client_is_told_when_to_come_again(fed, full_queue):
    fed.wait("the next job to end", lambda: fed.units()[REPLICA]["state"] == "dormant", within_s=90)
    text = (fed.folder / "blueprint.yaml").read_text().replace('"hold": "90s"', '"hold": "3s"')
    (fed.folder / "blueprint.yaml").write_text(text)
    applied = fed.run("apply", "--yes")
    assert "1 update, 0 replace, 0 delete, 1 keep" in applied.stdout, "it is told while it serves; nothing is started"
    status, _, code = ask(fed)
    assert (status, code) == (503, "FT8116")
    fed.run("reconcile", code=None)
    assert fed.units()[REPLICA]["state"] == "pending"

    def told():
        fed.run("reconcile", code=None)  # which hears what the scheduler expects, and tells the gateway
        status, again, _ = ask(fed)
        return status == 503 and 60 < int(again) < 60 * FULL_MINUTES + 300

    fed.wait("the scheduler's estimate", told, within_s=60)
    fed.bed.slurm("b", "scancel", full_queue)
    fed.wait("an answer", lambda: ask(fed)[0] == 200, within_s=90)
