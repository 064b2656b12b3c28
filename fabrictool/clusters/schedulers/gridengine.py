"""Grid Engine (Son of Grid Engine 8.1, Univa, Altair): another real scheduler, which keeps the protocol honest.

What differs from Slurm and was tried on 8.1.9: jobs have no comment that ``qstat`` lists, so they are found by their
name, which is the operation's; an ended job vanishes at once; ``qdel`` with ``-notify`` sends USR2 and, 60 s later
(``notify`` of the queue), KILL; there is no prediction of a start, and no end of an allocation in the lists.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from datetime import datetime
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
from fabrictool.clusters.schedulers.times import local_clock, passed_options
from fabrictool.domain.observed import Queue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OURS = frozenset({
    "N", "S", "a", "b", "cwd", "e", "h", "hold_jid", "i", "j", "notify", "o", "q", "r", "sync", "t", "terse", "wd",
})  # fmt: skip
"""Options of ``qsub`` that decide what the job is: never passed through."""


class GridEngine(Scheduler):
    """See the module's docstring."""

    kind = "gridengine"

    def prelude(self) -> str:
        """Grid Engine's commands need SGE_ROOT, which a shell without a profile may lack."""
        return (
            'if [ -z "$SGE_ROOT" ]; then for f in /etc/profile.d/sge*.sh /etc/profile.d/gridengine*.sh '
            "/var/lib/gridengine/default/common/settings.sh /opt/sge/default/common/settings.sh "
            '/usr/share/gridengine/default/common/settings.sh; do if [ -r "$f" ]; then . "$f"; break; fi; done; fi'
        )

    def survey(self, *, brief: bool) -> str:
        """Jobs as XML, because the table cuts their names; queues for the full one."""
        jobs = 'echo @offset; date +%z\necho @jobs; qstat -xml -u "$(id -un)" || exit 75\n'
        if brief:
            return jobs
        return (
            "echo @version; qstat -help | head -n 1\n"
            "echo @programs; command -v qsub\n"
            f"{jobs}"
            "echo @queues; qstat -g c || exit 75\n"
        )

    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        offset = first_line(sections, "offset", "+0000")
        version = first_line(sections, "version")
        return SchedulerFacts(
            version=tuple(int(part) for part in re.findall(r"\d+", version)[:3]),
            name=version or self.kind,
            jobs=_jobs("\n".join(sections.get("jobs", ())), offset),
            queues=dict(_queue(line) for line in sections.get("queues", ())[2:] if line.split()),
            programs=first_line(sections, "programs").rpartition("/")[0],
            now=now,
            utc_offset=offset,
        )

    def lookup(self) -> str:
        """``qstat -r`` writes each job's whole name below its line."""
        return (
            'qstat -r -u "$(id -un)" >"$in/look" && '
            "awk '/^ *[0-9]+ /{id = $1} /Full jobname:/{print id, $3}' \"$in/look\""
        )

    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        resources = []
        if job.walltime_s is not None:
            limit = max(60, int(job.walltime_s))
            soft = max(1, limit - int(min(job.warning_s, limit / 10)))
            resources += [f"h_rt={limit}", f"s_rt={soft}"]
        resources += [f"gpu={job.devices}"] if job.devices else []
        resources += ["exclusive=true"] if job.whole_node else []
        resources += [f"h_vmem={math.ceil(job.memory / 2**20)}M"] if job.memory and not job.whole_node else []
        argv = ["qsub", "-terse", "-N", job.name, "-o", f"{job.folder}/log", "-j", "y", "-r", "n", "-notify"]
        argv += ["-S", "/bin/sh", "-q", job.partition] if job.partition else ["-S", "/bin/sh"]
        argv += ["-l", ",".join(resources)] if resources else []
        if job.begin_in_s > 0:
            argv += ["-a", local_clock(facts.now + job.begin_in_s, facts.utc_offset, "%Y%m%d%H%M.%S")]
        for name, value in passed_options(job, _OURS):
            argv += [f"-{name}", *value.split()]
        ends = f"echo $(( $(date +%s) + {int(job.walltime_s)} ))" if job.walltime_s is not None else "echo 0"
        script = job_script(
            job, identity='"${JOB_ID:?}"', ends_at=ends, programs=facts.programs, run=job.command, notified=True
        )
        return Submission((*argv, f"{job.folder}/job.sh"), script)

    def stop(self) -> str:
        """``qdel`` warns first, because jobs are submitted with ``-notify``; what waits is simply removed."""
        return (
            'name=$(qstat -j "$1" 2>/dev/null | sed -n "s/^job_name: *//p")\n'
            '[ "$name" != "$2" ] || qdel "$1" >/dev/null\n'
        )

    def kill(self) -> str:
        """The same: its KILL comes when the warning's time is over."""
        return self.stop()

    def estimate(self, facts: SchedulerFacts, job: Job) -> tuple[str, ...] | None:
        """``qsub -w v`` only tells whether it could ever run."""
        submission = self.submission(facts, job)
        return ("qsub", "-w", "v", *submission.argv[2:])


def _jobs(text: str, offset: str) -> tuple[JobFacts, ...]:
    if not text.strip():
        return ()
    try:
        root = ET.fromstring(text)  # noqa: S314 - printed by the site's own qstat, for the user who reads it
    except ET.ParseError as error:
        raise FabrictoolError.of(
            "FT5401",
            f"unexpected output of qstat -xml: {text[:120]!r}: {error}",
            hint="report it with the scheduler's version",
        ) from error
    jobs = []
    for entry in root.iter("job_list"):
        fields = {child.tag: (child.text or "").strip() for child in entry}
        native = fields.get("state", "")
        state: JobState = "running" if re.search("[rtsST]", native) and "q" not in native else "pending"
        if "E" in native:
            state = "ended"  # it stays in the list and never runs
        number = fields.get("JB_job_number", "")
        jobs.append(
            JobFacts(
                id=number,
                state=state,
                native=native,
                name=fields.get("JB_name", ""),
                partition=fields.get("queue_name", "").partition("@")[0],
                reason="an error: see `qstat -j`" if "E" in native else "held" if "h" in native else "",
                submitted_at=_time(fields.get("JB_submission_time", ""), offset),
                begins_at=_time(fields.get("JAT_start_time", ""), offset),
            )
        )
    return tuple(jobs)


def _queue(line: str) -> tuple[str, Queue]:
    """A line of ``qstat -g c``: name, load, used, reserved, available, total, two numbers of what is away."""
    try:
        name, _, _used, _, available, total, suspended, disabled = line.split()[:8]
        away = int(suspended) + int(disabled)
        return name, Queue(up=int(total) > away, nodes=int(total), idle=int(available), away=away)
    except ValueError as error:
        raise FabrictoolError.of(
            "FT5401", f"unexpected output of qstat -g c: {line[:120]!r}", hint="report it with the scheduler's version"
        ) from error


def _time(text: str, offset: str) -> float | None:
    try:
        return datetime.strptime(f"{text}{offset}", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
