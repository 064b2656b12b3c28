"""Replicas beyond the planned ones, on nodes of a real Slurm that happen to be idle."""

import json
import signal
import sys
import threading

import pytest

from tests.bed.federation import KEY

pytestmark = pytest.mark.timeout(600)

EXTRA = "replica/tiny/1"
ASK = """
import json, sys, urllib.request
body = {"model": "tiny", "max_tokens": 120, "messages": [{"role": "user", "content": sys.argv[3]}]}
headers = {"authorization": "Bearer " + sys.argv[2], "content-type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=120) as answer:
    print(json.dumps([answer.status, answer.headers["x-fabrictool-replica"]]))
"""
CLIENTS = 4


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
    fed.write(clusters, {"tiny": {"replicas": replicas, "max_num_seqs": 1}})
    fed.up()
    return fed


class Crowd:
    """Clients that ask one thing after another, more than there are places."""

    def __init__(self, fed):
        self.fed, self.over, self.answers = fed, threading.Event(), []
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def _ask(self, number):
        argv = [sys.executable, "-c", ASK, f"http://{self.fed.gateway}:{self.fed.client_port}", KEY, f"hi {number}"]
        while not self.over.is_set():
            done = self.fed.bed.machine("ing").run(argv, check=False)
            self.answers.append(json.loads(done.stdout) if done.returncode == 0 else [0, done.stderr[-300:]])

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()


def state(fed):
    return fed.units().get(EXTRA, {}).get("state", "not there")


def test_one_more_starts_for_a_crowd_on_an_idle_node_and_ends_after_it(fed):
    assert "1 more start one by one while requests wait" in fed.run("plan").stdout
    assert state(fed) == "not there"
    watching = fed.start("reconcile", "--watch", "--interval", "2s")
    try:
        with Crowd(fed) as crowd:
            fed.wait("one more to run", lambda: state(fed) == "running", within_s=120)
            fed.wait("it to answer", lambda: any(replica == "tiny/1" for _, replica in crowd.answers), within_s=60)
        assert [answer for answer in crowd.answers if answer[0] != 200] == []
        fed.wait("it to end", lambda: state(fed) == "dormant", within_s=120)
    finally:
        watching.send_signal(signal.SIGINT)
        output = watching.communicate(timeout=60)
    assert watching.returncode == 0, output
    assert "No changes" in fed.run("plan").stdout
    assert fed.status()["good"]
