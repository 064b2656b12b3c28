"""Slurm, 22.05 and later: fixed ``-o`` formats instead of ``--json``, whose shape changes between releases.

Facts that were measured on 22.05 (`design` notes in docs/explanation/clusters.md): an agent under ``srun`` gets TERM at
once when its job is preempted, one in the batch shell only at the end; ``--time-min`` gives services the minimum;
``--signal`` comes up to 90 s before its time; one unknown id makes ``squeue -j`` fail, so jobs are listed by user.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.schedulers.apart import avoided
from fabrictool.clusters.schedulers.protocol import (
    Job,
    JobFacts,
    JobState,
    Scheduler,
    SchedulerFacts,
    Submission,
    Within,
    first_line,
)
from fabrictool.clusters.schedulers.script import job_script
from fabrictool.clusters.schedulers.times import parse_limit
from fabrictool.clusters.site_facts import leading_number
from fabrictool.domain.hostlist import hostlist, hostlist_of
from fabrictool.domain.observed import Away, Blocked, NodeKind, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

OLDEST = (22, 5)
_SQUEUE = "%A|%T|%P|%N|%V|%S|%e|%r|%j|%k"
_SINFO = "%R|%a|%D|%c|%m|%l|%A|%G|%T|%N"
_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
_PAUSED = frozenset({"STOPPED", "SUSPENDED"})
_PENDING = frozenset(["PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"])
_BLOCKED: tuple[tuple[str, Blocked], ...] = (
    (r"JobHeld(Admin|User)|.*requeued[ _]held|JobHoldMaxRequeue", "held"),
    (r"Invalid(Account|QOS)|(Account|QOS)NotAllowed|BadConstraints|DependencyNeverSatisfied", "invalid"),
    (r"Partition(Node|Time)Limit|PartitionConfig|ReservationDeleted|QOSMin\w*", "invalid"),
    (r"(QOS|Assoc)(Max|Min)\w*Per(Job|Node)\w*", "invalid"),
    (r"(QOS|Assoc)MaxJobs\w*|AssociationJobLimit|QOSUsageThreshold", "limit"),
    (r"Partition(Down|Inactive)|NodeDown|ReqNodeNotAvail, UnavailableNodes.*", "nodes"),
)
"""Reasons of jobs that wait (``squeue`` manual, "JOB REASON CODES") and do not start by waiting alone. Limits of groups
and "Nodes required for job are DOWN, DRAINED or reserved …" are the usual queue of a busy partition."""
_GRES = re.compile(r"gpu(?::([A-Za-z0-9_.-]+?))??:(\d+)")
_AWAY = re.compile(r"down|drain|fail|inval|maint|unknown|\w+\*")
"""How the states begin of nodes on which nothing starts, whether something still runs there or not; with ``*`` they do
not answer (``sinfo`` manual, "NODE STATE CODES"). Reserved ones may be so for us."""
_NEVER = frozenset(["", "N/A", "NONE", "(null)", "Unknown", "0"])


class Slurm(Scheduler):
    """See the module's docstring."""

    kind = "slurm"
    commands = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")
    oldest = OLDEST
    accounting = "sacct"
    several_nodes = True
    from_inside = True

    def survey(self, *, brief: bool) -> str:
        """Jobs always; version, partitions and reservations for the full one."""
        jobs = f"echo @jobs; squeue --local -h --me -t all -o {shlex.quote(_SQUEUE)} || exit 75\n"
        if brief:
            return "export SLURM_TIME_FORMAT=%s\n" + jobs
        return (
            "export SLURM_TIME_FORMAT=%s\n"
            "echo @version; sinfo --version || exit 75\n"
            "echo @programs; command -v sbatch\n"
            "echo @clock; scontrol show config 2>/dev/null | sed -n '1s/^Configuration data as of //p'\n"
            f"{jobs}"
            f"echo @queues; sinfo --local -h -o {shlex.quote(_SINFO)} || exit 75\n"
            "echo @waiting; squeue --local -h -t PD -o %P || exit 75\n"
            "echo @reservations; scontrol -o show reservation 2>/dev/null\n"
        )

    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        """See the protocol; `now` is the login node's clock. Every time that Slurm says is by its controller's."""
        now = _time(first_line(sections, "clock").strip()) or now
        version = _version(sections.get("version", ()))
        waiting = [name for line in sections.get("waiting", ()) for name in line.split(",")]
        queues = _queues(sections.get("queues", ()), waiting)
        return SchedulerFacts(
            version=version,
            name=first_line(sections, "version", self.kind),
            jobs=tuple(_job(line) for line in sections.get("jobs", ()) if _ours(line)),
            queues=queues,
            away=tuple(away for line in sections.get("reservations", ()) for away in _reservation(line, now, queues)),
            programs=first_line(sections, "programs").rpartition("/")[0],
            now=now,
        )

    def lookup(self) -> str:
        return "squeue --local -h --me -t all -o '%A %j %k'"

    def living(self) -> str:
        """An array's tasks by either of their numbers: people know them as 48213_7."""
        return f"{self.lookup()} && squeue --local -h -r --me -t all -o '%i %j %k'"

    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        if facts.version and facts.version < OLDEST:
            message = f"Slurm {'.'.join(map(str, facts.version))} is older than {OLDEST[0]}.{OLDEST[1]:02d}"
            raise FabrictoolError.of("FT5402", message, thing=job.partition, hint="ask the site for a later release")
        walltime = job.walltime_s
        argv = [
            "sbatch", "--parsable", f"--job-name={job.name}", f"--comment={job.comment}", *_nodes(job),
            "--no-requeue", "--export=NIL", "--open-mode=append", f"--output={_escaped(job.folder)}/log",
        ]  # fmt: skip
        argv += [f"--partition={job.partition}"] if job.partition else []
        if walltime is not None:
            argv += [f"--time={_limit(walltime)}", f"--signal=TERM@{int(min(job.warning_s, walltime / 10, 65535))}"]
        argv += _size(facts, job)
        argv += [f"--begin=now+{math.ceil(job.begin_in_s)}"] if job.begin_in_s > 0 else []
        argv += _passed({name: value for name, value in job.options.items() if not (job.apart and name == "exclude")})
        argv += [f"--exclude={avoided(facts, job)}"] if job.apart else []
        step = ["srun", *_nodes(job), "--export=ALL", "--input=none", "--quiet"]
        if job.nodes > 1:  # when one node's agent ends the first one's has that long to leave, and then all do
            step += ["--kill-on-bad-exit=0", f"--wait={math.ceil(job.warning_s)}"]
        step += [f"--cpus-per-task={job.cpus}"] if job.cpus and not job.whole_node else []  # not inherited since 22.05
        step += _passed(job.step_options)
        script = job_script(
            job,
            identity='"${SLURM_JOB_ID:?}"',
            ends_at=f"{ENDS_AT_NOW} 2>/dev/null || echo 0",
            programs=facts.programs,
            run=[*step, *job.command],
        )
        return Submission((*argv, f"{job.folder}/job.sh"), script)

    def stop(self) -> str:
        """TERM reaches the step, so the agent drains; what waits is cancelled."""
        return _state_of() + (
            'case $state in "") ;; PENDING) scancel --quiet "$1" ;; *) scancel --quiet --signal=TERM "$1" ;; esac\n'
        )

    def kill(self) -> str:
        return _state_of() + '[ -z "$state" ] || scancel --quiet "$1"\n'

    def within(self) -> Within:
        """A step that shares what the job has (``--overlap``, Slurm 20.11); it lasts as long as its ``srun``."""
        return Within(
            running="SLURM_TIME_FORMAT=%s squeue --local -h --me -t R -j \"$1\" -o '%B %e' 2>&1 || exit 75\n",
            run=(
                "srun", "--jobid=@JOB@", "--nodelist=@NODE@", "--job-name=@NAME@", "--overlap", "--nodes=1",
                "--ntasks=1", "--export=ALL", "--input=none", "--quiet",
            ),
            steps=(
                "listed=$(squeue --local -h -s -j \"$1\" -o '%i %j') || exit 75\n"
                "printf '%s\\n' \"$listed\" | awk -v name=\"$2\" '$2 == name { print $1 }'\n"
            ),
            leave='scancel --quiet --signal=TERM "$@"\n',
        )  # fmt: skip

    def estimate(self, facts: SchedulerFacts, job: Job) -> tuple[str, ...] | None:
        """``sbatch --test-only``: tells a start and the node, refuses what can never run."""
        submission = self.submission(facts, job)
        kept = [word for word in submission.argv[1:-1] if not word.startswith(("--parsable", "--output", "--signal"))]
        return ("env", "SLURM_TIME_FORMAT=%s", "sbatch", "--test-only", *kept, "--wrap=true")

    def estimated(self, stdout: str, stderr: str) -> float | None:
        """From ``sbatch: Job 17 to start at 1763749800 using …``; with the time format of the survey's environment."""
        match = re.search(r"to start at (\S+)", stderr + stdout)
        return None if match is None else _time(match.group(1))


