"""Units as processes of this machine, each in a run folder that proves whether it lives (`base/runfolder.py`).

At most once: a folder bears the operation's id, and whoever holds its lock is the operation. Two starts of one
operation race for the lock and one of them ends at once, so a start may be repeated after any crash.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.base.files import file_error, sync_folder, write_atomic
from fabrictool.base.runfolder import RunFolder
from fabrictool.base.settings import Settings
from fabrictool.clusters.jobs import check_one_node
from fabrictool.clusters.schedulers.protocol import STOPPED
from fabrictool.clusters.weights.depot import ThisMachine
from fabrictool.clusters.weights.readiness import not_ready
from fabrictool.domain.address import Address
from fabrictool.domain.observed import (
    ClusterFacts,
    ObservedUnit,
    UnitState,
    awaited,
    renewable,
    standing,
    wanted_models,
)
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import AgentSpec, UnitSpec, decode_spec, encode_spec
from fabrictool.mesh.identity import describe_chain
from fabrictool.status.client import StatusUnavailableError, fetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.clusters.protocol import JobScript, NewUnit
    from fabrictool.domain.inventory import KeptLogs
    from fabrictool.domain.plan import Outlook
    from fabrictool.status.documents import StatusDocument

_OPERATION = re.compile(r"[a-z0-9][a-z0-9._-]{0,120}")
_OPERATION_LOG = re.compile(r".+-g[0-9]+-[0-9a-f]{8}\.log")
"""Others' files may lie beside ours."""
_INHERITED = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"})
_INHERITED_PREFIXES = (
    "CUDA_", "FABRICTOOL_CACHE_", "FABRICTOOL_STATE_", "GGML_", "HF_", "HIP_", "LC_", "LLAMA_", "MKL_", "NCCL_",
    "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "ROCR_", "SGLANG_", "SLURM_", "SSL_", "VIRTUAL_ENV", "VLLM_", "XDG_",
)  # fmt: skip
START_SECONDS = 10.0
"""How long a started process may take to claim its folder; it only imports and locks."""


