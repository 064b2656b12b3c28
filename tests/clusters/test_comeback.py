"""The shell programs that bring gateways back after a reboot, and those that keep logs; beside a fake crontab."""

import os
import shutil
import subprocess
import time

import pytest

from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.schedulers.processes import Processes

SH = shutil.which("dash") or "sh"
JOB = "echo $$ $(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20) $(cat /proc/sys/kernel/random/boot_id) >pid\n"
JOB += 'echo "$(hostname).$$" >claim; echo x >>starts; exec sleep 60\n'
CRONTAB = """#!/bin/sh
table={table}
case $1 in
  -l) [ ! -e "$table.warns" ] || echo "a warning of PAM" >&2
      [ ! -e "$table.broken" ] || {{ echo "you are not allowed" >&2; exit 1; }}
      cat "$table" 2>/dev/null || {{ echo "no crontab for me" >&2; exit 1; }} ;;
  -r) rm "$table" ;;
  *) cp "$1" "$table" ;;
esac
"""


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    yield host
    subprocess.run(["pkill", "-KILL", "-f", f"sleep 60 {host.base}"], check=False)


class Host:
    def __init__(self, folder):
        self.base, self.tools, self.table = folder / "base", folder / "tools", folder / "table"
        self.tools.mkdir()
        (self.tools / "crontab").write_text(CRONTAB.format(table=self.table))
        (self.tools / "crontab").chmod(0o755)
        self.units = self.base / "units" / "f"

    def unit(self, operation="gateway-main-g1-0a1b2c3d", **files):
        folder = self.units / operation
        folder.mkdir(parents=True)
        (folder / "job.sh").write_text(JOB.replace("sleep 60", f"sh -c 'sleep 60; : {self.base}'"))
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder

    def run(self, program, *arguments, stdin=""):
        path = f"{self.tools}:{os.environ['PATH']}"
        argv = [SH, "-c", program, "ft", str(self.base), "f", *arguments]
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, env={"PATH": path}, check=False)

    def come_back(self, way, *operations):
        return self.run(shell.come_back_program(), way, *operations, stdin=Processes.on_boot())

    def forget(self, *operations, minutes=0, logs="-"):
        return self.run(shell.forget_program(), str(minutes), str(logs), *operations)

    def boot(self, calls=1):
        programs = [
            subprocess.Popen([SH, str(self.base / "on-boot")], env={"PATH": os.environ["PATH"]}) for _ in range(calls)
        ]
        for program in programs:
            assert program.wait(30) == 0

    @property
    def line(self):
        return f"@reboot /bin/sh {self.base}/on-boot"


TABLES = ["", "# mine\n\n7 7 * * * true % x\n", "7 7 * * * no end of line"]


@pytest.mark.parametrize("before", TABLES)
def test_the_line_comes_and_goes_and_all_others_stay(host, before):
    host.unit()
    host.table.write_text(before)
    for _ in range(2):
        assert host.come_back("cron", "gateway-main-g1-0a1b2c3d").returncode == 0
        assert host.table.read_text() == before + ("\n" if before[-1:] not in ("", "\n") else "") + host.line + "\n"
    assert host.forget("gateway-main-g1-0a1b2c3d").returncode == 0
    left = host.table.read_text() if host.table.exists() else ""
    assert left.rstrip("\n") == before.rstrip("\n")
    assert not (host.base / "on-boot").exists()


def test_a_warning_is_not_written_into_the_table(host):
    host.unit()
    host.table.write_text("# mine\n")
    (host.table.with_name("table.warns")).touch()
    assert host.come_back("cron").returncode == 0
    assert host.table.read_text() == f"# mine\n{host.line}\n"


def test_a_table_that_cannot_be_read_is_not_written_over(host):
    folder = host.unit()
    host.table.write_text("# mine\n")
    (host.table.with_name("table.broken")).touch()
    refused = host.come_back("cron", folder.name)
    assert (refused.returncode, "not allowed" in refused.stderr) == (69, True)
    assert host.table.read_text() == "# mine\n"
    assert not (folder / "again").exists(), "`plan` sees that it would not come back"