ENDS_AT_NOW = 'SLURM_TIME_FORMAT=%s squeue --local -h -j "$SLURM_JOB_ID" -o %e'


def _state_of() -> str:
    """Sets `state` to that of the job ``$1`` if its name is ``$2``; one ``squeue`` for all jobs of a program."""
    states = "PD,R,S,CF,SO,ST,RQ,RH,SI,CG"
    return (
        f"[ -n \"${{listed+x}}\" ] || listed=$(squeue --local -h --me -t {states} -o '%A %j %T') || exit 75\n"
        'state=$(printf \'%s\\n\' "$listed" | awk -v job="$1" -v name="$2" \'$1 == job && $2 == name { print $3 }\')\n'
    )


def _nodes(job: Job) -> list[str]:
    """One task a node."""
    return [f"--nodes={job.nodes}", f"--ntasks={job.nodes}", *(["--ntasks-per-node=1"] if job.nodes > 1 else [])]


def _passed(options: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in sorted(options.items())]


def _size(facts: SchedulerFacts, job: Job) -> list[str]:
    options = ["--exclusive", "--mem=0"] if job.whole_node else []
    if not job.whole_node:
        options += [f"--cpus-per-task={job.cpus}"] if job.cpus else []
        options += [f"--mem={math.ceil(job.memory / 2**20)}M"] if job.memory else []
    if job.devices:
        queue = facts.queues.get(job.partition)
        kind = job.device or (queue.device if queue is not None else "")
        # `--gpus` counts those of the whole job, the others those of a node.
        number = job.devices * job.nodes if job.devices_as == "gpus" else job.devices
        counted = f"{kind}:{number}" if kind else str(number)
        options.append(f"--gres=gpu:{counted}" if job.devices_as == "gres" else f"--{job.devices_as}={counted}")
    return options


