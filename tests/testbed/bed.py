"""The testbed: up, down, and what tests ask of it."""

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.testbed import files, keys, network, state
from tests.testbed.machine import Machine, spawn
from tests.testbed.state import BedError, Process, State
from tests.testbed.topology import CLUSTERS, Cluster, MachineSpec, address, machines

CLONE_NEWNET = 0x40000000


def wait_until(what: str, holds: Callable[[], object], *, within_s: float, every_s: float = 0.2) -> object:
    """The first true answer of `holds`; BedError with the last answer after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        answer = holds()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise BedError(f"{what}: not within {within_s} s (last answer: {answer!r})")
        time.sleep(every_s)


def _clean(found: State | None, specs: dict[str, MachineSpec]) -> None:
    """Ends all processes of a bed and removes its networks and its folder, whatever state it was left in."""
    for process in found.processes.values() if found else ():
        process.kill()
    for spec in specs.values():
        for pid in network.pids(spec.namespace):
            if process := Process.of(pid):
                process.kill()
    wait_until(
        "processes of the bed are still there",
        lambda: not any(Process.of(pid) for spec in specs.values() for pid in network.pids(spec.namespace)),
        within_s=10,
        every_s=0.02,
    )
    network.remove_all(specs.values())
    if found:
        root = Path(found.root)
        if root.name.startswith("ftbed-"):
            shutil.rmtree(root, ignore_errors=True)
    state.forget()


class Bed:
    """A living bed. Bed.up() makes it, Bed.attach() finds the one that another process made."""

    def __init__(self, root: Path, processes: dict[str, Process]) -> None:
        self.root = root
        self.specs = machines()
        self.times: dict[str, float] = {}  # step of `up` -> seconds
        self._processes = processes
        self._leaders: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count(1)

    # -- life -----------------------------------------------------------------------------------------------------

    @classmethod
    def up(cls, *, within_s: float = 60) -> "Bed":
        """Starts a bed; BedError when one is alive already. Remains of a dead one are removed first."""
        begin = time.monotonic()
        with state.locked():
            specs = machines()
            found = state.read()
            if found and found.alive:
                raise BedError(f"a testbed is up already, in {found.root}; `make testbed-down` ends it")
            if found or any(network.exists(s.namespace) for s in specs.values()) or network.exists(network.SWITCH):
                _clean(found, specs)
            bed = cls(Path(tempfile.mkdtemp(prefix="ftbed-", dir="/var/tmp")), {})
            try:
                bed._start(begin, within_s)
            except BaseException:
                bed._report_failure()
                _clean(bed._state, specs)
                raise
        return bed

    def _start(self, begin: float, within_s: float) -> None:
        state.write(self._state)
        marks = [("clean", time.monotonic())]
        network.create_switch()
        network.plug_in(self.specs.values())
        marks.append(("network", time.monotonic()))
        files.write_all(self.root, self.specs)
        marks.append(("files", time.monotonic()))
        for spec in self.specs.values():
            self._spawn(spec)
        state.write(self._state)
        marks.append(("spawn", time.monotonic()))
        for name in self.specs:
            self._wait_ready(name, within_s)
        for cluster in CLUSTERS:
            self.wait_nodes(cluster, "idle", within_s=within_s)
        marks.append(("ready", time.monotonic()))
        previous = begin
        for step, at in marks:
            self.times[step], previous = at - previous, at
        self.times["total"] = previous - begin

    @classmethod
    def attach(cls) -> "Bed":
        """The bed that is up; BedError when none is."""
        found = state.read()
        if not found or not found.alive:
            raise BedError("no testbed is up; `make testbed-up` starts one")
        return cls(Path(found.root), dict(found.processes))

    def down(self) -> float:
        """Ends it and leaves nothing; returns the seconds it took."""
        begin = time.monotonic()
        self.end_all()
        for leader in self._leaders:
            leader.wait(timeout=10)
        return time.monotonic() - begin

    @staticmethod
    def end_all() -> bool:
        """Removes the bed that is up, or the remains of one; False when there was nothing."""
        with state.locked(wait_s=10):
            specs, found = machines(), state.read()
            if not found and not any(network.exists(spec.namespace) for spec in specs.values()):
                return False
            _clean(found, specs)
            return True

    @property
    def _state(self) -> State:
        return State(str(self.root), state.boot_id(), self._processes)

    def _spawn(self, spec: MachineSpec) -> None:
        leader, process = spawn(self.root, spec)
        self._leaders.append(leader)
        self._processes[spec.name] = process

    def _wait_ready(self, name: str, within_s: float = 20) -> None:
        ready, process = self.root / "m" / name / "ready", self._processes[name]
        wait_until(
            f"{name} did not start its services",
            lambda: ready.exists() or (not process.alive and self._died(name)),
            within_s=within_s,
            every_s=0.02,
        )

    def _died(self, name: str) -> None:
        raise BedError(f"{name} died while it started; see {self.root}/m/{name}/log")

    def _report_failure(self) -> None:
        for path, tail in self.log_tails(lines=15).items():
            print(f"--- {path}\n{tail}", file=sys.stderr)

    # -- machines -------------------------------------------------------------------------------------------------

    def machine(self, name: str) -> Machine:
        if name not in self.specs:
            raise BedError(f"no machine is called {name!r}; there are {', '.join(self.specs)}")
        return Machine(self, self.specs[name], self._processes[name])

    def address(self, name: str) -> str:
        """The public address where it has one, else that inside of its cluster."""
        return address(self.machine(name).spec)

    def inner_address(self, name: str) -> str:
        spec = self.machine(name).spec
        return address(spec, spec.cluster)

    def power_cut(self, name: str) -> None:
        spec = self._cuttable(name)
        network.unplug(spec)
        process = self._processes[name]
        process.kill()
        wait_until(f"{name} still lives", lambda: not process.alive, within_s=10, every_s=0.01)
        wait_until(
            f"processes of {name} still live",
            lambda: not any(Process.of(pid) for pid in network.pids(spec.namespace)),
            within_s=10,
            every_s=0.02,
        )
        network.remove(spec)
        self._reap()

    def boot(self, name: str, *, wait: bool = True) -> None:
        spec = self._cuttable(name)
        with state.locked(wait_s=10):
            if self._processes[name].alive:
                raise BedError(f"{name} is running")
            network.remove(spec)
            network.plug_in([spec])
            self._spawn(spec)
            found = state.read()
            if found:  # other processes may have booted other machines
                processes = found.processes | {name: self._processes[name]}
                state.write(replace(found, processes=processes))
        if wait:
            self._wait_ready(name)

    def _cuttable(self, name: str) -> MachineSpec:
        spec = self.machine(name).spec
        if spec.role == "operator":
            raise BedError("the operator's machine shares its processes with this one: its power cannot be cut")
        return spec

    def _reap(self) -> None:
        self._leaders = [leader for leader in self._leaders if leader.poll() is None]

    # -- network --------------------------------------------------------------------------------------------------

    def cut_link(self, name: str, index: int = 0) -> None:
        """Pulls the cable of interface `index`; 0 is the public one where there is one."""
        network.set_link(self.machine(name).spec, index, up=False)

    def mend_link(self, name: str, index: int = 0) -> None:
        network.set_link(self.machine(name).spec, index, up=True)

    def drop(self, name: str, port: int) -> None:
        """The machine's TCP port neither hears nor answers any more: its connections are half-open."""
        network.drop(self.machine(name).spec, port)

    def undrop(self, name: str, port: int) -> None:
        network.undrop(self.machine(name).spec, port)

    @contextlib.contextmanager
    def sockets_in(self, name: str = "op") -> Iterator[None]:
        """Sockets that this thread makes within belong to that machine's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/thread-self/ns/net").open() as home, (network.NAMED / f"ft-{name}").open() as away:
            if libc.setns(away.fileno(), CLONE_NEWNET):
                raise BedError(f"cannot enter the network of {name}: {os.strerror(ctypes.get_errno())}")
            try:
                yield
            finally:
                if libc.setns(home.fileno(), CLONE_NEWNET):
                    raise BedError("cannot leave the network of a machine")

    # -- the operator ---------------------------------------------------------------------------------------------

    @property
    def key_file(self) -> Path:
        """The operator's private key; every user of every machine lets it in."""
        return self.root / files.OPERATOR_KEY

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: the right user, key and known hosts for every machine by name or address."""
        return self.root / "ssh_config"

    def operator_command(self, argv: Sequence[str], cwd: str | os.PathLike[str] | None = None) -> list[str]:
        op = f"/proc/{self._processes['op'].pid}/ns"
        enter = ["nsenter", f"--net={op}/net", f"--mount={op}/mnt", f"--uts={op}/uts", "--"]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *argv]

    def operator_popen(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **more: object,
    ) -> subprocess.Popen[str]:
        """Starts a command as root on the operator's machine. Its files, /tmp included, are this machine's.

        Signals reach the command itself. What it leaves behind ends with the bed.
        """
        arguments = {"stdin": subprocess.DEVNULL, "text": True} | more
        return subprocess.Popen(self.operator_command(argv, cwd), env=env, **arguments)

    def operator_run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = 120,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Like operator_popen, to the end; the exit status is the caller's to judge."""
        given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        command = self.operator_command(argv, cwd)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False, **given)

    def ssh(
        self,
        name: str,
        *argv: str,
        port: int = 22,
        user: str | None = None,
        timeout: float = 60,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """OpenSSH's client on the operator's machine; the words of argv are one shell line there."""
        who = ["-l", user] if user else []
        command = ["ssh", "-F", str(self.ssh_config), "-p", str(port), *who, name, *argv]
        return self.operator_run(command, timeout=timeout, stdin=stdin, cwd="/")

    def host_keys(self, name: str, port: int = 22) -> list[str]:
        """What a blueprint pins: lines `ssh-ed25519 AAAA...`."""
        spec = self.machine(name).spec
        if port not in spec.ssh_ports:
            raise BedError(f"{name} has no sshd on port {port}")
        return [keys.public(self.root / "m" / name / "ssh" / f"host_key_{port}")]

    @property
    def host_authority(self) -> str:
        """The public key that signed `host`'s host certificate, for @cert-authority."""
        return keys.public(self.root / files.HOST_CA)

    def new_key(self) -> Path:
        """A private key that no machine knows."""
        return keys.make_key(self.root / "keys" / f"key-{os.getpid()}-{next(self._numbers)}")

    def certify(self, key: Path, *principals: str, valid: str = "-5m:+1h") -> Path:
        """Signs a user key with the authority that all sshds trust; returns the certificate beside it."""
        return keys.sign(self.root / files.USER_CA, key, identity="operator", principals=list(principals), valid=valid)

    # -- Slurm ----------------------------------------------------------------------------------------------------

    def cluster(self, name: str) -> Cluster:
        return CLUSTERS[name]

    def slurm(
        self, cluster: str, *argv: str, root: bool = False, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A Slurm command on the login node, as the cluster's user; as root on the controller with root=True."""
        machine = self.machine(f"{cluster}-{'ctl' if root else 'login'}")
        return machine.run(argv, user=None if root else CLUSTERS[cluster].user, check=check, stdin=stdin)

    def node_states(self, cluster: str) -> dict[str, str]:
        """Node -> state as sinfo writes it, such as idle, mixed, down*; empty while the controller is silent."""
        done = self.slurm(cluster, "sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def wait_nodes(self, cluster: str, wanted: str, *, within_s: float = 60) -> None:
        def all_so() -> bool:
            states = self.node_states(cluster)
            return bool(states) and all(s == wanted for s in states.values())

        wait_until(f"nodes of {cluster} are not {wanted}", all_so, within_s=within_s)

    def job_state(self, cluster: str, job: str | int) -> str:
        """As scontrol says it, such as PENDING, RUNNING, COMPLETED; empty when the controller forgot the job."""
        done = self.slurm(cluster, "scontrol", "-o", "show", "job", str(job), check=False)
        words = dict(word.partition("=")[::2] for word in done.stdout.split())
        return words.get("JobState", "")

    def restart_slurmctld(self, cluster: str) -> None:
        """Stops the controller in good order and starts it again; returns when it answers."""
        machine = self.machine(f"{cluster}-ctl")
        machine.service("stop", "slurmctld")
        machine.service("start", "slurmctld")

        def answers() -> bool:
            return self.slurm(cluster, "scontrol", "ping", check=False).returncode == 0

        wait_until(f"slurmctld of {cluster} does not answer", answers, within_s=30)

    def maintenance(self, cluster: str, starts_in_s: float, duration_s: float) -> str:
        """Reserves all nodes for maintenance; returns the reservation's name. Slurm counts in whole minutes."""
        name = f"maintenance_{os.getpid()}_{next(self._numbers)}"
        start = f"starttime=now+{max(1, round(starts_in_s))}"
        length = f"duration={max(1, round(duration_s / 60))}"
        what = ["flags=maint,ignore_jobs", "nodes=ALL", "users=root"]
        self.slurm(
            cluster, "scontrol", "create", "reservation", f"reservationname={name}", start, length, *what, root=True
        )
        return name

    def end_maintenance(self, cluster: str, name: str) -> None:
        self.slurm(cluster, "scontrol", "delete", f"reservationname={name}", root=True)

    # -- logs -----------------------------------------------------------------------------------------------------

    def log_files(self) -> list[Path]:
        return sorted(p for p in (self.root / "m").glob("*/log/*") if p.is_file() and p.stat().st_size)

    def log_tails(self, *, lines: int = 20) -> dict[str, str]:
        """machine/file -> its last lines."""
        tails = {}
        for path in self.log_files():
            text = path.read_text(errors="replace").splitlines()[-lines:]
            tails[f"{path.parent.parent.name}/{path.name}"] = "\n".join(text)
        return tails

    def collect_logs(self, folder: Path) -> None:
        """Copies all logs to folder/MACHINE/."""
        for path in self.log_files():
            target = folder / path.parent.parent.name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
