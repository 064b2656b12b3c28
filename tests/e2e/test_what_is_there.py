"""What is said of a fabric whose parts are stopped, dead, gone or still on their way; and stopping it in any case."""

import json
import os
import shutil
import signal

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


def rows(bed):
    status = json.loads(bed.run("status", "--json", code=1).stdout)
    return {unit["address"]: unit for unit in status["units"]}


def test_status_shows_what_should_be_there_and_destroy_needs_neither_keys_nor_models(fabric_bed):
    bed = fabric_bed
    bed.up()
    first, second = (bed.units()[f"replica/tiny/{n}", "running"].pid for n in (0, 1))

    os.kill(first, signal.SIGSTOP)
    try:
        stopped = rows(bed)["replica/tiny/0"]
        assert (stopped["ready"], "SIGSTOP" in bed.run("status", code=1).stdout) == (False, True)
    finally:
        os.kill(first, signal.SIGCONT)

    os.kill(second, signal.SIGKILL)
    assert rows(bed)["replica/tiny/1"]["state"] == "killed"
    shutil.rmtree(bed.folder / "state/t/clusters/two")
    assert rows(bed)["replica/tiny/1"]["state"] == "missing"
    table = bed.run("status", code=1).stdout
    assert "1/2" in table, "one of the two that were applied serves"
    assert "unit replica/tiny/1" in bed.run("doctor", code=1).stdout

    bed.write(blueprint=(bed.folder / "blueprint.yaml").read_text().replace("replicas:", "replica:").replace("%", "%%"))
    for key in ("FT_TEST_KEY", "FT_ALPHA_KEY"):
        del bed.environment[key]
    bed.run("plan", code=65)
    assert "gateway" in bed.run("logs", "gateway/main").stdout
    said = bed.run("status", code=1).stderr
    assert "blueprint.yaml has 1 error" in said
    bed.run("destroy", "--yes")
    assert bed.running() == []


def test_an_apply_is_done_when_what_it_lists_serves(fabric_bed):
    bed = fabric_bed
    bed.up()
    pid = bed.units()["replica/tiny/0", "running"].pid
    os.kill(pid, signal.SIGSTOP)
    process = bed.start("apply", "--yes")
    try:
        assert any("SIGSTOP" in line for line in process.stderr), "it says what it waits for"
        assert process.poll() is None
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "nothing to do" in process.communicate(timeout=60)[1]
    assert process.returncode == 0
