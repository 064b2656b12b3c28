"""Runs `fetch` where the files are to lie: on this machine, on a login node while the connection lasts, or in a job.

A run has a folder of its own beside the sets, ``.fetch-sha256-HASH/units/-/weights-TOKEN``: schedulers' words for units
work on it.
"""

from __future__ import annotations

import json
import posixpath
import secrets
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.environment.interpreter import python_of
from fabrictool.clusters.jobs import environment_lines
from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.schedulers.protocol import Job
from fabrictool.clusters.survey import read_survey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import ClusterSpec

JOB_SECONDS = 12 * 3600.0
"""Of a job that fetches, where its partition allows as much: a terabyte at 25 MB/s."""
POLL_S = 3.0
LOST_LOOKS = 10
"""In a row; each pause is longer than the one before: some three minutes in all."""
LOOK_S = 30.0
"""Between two questions to the scheduler; most is learned from the file that the program writes."""
_ENOUGH = "python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || exit 69"
_FINAL = frozenset({"staged", "damaged", "failed", "busy", "ended"})
_CLEAN = 'rm -rf "$1"; cd "$2" && rmdir units/- units && cd .. && rmdir "$2"; true'


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a fetching program says of itself; `queued` is said by us, of its job."""

    state: str
    done: int = 0
    """Octets, as is `total`."""
    total: int = 0
    text: str = ""
    kind: str = ""
    """Of a failure; see `fetch.FetchRefusedError`."""

    @property
    def final(self) -> bool:
        return self.state in _FINAL


class FetchWay(Protocol):
    """Somewhere a fetching program runs."""

    def run(self, control: str, wanted: Mapping[str, Any], tell: Callable[[FetchReport], None]) -> FetchReport:
        """To its end; whatever happens, Ctrl-C included, nothing of it runs on. `control` is its set's folder."""


def read_told(text: str) -> FetchReport | None:
    """One line of the program's; None for anything else."""
    try:
        return msgspec.json.decode(text, type=FetchReport)
    except msgspec.DecodeError:
        return None


def _files(control: str, folder: str, wanted: Mapping[str, Any]) -> dict[str, bytes]:
    """Name → bytes of what a run begins with."""
    document = {**wanted, "lock": f"{control}/lock", "progress": f"{folder}/progress"}
    text = (resources.files("fabrictool.clusters.weights") / "fetch.py").read_bytes()
    return {"fetch.py": text, "wanted.json": json.dumps(document).encode()}


def _line(setup: Sequence[str], python: Sequence[str], folder: str) -> str:
    """Shell text that becomes the program; what Python itself complains of goes to ``log``."""
    words = [*python, "-I", f"{folder}/fetch.py", f"{folder}/wanted.json"]
    return "\n".join([f"exec 2>>{shlex.quote(folder + '/log')}", *setup, f"exec {shlex.join(words)}"])


def _fresh(control: str) -> str:
    return f"{control}/units/-/weights-{secrets.token_hex(6)}"


def _no_answer(log: str) -> FetchReport:
    return FetchReport(
        state="failed", kind="refused", text=f"it ended without an answer: {log.strip()[-300:] or 'no words'}"
    )


class FetchHere:
    """On the machine of this tool, for a cluster that is this machine."""

    def run(self, control: str, wanted: Mapping[str, Any], tell: Callable[[FetchReport], None]) -> FetchReport:
        folder = _fresh(control)
        Path(folder).mkdir(parents=True, mode=0o700)
        for name, data in _files(control, folder, wanted).items():
            Path(folder, name).write_bytes(data)
        line = _line((), (sys.executable,), folder)
        last: FetchReport | None = None
        # A group of its own: Ctrl-C is ours to hand on.
        with subprocess.Popen(["/bin/sh", "-c", line], stdout=subprocess.PIPE, start_new_session=True) as process:
            try:
                for text in process.stdout or ():
                    last = read_told(text.decode(errors="replace")) or last
                    if last is not None:
                        tell(last)
            finally:
                process.terminate()
                process.wait()
                log = Path(folder, "log").read_text(errors="replace")
                subprocess.run(
                    ["/bin/sh", "-c", _CLEAN, "clean", folder, control], stderr=subprocess.DEVNULL, check=False
                )
        return last if last is not None and last.final else _no_answer(log)


