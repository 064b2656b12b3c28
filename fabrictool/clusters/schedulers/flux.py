"""Flux, after the manual pages of flux-core 0.60 and later. Unverified: never tried on a real one.

Taken from the manuals: ids are written in decimals, because their usual form is not ASCII; ``flux jobs`` lists at most
as many as ``--count`` says; ``--signal`` warns before the limit; a cancelled job gets TERM and, 5 s later, KILL, so
what runs is told by ``flux job kill``. Memory cannot be asked for.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.schedulers.protocol import (
    Job,
    JobFacts,
    JobState,
    Scheduler,
    SchedulerFacts,
    Submission,
    first_line,
)
from fabrictool.clusters.schedulers.script import job_script
from fabrictool.clusters.schedulers.times import passed_options
from fabrictool.domain.observed import Queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_OURS = frozenset({
    "B", "N", "S", "c", "cc", "bcc", "cores-per-task", "dry-run", "env", "exclusive", "flags", "g", "gpus-per-task",
    "job-name", "n", "nodes", "ntasks", "output", "q", "queue", "t", "time-limit", "begin-time", "wait", "watch", "x",
})  # fmt: skip
_JOBS = "{id.dec}|{state}|{queue}|{t_submit}|{t_run}|{expiration}|{annotations.sched.t_estimate}|{name}"
_RESOURCES = "{queue}|{state}|{nnodes}|{ncores}|{ngpus}"
_SUBMIT = 'id=$(flux submit "$@") && flux job id --to=dec "$id"'


class Flux(Scheduler):
    """See the module's docstring."""

    kind = "flux"

    def survey(self, *, brief: bool) -> str:
        """Jobs always, those that are over with them; version and resources for the full one."""
        jobs = f"echo @jobs; flux jobs -a --count=10000 --no-header -o {shlex.quote(_JOBS)} || exit 75\n"
        if brief:
            return jobs
        return (
            "echo @version; flux version || exit 75\n"
            "echo @programs; command -v flux\n"
            f"{jobs}"
            f"echo @queues; flux resource list -n -s free,allocated,down -o {shlex.quote(_RESOURCES)} || exit 75\n"
        )

    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        version = first_line(sections, "version").split()
        return SchedulerFacts(
            version=tuple(int(part) for part in re.findall(r"\d+", version[-1])[:3]) if version else (),
            name=f"Flux {version[-1]}" if version else self.kind,
            jobs=tuple(_job(line) for line in sections.get("jobs", ()) if line),
            queues=_queues(sections.get("queues", ())),
            programs=first_line(sections, "programs").rpartition("/")[0],
            now=now,
        )

    def lookup(self) -> str:
        return "flux jobs -a --count=10000 --no-header -o '{id.dec} {name}'"

    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        argv = [f"--job-name={job.name}", f"--output={job.folder}/log", "--env=-*", "--nodes=1", "--ntasks=1"]
        argv += [f"--queue={job.partition}"] if job.partition else []
        argv += [f"--setattr=user.fabrictool={job.comment}"]
        argv += ["--exclusive"] if job.whole_node else []
        if not job.whole_node:
            argv += [f"--cores-per-task={job.cpus}"] if job.cpus else []
            argv += [f"--gpus-per-task={job.devices}"] if job.devices else []
        ends = "echo 0"
        if job.walltime_s is not None:
            seconds = max(60, int(job.walltime_s))
            argv += [f"--time-limit={seconds}s", f"--signal=SIGTERM@{max(1, int(min(job.warning_s, seconds / 10)))}s"]
            ends = f"echo $(( $(date +%s) + {seconds} ))"
        argv += [f"--begin-time=+{math.ceil(job.begin_in_s)}s"] if job.begin_in_s > 0 else []
        argv += [f"--{name}={value}" if value else f"--{name}" for name, value in passed_options(job, _OURS)]
        script = job_script(
            job,
            identity='"$(flux job id --to=dec "${FLUX_JOB_ID:?}")"',
            ends_at=ends,
            programs=facts.programs,
            run=job.command,
        )
        return Submission(("sh", "-c", _SUBMIT, "ft-flux", *argv, "sh", f"{job.folder}/job.sh"), script)

    def stop(self) -> str:
        """TERM to what runs, an end to what waits."""
        return (
            "said=$(flux jobs --no-header -o '{name} {state}' \"$1\" 2>/dev/null) || return 0\n"
            'case $said in "$2 RUN") flux job kill --signal=SIGTERM "$1" ;; "$2 CLEANUP"|"$2 INACTIVE") ;; '
            '"$2 "*) flux cancel "$1" ;; esac\n'
        )

    def kill(self) -> str:
        """TERM, and KILL some seconds later."""
        return (
            "said=$(flux jobs --no-header -o '{name} {state}' \"$1\" 2>/dev/null) || return 0\n"
            'case $said in "$2 INACTIVE") ;; "$2 "*) flux cancel "$1" ;; esac\n'
        )


def _job(line: str) -> JobFacts:
    parts = line.split("|", 7)
    if len(parts) < 8:
        raise FabrictoolError.of(
            "FT5401", f"unexpected output of flux jobs: {line[:120]!r}", hint="report it with `flux version`"
        )
    number, native, queue, submitted, begun, ends, expected, name = parts
    state: JobState = "ended" if native == "INACTIVE" else "running" if native in ("RUN", "CLEANUP") else "pending"
    return JobFacts(
        id=number,
        state=state,
        native=native,
        name=name,
        partition=queue,
        submitted_at=_time(submitted),
        begins_at=_time(expected) if state == "pending" else _time(begun),
        ends_at=_time(ends) if state == "running" else None,
    )


def _queues(lines: Iterable[str]) -> dict[str, Queue]:
    queues: dict[str, Queue] = {}
    for line in lines:
        parts = line.split("|")
        if len(parts) != 5 or not all(part.strip().isdecimal() for part in parts[2:]):
            raise FabrictoolError.of(
                "FT5401",
                f"unexpected output of flux resource list: {line[:120]!r}",
                hint="report it with `flux version`",
            )
        state, nodes, cores, devices = parts[1].strip(), *(int(part) for part in parts[2:])
        for name in parts[0].strip().split(","):
            before = queues.get(name, Queue())
            queues[name] = Queue(
                nodes=before.nodes + nodes,
                idle=before.idle + (nodes if state == "free" else 0),
                away=before.away + (nodes if state == "down" else 0),
                devices=max(before.devices, devices // nodes if nodes else 0),
                cpus=max(before.cpus, cores // nodes if nodes else 0),
            )
    return queues


def _time(text: str) -> float | None:
    try:
        return float(text) or None
    except ValueError:
        return None