def test_the_line_stays_while_anything_may_still_come_back(host):
    folder = host.unit()
    other = host.base / "units" / "other" / "gateway-x-g1-0a1b2c3d"
    other.mkdir(parents=True)
    (other / "again").write_text("here\n")
    host.come_back("cron", folder.name)
    host.forget(folder.name)
    assert host.line in host.table.read_text()
    assert host.come_back("-", folder.name).returncode == 0
    (other / "again").unlink()
    assert host.come_back("-").returncode == 0
    assert not host.table.exists()


def test_the_youngest_that_was_not_stopped_starts_once_however_often_it_is_called(host):
    here = os.uname().nodename
    first, second, tenth = (host.unit(f"gateway-main-g{n}-0a1b2c3d", again=here) for n in (1, 2, 10))
    (tenth / "stopped").touch()
    away = host.unit("gateway-far-g1-0a1b2c3d", again="elsewhere\n")
    mine = host.unit("gateway-mine-g1-0a1b2c3d")
    host.come_back("site")
    host.boot(calls=4)
    host.boot()
    started = [folder.name for folder in (first, second, tenth, away, mine) if (folder / "starts").exists()]
    assert started == ["gateway-main-g2-0a1b2c3d"]
    assert (second / "starts").read_text() == "x\n"
    assert "it ran on elsewhere" in (host.base / "on-boot.log").read_text()
    for path in (second / "claim", second / "pid"):  # cut off in the middle: the next call starts it
        path.unlink()
    subprocess.run(["pkill", "-KILL", "-f", f"sleep 60; : {host.base}"], check=False)
    host.boot()
    assert (second / "starts").read_text() == "x\nx\n"


def test_a_mark_that_cannot_be_written_keeps_nobody_from_stopping(host):
    folders = [host.unit(f"gateway-{name}-g1-0a1b2c3d", again="x") for name in ("a", "b")]
    (folders[0] / "stopped").symlink_to("/nowhere/stopped")
    words = [word for folder in folders for word in (folder.name, "1")]
    assert host.run(shell.signal_program(Processes(), kill=False), *words).returncode == 0
    assert not (folders[0] / "again").exists(), "it does not come back all the same"
    assert (folders[1] / "stopped").exists()


def test_who_asks_for_nothing_leaves_nothing(host):
    folder = host.unit()
    assert host.come_back("-", folder.name).returncode == 0
    assert sorted(path.name for path in host.base.iterdir()) == ["units"]


def test_a_log_that_cannot_be_written_keeps_no_gateway_away(host):
    folder = host.unit(again=os.uname().nodename)
    host.come_back("site")
    for name in ("on-boot.log", ".on-boot.lock"):
        (host.base / name).unlink(missing_ok=True)
        (host.base / name).symlink_to("/nowhere/x")
    host.boot()
    assert (folder / "starts").read_text() == "x\n"


def test_logs_are_kept_and_only_ours_are_removed(host, tmp_path):
    host.unit("replica-m-0-g1-0a1b2c3d", log="old\n")
    host.unit("replica-m-0-g2-0a1b2c3d", log="new\n")
    kept, now = tmp_path / "kept", time.time()
    theirs = [kept / "f" / "training.log", kept / "f" / "deep" / "replica-m-0-g1-0a1b2c3d.log"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
        os.utime(path, (now - 86400, now - 86400))
    assert host.forget("replica-m-0-g1-0a1b2c3d", minutes=60, logs=kept).returncode == 0
    first = kept / "f" / "replica-m-0-g1-0a1b2c3d.log"
    assert first.read_text() == "old\n"
    os.utime(first, (now - 86400, now - 86400))
    assert host.forget("replica-m-0-g2-0a1b2c3d", minutes=60, logs=kept).returncode == 0
    assert not first.exists()
    assert [path.read_text() for path in theirs] == ["precious"] * 2
    tail = host.run(shell.program("former-log"), str(kept), "1", "replica-m-0-g")
    assert tail.stdout == "new\n"


def test_a_log_that_cannot_be_kept_stays_where_it_is_without_keys(host, tmp_path):
    folder = host.unit("replica-m-0-g1-0a1b2c3d", log="why\n")
    (folder / "identity").mkdir()
    (tmp_path / "file").touch()
    assert host.forget(folder.name, minutes=60, logs=tmp_path / "file").returncode == 4
    assert (folder / "log").read_text() == "why\n"
    assert not (folder / "identity").exists()
