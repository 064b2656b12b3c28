"""A cluster behind a login node: one connection, one program a look, one program for any number of units.

What runs there is decided by pure parts: `schedulers/` says the words of a scheduler, `survey` reads what came back,
`allocation` says how long a job may run. This module carries bytes between them and the connection.
"""

from __future__ import annotations

import contextlib
import io
import posixpath
import tarfile
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.allocation import allocation
from fabrictool.clusters.schedulers import programs
from fabrictool.clusters.schedulers.protocol import ENDS_AT, Job
from fabrictool.clusters.survey import read_survey
from fabrictool.domain.observed import Away, ClusterFacts
from fabrictool.domain.specs import AgentSpec, GatewaySpec, UnitSpec, encode_spec
from fabrictool.mesh.identity import describe_chain
from fabrictool.status.documents import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabrictool.base.errors import Problem
    from fabrictool.clusters.connections.protocol import Completed, Connection
    from fabrictool.clusters.protocol import NewUnit
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import Cluster as Described
    from fabrictool.status.documents import StatusDocument

SURVEY_SECONDS = 60.0
SUBMIT_SECONDS = 60.0
SUBMIT_SECONDS_EACH = 5.0
WARNING_MARGIN_S = 120.0
"""A scheduler looks at its clocks every half minute, and sends its warning up to a minute early."""
_REFUSALS = {"refused": "FT5404", "unknown": "FT5405", "unplaced": "FT5406"}


