"""The disk of a unit's run folder is full while it serves: it goes on, says so once, and writes again when it can."""

import contextlib
import os
import signal
import subprocess

import pytest

from tests.conftest import BLUEPRINT
from tests.e2e.test_renewal import nearly_over
from tests.e2e.test_standstill import Asking, members, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts small file systems: needs root"),
]


@contextlib.contextmanager
def mounted(folder, size):
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def disks(fabric_bed):
    """Small disks for the run folders of both clusters."""
    clusters = fabric_bed.folder / "state" / "t" / "clusters"
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mounted(clusters / name, "512k")) for name in ("one", "two")]
        fabric_bed.clean_up()


def stuff(disk):
    """Again and again: a unit that had begun to write when the disk became full frees a little."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    for name, filling in (("log", b"."), ("mesh.trace", b"\n")):
        for path in disk.glob(f"*/{name}"):  # a file that ends within a page has room in it, however full the disk is
            with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                file.write(filling * (-path.stat().st_size % 4096))
    return filler


def logs(disks):
    return {path.parent.name: path.read_text() for disk in disks for path in disk.glob("*/log")}


def stamps(disks):
    return {path: path.stat().st_mtime_ns for disk in disks for path in disk.glob("*/health.json")}


def test_a_full_disk_stops_no_unit_and_is_said_once(fabric_bed, disks):
    bed = fabric_bed
    bed.write(blueprint=BLUEPRINT.rstrip().removesuffix("}") + ", trace: 16MiB}\n")
    bed.up()
    with Asking(bed) as asking:
        until(lambda: {"alpha", "beta"} <= set(asking.answers), 30.0)
        before = {name: member.session for name, member in members(bed).items()}
        fillers = [stuff(disk) for disk in disks]
        os.kill(bed.units()["replica/tiny/1", "running"].pid, signal.SIGSTOP)  # so that there is something to write
        until(lambda: [stuff(disk) for disk in disks] and not members(bed)["tiny/1"].linked, 30.0)
        os.kill(bed.units()["replica/tiny/1", "running"].pid, signal.SIGCONT)
        until(lambda: [stuff(disk) for disk in disks] and members(bed)["tiny/1"].linked, 30.0)
        count = len(asking.answers)
        until(lambda: {"alpha", "beta"} <= set(asking.answers[count:]), 60.0)
        assert {name: member.session for name, member in members(bed).items()} == before
        frozen = stamps(disks)
        for filler in fillers:
            filler.unlink()
        until(lambda: all(stamps(disks)[path] > frozen[path] for path in frozen), 60.0)
        told = [
            next(name for name in logs(disks) if name.startswith(unit)) for unit in ("gateway-main", "replica-tiny-1")
        ]
        until(lambda: all("lines are missing here" in logs(disks)[name] for name in told), 60.0)
    assert asking.failures == []
    for log in logs(disks).values():
        assert "Traceback" not in log
        assert "Logging error" not in log
        assert log.count("no sign of life can be written") <= 1
    assert all("FT4301 no space left while writing the log" in logs(disks)[name] for name in told)
    (trace,) = disks[0].glob("*/mesh.trace")
    assert trace.read_bytes().endswith(b"\n")
    assert logs(disks)[told[0]].count("the trace of the mesh ends here: FT4301") == 1
    assert bed.run("status").returncode == 0
    assert "No changes" in bed.run("plan").stdout


def test_a_certificate_that_cannot_be_written_is_said_and_renewed_when_there_is_room(fabric_bed, disks):
    bed = fabric_bed
    bed.up()
    pids = {address: unit.pid for (address, _), unit in bed.units().items()}
    nearly_over(bed, "replica/tiny/1")
    until(lambda: "its certificate ends soon" in bed.run("plan").stdout, 30.0)
    filler = stuff(disks[1])
    with Asking(bed) as asking:
        done = bed.run("apply", "--yes", code=None)
        assert done.returncode != 0
        assert "FT4301" in done.stderr
        filler.unlink()
        bed.run("apply", "--yes")
        count = len(asking.answers)
        until(lambda: {"alpha", "beta"} <= set(asking.answers[count:]), 30.0)
    assert asking.failures == []
    assert {address: unit.pid for (address, _), unit in bed.units().items()} == pids
    assert "No changes" in bed.run("plan").stdout


def test_units_that_are_stopped_on_a_full_disk_end_without_a_defect(fabric_bed, disks):
    bed = fabric_bed
    bed.up()
    pids = [unit.pid for unit in bed.units().values()]
    for disk in disks:
        stuff(disk)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    until(lambda: bed.running() == [], 60.0)
    assert not any("Traceback" in log or "Logging error" in log for log in logs(disks).values())
