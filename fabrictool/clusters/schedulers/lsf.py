"""IBM Spectrum LSF 10.1, after its documentation. Unverified: never tried on a real one.

Taken from the manuals: times in ``bjobs`` have no year, so the time that is left is asked for instead; limits are whole
minutes; ``bkill`` sends INT, TERM and KILL, so what runs is told by ``bkill -s TERM``; ``bsub`` prints the id in words;
``bjobs`` fails with words on stderr when there is no job at all. Sites may scale ``-W`` by a host's speed
(``ABS_RUNLIMIT`` off): the end that an agent is told is then wrong.
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
from fabrictool.clusters.schedulers.times import local_clock, passed_options
from fabrictool.domain.observed import Queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_OURS = frozenset({
    "H", "I", "IS", "Ip", "J", "Jd", "K", "W", "Zs", "b", "e", "eo", "env", "gpu", "i", "is", "json", "jsdl", "n", "o",
    "oo", "outdir", "q", "r", "rn", "t", "wa", "wt", "x", "yaml",
})  # fmt: skip
_RUNNING = frozenset(["RUN", "USUSP", "SSUSP", "UNKWN", "ZOMBI"])
_ENDED = frozenset(["DONE", "EXIT"])
_NONE = "No job found"
_JOBS = "jobid stat queue run_time time_left job_name delimiter='|'"
_SUBMIT = 'said=$(bsub "$@") || exit; printf "%s\\n" "$said" | sed -n "s/^Job <\\([0-9]*\\)>.*/\\1/p"'
_LEFT = re.compile(r"(\d+):(\d+)")


class Lsf(Scheduler):
    """See the module's docstring."""

    kind = "lsf"

    def prelude(self) -> str:
        """LSF's commands need its environment, which a shell without a profile may lack."""
        return (
            'if [ -z "$LSF_ENVDIR" ]; then for f in /etc/profile.d/lsf*.sh /opt/ibm/lsf*/conf/profile.lsf '
            '/usr/share/lsf/conf/profile.lsf; do if [ -r "$f" ]; then . "$f"; break; fi; done; fi'
        )

    def survey(self, *, brief: bool) -> str:
        """Jobs always; version and queues for the full one."""
        jobs = (
            "echo @offset; date +%z\n"
            f'echo @jobs; said=$(bjobs -a -noheader -o "{_JOBS}" 2>&1); '
            f'case $?:$said in 0:*|*:"{_NONE}"*) printf "%s\\n" "$said" ;; *) echo "$said" >&2; exit 75 ;; esac\n'
        )
        if brief:
            return jobs
        return (
            "echo @version; lsid | head -n 1\n"
            "echo @programs; command -v bsub\n"
            f"{jobs}"
            "echo @queues; bqueues -w || exit 75\n"
        )

    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        version = first_line(sections, "version")
        numbers = re.search(r"\d+(?:\.\d+)+", version)
        jobs = [line for line in sections.get("jobs", ()) if line.strip() and not line.startswith(_NONE)]
        return SchedulerFacts(
            version=tuple(int(part) for part in numbers.group().split(".")) if numbers else (),
            name=f"LSF {numbers.group()}" if numbers else self.kind,
            jobs=tuple(_job(line, now) for line in jobs),
            queues=_queues(sections.get("queues", ())),
            programs=first_line(sections, "programs").rpartition("/")[0],
            now=now,
            utc_offset=first_line(sections, "offset", "+0000"),
        )

    def lookup(self) -> str:
        """By the job's name; that there is no job at all is an answer, too."""
        return (
            'if bjobs -a -noheader -o "jobid job_name delimiter=\' \'" >"$in/look" 2>"$in/none"; '
            f'then cat "$in/look"; else grep -q \'^{_NONE}\' "$in/none"; fi'
        )

    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        argv = ["-J", job.name, "-Jd", job.comment, "-o", f"{job.folder}/log", "-rn", "-env", "none"]
        argv += ["-q", job.partition] if job.partition else []
        argv += ["-n", str(job.cpus)] if job.cpus else []
        argv += ["-R", "span[hosts=1]"]
        argv += ["-x"] if job.whole_node else []
        argv += ["-gpu", f"num={job.devices}"] if job.devices else []
        if job.memory and not job.whole_node:
            argv += ["-R", f"rusage[mem={math.ceil(job.memory / 2**20)}MB]"]
        ends = "echo 0"
        if job.walltime_s is not None:
            minutes = max(1, int(job.walltime_s // 60))
            argv += ["-W", str(minutes)]
            if minutes > 10:
                argv += ["-wa", "TERM", "-wt", str(max(1, math.ceil(min(job.warning_s, minutes * 6) / 60)))]
            ends = f"echo $(( $(date +%s) + {minutes * 60} ))"
        if job.begin_in_s > 0:  # whole minutes: never earlier than wanted
            begin = math.ceil((facts.now + job.begin_in_s) / 60) * 60
            argv += ["-b", local_clock(begin, facts.utc_offset, "%Y:%m:%d:%H:%M")]
        for name, value in passed_options(job, _OURS):
            argv += [f"-{name}", value] if value else [f"-{name}"]
        script = job_script(job, identity='"${LSB_JOBID:?}"', ends_at=ends, programs=facts.programs, run=job.command)
        return Submission(("sh", "-c", _SUBMIT, "ft-bsub", *argv, "/bin/sh", f"{job.folder}/job.sh"), script)

    def stop(self) -> str:
        """TERM to what runs, an end to what waits."""
        return (
            f"{_CHECKED}"
            'case ${said#* } in DONE|EXIT) ;; PEND|PSUSP|PROV|WAIT) bkill "$1" >/dev/null ;; '
            '*) bkill -s TERM "$1" >/dev/null ;; esac\n'
        )

    def kill(self) -> str:
        """``bkill`` sends INT, TERM and KILL."""
        return f'{_CHECKED}case ${{said#* }} in DONE|EXIT) ;; *) bkill "$1" >/dev/null ;; esac\n'


_CHECKED = (
    'said=$(bjobs -a -noheader -o "job_name stat delimiter=\' \'" "$1" 2>/dev/null) || return 0\n'
    '[ "${said% *}" = "$2" ] || return 0\n'
)
"""A number whose job is over, or bears another name, is left alone."""


def _job(line: str, now: float) -> JobFacts:
    parts = line.split("|", 5)
    if len(parts) < 6:
        raise FabrictoolError.of("FT5401", f"unexpected output of bjobs: {line[:120]!r}", hint="report it with `lsid`")
    number, native, queue, run, left, name = (part.strip() for part in parts)
    state: JobState = "ended" if native in _ENDED else "running" if native in _RUNNING else "pending"
    seconds, remaining = re.match(r"\d+", run), _LEFT.match(left)
    running = state == "running"
    return JobFacts(
        id=number,
        state=state,
        native=native,
        name=name,
        partition=queue,
        begins_at=now - int(seconds.group()) if running and seconds else None,
        ends_at=now + int(remaining[1]) * 3600 + int(remaining[2]) * 60 if running and remaining else None,
    )


def _queues(lines: Iterable[str]) -> dict[str, Queue]:
    """Of ``bqueues -w``; it tells no hosts."""
    queues = {}
    for line in lines:
        words = line.split()
        if not words or words[0] == "QUEUE_NAME":
            continue
        if len(words) < 10 or not words[8].isdecimal():
            raise FabrictoolError.of(
                "FT5401", f"unexpected output of bqueues: {line[:120]!r}", hint="report it with `lsid`"
            )
        queues[words[0]] = Queue(up=words[2].startswith("Open:Active"), pending=int(words[8]))
    return queues
