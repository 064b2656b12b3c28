"""One machine: a network, UTS, mount, PID and IPC namespace around etc/init.sh, which is its PID 1."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.testbed.files import accounts_folder
from tests.testbed.state import BedError, Process
from tests.testbed.topology import CLUSTERS, GPUS, MachineSpec

if TYPE_CHECKING:
    from tests.testbed.bed import Bed

REPOSITORY = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandError(BedError):
    """A command in the bed ended with another exit status than 0; the message has all that it said."""

    def __init__(self, machine: str, argv: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        said = f"{done.stdout or ''}{done.stderr or ''}".strip()
        super().__init__(f"{machine}: {' '.join(argv)}: exit {done.returncode}\n{said}")


def exposed_paths() -> list[str]:
    """What users of every machine must be able to read: this repository, its Python, and what that was made from."""
    paths = {REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    paths |= {Path(sys.executable).resolve().parents[1]}
    paths -= {Path("/usr"), Path("/")}
    return sorted(str(p) for p in paths if not any(q in p.parents for q in paths))


def spawn(root: Path, spec: MachineSpec) -> tuple[subprocess.Popen[bytes], Process]:
    """Starts the machine in its network namespace; returns the handle to reap and its PID 1 as seen from here."""
    cluster = CLUSTERS.get(spec.cluster)
    environment = {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "BED": str(root),
        "NAME": spec.name,
        "ROLE": spec.role,
        "CLUSTER": spec.cluster,
        "ACCOUNTING": cluster.accounting if cluster else "",
        "ACCOUNTS": str(accounts_folder(root, spec)),
        "HOSTS": str(root / f"hosts.{spec.cluster or 'pub'}"),
        "SSH_PORTS": " ".join(map(str, spec.ssh_ports)),
        "GPUS": str(GPUS),
        "EXPOSE": "\n".join(exposed_paths()),
    }
    (root / "m" / spec.name / "ready").unlink(missing_ok=True)
    own_processes = ["--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
    command = ["ip", "netns", "exec", spec.namespace, "unshare", "--uts", "--mount", "--propagation", "private"]
    command += [] if spec.role == "operator" else own_processes
    with (root / "m" / spec.name / "log" / "init.out").open("ab") as log:
        leader = subprocess.Popen(
            [*command, "bash", str(root / "etc" / "init.sh")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return leader, _first_process(leader, own=spec.role != "operator")


def _first_process(leader: subprocess.Popen[bytes], *, own: bool) -> Process:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and leader.poll() is None:
        pid: int | None = leader.pid
        if own:
            children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
            pid = int(children[0]) if children else None
        if pid and (process := Process.of(pid)):
            return process
        time.sleep(0.005)
    raise BedError(f"a machine did not start (exit status {leader.poll()}); see its log/init.out")


class Machine:
    """A running machine: programs in it, and its power."""

    def __init__(self, bed: "Bed", spec: MachineSpec, process: Process) -> None:
        self._bed = bed
        self.spec = spec
        self.process = process

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def alive(self) -> bool:
        return self.process.alive

    def command(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> list[str]:
        """The command line that runs `argv` in this machine, as root or as one of its users in their home.

        What it starts dies with it, unless it starts daemons of its own.
        """
        if not self.alive:
            raise BedError(f"{self.name} has no power")
        home = f"/home/{user}" if user else "/root"
        set_to = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": home, "USER": user or "root", "LOGNAME": user or "root"}
        set_to |= env or {}
        identity = [f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        into = ["nsenter", "-t", str(self.process.pid), "-a", "--"]
        clean = ["env", "-i", *(f"{k}={v}" for k, v in set_to.items())]
        # The operator's machine has no processes of its own: nsenter does not fork, and the parent is a thread of ours.
        fate = [] if self.spec.role == "operator" else ["--pdeathsig", "KILL"]
        enter = ["setpriv", *identity, *fate, "--", "env", "-C", str(cwd or (home if user else "/"))]
        return [*into, *clean, *enter, *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str | None = None,
        check: bool = True,
        stdin: str | None = None,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, `timeout` in seconds; raises CommandError unless check=False."""
        done = subprocess.run(
            self.command(argv, user=user, env=env, cwd=cwd),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
        )
        if check and done.returncode:
            raise CommandError(self.name, argv, done)
        return done

    def popen(self, argv: Sequence[str], *, user: str | None = None, **more: Any) -> subprocess.Popen[str]:
        """Starts a command; env and cwd are those within the machine, all else is Popen's."""
        command = self.command(argv, user=user, env=more.pop("env", None), cwd=more.pop("cwd", None))
        return subprocess.Popen(command, **({"stdin": subprocess.DEVNULL, "text": True} | more))

    def service(self, action: str, name: str) -> None:
        """start, stop (TERM) or kill (KILL) one service: slurmctld, slurmd, slurmdbd, mariadbd, munged, sshd-22."""
        root = str(self._bed.root)
        env = {"BED": root, "NAME": self.name, "CLUSTER": self.spec.cluster}
        inside = ["nsenter", "-t", str(self.process.pid), "-a", "--", "env", "-i", f"PATH={PATH}", "LANG=C.UTF-8"]
        command = [*inside, *(f"{k}={v}" for k, v in env.items()), "bash", f"{root}/etc/services.sh", action, name]
        # No pipe: a service that is started keeps what it inherits.
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)

    def power_cut(self) -> None:
        """Everything in it dies at once, and nothing of it says goodbye on the network."""
        self._bed.power_cut(self.name)

    def boot(self, *, wait: bool = True) -> None:
        """Power on again; with `wait`, until its services are started."""
        self._bed.boot(self.name, wait=wait)
