"""A short job on a compute node: what it is, and what it found out, judged. The edge is `in_a_job`."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.checks.promises import promise_checks, submits
from fabrictool.clusters.checks.result import Check
from fabrictool.clusters.jobs import environment_lines
from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.schedulers.protocol import Job
from fabrictool.clusters.site_facts import sections_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.checks.promises import Promise
    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.specs import HostPort

WALLTIME_S = 120.0
WAY = "way to the gateway"
POLL_S = 1.0
_LOOPBACK = ("127.", "localhost", "::1")
_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared with, not listened on


@dataclass(frozen=True, slots=True)
class Visit:
    """One job to a node."""

    token: str
    folder: str
    """``doctor/TOKEN``, absolute."""
    partition: str
    python: tuple[str, ...]
    """Words of the agents' interpreter; empty: there is none."""
    setup: tuple[str, ...]
    hubs: tuple[HostPort, ...]
    """Where agents will connect to."""
    promises: tuple[Promise, ...] = ()
    """What the inventory says of its nodes."""

    @property
    def operation(self) -> str:
        """The job's name is ``ft-`` and this."""
        return f"doctor-{self.token}"

    @property
    def command(self) -> tuple[str, ...]:
        hubs = ",".join(str(hub) for hub in self.hubs if _dialable(hub)) or "-"
        return ("sh", f"{self.folder}/check.sh", "-", "-", hubs, *self.python)


def partition_for(described: ClusterSpec, survey: Survey, wanted: str) -> str:
    """The wanted one; else one with an idle node, with accelerators if any has."""
    queues = survey.scheduler.queues
    of = {name: queues.get(partition.queue or name) for name, partition in described.partitions.items()}
    names = [name for name, queue in of.items() if queue is not None and queue.up] or list(of)
    ranked = sorted(
        names,
        key=lambda name: (
            (queue := of[name]) is not None and queue.idle == 0,
            described.partitions[name].device == "cpu",
            described.partitions[name].tier != "owned",
        ),
    )
    return wanted or ranked[0]


def job_of(visit: Visit, described: ClusterSpec, survey: Survey) -> Job:
    """The job: one device, two minutes, the options of replicas' jobs."""
    partition = described.partitions[visit.partition]
    return Job(
        operation=visit.operation,
        address="",  # nothing of a fabric: no controller takes it for a unit
        fabric="-",
        lineage="",
        serial=0,
        folder=visit.folder,
        home=survey.home,
        command=visit.command,
        partition=partition.queue or visit.partition,
        devices=0 if partition.device == "cpu" else 1,
        whole_node=partition.whole_nodes,
        walltime_s=WALLTIME_S,
        warning_s=WALLTIME_S / 10,
        setup=(*environment_lines(described.environment), *visit.setup),
        options=partition.job.options,
    )


def in_a_job(
    visit: Visit,
    described: ClusterSpec,
    survey: Survey,
    scheduler: Scheduler,
    connection: Connection,
    wait_s: float,
) -> list[Check]:
    """Submit, wait, judge; the job is cancelled and its folder removed whatever happens, Ctrl-C included."""
    number = ""
    try:
        job = job_of(visit, described, survey)
        if described.partitions[visit.partition].job.successors:
            again = scheduler.estimate(survey.scheduler, job) or ()
            visit = replace(visit, promises=(*visit.promises, submits(again)))
        connection.put(shell.program("doctor-node").encode(), f"{visit.folder}/check.sh", mode=0o700)
        promised = "".join(promise.line for promise in visit.promises)
        connection.put(promised.encode(), f"{visit.folder}/promised", mode=0o600)
        if not described.queues:
            done = connection.run(["sh", "-c", 'cd "$0" && exec "$@"', visit.folder, *visit.command])
            return node_checks(_read(connection, visit), visit, described) or [_no_result(done.stderr.decode())]
        submission = scheduler.submission(survey.scheduler, job)
        connection.put(submission.script.encode(), f"{visit.folder}/job.sh", mode=0o700)
        done = connection.run(list(submission.argv))
        number = done.stdout.decode(errors="replace").strip().rpartition("\n")[2].partition(";")[0]
        if done.status != 0 or not number:
            refusal = done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.status}"
            hint = "correct account, QOS or limits under `job` of this partition in the inventory"
            return [Check("job", False, f"refused on {visit.partition}: {refusal}", hint)]
        mark = mark_check(connection.run(["sh", "-c", scheduler.lookup()]).stdout.decode(errors="replace"), job)
        return [mark, *_awaited(visit, described, connection, number, wait_s)]
    finally:
        _end(visit, described, scheduler, connection, number)


def _awaited(visit: Visit, described: ClusterSpec, connection: Connection, number: str, wait_s: float) -> list[Check]:
    began, job = time.monotonic(), f"{number} on {visit.partition}"
    while time.monotonic() - began < wait_s:
        if results := node_checks(_read(connection, visit), visit, described):
            return [Check("job", True, f"{job} answered after {time.monotonic() - began:.0f} s"), *results]
        time.sleep(POLL_S)
    log = connection.run(["tail", "-n", "2", f"{visit.folder}/log"]).stdout.decode(errors="replace").strip()
    if log:
        return [Check("job", False, f"{job} gave no result: {log[-200:]}", "run the command again")]
    text = f"{job} did not start within {wait_s:.0f} s, so its nodes were not checked"
    return [Check("job", True, text, "try another --partition, a longer --wait, or run it again later", warning=True)]


