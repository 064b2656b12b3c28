"""The troubles of the acceptance list: each ends in a clear error with a code, and nothing is lost."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import BLUEPRINT, INVENTORY
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system and drops rights: needs root")


def test_wrong_yaml_names_the_place_and_starts_nothing(fabric_bed):
    bed = fabric_bed
    text = (bed.folder / "blueprint.yaml").read_text().replace("replicas:", "replica:")
    (bed.folder / "blueprint.yaml").write_text(text)
    done = bed.run("apply", "--yes", code=65)
    assert "blueprint.yaml:12:5" in done.stderr
    assert "did you mean" in done.stderr
    assert bed.units() == {}


def test_a_missing_secret_is_said_before_anything_starts(fabric_bed):
    bed = fabric_bed
    bed.run("trust", "init")
    del bed.environment["FT_TEST_KEY"]
    done = bed.run("apply", "--yes", code=None)
    assert done.returncode in (1, 65)
    assert "FT14" in done.stderr
    assert "FT_TEST_KEY" in done.stderr
    assert bed.units() == {}


def test_missing_trust_is_said_before_anything_starts(fabric_bed):
    done = fabric_bed.run("apply", "--yes", code=1)
    assert "FT6302" in done.stderr
    assert "trust init" in done.stderr
    assert fabric_bed.units() == {}


def test_a_port_in_use(fabric_bed):
    bed = fabric_bed
    bed.run("trust", "init")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", bed.values["listen"]))
        taken.listen()
        done = bed.run("apply", "--yes", code=4)
    assert "FT5105" in done.stderr
    assert "FT8004" in done.stderr
    assert "address already in use" in done.stderr
    bed.run("apply", "--yes")
    assert len(bed.running()) == 3


def test_a_dead_engine(fabric_bed):
    bed = fabric_bed
    broken = bed.folder / "broken.gguf"
    broken.write_bytes(b"not a model")
    bed.write(model=broken, replicas=1)
    bed.run("trust", "init")
    done = bed.run("apply", "--yes", code=4)
    assert "replica/tiny/0" in done.stderr
    assert "FT7105" in done.stderr
    assert "engine" in bed.run("logs", "replica/tiny/0").stdout
    assert bed.running() == ["gateway/main"]
    bed.write(model=bed.values["model"].parent / "no-such.gguf")
    assert "FT7013" in bed.run("apply", "--yes", code=4).stderr


def test_a_second_apply_at_the_same_time(fabric_bed):
    bed = fabric_bed
    bed.run("trust", "init")
    first = bed.start("apply", "--yes")
    assert first.stderr.readline()
    first.send_signal(signal.SIGSTOP)  # it holds the lease however slow this machine is
    try:
        second = bed.run("apply", "--yes", code=5)
    finally:
        first.send_signal(signal.SIGCONT)
    assert "FT4003" in second.stderr
    assert f"pid {first.pid}" in second.stderr
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert len(bed.running()) == 3


def fill(folder):
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return filler


@ROOT_ONLY
def test_a_full_disk_loses_nothing(fabric_bed):
    bed = fabric_bed
    state = bed.folder / "state"
    state.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", state], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        bed.run("trust", "init")
        filler = fill(state)
        before = sorted(p.relative_to(state) for p in state.rglob("*"))
        done = bed.run("apply", "--yes", code=None)
        assert done.returncode in (1, 4)
        assert "FT4301" in done.stderr
        assert bed.units() == {}
        assert all((state / p).exists() for p in before)
        filler.unlink()
        bed.run("apply", "--yes")
        assert len(bed.running()) == 3
        fill(state)
        done = bed.run("destroy", "--yes")
        assert "the disk is full" in done.stderr
        assert bed.running() == []
    finally:
        bed.clean_up()
        subprocess.run(["umount", "-l", state], check=True)


@ROOT_ONLY
def test_no_rights_on_the_state_folder():
    folder = Path(tempfile.mkdtemp(prefix="ft-rights-"))
    folder.chmod(0o755)
    try:
        (folder / "inventory.yaml").write_text(INVENTORY)
        state = folder / "state"
        state.mkdir(mode=0o700)
        from tests.conftest import BLUEPRINT

        values = {"model": "/m", "precision": "bf16", "context": 64, "replicas": 1, "listen": 1, "mesh": 2}
        (folder / "blueprint.yaml").write_text(BLUEPRINT % values)
        for command in (["trust", "init"], ["apply", "--yes"], ["plan"]):
            done = subprocess.run(
                ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-m", "fabrictool.cli.main", *command],
                cwd=folder,
                env=os.environ | {"FABRICTOOL_STATE_DIR": str(state), "FT_TEST_KEY": "x" * 20},
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=60,
            )
            if "ModuleNotFoundError" in done.stderr or "ermission denied" in done.stderr.partition("FT")[0]:
                pytest.skip("the checkout itself cannot be read by another user")
            assert "Traceback" not in done.stderr, done.stderr
            assert done.returncode == 1
            assert "FT4302" in done.stderr
            assert "permission denied" in done.stderr
        assert list(state.iterdir()) == []
    finally:
        shutil.rmtree(folder)


UNREACHABLE = """\
  far:
    site: b
    kind: slurm
    login:
      - host: 127.0.0.1
        port: %(port)s
        user: nobody
        host_keys: ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKqP3ai0Nlr4dtzzyKfIuLsL9pe2sr4n5hn5p8x0Y2fS"]
    partitions: {normal: {device: a100-80g, devices_per_node: 4, nodes: 2, memory_per_node: 512GiB}}
