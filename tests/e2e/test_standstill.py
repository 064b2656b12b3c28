"""A process stands still for a while: nobody evicts it, no request fails for an agent, and it is back once it moves."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import msgspec
import pytest

from fabrictool.status.fleet import FleetStatus
from tests.conftest import KEY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

LONG = pytest.mark.long
BACK_WITHIN_S = 15.0
"""It dials again at once; the rest is this machine's."""


def ask(bed):
    """Who answered, of whoever may."""
    request = urllib.request.Request(  # noqa: S310 - our own loopback URL
        f"{bed.url}/v1/chat/completions",
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode(),
        {"authorization": f"Bearer {KEY}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=90) as answer:  # noqa: S310 - our own loopback URL
        answer.read()
        return answer.headers["x-fabric-provider"]


def members(bed):
    printed = json.loads(bed.run("mesh", "members", "--json").stdout)
    view = msgspec.convert(printed["document"], FleetStatus)
    return {member.services[0].replica if member.services else "gateway": member for member in view.members}


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


class Asking(threading.Thread):
    """One request after another until told to stop."""

    def __init__(self, bed):
        super().__init__()
        self.bed, self.over = bed, threading.Event()
        self.answers, self.failures = [], []

    def run(self):
        while not self.over.is_set():
            try:
                self.answers.append(ask(self.bed))
            except urllib.error.HTTPError as error:
                self.failures.append(f"{error.code}: {error.read().decode()}")
            except OSError as error:
                self.failures.append(repr(error))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


@pytest.mark.parametrize("seconds", [pytest.param(1.0, marks=LONG), 3.0, 10.0, pytest.param(60.0, marks=LONG)])
def test_an_agent_that_stands_still_costs_no_request_and_is_back_at_once(fabric_bed, seconds):
    fabric_bed.up()
    pid = fabric_bed.units()["replica/tiny/1", "running"].pid
    before = members(fabric_bed)["tiny/1"]
    with Asking(fabric_bed) as asking:
        until(lambda: {"alpha", "beta"} <= set(asking.answers), 30.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
            if seconds >= 10.0:
                seen = members(fabric_bed)["tiny/1"]
                assert (seen.linked, seen.lost_how) == (False, "silent")
                assert seen.state in ("lost", "suspected")
                count = len(asking.answers)
                until(lambda: len(asking.answers) > count + 5, 30.0)
                assert set(asking.answers[count:]) == {"alpha"}
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: members(fabric_bed)["tiny/1"].state == "serving", BACK_WITHIN_S)
        count = len(asking.answers)
        until(lambda: "beta" in asking.answers[count:], 30.0)
    assert asking.failures == []
    after = members(fabric_bed)["tiny/1"]
    assert (after.session, after.state, after.linked) == (before.session, "serving", True)
    assert not [accusation for accusation in after.accusations if accusation.stands]
    assert "No changes" in fabric_bed.run("plan").stdout


def test_a_gateway_that_stands_still_accuses_nobody_and_has_its_agents_again(fabric_bed):
    fabric_bed.up()
    pid = fabric_bed.units()["gateway/main", "running"].pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(8.0)
    os.kill(pid, signal.SIGCONT)
    with Asking(fabric_bed) as asking:
        until(lambda: {"alpha", "beta"} <= set(asking.answers), BACK_WITHIN_S)
    assert [member.accusations for member in members(fabric_bed).values()] == [[], [], []]
