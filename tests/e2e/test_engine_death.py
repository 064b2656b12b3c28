"""An engine that dies beside a living agent comes back, and the fabric knows meanwhile."""

import json
import os
import signal
import time

import pytest

from tests.e2e.test_apply import ask

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def until(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline
        time.sleep(0.1)


def gateway(bed):
    return json.loads(bed.run("status", "--json", code=None).stdout)["gateway"]


def test_a_killed_engine_is_restarted_as_a_new_service(fabric_bed):
    bed = fabric_bed
    bed.write(replicas=1)
    bed.up()
    (before,) = (s for n in gateway(bed)["nodes"] for s in n["services"])
    agent = bed.units()["replica/tiny/0", "running"]
    engine = json.loads(bed.run("status", "--json", "--url", agent.status_url).stdout)["document"]["engine"]
    os.kill(engine["pid"], signal.SIGKILL)
    until(
        lambda: any(
            s["service"] == before["service"] and s["lifecycle"] == "DOWN"
            for n in gateway(bed)["nodes"]
            for s in n["services"]
        )
    )
    down = next(s for n in gateway(bed)["nodes"] for s in n["services"] if s["service"] == before["service"])
    assert "killed by signal 9" in down["note"], "the reason outlives the engine"
    until(lambda: gateway(bed)["models"][0]["ready"] == 1)
    assert ask(bed)["model"] == "tiny"
    services = [s for n in gateway(bed)["nodes"] for s in n["services"] if s["lifecycle"] == "SERVING"]
    assert [s["service"] != before["service"] for s in services] == [True]
    assert bed.units()["replica/tiny/0", "running"].pid == agent.pid, "the agent and its session stay"
    assert "No changes" in bed.run("plan").stdout


def test_term_drains_open_requests_before_the_engine_stops(fabric_bed):
    bed = fabric_bed
    bed.up()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, bed, max_tokens=60) for _ in range(12)]
        os.kill(bed.units()["replica/tiny/0", "running"].pid, signal.SIGTERM)
        assert [a.result()["model"] for a in answers] == ["tiny"] * 12
    until(lambda: "replica/tiny/0" not in bed.running())
    (left,) = (u for u in bed.units().values() if u.state == "ended")
    assert left.reason == "told to stop"
    assert gateway(bed)["totals"]["failures"] == 0
