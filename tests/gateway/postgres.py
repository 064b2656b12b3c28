"""A PostgreSQL server of Debian's package on loopback, in a folder of its own, run by an account without rights."""

import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path

from tests.ports import free_port

ACCOUNT = "postgres"
"""Of Debian's package: the server refuses to run as root."""
PASSWORD = "not-a-secret"


def programs():
    """The newest version's folder; None where the package is not installed."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


class Postgres:
    """`kill` is ``kill -9`` of the server with all of its processes."""

    def __init__(self, folder):
        self._programs, self._data = programs(), folder / "data"
        self._as = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT)
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(folder, account.pw_uid, account.pw_gid)
        self.port = free_port()
        self.url = f"postgresql://{ACCOUNT}:{PASSWORD}@127.0.0.1:{self.port}/postgres"
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        words = ["-U", ACCOUNT, "-A", "scram-sha-256", "--pwfile", secret, "--no-sync", "-E", "UTF8"]
        self._run("initdb", "-D", self._data, *words)

    def _run(self, program, *words):
        argv = [str(self._programs / program), *map(str, words)]
        subprocess.run(argv, cwd="/", check=True, capture_output=True, timeout=120, **self._as)

    def start(self):
        words = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c shared_buffers=16MB"
        self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", self._data.parent / "log", "-o", words)

    def kill(self):
        """The lock file that it leaves is removed: its process stays a zombie where nobody reaps orphans."""
        leader = int((self._data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        for process in (leader, *map(int, children)):
            os.kill(process, signal.SIGKILL)
        for process in (leader, *map(int, children)):
            while _lives(process):
                pass
        (self._data / "postmaster.pid").unlink()

    def stop(self):
        if (self._data / "postmaster.pid").exists():
            self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", self._data)
        shutil.rmtree(self._data, ignore_errors=True)


def _lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
