"""Replicas that end when nobody asks for them, and come back when somebody does: the way a user meets it."""

import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import BLUEPRINT, KEY
from tests.e2e.test_join import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

IDLE_AFTER_S = 10


@pytest.fixture
def dormant_bed(fabric_bed):
    """One replica, which may end."""
    rule = f"replicas: {{min: 0, max: 1, idle_after: {IDLE_AFTER_S}s, hold: 90s}}"
    fabric_bed.write(blueprint=BLUEPRINT.replace("replicas: {min: %(replicas)s, max: %(replicas)s}", rule))
    fabric_bed.up()
    return fabric_bed


@pytest.fixture
def watch(dormant_bed):
    """A ``reconcile --watch`` beside it, as long as the test lasts."""
    process = dormant_bed.start("reconcile", "--watch", "--interval", "1s")
    yield process
    process.send_signal(signal.SIGINT)
    complaints = process.communicate(timeout=60)[1]
    assert process.returncode == 0, complaints


def call(bed, path, body=None, **headers):
    """Status, headers and document of one answer."""
    url, headers = bed.url + path, {"authorization": f"Bearer {KEY}", **headers}
    answer = httpx.request("GET" if body is None else "POST", url, json=body, headers=headers, timeout=150)
    return answer.status_code, answer.headers, answer.json()


def ask(bed, **headers):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    return call(bed, "/v1/chat/completions", body, **headers)


def states(bed):
    shown = json.loads(bed.run("status", "--json", code=None).stdout)
    return {unit["address"]: unit["state"] for unit in shown["units"]}


def until_dormant(bed):
    wait_for(lambda: states(bed) == {"gateway/main": "running", "replica/tiny/0": "dormant"}, seconds=90)


def test_down_to_zero_and_up_again_when_somebody_asks(dormant_bed):
    bed = dormant_bed
    assert ask(bed)[0] == 200
    until_dormant(bed)

    shown = bed.run("status").stdout
    assert "1 of 2 units run, 1 starts when somebody asks" in shown
    assert "starts when somebody asks: nobody asked for tiny for 1" in shown
    assert "planned, and no node" not in shown
    assert "no changes" in bed.run("plan").stdout.lower()
    bed.run("apply", "--yes")
    healed = bed.run("reconcile")
    assert "1 replica ended for want of requests, and starts for the next one" in healed.stderr
    assert "nothing has drifted" in healed.stderr
    assert states(bed)["replica/tiny/0"] == "dormant", "nobody asked"

    assert [model["id"] for model in call(bed, "/v1/models")[2]["data"]] == ["tiny"]
    status, headers, document = ask(bed, **{"x-fabric-max-wait": "0"})
    assert (status, document["error"]["fabric_code"]) == (503, "FT8116")
    assert 1 <= int(headers["retry-after"]) <= 3600
    dry = bed.run("reconcile", "--dry-run").stdout
    assert "replica/tiny/0" in dry
    assert "requests wait for its model" in dry
    bed.run("reconcile")
    assert ask(bed)[0] == 200
    assert states(bed)["replica/tiny/0"] == "running"


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("bursts", [2, pytest.param(20, marks=[pytest.mark.extended, pytest.mark.timeout(900)])])
def test_who_asks_meanwhile_waits_and_is_served(dormant_bed, bursts):
    """The requests come in bursts, at times drawn anew, many of them in the moment in which the replica ends."""
    bed, rng = dormant_bed, random.Random()
    until_dormant(bed)
    answers = []
    with ThreadPoolExecutor(8) as pool:
        for _ in range(bursts):
            answers += pool.map(lambda _: ask(bed), range(8))
            time.sleep(IDLE_AFTER_S + rng.uniform(-0.5, 2.5))
    assert [status for status, _, _ in answers] == [200] * 8 * bursts, [document for _, _, document in answers]
    assert len({document["choices"][0]["message"]["content"] for _, _, document in answers}) == 1
