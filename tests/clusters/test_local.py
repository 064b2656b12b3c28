"""Run folders of this machine: damaged, of another machine, of another pid namespace."""

import json
import os
import shutil
import subprocess
import sys
import time

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import RunFolder
from fabrictool.base.units import Duration
from fabrictool.clusters.local import LocalCluster
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.inventory import KeptLogs
from fabrictool.domain.specs import AgentSpec, GatewaySpec, HostPort, encode_spec, mark_of

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m", source="x", engine="vllm"
)
OPERATION = "replica-m-0-g1-00000000"
HOLD = """
import sys, time
from pathlib import Path
from fabrictool.base.runfolder import RunFolder
RunFolder(Path(sys.argv[1])).claim()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    found = RunFolder(tmp_path / OPERATION)
    found.path.mkdir()
    found.spec.write_bytes(encode_spec(SPEC))
    return found


@pytest.fixture
def held(folder):
    """A living process of that folder."""
    with subprocess.Popen([sys.executable, "-c", HOLD, folder.path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def observed(tmp_path):
    return LocalCluster("c", tmp_path).observe()


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff", b'{"unit": "agent"}'])
def test_one_damaged_folder_is_one_damaged_unit_and_can_be_stopped(tmp_path, folder, held, content):
    folder.spec.write_bytes(content)
    facts = observed(tmp_path)
    assert facts.known
    assert [(unit.state, unit.operation, unit.pid) for unit in facts.units] == [("damaged", OPERATION, held.pid)]
    cluster = LocalCluster("c", tmp_path)
    cluster.kill([OPERATION])
    held.wait()
    cluster.forget([OPERATION])
    assert observed(tmp_path).units == ()


def test_logs_of_what_is_gone_are_kept_as_long_as_the_inventory_says(tmp_path):
    kept = KeptLogs(keep=Duration(3600))
    cluster = LocalCluster("c", tmp_path / "units", logs=kept)
    for number, minutes in (("replica-m-0-g1-0a1b2c3d", 90), ("replica-m-0-g2-0a1b2c3d", 0)):
        run = RunFolder(tmp_path / "units" / number)
        run.path.mkdir(parents=True)
        run.log.write_text(f"one\n{number}\n")
        cluster.forget([number])
        assert cluster.former_log("replica-m-0-g", 1) == [number]
        log = next((tmp_path / "units.logs").glob(f"{number}.log"))
        os.utime(log, (time.time() - 60 * minutes,) * 2)
    cluster.forget(["replica-m-1-g1-0a1b2c3d"])
    assert [path.stem for path in (tmp_path / "units.logs").iterdir()] == ["replica-m-0-g2-0a1b2c3d"]
    assert LocalCluster("c", tmp_path / "units").former_log("replica-m-0-g", 1) == []


def test_a_damaged_certificate_is_one_that_has_ended(tmp_path, folder):
    folder.identity.mkdir()
    (folder.identity / "session.crt").write_bytes(b"")
    (unit,) = observed(tmp_path).units
    assert unit.certificate_ends_at == 0.0


def test_a_folder_of_another_machine_makes_the_cluster_unknown(tmp_path, folder, held):
    (folder.path / "lock").write_text(json.dumps({"host": "elsewhere", "boot": "another"}))
    facts = observed(tmp_path)
    assert not facts.known
    assert "elsewhere" in facts.reason
    with pytest.raises(FabrictoolError, match="FT5108"):
        LocalCluster("c", tmp_path).stop([OPERATION])
    assert held.poll() is None


def test_another_machines_unit_that_said_goodbye_has_ended(tmp_path, folder):
    (folder.path / "lock").write_text(json.dumps({"host": "elsewhere", "boot": "another"}))
    folder.write_exit(0, "told to stop", 1.0)
    assert [unit.state for unit in observed(tmp_path).units] == ["ended"]


def test_after_a_reboot_of_this_machine_its_units_are_dead(tmp_path, folder, held):
    held.kill()
    held.wait()
    folder.write_process()
    lock = json.loads((folder.path / "lock").read_text())
    (folder.path / "lock").write_text(json.dumps(lock | {"boot": "the one before"}))
    assert [unit.state for unit in observed(tmp_path).units] == ["killed"]


@pytest.mark.usefixtures("folder")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes a pid namespace: needs root")
def test_a_process_of_another_pid_namespace_is_never_signalled(tmp_path, held):
    code = f"""
from pathlib import Path
from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.local import LocalCluster
cluster = LocalCluster("c", Path({str(tmp_path)!r}))
print(cluster.observe().known)
try:
    cluster.stop([{OPERATION!r}])
except FabrictoolError as error:
    print(error.problems[0].code)
"""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.split() == ["False", "FT5108"], done.stderr
    assert held.poll() is None


GATEWAY = GatewaySpec(
    fabric="f", provider="p", site="s", cluster="c", name="g", listen=HostPort("h", 1), mesh=HostPort("h", 2)
)


@pytest.mark.usefixtures("held")
def test_another_spec_is_written_and_it_shows_whether_it_is_in_force(tmp_path, folder):
    cluster = LocalCluster("c", tmp_path)
    folder.spec.write_bytes(encode_spec(GATEWAY))
    assert observed(tmp_path).units[0].in_force == ""
    folder.write_health(json.dumps({"ready": True, "spec": mark_of(folder.spec.read_bytes())}).encode(), b"{}")
    assert observed(tmp_path).units[0].in_force == "current"
    new = msgspec.structs.replace(GATEWAY, retries=7)
    assert cluster.update([NewUnit(OPERATION, "gateway/g", new, {"keys.json": b"k"})]) == {}
    assert (cluster.spec(OPERATION), observed(tmp_path).units[0].in_force) == (new, "former")
    keys = folder.path / "keys.json"
    assert (keys.read_bytes(), keys.stat().st_mode & 0o777) == (b"k", 0o600)
    elsewhere = NewUnit("gateway-x-g1-00000000", "gateway/x", new, {})
    assert cluster.update([elsewhere])[elsewhere.operation].problems[0].code == "FT5113"
    assert not (tmp_path / elsewhere.operation).exists()