class RemoteCluster:
    """See the module's docstring. `connect` gives its login nodes, tried in order; asked for when first needed."""

    def __init__(
        self,
        name: str,
        fabric: str,
        described: Described,
        scheduler: Scheduler,
        connect: Callable[[], Sequence[Connection]],
    ) -> None:
        self.name = name
        self.poll_s = float(described.poll)
        self._fabric = fabric
        self._described = described
        self._scheduler = scheduler
        self._connect = connect
        self._opened: Sequence[Connection] = ()
        self._lock = threading.Lock()
        self._survey: Survey | None = None

    # -- facts ------------------------------------------------------------------------------------------------

    def observe(self, *, brief: bool = False) -> ClusterFacts:
        """One program on the login node."""
        try:
            survey = self._look(brief=brief)
        except FabrictoolError as error:
            reason = "; ".join(problem.message for problem in error.problems)
            return ClusterFacts(cluster=self.name, known=False, reason=reason, hint=error.problems[0].hint or "")
        facts = survey.scheduler
        return ClusterFacts(
            cluster=self.name,
            known=True,
            units=survey.units,
            scheduler=facts.name,
            queues=dict(facts.queues),
            away=self._away(survey),
        )

    def survey(self) -> Survey:
        """The last look, or the first; raises what a login node that does not answer raises."""
        return self._survey or self._look(brief=False)

    def spec(self, operation: str) -> UnitSpec:
        """From the last look."""
        spec = self.survey().specs.get(operation)
        if spec is None:
            message = f"the spec of {operation} cannot be read"
            raise FabrictoolError.of("FT5104", message, thing=f"cluster/{self.name}")
        return spec

    def document(self, operation: str) -> StatusDocument | None:
        """As the unit wrote it last."""
        written = self._run("ft-document", programs.program("document"), [operation]).stdout
        try:
            return decode(written) if written else None
        except msgspec.DecodeError:
            return None

    @contextlib.contextmanager
    def page(self, operation: str) -> Iterator[str]:
        """Through the login node of a plain host, which is the unit's own machine; of jobs there is none."""
        url = self.survey().pages.get(operation, "")
        parts = urlsplit(url)
        if self._scheduler.kind != "ssh" or parts.port is None:
            yield ""
            return
        with self._connections[0].forward("127.0.0.1", parts.port) as (host, port):
            yield f"http://{host}:{port}{parts.path}"

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """Of the job's output."""
        tail = self._run("ft-log", programs.program("tail"), [operation, str(lines)]).stdout
        return tail.decode(errors="replace").splitlines()

    def estimate(self, unit: NewUnit) -> float | None:
        """Wall second at which the scheduler would start it; None when it does not say.

        Raises
        ------
        FabrictoolError
            FT5404 when it would never start it.
        """
        survey = self.survey()
        argv = self._scheduler.estimate(survey.scheduler, self._job(unit, survey))
        if argv is None:
            return None
        done = self._connected(["env", "SLURM_TIME_FORMAT=%s", *argv])
        stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if done.status != 0:
            message = f"{unit.address} would never start: {stderr.strip()[-300:]}"
            raise FabrictoolError.of("FT5404", message, thing=f"cluster/{self.name}")
        return self._scheduler.estimated(stdout, stderr)

    # -- commands ---------------------------------------------------------------------------------------------

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """One program submits all of them, each at most once."""
        if not units:
            return {}
        survey = self.survey()
        failed: dict[str, FabrictoolError] = {}
        folders: dict[str, dict[str, bytes]] = {}
        for unit in units:
            try:
                folders[unit.operation] = self._folder(unit, survey)
            except FabrictoolError as error:
                failed[unit.operation] = error
        if not folders:
            return failed
        done = self._run(
            "ft-submit",
            programs.submit_program(self._scheduler),
            sorted(folders),
            stdin=_tar(folders),
            timeout_s=SUBMIT_SECONDS + SUBMIT_SECONDS_EACH * len(folders),
        )
        verdicts = {}
        for line in done.stdout.decode(errors="replace").splitlines():
            operation, *rest = line.split("\t")
            if len(rest) == 3:
                verdicts[operation] = rest
        for operation in folders:
            verdict, _, why = verdicts.get(
                operation, ("unknown", "", f"no verdict: {done.stderr.decode(errors='replace')[-200:]}")
            )
            if verdict in _REFUSALS:
                failed[operation] = self._refusal(operation, verdict, why)
        return failed

    def stop(self, operations: Iterable[str]) -> None:
        """TERM, or an end to what waits."""
        self._signal(operations, kill=False)

    def kill(self, operations: Iterable[str]) -> None:
        """The end of the job."""
        self._signal(operations, kill=True)

    def forget(self, operations: Iterable[str]) -> None:
        """Remove run folders, identity first."""
        named = sorted(operations)
        if named:
            self._run("ft-forget", programs.program("forget"), named)

    def close(self) -> None:
        """Of every login node."""
        for connection in self._opened:
            connection.close()

    @property
    def _connections(self) -> Sequence[Connection]:
        with self._lock:
            if not self._opened:
                self._opened = self._connect()
            return self._opened

    # -- internals --------------------------------------------------------------------------------------------

    def _look(self, *, brief: bool) -> Survey:
        done = self._run("ft-survey", programs.survey_program(self._scheduler, brief=brief), [])
        if done.status != 0:
            why = done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.status}"
            raise UnreachableError.of(
                "FT5109",
                f"the scheduler does not answer: {why}",
                thing=f"cluster/{self.name}",
                hint="its login node answers; nothing on the cluster is touched until the scheduler does",
                transient=True,
            )
        found = read_survey(done.stdout.decode(errors="replace"), self._scheduler, thing=f"cluster/{self.name}")
        with self._lock:
            if brief and self._survey is not None:  # queues and reservations stay as last seen
                old = self._survey.scheduler
                found = replace(found, scheduler=replace(old, jobs=found.scheduler.jobs))
            self._survey = found
        return found

    def _signal(self, operations: Iterable[str], *, kill: bool) -> None:
        named = sorted(operations)
        if not named:
            return
        jobs = {unit.operation: unit.job for unit in self.survey().units}
        pairs = [word for operation in named for word in (operation, jobs.get(operation) or "-")]
        done = self._run("ft-signal", programs.signal_program(self._scheduler, kill=kill), pairs)
        said = done.stdout.decode(errors="replace").strip()
        if said:
            message = f"not every signal was delivered: {said[:300]}"
            raise FabrictoolError.of("FT5409", message, thing=f"cluster/{self.name}", transient=True)

    def _folder(self, unit: NewUnit, survey: Survey) -> dict[str, bytes]:
        job = self._job(unit, survey)
        submission = self._scheduler.submission(survey.scheduler, job)
        chain = unit.files.get("identity/session.crt")
        described = describe_chain(chain) if chain is not None else None
        meta = {
            "address": unit.address,
            "lineage": unit.lineage,
            "serial": unit.serial,
            "certificate_begins_at": described.begin if described is not None else 0.0,
            "certificate_ends_at": described.end if described is not None else None,
        }
        return {
            **unit.files,
            "spec.json": encode_spec(unit.spec) + b"\n",
            "meta.json": msgspec.json.encode(meta) + b"\n",
            "job.sh": submission.script.encode(),
            "submit": f"{submission.line}\n".encode(),
        }

    def _job(self, unit: NewUnit, survey: Survey) -> Job:
        """The unit in no scheduler's words; raises FT5403 without a Python, FT5408 for what cannot run here."""
        spec, operation = unit.spec, unit.operation
        folder = posixpath.join(survey.base, "units", self._fabric, operation)
        module = "fabrictool.agent" if isinstance(spec, AgentSpec) else "fabrictool.gateway"
        python, setup = self._python(survey)
        common: dict[str, Any] = {
            "operation": operation,
            "address": unit.address,
            "fabric": self._fabric,
            "lineage": unit.lineage,
            "serial": unit.serial,
            "folder": folder,
            "home": survey.home,
            "setup": (*setup, f"export FABRICTOOL_CACHE_DIR={survey.base}/cache"),
        }
        if isinstance(spec, GatewaySpec):
            if self._scheduler.kind != "ssh":
                message = f"{unit.address} cannot run as a job of {self.name}: its address would change"
                raise FabrictoolError.of("FT5408", message, thing=unit.address)
            return Job(**common, command=(*python, "-P", "-m", module, folder))
        partition = self._described.partitions[spec.node]
        if spec.device_indices == () and spec.devices > partition.devices_per_node:
            message = f"{unit.address} needs {spec.devices} devices, and a node of {spec.node} has "
            raise FabrictoolError.of("FT5408", f"{message}{partition.devices_per_node}", thing=unit.address)
        facts = survey.scheduler
        granted = allocation(
            operation, spec.node, spec.walltime_s, facts.queues.get(spec.node), self._away(survey), survey.now
        )
        wanted, each = partition.job, max(1, spec.devices)
        return Job(
            **common,
            command=(*python, "-P", "-m", module, folder, ENDS_AT),
            partition=spec.node,
            devices=0 if spec.device == "cpu" else spec.devices,
            whole_node=partition.whole_nodes,
            cpus=wanted.cpus_per_device * each if wanted.cpus_per_device is not None else None,
            memory=int(wanted.memory_per_device) * each if wanted.memory_per_device is not None else None,
            walltime_s=granted.walltime_s,
            begin_in_s=granted.begin_in_s,
            warning_s=spec.drain_s + WARNING_MARGIN_S,
            options=wanted.options,
        )

    def _away(self, survey: Survey) -> tuple[Away, ...]:
        """The scheduler's reservations, and the inventory's windows, of which it need not know."""
        windows = [
            Away(name=window.title or "maintenance", begin=float(window.begin), end=float(window.end),
                 partitions=(name,), enforced=False)
            for name, partition in self._described.partitions.items()
            for window in partition.maintenance
            if float(window.end) > survey.now
        ]  # fmt: skip
        return (*survey.scheduler.away, *windows)

    def _python(self, survey: Survey) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The interpreter's words, and shell lines that come before them."""
        way = self._described.software.python
        if way.venv is not None:
            return (f"{way.venv}/bin/python",), ()
        if way.path is not None:
            return (way.path,), ()
        if way.container is not None:
            return ("apptainer", "exec", "--nv", way.container, "python3"), ()
        if way.module is not None:
            load = "command -v module >/dev/null 2>&1 || . /etc/profile"
            return ("python3",), (load, f"module load {way.module} || exit 66")
        if not survey.environment:
            message = f"{self.name} has no Python for agents"
            raise FabrictoolError.of(
                "FT5403", message, thing=f"cluster/{self.name}", hint=f"fabrictool bootstrap {self.name}"
            )
        return (posixpath.join(survey.base, "env", "current", "bin", "python"),), ()

    def _refusal(self, operation: str, verdict: str, why: str) -> FabrictoolError:
        passing = ("Unable to contact", "Connection refused", "Socket timed out", "QOSMax", "AssocMax", "limit")
        return UnreachableError.of(
            _REFUSALS[verdict],
            f"{operation}: {why}",
            thing=f"cluster/{self.name}",
            transient=verdict == "unknown" or any(word in why for word in passing),
        )

    def _run(
        self,
        name: str,
        program: str,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = SURVEY_SECONDS,
    ) -> Completed:
        argv = ["sh", "-c", program, name, self._described.folder, self._fabric, *arguments]
        return self._connected(argv, stdin=stdin, timeout_s=timeout_s)

    def _connected(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = SURVEY_SECONDS) -> Completed:
        """On the first login node that answers: every program may be repeated, so a loss is followed by the next."""
        problems: list[Problem] = []
        for connection in self._connections:
            try:
                return connection.run(argv, stdin=stdin, timeout_s=timeout_s)
            except FabrictoolError as error:
                problems += error.problems
        if not problems:
            raise UnreachableError.of("FT5109", "it has no login node", thing=f"cluster/{self.name}")
        raise UnreachableError(problems)


def _tar(folders: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """Folders of mode 0700, files of mode 0600."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for operation, files in sorted(folders.items()):
            folders_of = {posixpath.join(operation, posixpath.dirname(name)).rstrip("/") for name in files}
            for folder in sorted({operation, *folders_of}):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o700
                tar.addfile(entry)
            for name, data in sorted(files.items()):
                entry = tarfile.TarInfo(posixpath.join(operation, name))
                entry.size, entry.mode = len(data), 0o600
                tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