class LocalCluster:
    """Processes on the machine that runs the tool."""

    poll_s = 0.1

    def __init__(
        self, name: str, root: Path, *, python: str = "", logs: KeptLogs | None = None, fabric: str = ""
    ) -> None:
        self.name = name
        self._root = root
        self._python = python or sys.executable
        self._logs = logs
        named = logs.folder if logs is not None else None
        self._log_folder = Path(named).expanduser() / fabric if named else Path(f"{root}.logs")

    # -- facts ------------------------------------------------------------------------------------------------

    def observe(self, *, brief: bool = False, patient: bool = False) -> ClusterFacts:
        try:
            folders = sorted(p for p in self._root.iterdir() if p.is_dir()) if self._root.exists() else []
            units = tuple(unit for unit in (_observe_unit(RunFolder(p)) for p in folders) if unit is not None)
        except (OSError, FabrictoolError) as error:
            hint = f"check the rights of {self._root}"
            if isinstance(error, FabrictoolError):
                hint = error.problems[0].hint or hint
            reason = f"its run folders cannot be read: {error}"
            return ClusterFacts(cluster=self.name, known=False, reason=reason, hint=hint)
        return ClusterFacts(cluster=self.name, known=True, units=units)

    def outlook(self, units: Sequence[NewUnit]) -> tuple[list[Outlook], list[str]]:
        refused = not_ready(units, self.name, ThisMachine())
        problems = [problem for error in refused.values() for problem in error.problems]
        return [], [f"{problem.code} {problem.message}" for problem in problems]

    def scripts(self, units: Sequence[NewUnit]) -> list[JobScript]:
        return []

    def spec(self, operation: str) -> UnitSpec:
        return _read_spec(self._folder(operation))

    def certificate(self, operation: str) -> bytes:
        path = self._folder(operation).identity / "session.crt"
        try:
            return path.read_bytes()
        except OSError as error:
            raise file_error(error, path) from error

    def state(self, operation: str) -> UnitState | None:
        """None for an operation that was never prepared here."""
        folder = self._folder(operation)
        return _state(folder) if folder.spec.exists() else None

    def page(self, operation: str) -> AbstractContextManager[str]:
        return contextlib.nullcontext(str(self._folder(operation).process().get("status", "")))

    def document(self, operation: str) -> StatusDocument | None:
        url = str(self._folder(operation).process().get("status", ""))
        try:
            return fetch(url, timeout_s=2.0) if url else None
        except StatusUnavailableError:
            return None

    def log_tail(self, operation: str, lines: int) -> list[str]:
        return self._folder(operation).log_tail(lines)

    def former_log(self, start: str, lines: int) -> list[str]:
        if self._logs is None or not self._log_folder.is_dir():
            return []
        logs = sorted(self._log_folder.glob(f"{glob.escape(start)}*.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(errors="replace").splitlines()[-lines:] if logs else []

    # -- commands ---------------------------------------------------------------------------------------------

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        failed = not_ready(units, self.name, ThisMachine())
        for unit in units:
            if unit.operation in failed:
                continue
            try:
                check_one_node(unit.address, unit.spec, "local")
                self.prepare(unit.operation, unit.spec, unit.files)
                self.launch(unit.operation)
            except FabrictoolError as error:
                failed[unit.operation] = error
        return failed

    def update(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        failed = {}
        for unit in units:
            folder = self._folder(unit.operation)
            try:
                if not folder.spec.exists():
                    raise FabrictoolError.of("FT5113", f"{unit.address} has no run folder", thing=unit.address)
                for name, data in unit.files.items():
                    write_atomic(folder.path / name, data, mode=0o600)
                write_atomic(folder.spec, encode_spec(unit.spec))
            except FabrictoolError as error:
                failed[unit.operation] = error
        return failed

    def prepare(self, operation: str, spec: UnitSpec, secrets: Mapping[str, bytes]) -> None:
        """Place the files; the spec comes last and makes the folder count."""
        folder = self._folder(operation)
        if folder.spec.exists():
            return
        try:
            folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.path.chmod(0o700)
            for name, data in secrets.items():
                write_atomic(folder.path / name, data, mode=0o600)
            write_atomic(folder.spec, encode_spec(spec))
            sync_folder(self._root)
        except OSError as error:
            raise file_error(error, folder.path) from error

    def launch(self, operation: str) -> None:
        """Spawn the unit in a session of its own and wait until it has claimed its folder."""
        folder = self._folder(operation)
        if _state(folder) != "prepared":
            return
        module = "agent" if isinstance(_read_spec(folder), AgentSpec) else "gateway"
        command = [self._python, "-P", "-m", f"fabrictool.{module}", str(folder.path.absolute())]
        try:
            pid = _spawn(command, folder.log)
        except OSError as error:
            raise file_error(error, folder.log) from error
        deadline = time.monotonic() + START_SECONDS
        while folder.holder() is None and not folder.exit():
            code = _exit_code(pid)
            if code is not None or time.monotonic() > deadline:
                if _state(folder) != "prepared":
                    return  # another process of the same operation won the race, or it ran and ended already
                tail = "".join(f"\n        {line.strip()}" for line in folder.log_tail(3))
                what = f"ended with code {code}" if code is not None else f"did not start within {START_SECONDS:.0f} s"
                raise UnreachableError.of(
                    "FT5101", f"the unit {operation} {what}", thing=f"cluster/{self.name}", hint=f"its log: {tail}"
                )
            time.sleep(0.02)

    def stop(self, operations: Iterable[str]) -> None:
        """TERM to the process that holds the folder."""
        for operation in operations:
            self._signal(operation, signal.SIGTERM)

    def kill(self, operations: Iterable[str]) -> None:
        for operation in operations:
            self._signal(operation, signal.SIGKILL)

    def forget(self, operations: Iterable[str]) -> None:
        """Remove the folders, keys first."""
        for operation in operations:
            self._forget(operation)

    def close(self) -> None: ...

    def _forget(self, operation: str) -> None:
        folder = self._folder(operation)
        if folder.holder() is not None:
            raise FabrictoolError.of("FT5102", f"{operation} still runs", thing=f"cluster/{self.name}")
        try:
            shutil.rmtree(folder.identity, ignore_errors=True)
            self._keep_log(folder)
            if folder.path.exists():
                shutil.rmtree(folder.path)
        except OSError as error:
            raise file_error(error, folder.path) from error

    def _keep_log(self, folder: RunFolder) -> None:
        if self._logs is None:
            return
        self._log_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.log.exists():
            shutil.copyfile(folder.log, self._log_folder / f"{folder.path.name}.log")
        oldest = time.time() - float(self._logs.keep)
        for path in self._log_folder.glob("*.log"):
            if _OPERATION_LOG.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()

    # -- internals --------------------------------------------------------------------------------------------

    def _folder(self, operation: str) -> RunFolder:
        if not _OPERATION.fullmatch(operation):
            raise FabrictoolError.of("FT5103", f"{operation!r} is not an operation's id", thing=f"cluster/{self.name}")
        return RunFolder(self._root / operation)

    def _signal(self, operation: str, number: signal.Signals) -> None:
        pid = self._folder(operation).holder()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _state(folder: RunFolder) -> UnitState:
    if folder.holder() is not None:
        return "running"
    if folder.exit():
        return "ended"
    return "killed" if folder.process() else "prepared"


def _read_spec(folder: RunFolder) -> UnitSpec:
    try:
        return decode_spec(folder.spec.read_bytes())
    except OSError as error:
        raise file_error(error, folder.spec) from error
    except msgspec.DecodeError as error:
        raise FabrictoolError.of("FT5104", f"{folder.spec} is damaged: {error}", file=str(folder.spec)) from error


def _certificate(folder: RunFolder) -> tuple[float, float | None]:
    """Wall time of the session certificate's begin and of its chain's end; None for the end when it has none."""
    try:
        described = describe_chain((folder.identity / "session.crt").read_bytes())
    except FileNotFoundError:
        return 0.0, None
    except OSError as error:
        raise file_error(error, folder.identity) from error
    except FabrictoolError:
        return 0.0, 0.0  # damaged: no time is left on it, so the next apply gives the unit another
    return described.begin, described.end


def _observe_unit(folder: RunFolder) -> ObservedUnit | None:
    if not folder.spec.exists():
        return None
    try:
        spec = _read_spec(folder)
    except FabrictoolError as error:
        if error.problems[0].code != "FT5104":
            raise
        return ObservedUnit(
            address=str(Address("damaged", folder.path.name)),
            operation=folder.path.name,
            state="damaged",
            spec_digest="",
            pid=folder.holder(),
            holds=folder.holder() is not None,
            reason=str(error),
        )
    process = folder.process()
    begins, ends = _certificate(folder)
    walltime = spec.walltime_s if isinstance(spec, AgentSpec) else None
    started = process.get("started_at")
    state = _state(folder)
    health = folder.health() if state == "running" else {}
    stopped = state == "running" and _stopped(folder.holder())
    return ObservedUnit(
        address=str(Address.of(spec)),
        operation=folder.path.name,
        state=state,
        spec_digest=spec_digest(spec),
        in_force=standing(health, folder.spec.read_bytes(), ends),
        pid=folder.holder(),
        reason=str(folder.exit().get("reason", "")),
        dormant=state == "ended" and folder.dormant,
        wanted=wanted_models(health),
        status_url=str(process.get("status", "")),
        certificate_begins_at=begins,
        certificate_ends_at=ends,
        renewable=renewable(health),
        hands_over=health.get("hands_over") is True,
        ends_at=started + walltime if walltime is not None and isinstance(started, int | float) else None,
        waits_for=awaited(health.get("waits_for")),
        ready=health.get("ready") is True and not stopped,
        detail=STOPPED if stopped else str(health.get("text", "starting" if state == "running" else "")),
        begins_at=started if isinstance(started, int | float) else None,
    )


def _stopped(pid: int | None) -> bool:
    """Whether a signal stopped the process (SIGSTOP, a debugger), so that it does nothing until it is continued."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(fields) and fields[0] in ("T", "t")


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What a unit inherits: the machine's settings and the engines' own, never a tenant's key that is set here."""
    inherited = {
        name: value for name, value in ours.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    settings = Settings.from_environment(ours)
    absolute = {"FABRICTOOL_STATE_DIR": settings.state_path, "FABRICTOOL_CACHE_DIR": settings.cache_path}
    return inherited | {name: str(path) for name, path in absolute.items() if name in inherited}


def _spawn(command: list[str], log: Path) -> int:
    """Start a process that outlives us, in a session of its own, with nothing of ours but its log; returns its pid."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, 1),
            (os.POSIX_SPAWN_DUP2, descriptor, 2),
        ]
        return os.posix_spawn(command[0], command, _environment(os.environ), file_actions=actions, setsid=True)
    finally:
        os.close(descriptor)


def _exit_code(pid: int) -> int | None:
    """Of our child, once it has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