class _Remote:
    """What both ways over SSH share."""

    def __init__(self, cluster: str, described: ClusterSpec, connection: Connection, scheduler: Scheduler) -> None:
        self._cluster, self._described, self._connection = cluster, described, connection
        self._scheduler = scheduler

    def _survey(self) -> Survey:
        """What jobs and the interpreter depend on there; raises FT5407."""
        text = shell.survey_program(self._scheduler, brief=False)
        done = self._connection.run(["sh", "-c", text, "ft-survey", self._described.folder, "-"])
        if done.status != 0:
            why = done.stderr.decode(errors="replace").strip()[-200:]
            message = f"{self._cluster}: the scheduler does not answer: {why}"
            raise FabrictoolError.of("FT5407", message, hint="run the command again", transient=True)
        return read_survey(done.stdout.decode(errors="replace"), self._scheduler, thing=f"cluster/{self._cluster}")

    def _python(self, survey: Survey) -> tuple[list[str], tuple[str, ...]]:
        """Shell lines, and the interpreter: the agents', else any that is new enough, for nothing is imported."""
        lines = environment_lines(self._described.environment)
        try:
            python, setup = python_of(self._described, self._cluster, survey)
        except FabrictoolError:
            return [*lines, _ENOUGH], ("python3",)
        return [*lines, *setup], python

    def _place(self, folder: str, files: Mapping[str, bytes]) -> None:
        self._connection.run(["mkdir", "-p", "-m", "700", folder])
        for name, data in files.items():
            self._connection.put(data, f"{folder}/{name}")

    def _text(self, path: str) -> str:
        done = self._connection.run(["sh", "-c", 'tail -c 2000 "$0" 2>/dev/null', path])
        return done.stdout.decode(errors="replace")

    def _clean(self, control: str, folder: str) -> None:
        with suppress(FabrictoolError):
            self._connection.run(["sh", "-c", _CLEAN, "clean", folder, control])


class FetchAtLogin(_Remote):
    """On the login node; ends with the connection, and then the same command goes on where it stopped."""

    def run(self, control: str, wanted: Mapping[str, Any], tell: Callable[[FetchReport], None]) -> FetchReport:
        folder = _fresh(control)
        setup, python = self._python(self._survey())
        last: FetchReport | None = None
        try:
            self._place(folder, _files(control, folder, wanted))
            with self._connection.stream(["sh", "-c", _line(setup, python, folder)]) as lines:
                for line in lines:
                    last = read_told(line.decode(errors="replace")) or last
                    if last is not None:
                        tell(last)
            return last if last is not None and last.final else _no_answer(self._text(f"{folder}/log"))
        finally:
            self._clean(control, folder)


