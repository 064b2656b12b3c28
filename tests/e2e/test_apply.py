"""apply, destroy and what lies between, on real processes."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import ALPHA_KEY, BLUEPRINT, INVENTORY, KEY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EVERYTHING = ["gateway/main", "replica/tiny/0", "replica/tiny/1"]

CRASHING = """
import os, signal, sys
from fabrictool.applier import journal
write, left = journal.Journal.write, [int(sys.argv.pop(1))]
moment = sys.argv.pop(1)
def crashing(self, *arguments, **keywords):
    left[0] -= 1
    if left[0] == 0 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, *arguments, **keywords)
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.write = crashing
from fabrictool.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def ask(bed, key=KEY, headers=None, **body):
    request = urllib.request.Request(  # noqa: S310 - our own loopback URL
        bed.url + "/v1/chat/completions",
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | body).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"} | (headers or {}),
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own loopback URL
        whose = {"provider": answer.headers["x-fabric-provider"], "replica": answer.headers["x-fabric-replica"]}
        return json.load(answer) | whose


def test_apply_serves_and_applying_twice_changes_nothing(fabric_bed):
    bed = fabric_bed
    bed.up()
    assert bed.running() == EVERYTHING
    answer = ask(bed)
    assert answer["usage"]["completion_tokens"] <= 2
    nodes = json.loads(bed.run("status", "--json").stdout)["gateway"]["nodes"]
    serving = {(row["session"][:8], service["replica"]) for row in nodes for service in row["services"]}
    assert answer["replica"] in {f"{replica}@{session}" for session, replica in serving}
    before = {key: unit.pid for key, unit in bed.units().items()}
    assert "nothing to do" in bed.run("apply", "--yes").stderr
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout
    assert {key: unit.pid for key, unit in bed.units().items()} == before
    status = json.loads(bed.run("status", "--json").stdout)
    assert status["good"]
    assert [unit["state"] for unit in status["units"]] == ["running"] * 3
    assert status["gateway"]["models"][0]["ready"] == 2
    assert "service-serving" in bed.run("events").stdout
    assert "engine" in bed.run("logs", "tiny/0").stdout
    assert status["drift"] == []
    bed.write(context=128)
    assert "~ the blueprint is not the one" in bed.run("status").stdout
    assert "delete  replica/tiny/1" in bed.run("destroy", "--yes").stdout
    assert bed.units() == {}
    assert "0 of 0 units run" in bed.run("status", code=1).stdout
    assert "nothing of fabric t is running" in bed.run("destroy", "--yes").stderr


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_planted_secret_is_in_no_artefact(fabric_bed):
    bed = fabric_bed
    bed.run("plan", "-o", "plan.json")
    bed.up()
    ask(bed)
    bed.run("events", "--json")
    found = [p for p in bed.folder.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]
    assert found == []
    for unit in bed.units().values():
        for process in (unit.pid, *children(unit.pid)):
            for file in ("cmdline", "environ"):
                assert KEY.encode() not in Path(f"/proc/{process}/{file}").read_bytes(), (unit.address, file)
    for key in bed.folder.rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0, key


def test_a_killed_replica_is_missed_and_brought_back(fabric_bed):
    bed = fabric_bed
    bed.up()
    victim = bed.units()["replica/tiny/1", "running"]
    engines = children(victim.pid)
    assert engines
    os.kill(victim.pid, signal.SIGKILL)
    for _ in range(20):
        assert ask(bed)["model"] == "tiny"
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in engines) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in engines), "the engine dies with its agent"
    plan = json.loads(bed.run("plan", "--json").stdout)
    changes = [(a["kind"], a["address"], a["reason"]) for a in plan["actions"] if a["kind"] != "keep"]
    assert changes == [("create", "replica/tiny/1", "the former one was killed")]
    assert bed.run("status", code=1)
    bed.run("apply", "--yes")
    assert bed.running() == EVERYTHING
    assert len(bed.units()) == 3, "what the dead one left is cleared away"


