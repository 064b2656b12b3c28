"""The testbed: up, down, and what tests ask of it."""

import itertools
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed import files, network, state
from tests.testbed.machine import Machine, spawn
from tests.testbed.operator_side import OperatorSide
from tests.testbed.slurm_side import SlurmSide
from tests.testbed.state import BedError, Process, State
from tests.testbed.topology import CLUSTERS, SWITCH, MachineSpec, address, machines
from tests.testbed.waiting import wait_until

if TYPE_CHECKING:
    import subprocess


def _clean(found: State | None, specs: dict[str, MachineSpec]) -> None:
    """Ends all processes of a bed and removes its networks and its folder, whatever state it was left in."""
    processes = set(found.processes.values()) if found and found.boot == state.boot_id() else set()

    def ended() -> bool:
        # A dying process leaves its network before it is gone, and others may be born meanwhile: ask both, again.
        for spec in specs.values():
            processes.update(living for pid in network.pids(spec.namespace) if (living := Process.of(pid)))
        for process in processes:
            process.kill()
        return not any(process.alive for process in processes)

    wait_until("processes of the bed do not end", ended, within_s=10, every_s=0.02)
    network.remove_all(specs.values())
    if found:
        root = Path(found.root)
        if root.name.startswith("ftbed-"):
            shutil.rmtree(root, ignore_errors=True)
    state.forget()


class Bed(OperatorSide, SlurmSide):
    """A living bed. Bed.up() makes it, Bed.attach() finds the one that another process made."""

    def __init__(self, root: Path, processes: dict[str, Process]) -> None:
        self.root = root
        self.specs = machines()
        self.times: dict[str, float] = {}  # step of `up` -> seconds
        self._processes = processes
        self._owner: Process | None = None
        self._leaders: list[subprocess.Popen[bytes]] = []
        self.numbers = itertools.count(1)

    # -- life -----------------------------------------------------------------------------------------------------

    @classmethod
    def up(cls, *, owned: bool = False, within_s: float = 60) -> "Bed":
        """Starts a bed; BedError when one is alive already. Remains of a dead one are removed first.

        An owned bed counts as dead once this process has ended.
        """
        begin = time.monotonic()
        with state.locked():
            specs = machines()
            found = state.read()
            if found and found.alive and not found.orphaned:
                raise BedError(f"a testbed is up already, in {found.root}; `make testbed-down` ends it")
            if found or any(network.exists(s.namespace) for s in specs.values()) or network.exists(SWITCH):
                _clean(found, specs)
            bed = cls(Path(tempfile.mkdtemp(prefix="ftbed-", dir="/var/tmp")), {})
            bed._owner = Process.of(os.getpid()) if owned else None
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

    def remains(self) -> list[str]:
        """What of this bed still exists: after `down`, nothing."""
        left = [f"process {process.pid} of {name}" for name, process in self._processes.items() if process.alive]
        left += [spec.namespace for spec in self.specs.values() if network.exists(spec.namespace)]
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        left += [line for line in mounts if str(self.root) in line]
        return left + [str(path) for path in (self.root, state.FILE, network.NAMED / SWITCH) if path.exists()]

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
        return State(str(self.root), state.boot_id(), self._processes, self._owner)

    def _spawn(self, spec: MachineSpec) -> None:
        leader, process = spawn(self.root, spec)
        self._leaders.append(leader)
        self._processes[spec.name] = process

    def _wait_ready(self, name: str, within_s: float = 20) -> None:
        ready, process = self.root / "m" / name / "ready", self._processes[name]

        def started() -> bool:
            if not process.alive:
                raise BedError(f"{name} died while it started; see {self.root}/m/{name}/log")
            return ready.exists()

        wait_until(
            f"{name} did not start its services",
            started,
            within_s=within_s,
            every_s=0.02,
        )

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

    # -- logs -----------------------------------------------------------------------------------------------------

    def log_files(self) -> list[Path]:
        """All that say something; what a service says twice, on its standard error too, counts once."""
        found = [p for p in (self.root / "m").glob("*/log/*") if p.is_file() and p.stat().st_size]
        return sorted(p for p in found if p.suffix != ".out" or p.with_suffix(".log") not in found)

    def log_tails(self, *, lines: int = 20, since: float = 0.0) -> dict[str, str]:
        """machine/file -> its last lines, of files that were written to since then (a time as time.time())."""
        tails = {}
        for path in self.log_files():
            if path.stat().st_mtime < since:
                continue
            text = path.read_text(errors="replace").splitlines()[-lines:]
            tails[f"{path.parent.parent.name}/{path.name}"] = "\n".join(text)
        return tails

    def collect_logs(self, folder: Path) -> None:
        """Copies all logs to folder/MACHINE/."""
        for path in self.log_files():
            target = folder / path.parent.parent.name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
