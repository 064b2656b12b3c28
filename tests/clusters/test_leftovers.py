"""What is left behind on a site: found and removed only when nothing can use it any more. Beside a fake squeue."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import boot_id
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.clusters.leftovers import leftovers
from fabrictool.clusters.schedulers.processes import Processes
from fabrictool.clusters.schedulers.slurm import Slurm

DAY = 86400


class Here:
    """Runs programs on this machine, where `squeue` is a fake that prints a file."""

    def __init__(self, tools):
        self.tools = tools

    def run(self, argv, *, stdin=b"", timeout_s=60.0):
        path = f"{self.tools}:{os.environ['PATH']}"
        done = subprocess.run(list(argv), input=stdin, capture_output=True, env={"PATH": path}, check=False)
        return Completed(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def site(tmp_path):
    base, tools = tmp_path / "base", tmp_path / "tools"
    tools.mkdir()
    squeue = tools / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ -e "{tools}/jobs" ] || exit 1\ncat "{tools}/jobs"\n')
    squeue.chmod(0o755)
    (tools / "jobs").write_text("17 ft-living-g1-0 ft1;op=living-g1-0\n")

    def add(path, text="", days=30.0):
        file = base / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        at = time.time() - days * DAY
        for each in (file, *[p for p in file.parents if p != base and base in p.parents]):
            os.utime(each, (at, at))

    for name in ("living-g1-0", "dead-g1-0", "fresh-g1-0"):
        add(f"units/f/{name}/job.sh", f"exec /x/env/rel/{'aaaa' if name != 'dead-g1-0' else 'bbbb'}/bin/python")
    add("units/f/fresh-g1-0/log", days=2)
    for release in ("aaaa", "bbbb", "cccc"):
        add(f"env/rel/{release}/MANIFEST")
    (base / "env/current").symlink_to("rel/aaaa")
    add("cache/weights/x.bin", "w" * 4096)

    def prune(*, keep_days=7, remove=(), scheduler=None):
        told = leftovers("c", str(base), Here(tools), scheduler or Slurm(), keep_days=keep_days, remove=remove)
        return {(item.kind, item.path): item for item in told}

    prune.base, prune.tools, prune.add = base, tools, add
    return prune


def test_what_may_be_used_is_not_listed(site):
    assert set(site()) == {("run", "units/f/dead-g1-0"), ("environment", "env/rel/cccc")}
    assert ("run", "units/f/fresh-g1-0") in site(keep_days=1)
    assert site()["run", "units/f/dead-g1-0"].days == 30


def test_it_removes_just_what_was_listed(site):
    listed = site()
    assert set(site(remove=listed.values())) == set(listed)
    left = {str(path.relative_to(site.base)) for path in site.base.rglob("*") if path.is_file()}
    assert left == {
        "units/f/living-g1-0/job.sh", "units/f/fresh-g1-0/job.sh", "units/f/fresh-g1-0/log", "env/rel/aaaa/MANIFEST",
        "env/rel/bbbb/MANIFEST", "cache/weights/x.bin",
    }  # fmt: skip
    assert set(site()) == {("environment", "env/rel/bbbb")}, "only the dead unit named it"


def test_what_came_to_life_since_it_was_listed_stays(site):
    listed = site()
    with (site.tools / "jobs").open("a") as jobs:
        jobs.write("18 ft-dead-g1-0 x\n")
    assert set(site(remove=listed.values())) == {("environment", "env/rel/cccc")}
    assert (site.base / "units/f/dead-g1-0/job.sh").exists()


def test_where_no_unit_is_left_environment_and_caches_go_too(site):
    (site.tools / "jobs").write_text("")
    for _ in "12":
        site(keep_days=0, remove=site(keep_days=0).values())
    assert [path for path in site.base.rglob("*") if path.is_file()] == []


def test_an_environment_that_was_just_placed_or_is_on_its_way_stays(site):
    site.add("env/rel/cccc/lib/new", days=0)
    assert ("environment", "env/rel/cccc") not in site()
    site.add("env/rel/dddd/MANIFEST")
    site.add("env/.in.0123/archive", days=0)
    assert [path for kind, path in site() if kind == "environment"] == []


def test_of_a_plain_host_a_living_process_keeps_its_folder(site):
    """There the run folders themselves say which processes live."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        began = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        site.add("units/f/living-g1-0/pid", f"{process.pid} {began} {boot_id()}\n")
        site.add("units/f/dead-g1-0/pid", f"{process.pid} 1 {boot_id()}\n")
        listed = site(scheduler=Processes())
        assert ("run", "units/f/living-g1-0") not in listed
        assert ("run", "units/f/dead-g1-0") in listed
    finally:
        process.kill()
        process.wait()


def test_nothing_is_removed_while_the_scheduler_is_silent(site):
    listed = site()
    (site.tools / "jobs").unlink()
    with pytest.raises(FabrictoolError) as caught:
        site(remove=listed.values())
    assert caught.value.problems[0].code == "FT5109"
    assert (site.base / "units/f/dead-g1-0").exists()


def test_a_site_without_anything_has_nothing(tmp_path, site):
    assert leftovers("c", str(tmp_path / "none"), Here(site.tools), Slurm(), keep_days=7) == []


def test_an_environment_that_a_job_to_come_or_an_adopted_server_needs_stays(site):
    site.add("units/f/living-g1-0/next/1-living-g2-0/job.sh", "exec /x/env/rel/cccc/bin/python")
    assert ("environment", "env/rel/cccc") not in site()
    site.add("units/f/living-g1-0/next/1-living-g2-0/job.sh", "exec /x/env/rel/aaaa/bin/python")
    assert ("environment", "env/rel/cccc") in site()
    site.add("adopted/f/ft-adopted-7/start.sh", "exec /x/env/rel/cccc/bin/python")
    assert ("environment", "env/rel/cccc") not in site()


@pytest.mark.parametrize("job", ["17", "17_3", "19"])
def test_an_adopted_servers_agent_goes_when_its_job_has_ended(site, job):
    by_task = "17_3 theirs none" if job != "17" else "17 theirs none"
    by_number = "19 theirs none" if job != "17" else by_task
    (site.tools / "squeue").write_text(
        f'#!/bin/sh\ncase "$*" in *"%A %j"*) echo {by_number};; *-r*"%i %j"*) echo {by_task};; esac\n'
    )
    for over in ("3", "17_4"):
        site.add(f"adopted/f/ft-adopted-{over}/identity/key")
    site.add(f"adopted/f/ft-adopted-{job}/identity/key")
    site.add("adopted/f/ft-adopted-9/identity/key")
    site.add("adopted/f/ft-adopted-9.lock")
    site.add("adopted/f/ft-adopted-8/health.json", days=0)
    listed = {key: item for key, item in site().items() if key[0] == "adopted"}
    assert set(listed) == {("adopted", f"adopted/f/ft-adopted-{over}") for over in ("3", "9", "17_4")}
    assert set(site(remove=listed.values())) == set(listed)
    left = {path.name for path in (site.base / "adopted/f").iterdir()}
    assert left == {f"ft-adopted-{job}", "ft-adopted-8"}
    site.add(f"adopted/f/ft-adopted-{job}/ended", "0")
    assert ("adopted", f"adopted/f/ft-adopted-{job}") in site(), "the job goes on without it"