def _limit(seconds: float) -> str:
    """``D-HH:MM:SS``, whole minutes, never more than asked for: a maintenance window may begin then."""
    minutes = max(1, int(seconds // 60))
    days, rest = divmod(minutes, 1440)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _escaped(path: str) -> str:
    """``%`` begins a pattern in the name of an output file."""
    return path.replace("%", "%%")


def _ours(line: str) -> bool:
    """Others' jobs may have a line break in a name or a comment; only lines about ours must be whole."""
    return re.match(r"\d+\|", line) is not None and ("|ft-" in line or line.count("|") >= 9)


def _job(line: str) -> JobFacts:
    parts = line.split("|", 9)
    if len(parts) < 10:
        raise FabrictoolError.of(
            "FT5401",
            f"unexpected output of squeue: {line[:120]!r}",
            hint="report it with the output of `sinfo --version`",
        )
    number, native, partition, node, submitted, begins, ends, reason, name, comment = parts
    state: JobState = "ended" if native in _ENDED else "pending" if native in _PENDING else "running"
    return JobFacts(
        id=number,
        state=state,
        native=native,
        name=name,
        comment="" if comment in _NEVER else comment,
        partition=partition,
        node=",".join(hostlist(node)),
        reason="" if reason in ("None", "(null)") else reason,
        blocked=_blocked(reason) if state == "pending" else "",
        leaving=native == "COMPLETING",
        paused=f"the scheduler has {native.lower()} its job; ask the site why" if native in _PAUSED else "",
        submitted_at=_time(submitted),
        begins_at=_time(begins),
        ends_at=_time(ends),
    )


def _blocked(reason: str) -> Blocked:
    return next((kind for pattern, kind in _BLOCKED if re.fullmatch(pattern, reason)), "")


def _queues(lines: Iterable[str], waiting: Sequence[str]) -> dict[str, Queue]:
    """One a partition; `sinfo` has a line for each kind and state of node in it, and the largest kind counts."""
    queues: dict[str, Queue] = {}
    for line in lines:
        parts = line.split("|", 9)
        if len(parts) < 10:
            raise FabrictoolError.of(
                "FT5401",
                f"unexpected output of sinfo: {line[:120]!r}",
                hint="report it with the output of `sinfo --version`",
            )
        name, up, nodes, cpus, memory, longest, busy_idle, gres, state, names = parts
        busy, _, idle = busy_idle.partition("/")
        kinds = _GRES.search(gres)
        before = queues.get(name, Queue())
        of_this = NodeKind(
            nodes=hostlist_of(hostlist(names)),
            devices=int(kinds.group(2)) if kinds else 0,
            device=(kinds.group(1) or "") if kinds else "",
            away=_AWAY.match(state) is not None,
        )
        # The order of the lines depends on the nodes' states, which must not choose the type.
        larger = (of_this.devices, before.device) > (before.devices, of_this.device)
        here = Queue(
            up=up == "up",
            nodes=before.nodes + leading_number(nodes),
            idle=before.idle + leading_number(idle),
            away=before.away + max(0, leading_number(nodes) - leading_number(busy) - leading_number(idle)),
            pending=waiting.count(name),
            longest_s=parse_limit(longest),
            devices=max(before.devices, of_this.devices),
            device=of_this.device if larger else before.device,
            cpus=max(before.cpus, leading_number(cpus)),
            memory=max(before.memory, leading_number(memory) * 2**20),
            kinds=(*before.kinds, of_this) if of_this.nodes else before.kinds,
        )
        queues[name] = here
    return queues


def _reservation(line: str, now: float, queues: Mapping[str, Queue]) -> list[Away]:
    """Reservations that end or hold our jobs: maintenance, of all nodes, of a partition, or of some nodes by name."""
    fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
    begin, end = _time(fields.get("StartTime", "")), _time(fields.get("EndTime", ""))
    flags = fields.get("Flags", "").split(",")
    if "ReservationName" not in fields or begin is None or end is None or end <= now:
        return []
    if "MAINT" not in flags and "IGNORE_JOBS" not in flags:
        return []
    name, count = fields["ReservationName"], leading_number(fields.get("NodeCnt", ""))
    partitions = _names(fields.get("PartitionName", ""))
    largest = max((queue.nodes for queue in queues.values()), default=0)
    if not partitions and ("ALL_NODES" in flags or (largest and count >= sum(q.nodes for q in queues.values()))):
        return [Away(name=name, begin=begin, end=end)]
    if partitions and all(count >= queues[partition].nodes for partition in partitions if partition in queues):
        return [Away(name=name, begin=begin, end=end, partitions=partitions)]
    nodes = hostlist(fields.get("Nodes", ""))
    return [Away(name=name, begin=begin, end=end, nodes=nodes)] if nodes else []


def _names(partition: str) -> tuple[str, ...]:
    return () if partition in _NEVER else tuple(partition.split(","))


def _version(lines: Sequence[str]) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", " ".join(lines))
    return () if match is None else tuple(int(part) for part in match.groups() if part)


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() and text not in _NEVER else None
