"""OpenPBS and PBS Pro, after the documentation of release 2021 and later. Unverified: never tried on a real one.

Taken from the manuals: ``qstat -f`` takes no ``-u``, so ``qselect`` names our jobs first; ``-w`` keeps long lines
whole; one id that is over makes ``qstat`` exit with 35 or 153 while it prints the others. There is no warning before
the walltime's end, and ``qdel`` gives ``kill_delay`` seconds (10 by default), so what runs is told by ``qsig``.
"""

from __future__ import annotations

import math
import re
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
from fabrictool.clusters.schedulers.times import local_clock, parse_clock, parse_length, passed_options
from fabrictool.domain.observed import Queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_OURS = frozenset("CIJNSVXacefhjoqrvz")
_TIME = "%a %b %d %H:%M:%S %Y"
_RUNNING = frozenset("RESUB")
_ENDED = frozenset("FXC")
_LIST = 'ids=$(qselect -x -u "$(id -un)")'
_SHOWN = "0|35|153"
"""Exit codes of ``qstat`` that are an answer: all known, one finished, one unknown."""


class Pbs(Scheduler):
    """See the module's docstring."""

    kind = "pbs"

    def prelude(self) -> str:
        """The commands may be on no path of a shell without a profile."""
        return "command -v qsub >/dev/null 2>&1 || { [ ! -r /etc/profile.d/pbs.sh ] || . /etc/profile.d/pbs.sh; }"

    def survey(self, *, brief: bool) -> str:
        """Jobs always; version and queues for the full one."""
        jobs = (
            f"echo @offset; date +%z\necho @jobs; {_LIST} || exit 75\n"
            f'if [ -n "$ids" ]; then qstat -x -f -w $ids; case $? in {_SHOWN}) ;; *) exit 75 ;; esac; fi\n'
        )
        if brief:
            return jobs
        return (
            "echo @version; qstat --version\n"
            "echo @programs; command -v qsub\n"
            f"{jobs}"
            "echo @queues; qstat -Q -f -w || exit 75\n"
        )

    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        offset = first_line(sections, "offset", "+0000")
        version = first_line(sections, "version").rpartition("=")[2].strip()
        return SchedulerFacts(
            version=tuple(int(part) for part in re.findall(r"\d+", version)[:3]),
            name=f"PBS {version}" if version else self.kind,
            jobs=tuple(_job(name, fields, offset) for name, fields in _blocks(sections.get("jobs", ()), "Job Id:")),
            queues={name: _queue(fields) for name, fields in _blocks(sections.get("queues", ()), "Queue:")},
            programs=first_line(sections, "programs").rpartition("/")[0],
            now=now,
            utc_offset=offset,
        )

    def lookup(self) -> str:
        """Jobs that are over count, too, where the server keeps them."""
        return (
            f'{_LIST} && : >"$in/look" && if [ -n "$ids" ]; then qstat -x -f -w $ids >"$in/look"; '
            f"case $? in {_SHOWN}) ;; *) false ;; esac; fi && "
            "awk '/^Job Id: /{id = $3} /^ *Job_Name = /{print id, $3}' \"$in/look\""
        )

    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        chunk = "select=1"
        chunk += f":ncpus={job.cpus}" if job.cpus else ""
        chunk += f":ngpus={job.devices}" if job.devices else ""
        chunk += f":mem={math.ceil(job.memory / 2**20)}mb" if job.memory and not job.whole_node else ""
        argv = ["qsub", "-N", job.name, "-o", f"{job.folder}/log", "-j", "oe", "-r", "n", "-S", "/bin/sh"]
        argv += ["-q", job.partition] if job.partition else []
        argv += ["-l", chunk]
        argv += ["-l", "place=exclhost"] if job.whole_node else []
        ends = "echo 0"
        if job.walltime_s is not None:
            seconds = max(60, int(job.walltime_s))
            argv += ["-l", f"walltime={seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"]
            ends = f"echo $(( $(date +%s) + {seconds} ))"
        if job.begin_in_s > 0:
            argv += ["-a", local_clock(facts.now + job.begin_in_s, facts.utc_offset, "%Y%m%d%H%M.%S")]
        for name, value in passed_options(job, _OURS):
            argv += [f"-{name}", value] if value else [f"-{name}"]
        script = job_script(job, identity='"${PBS_JOBID:?}"', ends_at=ends, programs=facts.programs, run=job.command)
        return Submission((*argv, f"{job.folder}/job.sh"), script)

    def stop(self) -> str:
        """TERM to what runs, an end to what waits."""
        return (
            f"{_CHECKED}"
            "state=$(printf '%s\\n' \"$said\" | sed -n 's/^ *job_state = //p')\n"
            'case $state in R|S|U|B|E) qsig -s SIGTERM "$1" ;; *) qdel "$1" ;; esac\n'
        )

    def kill(self) -> str:
        """TERM, and KILL after the server's ``kill_delay``."""
        return f'{_CHECKED}qdel "$1"\n'


_CHECKED = (
    'said=$(qstat -f -w "$1" 2>/dev/null) || return 0\n'
    '[ "$(printf \'%s\\n\' "$said" | sed -n \'s/^ *Job_Name = //p\')" = "$2" ] || return 0\n'
)
"""A number whose job is over, or bears another name, is left alone."""


def _blocks(lines: Iterable[str], head: str) -> Iterator[tuple[str, dict[str, str]]]:
    """``KEY = VALUE`` lines under each line that begins with `head`; a line that begins with a tab continues one."""
    name, fields, last = "", dict[str, str](), ""
    for line in lines:
        if line.startswith(head):
            if name:
                yield name, fields
            name, fields, last = line.removeprefix(head).strip(), {}, ""
        elif line.startswith("\t") and last:
            fields[last] += line.strip()
        elif " = " in line and name:
            last, _, value = line.strip().partition(" = ")
            fields[last] = value
        elif line.strip():
            raise FabrictoolError.of(
                "FT5401",
                f"unexpected output of qstat -f: {line[:120]!r}",
                hint="report it with the scheduler's version",
            )
    if name:
        yield name, fields


def _job(number: str, fields: Mapping[str, str], offset: str) -> JobFacts:
    native = fields.get("job_state", "")
    state: JobState = "running" if native in _RUNNING else "ended" if native in _ENDED else "pending"
    begun, longest = (
        parse_clock(fields.get("stime", ""), offset, _TIME),
        parse_length(fields.get("Resource_List.walltime", "")),
    )
    expected = parse_clock(fields.get("estimated.start_time", ""), offset, _TIME)
    return JobFacts(
        id=number,
        state=state,
        native=native,
        name=fields.get("Job_Name", ""),
        partition=fields.get("queue", ""),
        reason=fields.get("comment", "") if state == "pending" else "",
        submitted_at=parse_clock(fields.get("ctime", ""), offset, _TIME),
        begins_at=expected if state == "pending" else begun,
        ends_at=begun + longest if state == "running" and begun is not None and longest is not None else None,
    )


def _queue(fields: Mapping[str, str]) -> Queue:
    """The server tells no nodes of a queue."""
    waiting = re.findall(r"(?:Queued|Held|Waiting):(\d+)", fields.get("state_count", ""))
    return Queue(
        up=fields.get("enabled") == "True" and fields.get("started") == "True",
        pending=sum(int(number) for number in waiting),
        longest_s=parse_length(fields.get("resources_max.walltime", "")),
    )
