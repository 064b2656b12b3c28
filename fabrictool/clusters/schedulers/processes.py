"""Plain hosts: no scheduler, a session of its own for every unit, and a pid that cannot lie.

A pid file alone is not believed: it names the process's start time and the machine's boot as well, so a reused pid or a
reboot is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.clusters.schedulers.protocol import (
    STOPPED,
    Job,
    JobFacts,
    Scheduler,
    SchedulerFacts,
    Submission,
    first_line,
)  # fmt: skip
from fabrictool.clusters.schedulers.script import job_script
from fabrictool.clusters.schedulers.shell import script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_ALIVE = (
    'ft_alive() { [ -s "$1/pid" ] && read -r p t b <"$1/pid" && '
    '[ "$b" = "$(cat /proc/sys/kernel/random/boot_id)" ] && '
    '[ "$t" = "$(sed \'s/.*) //\' "/proc/$p/stat" 2>/dev/null | cut -d\' \' -f20)" ]; }\n'
)  # the name in brackets may hold blanks: fields are counted behind it
_START = "$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)"
_BOOT = "$(cat /proc/sys/kernel/random/boot_id)"


class Processes(Scheduler):
    """See the module's docstring."""

    kind = "ssh"
    commands = ("setsid",)

    def survey(self, *, brief: bool) -> str:
        """The units that live, by their folders."""
        return (
            "echo @version; uname -sr\n"
            f"{_ALIVE}"
            "echo @jobs\n"
            'for d in "$units"/*/; do d=${d%/}; s=; if ft_alive "$d"; then '
            's=running; case "$(sed \'s/.*) //\' "/proc/$p/stat" 2>/dev/null)" in [Tt]*) s=stopped ;; esac; '
            'elif [ -s "$d/pid" ]; then s=ended; fi; '
            '[ -z "$s" ] || echo "$(cat "$d/claim" 2>/dev/null) $s ${d##*/}"; done\n'
        )

    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        jobs = []
        for line in sections.get("jobs", ()):
            number, state, operation = line.rsplit(" ", 2)
            alive = state != "ended"
            jobs.append(
                JobFacts(
                    id=number,
                    state="running" if alive else "ended",
                    native="alive" if alive else "gone",
                    name=f"ft-{operation}",
                    paused=STOPPED if state == "stopped" else "",
                )
            )
        return SchedulerFacts(name=first_line(sections, "version", self.kind), jobs=tuple(jobs))

    def lookup(self) -> str:
        """What was started in a folder bears the folder's name."""
        return 'for d in "$units"/*/; do d=${d%/}; [ -s "$d/pid" ] && echo "$(cat "$d/claim") ft-${d##*/}"; done; true'

    def living(self) -> str:
        listing = 'd=${d%/}; if ft_alive "$d"; then echo "$p ft-${d##*/}"; fi'
        return f'{_ALIVE}for d in "$units"/*/; do {listing}; done; true'

    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        """A session of its own, which outlives the connection; it writes its pid before it becomes the agent."""
        script = job_script(
            job,
            identity='"$(hostname).$$"',
            ends_at=f"echo $(( $(date +%s) + {int(job.walltime_s)} ))" if job.walltime_s is not None else "echo 0",
            programs="",
            run=job.command,
            claimed=(f'echo "$$ {_START} {_BOOT}" >pid.new && mv pid.new pid',),
        )
        start = (
            'cd "$0" && setsid sh ./job.sh </dev/null >>log 2>&1 9>&- & i=0; while [ $i -lt 100 ]; do '
            '[ -s "$0/pid" ] && exec cat "$0/claim"; i=$((i+1)); sleep 0.05; done; '
            'echo "no pid within 5 s" >&2; exit 75'
        )
        return Submission(("sh", "-c", start, job.folder), script)

    @staticmethod
    def on_boot() -> str:
        """What starts gateways again after a reboot."""
        return script("on-boot", alive=_ALIVE)

    def stop(self) -> str:
        """TERM to the process, if it is still the one that was started."""
        return f'{_ALIVE}d="$units/${{2#ft-}}"; if ft_alive "$d"; then kill -TERM "$p"; fi\n'

    def kill(self) -> str:
        """KILL; the engine dies with its agent."""
        return f'{_ALIVE}d="$units/${{2#ft-}}"; if ft_alive "$d"; then kill -KILL "$p"; fi\n'