class FetchInJob(_Remote):
    """In a job of its own, for sites that forbid long work on login nodes; on a plain host in a process of its own.

    One that a killed command left is found by its name, and awaited.
    """

    def __init__(
        self,
        cluster: str,
        described: ClusterSpec,
        connection: Connection,
        scheduler: Scheduler,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(cluster, described, connection, scheduler)
        self._partition, self._poll_s = partition_of(described), poll_s

    def run(self, control: str, wanted: Mapping[str, Any], tell: Callable[[FetchReport], None]) -> FetchReport:
        operation, number = self._left(control)
        folder = f"{control}/units/-/{operation}"
        last: FetchReport | None = None
        joined = bool(number)
        """Somebody else may await it, too: it is neither cancelled nor cleared away from here."""
        try:
            if not number:
                folder = _fresh(control)
                operation = posixpath.basename(folder)
                number = self._submitted(folder, _files(control, folder, wanted))
            tell(FetchReport(state="queued", text=f"job {number} on {self._partition}"))
            last = self._awaited(control, folder, operation, number, tell)
            return last
        finally:
            if last is None and not joined:
                self._cancel(control, operation, number)
            if last is not None or not joined:
                self._clean(control, folder)

    def _submitted(self, folder: str, files: Mapping[str, bytes]) -> str:
        """The job's number; raises FT5608 when the scheduler refuses it."""
        survey = self._survey()
        setup, python = self._python(survey)
        partition = self._described.partitions[self._partition]
        job = Job(
            operation=posixpath.basename(folder),
            address="",  # nothing of a fabric: no controller takes it for a unit
            fabric="-",
            lineage="",
            serial=0,
            folder=folder,
            home=survey.home,
            command=(*python, "-I", f"{folder}/fetch.py", f"{folder}/wanted.json"),
            partition=partition.queue or self._partition,
            walltime_s=min(JOB_SECONDS, float(partition.walltime or JOB_SECONDS)),
            setup=tuple(setup),
            options=partition.job.options,
        )
        submission = self._scheduler.submission(survey.scheduler, job)
        self._place(folder, {**files, "job.sh": submission.script.encode()})
        done = self._connection.run(list(submission.argv))
        number = done.stdout.decode(errors="replace").strip().rpartition("\n")[2].partition(";")[0]
        if done.status != 0 or not number:
            why = done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.status}"
            hint = "correct `job` of this partition in the inventory, or name another in `weights_partition`"
            message = f"{self._cluster} refused the job on {self._partition}: {why}"
            raise FabrictoolError.of("FT5608", message, thing=f"cluster/{self._cluster}", hint=hint)
        return number

    def _awaited(
        self, control: str, folder: str, operation: str, number: str, tell: Callable[[FetchReport], None]
    ) -> FetchReport:
        looked, lost = time.monotonic(), 0
        while True:
            try:
                told = read_told(self._text(f"{folder}/progress"))
            except FabrictoolError:  # a login node may be away for a while, and the job goes on
                lost += 1
                if lost > LOST_LOOKS:
                    raise
                time.sleep(self._poll_s * lost)
                continue
            lost = 0
            if told is not None and told.final:
                return told
            tell(told or FetchReport(state="queued", text=f"job {number} on {self._partition}"))
            time.sleep(self._poll_s)
            if time.monotonic() - looked < LOOK_S * self._poll_s / POLL_S:
                continue
            looked = time.monotonic()
            if operation not in self._living(control):
                told = read_told(self._text(f"{folder}/progress"))
                return told if told is not None and told.final else _no_answer(self._text(f"{folder}/log"))

    def _living(self, control: str) -> dict[str, str]:
        """Operation → number, of our jobs that are not over."""
        text = shell.program("weights-jobs", prelude=self._scheduler.prelude(), living=self._scheduler.living())
        done = self._connection.run(["sh", "-c", text, "ft-weights-jobs", control, "-"])
        if done.status != 0:
            message = f"{self._cluster}: the scheduler does not say which jobs it has"
            raise FabrictoolError.of("FT5407", message, hint="run the command again", transient=True)
        rows = [line.split(" ", 2) for line in done.stdout.decode(errors="replace").splitlines()]
        return {row[1].removeprefix("ft-"): row[0] for row in rows if len(row) > 1}

    def _left(self, control: str) -> tuple[str, str]:
        """(operation, number) of a job for this set that lives, or two empty ones."""
        done = self._connection.run(["sh", "-c", 'ls "$0/units/-" 2>/dev/null', control])
        folders = done.stdout.decode(errors="replace").split()
        living = self._living(control) if folders else {}
        return next(((name, living[name]) for name in folders if name in living), ("", ""))

    def _cancel(self, control: str, operation: str, number: str) -> None:
        """By number and name; by name alone when the submission broke off."""
        if not operation:
            return
        with suppress(FabrictoolError):
            known = number or self._living(control).get(operation, "")
            if known:
                text = shell.signal_program(self._scheduler, kill=self._described.queues)
                self._connection.run(["sh", "-c", text, "ft-signal", control, "-", operation, known])


def partition_of(described: ClusterSpec) -> str:
    """The inventory's, else one without accelerators if there is any."""
    every = described.partitions
    ranked = sorted(every, key=lambda name: (every[name].device != "cpu", every[name].tier != "owned"))
    return described.weights_partition or ranked[0]
