"""Replicas beyond the planned ones, on nodes of a real Slurm that happen to be idle."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from tests.bed.federation import KEY

pytestmark = pytest.mark.timeout(600)

EXTRA = "replica/tiny/1"
CROWD = """
import json, sys, threading, urllib.request
over = threading.Event()
def ask(number):
    body = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": f"hi {number}"}]}
    headers = {"authorization": "Bearer " + sys.argv[2], "content-type": "application/json"}
    while not over.is_set():
        request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
                line = [answer.status, answer.headers["x-fabric-replica"].partition("@")[0]]
        except OSError as error:
            line = [0, repr(error)]
        print(json.dumps(line), flush=True)
threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
for thread in threads:
    thread.start()
sys.stdin.read()
over.set()
for thread in threads:
    thread.join()
"""


@pytest.fixture(scope="module")
def fed(make_federation):
    """One replica with one place, and another that may come."""
    fed = make_federation("extra")
    cpu = {"device": "cpu", "nodes": 2, "memory_per_node": "4 GiB"}
    clusters = {
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": cpu | {"nodes": 1}}, kind="ssh"),
    }
    replicas = {"min": 1, "max": 1, "idle_after": "20s", "extra": 1}
    fed.write(
        clusters,
        {"tiny": {"replicas": replicas, "max_num_seqs": 1, "place": {"pin": [{"cluster": "b", "replicas": 1}]}}},
    )
    fed.up()
    return fed


class Crowd:
    """Clients that ask one thing after another, more than there are places, until it is left."""

    def __init__(self, fed):
        argv = [sys.executable, "-c", CROWD, f"http://{fed.gateway}:{fed.client_port}", KEY]
        machine = fed.bed.machine("ing")
        self.process = machine.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answers = []
        self.reader = threading.Thread(target=self._read)

    def _read(self):
        for line in self.process.stdout:
            self.answers.append(json.loads(line))

    def __enter__(self):
        self.reader.start()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.reader.join(120)
        self.process.stdout.close()
        assert self.process.wait(30) == 0


def state(fed):
    return fed.units().get(EXTRA, {}).get("state", "not there")


@pytest.mark.extended  # a minute of waiting; tests/e2e/test_idle.py does it without Slurm
def test_one_more_starts_for_a_crowd_on_an_idle_node_and_ends_after_it(fed):
    assert any("1 more start one by one while requests wait" in reason for reason in fed.plan()["reasons"])
    assert state(fed) == "not there"
    watching = fed.start("reconcile", "--watch", "--interval", "2s")
    try:
        with Crowd(fed) as crowd:
            fed.wait("one more to run", lambda: state(fed) == "running", within_s=120)
            fed.wait("it to answer", lambda: any(replica == "tiny/1" for _, replica in crowd.answers), within_s=60)
        assert {replica for _, replica in crowd.answers} == {"tiny/0", "tiny/1"}
        assert [answer for answer in crowd.answers if answer[0] != 200] == []
        fed.wait("it to end", lambda: state(fed) == "dormant", within_s=120)
    finally:
        watching.send_signal(signal.SIGINT)
        output = watching.communicate(timeout=60)
    assert watching.returncode == 0, output
    assert "No changes" in fed.run("plan").stdout
    assert fed.status()["good"]