def mark_check(listed: str, job: Job) -> Check:
    """Whether the scheduler keeps our mark; `listed` has ``ID NAME COMMENT`` a line."""
    rows = [line.split(" ", 2) for line in listed.splitlines()]
    mine = next((row for row in rows if len(row) > 1 and row[1] == job.name), None)
    if mine is None:
        return Check("job's mark", False, f"no job named {job.name} is listed", "the site may rename jobs: ask them")
    if len(mine) > 2 and mine[2].strip() == job.comment:
        return Check("job's mark", True, "names and comments are kept")
    hint = "jobs are found by name alone, and `state rebuild` recovers less"
    return Check("job's mark", True, "names are kept, comments are not", hint, warning=True)


def node_checks(text: str, visit: Visit, described: ClusterSpec) -> list[Check]:
    """What ``doctor-node.sh`` found; empty for a result that is not there yet."""
    sections = sections_of(text)
    if "end" not in sections:
        return []
    first = {name: lines[0] for name, lines in sections.items() if lines}
    host = first.get("host", "")
    shared = first.get("shared", "") == visit.token
    hint = "choose a `folder` on a file system that login and compute nodes share"
    checks = [
        Check("shared folder", shared, f"{host} sees what the login node wrote" if shared else f"not on {host}", hint)
    ]
    if described.partitions[visit.partition].device != "cpu":
        checks.append(_gpu(sections.get("gpu", ())))
    promised = promise_checks(visit.promises, sections.get("promised", ()))
    return [*checks, *promised, *_python(sections, visit), *_egress(sections, visit)]


def _gpu(lines: Sequence[str]) -> Check:
    visible = next((line.partition(" ")[2] for line in lines if line.startswith("visible")), "")
    seen = [line for line in lines if line.startswith("GPU ")]
    text = f"device {visible}" if visible else "no *_VISIBLE_DEVICES"
    text += f", nvidia-smi: {seen[0].partition(' (UUID')[0]}" if seen else ""
    hint = "a job that asks for one device sees none; check `devices_per_node` and the partition's GRES"
    return Check("accelerator", bool(visible or seen), text, hint)


def _python(sections: dict[str, list[str]], visit: Visit) -> list[Check]:
    if not visit.python:
        return []
    answer = " ".join(sections.get("python", ()))
    text = answer.removeprefix("runs ")
    return [
        Check(
            "agents' Python",
            answer.startswith("runs "),
            f"fabrictool {text}" if text != answer else answer[-200:],
            "fabrictool bootstrap",
        )
    ]


def _egress(sections: dict[str, list[str]], visit: Visit) -> list[Check]:
    """From a node to each gateway: everything that agents say goes this way."""
    if not visit.hubs:
        text = "not tried: no blueprint with a gateway"
        return [Check(WAY, True, text, "give a blueprint with -b FILE", warning=True)]
    answers = dict(line.partition(" ")[::2] for line in sections.get("egress", ()))
    reached = [hub for hub in visit.hubs if answers.get(str(hub)) == "connected"]
    return [_way(hub, visit, answers.get(str(hub), "failed"), reached) for hub in visit.hubs]


def _way(hub: HostPort, visit: Visit, answer: str, reached: list[HostPort]) -> Check:
    """One that is not reached is no fault where another is: that one relays."""
    if not _dialable(hub):
        hint = "a gateway's `mesh` or `advertise` must be an address that compute nodes can connect to"
        loops = hub.host.startswith(_LOOPBACK)
        return Check(WAY, not loops, f"not tried: {hub} is not the address of a machine", hint, not loops)
    if not visit.python:
        return Check(WAY, True, "not tried: no Python", "fabrictool bootstrap", warning=True)
    if answer == "connected":
        return Check(WAY, True, f"a node connects to {hub}")
    if answer == "refused":
        hint = "nobody listens there; run the gateway (`fabrictool apply`) and check again to be sure"
        return Check(WAY, True, f"{hub} is reachable, but refuses the connection", hint, warning=True)
    hint = f"ask the site to let nodes connect to {hub} (TCP); the gateway must run for this check"
    why = f"{hub}: {answer.removeprefix('failed').strip()}"
    if reached:
        hint = f"{reached[0]} relays for it; with a way to a second one the end of the first is no interruption"
        return Check(WAY, True, why, hint if len(reached) == 1 else "", warning=len(reached) == 1)
    return Check(WAY, False, why, hint)


def _dialable(hub: HostPort) -> bool:
    return not hub.host.startswith(_LOOPBACK) and hub.host not in _ANY


def _no_result(stderr: str) -> Check:
    return Check("node", False, f"the check left no result: {stderr.strip()[-200:]}", "run the command again")


def _read(connection: Connection, visit: Visit) -> str:
    return connection.run(["sh", "-c", 'cat "$0" 2>/dev/null', f"{visit.folder}/result"]).stdout.decode(
        errors="replace"
    )


def _end(visit: Visit, described: ClusterSpec, scheduler: Scheduler, connection: Connection, number: str) -> None:
    """Cancel by number and name; by name alone when the submission broke off."""
    with suppress(FabrictoolError):
        if described.queues:
            if not number:
                listed = connection.run(["sh", "-c", scheduler.lookup()]).stdout.decode(errors="replace").splitlines()
                rows = [line.split(" ", 2) for line in listed]
                number = next((row[0] for row in rows if len(row) > 1 and row[1] == f"ft-{visit.operation}"), "")
            if number:
                program = shell.signal_program(scheduler, kill=True)
                connection.run(["sh", "-c", program, "ft-signal", described.folder, "-", visit.operation, number])
        connection.run(["sh", "-c", shell.program("doctor-end"), "ft-doctor-end", described.folder, "-", visit.token])