"""


def own_address():
    """Of this machine, as others would dial it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.1", 9))
        return probe.getsockname()[0]


def test_an_unreachable_cluster_is_unknown_and_untouched(fabric_bed):
    bed = fabric_bed
    port = free_port()
    # A loopback address is refused where agents are on other machines.
    anywhere = BLUEPRINT.replace("mesh: 127.0.0.1:", f"mesh: {own_address()}:")
    bed.write(inventory=INVENTORY + UNREACHABLE % {"port": port}, blueprint=anywhere)
    done = bed.run("plan")
    assert "far is unknown" in done.stdout
    assert "nothing on it will be touched" in done.stdout
    plan = json.loads(bed.run("plan", "--json").stdout)
    assert plan["read_set"]["cluster/far"] == "unknown"
    assert {a["cluster"] for a in plan["actions"]} == {"one", "two"}
    bed.up()
    status = json.loads(bed.run("status", "--json").stdout)
    assert list(status["unknown_clusters"]) == ["far"]


def test_replicas_on_a_cluster_that_stops_answering_are_neither_stopped_nor_replaced(fabric_bed):
    bed = fabric_bed
    bed.up()
    folder = bed.folder / "state/t/clusters/two"
    folder.rename(bed.folder / "aside")
    folder.write_text("no folder")
    done = bed.run("plan", code=69)
    assert "two is unknown" in done.stdout
    assert "two is needed and did not answer" in done.stderr
    why = "run folders cannot be read"
    assert (done.stdout.count(why), done.stderr.count(why)) == (1, 0), "why it is unknown is said once"
    assert why in bed.run("plan", "--json", code=69).stderr
    plan = json.loads(bed.run("plan", "--json", code=69).stdout)
    kinds = {a["address"]: a["kind"] for a in plan["actions"]}
    assert sorted(kinds.values()) == ["keep", "keep", "unknown"]
    assert plan["forecast"]["models"][0]["replicas"] == 2
    applied = bed.run("apply", "--yes", code=69)
    assert "nothing to do" in applied.stderr
    assert (applied.stdout + applied.stderr).count(why) == 1
    status = bed.run("status", code=1)
    assert (status.stdout + status.stderr).count(why) == 1
    assert "does not answer" not in status.stdout
    left = bed.run("destroy", "--yes", code=4)
    assert "FT5109" in left.stderr
    assert "replica/tiny/1" in left.stderr
    assert "FT5109" in bed.run("destroy", "--yes", code=69).stderr
    folder.unlink()
    (bed.folder / "aside").rename(folder)
    assert bed.running() == ["replica/tiny/1"]
    bed.run("destroy", "--yes")
    assert bed.units() == {}


@pytest.mark.parametrize("then", ["apply", "destroy"])
def test_a_damaged_folder_is_said_and_cleared_away(fabric_bed, then):
    bed = fabric_bed
    bed.up()
    (damaged,) = (p for p in (bed.folder / "state/t/clusters/two").iterdir() if p.is_dir())
    pid = bed.units()["replica/tiny/1", "running"].pid
    (damaged / "spec.json").write_bytes(b"{}")
    assert "damaged" in bed.run("status", code=1).stdout
    assert "delete" in bed.run("plan").stdout
    bed.run(then, "--yes")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(bed.units()) == len(bed.running()) == {"apply": 3, "destroy": 0}[then]


def test_a_model_that_cannot_fit_is_infeasible_and_says_what_would_help(fabric_bed):
    bed = fabric_bed
    bed.write(replicas=3)
    done = bed.run("plan", code=3)
    assert "FT2003" in done.stderr
    assert "lower replicas.min to 2" in done.stderr


def test_a_killed_gateway_is_brought_back_and_the_agents_find_it(fabric_bed):
    bed = fabric_bed
    bed.up()
    os.kill(bed.units()["gateway/main", "running"].pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while "gateway/main" in bed.running():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    bed.run("apply", "--yes")
    deadline = time.monotonic() + 60
    while True:
        status = json.loads(bed.run("status", "--json", code=None).stdout)
        if status["gateway"] and status["gateway"]["models"] and status["gateway"]["models"][0]["ready"] == 2:
            break
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


def test_a_corrupt_model_is_started_once_and_doctor_says_so(fabric_bed, tmp_path):
    bed = fabric_bed
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(bed.values["model"]).read_bytes()[:20_000])
    bed.write(model=cut, replicas=1)
    bed.run("trust", "init")
    said = bed.run("apply", "--yes", code=4).stderr
    assert "FT7105: engine reference refuses its model" in said
    assert "restart" not in said
    assert " | " not in said
    assert "cut.gguf is corrupt" in bed.run("doctor", code=1).stdout
