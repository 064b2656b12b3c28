"""What is left behind on a site: found and removed only when nothing can use it any more. Beside a fake squeue."""

import os
import subprocess
import time

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.clusters.leftovers import leftovers
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

    def prune(*, keep_days=7, remove=False):
        return {
            (item.kind, item.path): item
            for item in leftovers("c", str(base), Here(tools), Slurm(), keep_days=keep_days, remove=remove)
        }

    prune.base, prune.tools, prune.add = base, tools, add
    return prune


def test_what_may_be_used_is_not_listed(site):
    assert set(site()) == {("run", "units/f/dead-g1-0"), ("environment", "env/rel/cccc")}
    assert ("run", "units/f/fresh-g1-0") in site(keep_days=1)
    assert site()["run", "units/f/dead-g1-0"].days == 30


def test_it_removes_just_what_it_listed_and_then_nothing_is_left(site):
    assert set(site(remove=True)) == {
        ("run", "units/f/dead-g1-0"),
        ("environment", "env/rel/cccc"),
        ("environment", "env/rel/bbbb"),
    }, "with the dead unit goes the environment that only it named"
    assert site() == {}
    left = {str(path.relative_to(site.base)) for path in site.base.rglob("*") if path.is_file()}
    assert "units/f/living-g1-0/job.sh" in left
    assert "env/rel/aaaa/MANIFEST" in left
    assert "cache/weights/x.bin" in left


def test_where_no_unit_is_left_environment_and_caches_go_too(site):
    (site.tools / "jobs").write_text("")
    site(keep_days=0, remove=True)
    assert [path for path in site.base.rglob("*") if path.is_file()] == []


def test_nothing_is_removed_while_the_scheduler_is_silent(site):
    (site.tools / "jobs").unlink()
    with pytest.raises(FabrictoolError) as caught:
        site(remove=True)
    assert caught.value.problems[0].code == "FT5109"
    assert (site.base / "units/f/dead-g1-0").exists()


def test_a_site_without_anything_has_nothing(tmp_path, site):
    assert leftovers("c", str(tmp_path / "none"), Here(site.tools), Slurm(), keep_days=7, remove=False) == []
