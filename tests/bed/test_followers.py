"""Jobs that submit the next one by themselves: the operator's machine does nothing meanwhile."""

import json
import threading

import pytest

from tests.bed.test_dormant import ask

pytestmark = pytest.mark.timeout(600)

REPLICA = "replica/tiny/0"
WALLTIME = "3m"
"""Of which two minutes may be spent on two jobs at once: the next one comes after one."""


@pytest.fixture(scope="module")
def fed(make_federation):
    fed = make_federation("followers")
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB"}
    clusters = {
        "b": fed.cluster("b", {"normal": cpu | {"walltime": WALLTIME, "job": {"successors": 2}}}),
        "ing": fed.cluster("ing", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
    }
    fed.write(
        clusters, {"tiny": {"replicas": {"min": 1, "max": 1}, "place": {"pin": [{"cluster": "b", "replicas": 1}]}}}
    )
    fed.up()
    return fed


class Client(threading.Thread):
    """Asks one thing after another."""

    def __init__(self, fed):
        super().__init__()
        self.fed, self.over, self.answers = fed, threading.Event(), []

    def run(self):
        while not self.over.wait(0.5):
            self.answers.append(ask(self.fed))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


def listed(fed):
    """What lies in the folder of the units, keys and what is prepared included."""
    found = fed.bed.ssh("b-login", "find .fabrictool/units -name session.key")
    return sorted(line.split("/units/")[1] for line in found.stdout.split())


def test_a_job_is_followed_without_an_operator_and_no_request_fails(fed):
    first = fed.units()[REPLICA]
    with Client(fed) as client:
        fed.wait("the next job", lambda: fed.units()[REPLICA]["job"] not in ("", first["job"]), within_s=180)
        fed.wait("the former one to leave", lambda: fed.bed.job_state("b", first["job"]) == "COMPLETED", within_s=120)
        second = fed.units()[REPLICA]
        assert second["state"] == "running"
    assert len(client.answers) > 20
    assert [answer for answer in client.answers if answer[0] != 200] == []
    events = fed.run("logs", REPLICA, "--lines", "400").stdout
    assert "next-job" not in events, "the next one has submitted none yet"
    looked = fed.run("reconcile", "--dry-run", code=None).stdout
    assert "1 of 2 jobs that may follow it are prepared" in looked
    fed.run("reconcile")
    fed.wait("both to be prepared again", lambda: len([key for key in listed(fed) if "/next/" in key]) == 2)
    assert "No changes" in fed.run("plan").stdout
    assert fed.units()[REPLICA]["job"] == second["job"], "it was told while it served"


def test_what_was_prepared_ends_with_the_unit(fed):
    assert [key for key in listed(fed) if "/next/" in key]
    fed.run("destroy", "--yes")
    assert listed(fed) == []
    jobs = fed.bed.slurm("b", "squeue", "-h", "-o", "%j")
    assert "ft-replica" not in json.dumps(jobs.stdout)
