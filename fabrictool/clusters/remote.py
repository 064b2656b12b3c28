"""A cluster behind a login node: one connection, one program a look, one program for any number of units.

What runs there is decided by pure parts: `schedulers/` says the words of a scheduler, `survey` reads what came back,
`allocation` says how long a job may run. This module carries bytes between them and the connection.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import re
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from fabrictool.base.clock import SystemClock, minute_text
from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.heartbeats import LOOK_AGAIN_S, Heartbeats, skew_s
from fabrictool.clusters.jobs import away, follower_files, job_of, run_folder, tar, told_files
from fabrictool.clusters.protocol import JobScript
from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.schedulers.apart import awaited
from fabrictool.clusters.schedulers.processes import Processes
from fabrictool.clusters.survey import Looker, read_survey
from fabrictool.clusters.weights.readiness import not_ready
from fabrictool.domain.observed import ClusterFacts, Queue
from fabrictool.domain.plan import Outlook
from fabrictool.domain.specs import GatewaySpec
from fabrictool.status.documents import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fabrictool.base.clock import Clock
    from fabrictool.base.errors import Problem
    from fabrictool.clusters.connections.protocol import Completed, Connection
    from fabrictool.clusters.protocol import NewUnit
    from fabrictool.clusters.schedulers.protocol import Job, Scheduler
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.status.documents import StatusDocument

SURVEY_SECONDS = 60.0
SUBMIT_SECONDS = 60.0
SUBMIT_SECONDS_EACH = 5.0
TRIES, COMMAND_TRIES, FIRST_PAUSE_S, RETRY_FOR_S = 3, 5, 1.0, 20.0
"""A connection that breaks is opened again after 1 and 2 s, and for what changes something after 4 and 8 s, too.
Nothing is tried anew once 20 s have passed: a login node that swallows packets costs one time-out, not several."""
LOG_NOT_KEPT = 4
LOOK_AGAIN_EVERY_S = 5.0
MOST_ESTIMATES = 8
"""Shapes of jobs that one plan asks the scheduler about: a login node belongs to everybody."""
_REFUSALS = {
    "refused": ("FT5404", "correct partition, account or limits in the inventory, and plan again"),
    "unknown": ("FT5405", "run the command again: it asks the scheduler first"),
    "foreign": ("FT5410", "rename one of the two fabrics, or share one state (`state` in the blueprint)"),
    "unplaced": ("FT5406", "check space, quota and rights there; `folder` in the inventory chooses another place"),
}


class RemoteCluster:
    """See the module's docstring. `connect` gives its login nodes, tried in order; asked for when first needed."""

    # Wide: what it is, how it is reached, and time, which tests give it.
    def __init__(
        self,
        name: str,
        fabric: str,
        described: ClusterSpec,
        scheduler: Scheduler,
        connect: Callable[[], Sequence[Connection]],
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
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
        self._clock = clock or SystemClock()
        self._pause = pause
        self._heartbeats = Heartbeats()
        self._skew_s = 0.0
        self._lost = False
        """It did not answer when it was asked last, after all retries."""

    # -- facts ------------------------------------------------------------------------------------------------

    def observe(self, *, brief: bool = False, patient: bool = False) -> ClusterFacts:
        try:
            survey = self._look(brief=brief)
            until = self._clock.monotonic() + LOOK_AGAIN_S
            while patient and survey.unsure and self._clock.monotonic() < until:
                self._pause(LOOK_AGAIN_EVERY_S)
                survey = self._look(brief=True)
        except FabrictoolError as error:
            reason = "; ".join(problem.message for problem in error.problems)
            return ClusterFacts(cluster=self.name, known=False, reason=reason, hint=error.problems[0].hint or "")
        facts = survey.scheduler
        return ClusterFacts(
            cluster=self.name,
            known=True,
            units=survey.units,
            scheduler=facts.name,
            queues={self._named(queue): self._told(queue, its) for queue, its in facts.queues.items()},
            away=tuple(
                msgspec.structs.replace(
                    reservation, partitions=tuple(self._named(queue) for queue in reservation.partitions)
                )
                for reservation in away(self._described, survey)
            ),
            now=survey.now,
            skew_s=self._skew_s,
            owner=survey.owner,
            here=survey.here,
        )

    def _named(self, queue: str) -> str:
        """The inventory's name of a partition; what it does not name keeps the scheduler's."""
        partitions = self._described.partitions.items()
        return next((name for name, partition in partitions if (partition.queue or name) == queue), queue)

    def _told(self, name: str, queue: Queue) -> Queue:
        """Names of nodes only where they can matter: they are most of what is known of a large site."""
        ours = self._named(name) in self._described.partitions
        return queue if ours else msgspec.structs.replace(queue, kinds=())

    def survey(self) -> Survey:
        """The last look, or the first; raises what a login node that does not answer raises."""
        return self._survey or self._look(brief=False)

    def spec(self, operation: str) -> UnitSpec:
        """From the last look; raises FT5104 when that has none."""
        spec = self.survey().specs.get(operation)
        if spec is None:
            message = f"the spec of {operation} cannot be read"
            raise FabrictoolError.of("FT5104", message, thing=f"cluster/{self.name}")
        return spec

    def certificate(self, operation: str) -> bytes:
        written = self._run("ft-certificate", shell.program("certificate"), [operation]).stdout
        if not written:
            message = f"the certificate of {operation} cannot be read"
            raise FabrictoolError.of("FT5104", message, thing=f"cluster/{self.name}")
        return written

    def document(self, operation: str) -> StatusDocument | None:
        """As the unit wrote it last."""
        written = self._run("ft-document", shell.program("document"), [operation]).stdout
        try:
            return decode(written) if written else None
        except msgspec.DecodeError:
            return None

    @contextlib.contextmanager
    def page(self, operation: str) -> Iterator[str]:
        """Through the login node of a plain host, which is the unit's own machine; of jobs there is none."""
        url = self.survey().pages.get(operation, "")
        parts = urlsplit(url)
        if self._described.queues or parts.port is None:
            yield ""
            return
        with self._connections[0].forward("127.0.0.1", parts.port) as (host, port):
            yield f"http://{host}:{port}{parts.path}"

    def log_tail(self, operation: str, lines: int) -> list[str]:
        tail = self._run("ft-log", shell.program("tail"), [operation, str(lines)]).stdout
        return tail.decode(errors="replace").splitlines()

    def former_log(self, start: str, lines: int) -> list[str]:
        if self._described.logs is None:
            return []
        tail = self._run("ft-former-log", shell.program("former-log"), [self._log_folder, str(lines), start]).stdout
        return tail.decode(errors="replace").splitlines()

    @property
    def _log_folder(self) -> str:
        kept = self._described.logs
        return kept.folder if kept is not None and kept.folder is not None else "-"

    def outlook(self, units: Sequence[NewUnit]) -> tuple[list[Outlook], list[str]]:
        """One question for all units of the same shape; what cannot run at all is a warning."""
        outlooks: list[Outlook] = []
        warnings: dict[str, None] = {}
        starts: dict[tuple[object, ...], float | None] = {}
        survey = self.survey()
        for error in self._without_weights(units).values():
            warnings |= {f"{problem.code} {problem.message}": None for problem in error.problems}
        for unit in units:
            try:
                job = self._job(unit, survey)
                shape = job.shape
                if waits := awaited(survey.scheduler, job):  # Slurm says "never" of nodes that are away
                    warnings[waits] = starts[shape] = None
                elif shape not in starts and len(starts) < MOST_ESTIMATES:
                    starts[shape] = self._estimate(job, survey)
            except FabrictoolError as error:
                warnings |= {f"{problem.code} {problem.message}": None for problem in error.problems}
                continue
            if not self._described.queues:
                continue
            queue = survey.scheduler.queues.get(job.partition)
            start = starts.get(shape)
            windows = [
                a
                for a in away(self._described, survey)
                if not a.nodes and (not a.partitions or job.partition in a.partitions)
            ]
            outlooks.append(
                Outlook(
                    address=unit.address,
                    partition=job.partition,
                    queue="" if queue is None else _queue_words(queue),
                    starts_at=start,
                    ends_at=None if start is None or job.walltime_s is None else start + job.walltime_s,
                    walltime_s=job.walltime_s,
                    window="; ".join(f"{a.name} from {minute_text(a.begin)} to {minute_text(a.end)}" for a in windows),
                )
            )
        return outlooks, list(warnings)

    def scripts(self, units: Sequence[NewUnit]) -> list[JobScript]:
        survey = self.survey()
        scripts = []
        for unit in units:
            submission = self._scheduler.submission(survey.scheduler, self._job(unit, survey))
            scripts.append(JobScript(unit.address, self.name, submission.line, submission.script))
        return scripts

    def _estimate(self, job: Job, survey: Survey) -> float | None:
        """Wall second of the expected start; raises FT5404 when it would never start."""
        argv = self._scheduler.estimate(survey.scheduler, job)
        if argv is None:
            return None
        program = f'{self._scheduler.prelude()}\nexec "$@"'
        done = self._connected(["sh", "-c", program, "ft-estimate", *argv])
        stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if done.status != 0:
            message = f"{self.name}/{job.partition} would never start such a job: {stderr.strip()[-300:]}"
            raise FabrictoolError.of("FT5404", message, thing=f"cluster/{self.name}")
        return self._scheduler.estimated(stdout, stderr)

    # -- commands ---------------------------------------------------------------------------------------------

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """One program submits all of them, each at most once."""
        if not units:
            return {}
        survey = self.survey()
        failed = self._without_weights(units)
        units = [unit for unit in units if unit.operation not in failed]
        folders: dict[str, dict[str, bytes]] = {}
        for unit in units:
            try:
                files = run_folder(unit, self._job(unit, survey), self._scheduler, survey)
                folders[unit.operation] = files | self._followers(unit)
            except FabrictoolError as error:
                failed[unit.operation] = error
        if not folders:
            return failed
        done = self._run(
            "ft-submit",
            shell.submit_program(self._scheduler),
            sorted(folders),
            stdin=tar(folders, _owner_files(units[0].lineage)),
            timeout_s=SUBMIT_SECONDS + SUBMIT_SECONDS_EACH * len(folders),
            changes=True,
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
        started = [unit for unit in units if unit.operation not in failed]
        return failed | self._come_back([unit for unit in started if _comes_back(unit)])

    def _come_back(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """See to it that gateways start again after a reboot, or no longer do; they run either way."""
        failed = {}
        for unit in units:
            spec = unit.spec
            if not isinstance(spec, GatewaySpec) or self._described.kind != "ssh":
                continue
            way, script = (
                ("-", b"") if not _comes_back(unit) else (str(spec.after_reboot), Processes.on_boot().encode())
            )
            argv = [way, unit.operation]
            done = self._run("ft-come-back", shell.come_back_program(), argv, stdin=script, changes=True)
            if done.status != 0:
                why = done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.status}"
                hint = "correct `after_reboot` in the inventory; `site` installs nothing, without it nothing comes back"
                message = f"{unit.address} runs, but would not start again after a reboot: {why}"
                failed[unit.operation] = FabrictoolError.of("FT5415", message, thing=unit.address, hint=hint)
        return failed

    def update(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        folders = {unit.operation: told_files(unit) for unit in units}
        for unit in units:
            with contextlib.suppress(FabrictoolError):  # whom it serves must not wait for what may follow it
                folders[unit.operation] |= self._followers(unit)
        done = self._run("ft-update", shell.program("update"), sorted(folders), stdin=tar(folders), changes=True)
        placed = set(done.stdout.decode(errors="replace").split())
        why = done.stderr.decode(errors="replace").strip()[-200:] or "its run folder is missing"
        return {
            operation: self._refusal(operation, "unplaced", why) for operation in folders if operation not in placed
        }

    def stop(self, operations: Iterable[str]) -> None:
        self._signal(operations, kill=False)

    def kill(self, operations: Iterable[str]) -> None:
        self._signal(operations, kill=True)

    def forget(self, operations: Iterable[str]) -> None:
        """Remove run folders, identity first."""
        named = sorted(operations)
        if named:
            kept = self._described.logs
            minutes = 0 if kept is None else max(1, int(float(kept.keep) // 60))
            arguments = [str(minutes), self._log_folder, *named]
            done = self._run("ft-forget", shell.forget_program(), arguments, changes=True)
            if done.status != 0:
                why = done.stderr.decode(errors="replace").strip()[-200:]
                message = f"the files of {len(named)} unit{'s'[: len(named) != 1]} cannot be removed: {why}"
                hint = "check the rights there; keys may be left in these folders"
                raise FabrictoolError.of("FT5406", message, thing=f"cluster/{self.name}", hint=hint, transient=True)

    def close(self) -> None:
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
        before = self._clock.wall()
        done = self._run("ft-survey", shell.survey_program(self._scheduler, brief=brief), [])
        if done.status != 0:
            why = done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.status}"
            raise UnreachableError.of(
                "FT5109",
                f"the scheduler does not answer: {why}",
                thing=f"cluster/{self.name}",
                hint="its login node answers; nothing on the cluster is touched until the scheduler does",
                transient=True,
            )
        after = self._clock.wall()
        looker = Looker(after, self._clock.monotonic(), self._heartbeats)
        text = done.stdout.decode(errors="replace")
        survey = read_survey(text, self._scheduler, thing=f"cluster/{self.name}", looker=looker)
        self._skew_s = skew_s(survey.login_now, before, after)
        with self._lock:
            if brief and self._survey is not None:  # queues and reservations stay as last seen
                old = self._survey
                now = survey.login_now + old.now - old.login_now
                scheduler = replace(old.scheduler, jobs=survey.scheduler.jobs, now=now)
                survey = replace(survey, scheduler=scheduler, now=now)
            self._survey = survey
        return survey

    def _signal(self, operations: Iterable[str], *, kill: bool) -> None:
        named = sorted(operations)
        if not named:
            return
        jobs = {unit.operation: unit.job for unit in self.survey().units}
        pairs = [word for operation in named for word in (operation, jobs.get(operation) or "-")]
        done = self._run("ft-signal", shell.signal_program(self._scheduler, kill=kill), pairs, changes=True)
        undelivered = done.stdout.decode(errors="replace").strip()
        if done.status != 0:
            undelivered = (
                f"the scheduler does not answer: {done.stderr.decode(errors='replace').strip()[-200:]} {undelivered}"
            )
        if undelivered:
            message = f"not every signal was delivered: {undelivered[:300]}"
            raise FabrictoolError.of(
                "FT5409",
                message,
                thing=f"cluster/{self.name}",
                hint="run the command again; running units are not affected",
                transient=True,
            )

    def _without_weights(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        return not_ready(units, self.name, _AnyLogin(self._connected))

    def _job(self, unit: NewUnit, survey: Survey, *, later: bool = False) -> Job:
        return job_of(unit, self._described, self.name, self._fabric, survey, self._scheduler, later=later)

    def _followers(self, unit: NewUnit) -> dict[str, bytes]:
        if not unit.followers:
            return {}
        survey = self.survey()
        jobs = [self._job(follower, survey, later=True) for follower in unit.followers]
        return follower_files(unit, jobs, self._scheduler, survey)

    def _refusal(self, operation: str, verdict: str, why: str) -> FabrictoolError:
        code, hint = _REFUSALS[verdict]
        return UnreachableError.of(
            code,
            f"{operation}: {why}",
            thing=f"cluster/{self.name}",
            hint=hint,
            transient=verdict == "unknown" or re.search(shell.PASSING, why) is not None,
        )

    def _run(
        self,
        name: str,
        program: str,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = SURVEY_SECONDS,
        changes: bool = False,
    ) -> Completed:
        argv = ["sh", "-c", program, name, self._described.folder, self._fabric, *arguments]
        return self._connected(argv, stdin=stdin, timeout_s=timeout_s, changes=changes)

    def _connected(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = SURVEY_SECONDS, changes: bool = False
    ) -> Completed:
        """On the first login node that answers, and again for a while if none does: every program may be repeated."""
        begun = self._clock.monotonic()
        # A command looks many times: who was lost after all retries is asked once a look.
        tries = COMMAND_TRIES if changes else 1 if self._lost else TRIES
        for attempt in itertools.count():
            problems: list[Problem] = []
            for connection in self._connections:
                try:
                    done = connection.run(argv, stdin=stdin, timeout_s=timeout_s)
                except FabrictoolError as error:
                    problems += error.problems
                else:
                    self._lost = False
                    return done
            late = self._clock.monotonic() - begun > RETRY_FOR_S
            if attempt + 1 >= tries or late or not any(problem.transient for problem in problems):
                break
            self._pause(FIRST_PAUSE_S * 2**attempt)
        self._lost = True
        if not problems:
            raise UnreachableError.of("FT5109", "it has no login node", thing=f"cluster/{self.name}")
        raise UnreachableError(problems)


@dataclass(frozen=True, slots=True)
class _AnyLogin:
    """Runs a command on whichever login node answers."""

    connected: Callable[..., Completed]

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = SURVEY_SECONDS) -> Completed:
        return self.connected(argv, stdin=stdin, timeout_s=timeout_s)


def _comes_back(unit: NewUnit) -> bool:
    return isinstance(unit.spec, GatewaySpec) and not isinstance(unit.spec.after_reboot, msgspec.UnsetType)


def _owner_files(lineage: str) -> dict[str, bytes]:
    """What says whose fabric of this name it is."""
    if not lineage:
        return {}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry for this number, as in some containers
        user = str(os.getuid())
    return {".owner": f"{lineage} {user}@{socket.gethostname()}\n".encode()}


def _queue_words(queue: Queue) -> str:
    up = f"{queue.idle} of {queue.nodes} nodes idle, {queue.pending} pending jobs"
    return (up + (f", {queue.away} nodes away" if queue.away else "")) if queue.up else "the partition is down"
