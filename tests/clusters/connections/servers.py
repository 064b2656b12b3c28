"""A real sshd of this machine for each need: on a free port, with keys of its own, as the user who runs the tests."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path

from fabrictool.clusters.connections.protocol import Endpoint
from tests.ports import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
BASE = """\
ListenAddress 127.0.0.1
Port {port}
PidFile none
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
TrustedUserCAKeys {folder}/user_ca.pub
AuthorizedPrincipalsFile {folder}/principals
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowAgentForwarding yes
LogLevel VERBOSE
SetEnv HOME={folder}
Subsystem sftp internal-sftp
"""


# HOME: the start-up files of whoever runs the tests are no part of them.


def keygen(*arguments):
    subprocess.run(["ssh-keygen", "-q", *map(str, arguments)], check=True, stdin=subprocess.DEVNULL, timeout=30)


def new_key(path, kind="ed25519"):
    keygen("-t", kind, "-N", "", "-C", "", "-f", path)
    return path


def public(path):
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def sign(authority, key, *options, name="t", principals=None, validity=""):
    """A certificate beside the key; `validity` as ssh-keygen -V wants it."""
    validity = ["-V", validity] if validity else []
    keygen("-s", authority, "-I", name, "-n", principals or getpass.getuser(), *options, *validity, f"{key}.pub")


def eventually(check, seconds=60.0):
    """The first true answer of `check`, or a failure after `seconds`."""
    until = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < until, f"{check} did not become true"
        time.sleep(0.02)
    return answer


def answers(port):
    with closing(socket.socket()) as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """One sshd; `config` comes before the base, so that it wins."""

    def __init__(self, folder, config="", port=None, host_key=None, prepare=None):
        self.folder, self.port, self.config = folder, port or free_port(), config
        folder.mkdir(exist_ok=True)
        self.host_key = folder / "host"
        if host_key is None:
            new_key(self.host_key)
        else:
            for end in ("", ".pub"):
                shutil.copy(f"{host_key}{end}", f"{self.host_key}{end}")
            self.host_key.chmod(0o600)
        if prepare is not None:
            prepare(self.host_key)
        self.process = None
        self.log = folder / "log"

    def start(self):
        conf = self.folder / "conf"
        conf.write_text(self.config + BASE.format(port=self.port, folder=self.folder))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", conf], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        eventually(lambda: self.process.poll() is not None or answers(self.port))
        assert self.process.poll() is None, self.log.read_text()
        return self

    def endpoint(self, identity="", **changes):
        values = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "host_keys": (public(self.host_key),),
            "identity": str(identity),
        }
        return Endpoint(**values | changes)

    def sessions(self):
        """The sshd processes of its connections; they are its children."""
        if self.process.poll() is not None:
            return []
        tree = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in tree.read_text().split()]

    def cut(self):
        """Kill every connection, as a reboot of the login node would.

        The server's process first: a shell that outlived its command for a moment could still say how it ended.
        """
        for pid in self.sessions():
            for victim in (pid, *reversed(descendants(pid))):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    def stop(self):
        if self.process is not None:
            self.cut()
            self.process.kill()
            self.process.wait()


def descendants(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (*descendants(child), child)]


class Yard:
    """Where a test gets its servers, keys and endpoints."""

    def __init__(self, folder):
        self.folder = folder
        self.key = new_key(folder / "key")
        self.user_ca = new_key(folder / "user_ca")
        self.host_ca = new_key(folder / "host_ca")
        self.servers = []

    def server(self, config="", **options):
        found = Server(self.folder / f"server{len(self.servers)}", config, **options)
        self.servers.append(found)
        (found.folder / "authorized").write_text(public(self.key) + "\n")
        (found.folder / "principals").write_text(getpass.getuser() + "\n")
        shutil.copy(f"{self.user_ca}.pub", found.folder / "user_ca.pub")
        return found.start()

    def stop(self):
        for server in self.servers:
            server.stop()