def test_a_changed_blueprint_replaces_and_a_removed_model_is_deleted(fabric_bed):
    bed = fabric_bed
    bed.up()
    before = bed.units()
    bed.write(context=128)
    plan = bed.run("plan", "-v").stdout
    assert "context: 256 → 128" in plan
    bed.run("apply", "--yes")
    after = bed.units()
    assert bed.running() == EVERYTHING
    assert after["gateway/main", "running"].pid == before["gateway/main", "running"].pid
    assert after["replica/tiny/0", "running"].pid != before["replica/tiny/0", "running"].pid
    bed.write(replicas=1)
    assert bed.run("apply", "--yes", "--max-delete", "0", code=6).stderr.count("FT3001") == 1
    bed.run("apply", "--yes", "--max-delete", "1")
    assert len(bed.running()) == 2
    assert ask(bed)


def test_the_blueprints_groups_and_the_clients_header_decide_who_serves(fabric_bed):
    bed = fabric_bed
    bed.up()
    assert {ask(bed)["provider"] for _ in range(12)} == {"alpha", "beta"}
    assert {ask(bed, ALPHA_KEY)["provider"] for _ in range(6)} == {"alpha"}
    assert {ask(bed, headers={"x-fabric-providers": "beta"})["provider"] for _ in range(6)} == {"beta"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(bed, ALPHA_KEY, {"x-fabric-providers": "beta"})
    assert refused.value.code == 403
    refused.value.close()
    served = bed.units()["replica/tiny/0", "running"]
    os.kill(served.pid, signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError) as unready:
        ask(bed, ALPHA_KEY)
    assert unready.value.code in (502, 503), "trust is not widened because the trusted one has died"
    unready.value.close()
    assert ask(bed)["provider"] == "beta"


def test_a_changed_key_and_a_removed_tenant_reach_the_gateway(fabric_bed):
    bed = fabric_bed
    bed.up()
    before = bed.units()["gateway/main", "running"].pid
    bed.environment["FT_ALPHA_KEY"] = "ftk_another-key-of-the-same-tenant"
    plan = json.loads(bed.run("plan", "--json").stdout)
    assert [(a["kind"], a["address"]) for a in plan["actions"] if a["kind"] != "keep"] == [("update", "gateway/main")]
    del bed.environment["FT_ALPHA_KEY"]
    assert "tenant keys unavailable" in bed.run("plan").stdout
    bed.environment["FT_ALPHA_KEY"] = "ftk_another-key-of-the-same-tenant"
    bed.run("apply", "--yes")
    assert refusal(bed, ALPHA_KEY) == 401
    assert refusal(bed, bed.environment["FT_ALPHA_KEY"]) != 401
    assert "No changes" in bed.run("plan").stdout
    bed.write(blueprint=BLUEPRINT.replace("  alphie: {group: only-alpha, key: secret://env/FT_ALPHA_KEY}\n", ""))
    assert "alphie" in bed.run("apply", "--yes").stdout
    assert refusal(bed, bed.environment["FT_ALPHA_KEY"]) == 401
    assert bed.units()["gateway/main", "running"].pid == before, "it took both over while it served"


def refusal(bed, key):
    """The status of one request: 200 when nothing was refused."""
    try:
        ask(bed, key)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def journal_lines(bed):
    return sum(len(p.read_text().splitlines()) for p in (bed.folder / "state/t/journal").glob("*.ndjson"))


def crash(bed, step, moment, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", CRASHING, str(step), moment, *arguments],
        cwd=bed.folder,
        env=bed.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


LINES = {"create": 8, "replace": 5}
"""Of the journals of a first apply and of one replacement; as many moments to crash at."""


MOMENTS = ["before", pytest.param("after", marks=pytest.mark.extended)]
"""Before a line is written its step is done and unrecorded: the worse of the two."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_at_every_journal_step_ends_in_the_same_state(fabric_bed, moment):
    bed = fabric_bed
    bed.write(replicas=1)
    bed.up()
    assert journal_lines(bed) == LINES["create"]
    bed.run("destroy", "--yes")
    for step in range(1, LINES["create"] + 1):
        crash(bed, step, moment, "apply", "--yes")
        bed.run("apply", "--yes")
        assert bed.running() == ["gateway/main", "replica/tiny/0"], step
        assert len(bed.units()) == 2, "nothing doubled, nothing left behind"
        bed.run("destroy", "--yes")
        assert bed.units() == {}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("then", ["apply", pytest.param("destroy", marks=pytest.mark.extended)])
def test_kill_9_at_every_journal_step_of_a_replacement(fabric_bed, then, moment):
    bed = fabric_bed
    bed.write(replicas=1)
    bed.up()
    before = journal_lines(bed)
    bed.write(context=255)
    bed.run("apply", "--yes")
    assert journal_lines(bed) - before == LINES["replace"]
    for step in range(1, LINES["replace"] + 1):
        bed.write(context=bed.values["context"] - 1)
        crash(bed, step, moment, "apply", "--yes")
        bed.run(then, "--yes")
        every = [unit.address for cluster in bed.clusters().values() for unit in cluster.observe().units]
        if then == "destroy":
            assert every == [], step
            bed.run("apply", "--yes")
            continue
        assert sorted(every) == ["gateway/main", "replica/tiny/0"], step
        assert "No changes" in bed.run("plan").stdout


def test_a_saved_plan_goes_on_where_a_crash_left_it(fabric_bed):
    bed = fabric_bed
    bed.run("trust", "init")
    bed.run("plan", "-o", "plan.json")
    crash(bed, 6, "after", "apply", "plan.json", "--yes")
    first = bed.units()["gateway/main", "running"].pid
    bed.run("apply", "plan.json", "--yes")
    assert bed.running() == EVERYTHING
    assert bed.units()["gateway/main", "running"].pid == first
    assert "applied before" in bed.run("apply", "plan.json", "--yes").stderr
    bed.run("destroy", "--yes")
    assert "FT4004" in bed.run("apply", "plan.json", "--yes", code=5).stderr


def test_a_stale_plan_is_refused_and_says_what_changed(fabric_bed):
    bed = fabric_bed
    bed.up()
    bed.write(context=128)
    bed.run("plan", "-o", "plan.json")
    os.kill(bed.units()["replica/tiny/0", "running"].pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while "replica/tiny/0" in bed.running():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    refused = bed.run("apply", "plan.json", "--yes", code=5)
    assert "FT4004" in refused.stderr
    assert "unit/replica/tiny/0" in refused.stderr
    assert bed.running() == ["gateway/main", "replica/tiny/1"]


def test_a_comment_in_the_blueprint_does_not_make_a_plan_stale_but_a_second_start_does(fabric_bed):
    bed = fabric_bed
    bed.write(replicas=1)
    bed.run("trust", "init")
    bed.run("plan", "-o", "first.json")
    with (bed.folder / "blueprint.yaml").open("a") as file:
        file.write("# reviewed\n")
    bed.run("apply", "first.json", "--yes")
    bed.write(replicas=2)
    bed.run("plan", "-o", "a.json")
    bed.run("plan", "-o", "b.json", "--seed", "7")
    bed.run("apply", "a.json", "--yes")
    refused = bed.run("apply", "b.json", "--yes", code=5)
    assert "unit/replica/tiny/1" in refused.stderr
    assert bed.running() == EVERYTHING


def test_units_of_a_disabled_cluster_are_said_and_keep_their_names(fabric_bed):
    bed = fabric_bed
    bed.up()
    lines = INVENTORY.splitlines(keepends=True)
    lines.insert(lines.index("  two:\n") + 1, "    enabled: false\n")
    bed.write(inventory="".join(lines), blueprint=BLUEPRINT.replace("min: %(replicas)s", "min: 1"))
    plan = bed.run("plan").stdout
    assert "two is not enabled in the inventory" in plan
    assert "replica/tiny/1" in plan
    assert "two is not enabled" in bed.run("status", code=1).stdout
    assert "FT5109" in bed.run("destroy", "--yes", code=4).stderr
    bed.write()
    bed.run("destroy", "--yes")
    assert bed.units() == {}


def test_ctrl_c_finishes_the_step_and_the_next_apply_goes_on(fabric_bed):
    bed = fabric_bed
    bed.run("trust", "init")
    process = bed.start("apply", "--yes")
    for line in process.stderr:
        if "gateway/main" in line:
            process.send_signal(signal.SIGINT)
            break
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert "FT4103" in stderr
    assert bed.running() in ([], ["gateway/main"])  # no replica was begun
    bed.run("apply", "--yes")
    assert bed.running() == EVERYTHING
