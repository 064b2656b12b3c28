"""An engine that somebody started in a job of their own comes under the mesh: an agent starts in the job, beside it.

Nothing of the job is changed, and nothing of the engine: when the agent leaves, both go on.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UnreachableError
from fabrictool.clusters.environment.interpreter import python_of
from fabrictool.clusters.jobs import environment_lines, tar
from fabrictool.clusters.kinds import scheduler_of
from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.site_facts import sections_of
from fabrictool.clusters.survey import object_of, read_survey
from fabrictool.domain.specs import encode_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.clusters.connections.protocol import Completed, Connection
    from fabrictool.clusters.schedulers.protocol import Scheduler, Within
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.specs import AgentSpec


_NUMBER = re.compile(r"[0-9]+(_[0-9]+)?")
"""Of a job, or of a task of an array."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job of the account that logs in."""

    id: str
    node: str
    """The one on which its script runs."""
    ends_at: float | None
    """Wall seconds."""


@dataclass(frozen=True, slots=True)
class AdoptedAgent:
    """How the agent is."""

    ready: bool
    """It serves, and a gateway reaches it."""
    text: str
    over: str
    """Why it is no more; "": it is."""


class AdoptingCluster:
    """One cluster's login node, and what its scheduler can start inside a job."""

    def __init__(self, name: str, fabric: str, described: ClusterSpec, connection: Connection) -> None:
        """Raises FT5418 where nothing can be started inside a job."""
        self._name, self._fabric = name, fabric
        self._described, self._connection = described, connection
        self._scheduler: Scheduler = scheduler_of(described.kind)
        within = self._scheduler.within()
        if within is None:
            message = f"nothing can be started inside a job of {name}, a {described.kind} cluster"
            hint = "let the job's own script call `fabrictool agent join`"
            raise InvalidInputError.of("FT5418", message, thing=f"cluster/{name}", hint=hint)
        self._within: Within = within

    def job(self, number: str) -> RunningJob:
        """Raises FT5419 where it is not one job of ours that runs."""
        if not _NUMBER.fullmatch(number):
            message = f"{number[:40]!r} is not the number of a job"
            raise InvalidInputError.of(
                "FT5419", message, thing=f"cluster/{self._name}", hint="such as 48213, or 48213_7"
            )
        done = self._shell(self._within.running, number)
        words = done.stdout.decode(errors="replace").split()
        if done.status != 0 or len(words) != 2:
            why = "several tasks of it run: name one, such as 48213_7" if words else "no such job of this account runs"
            why = why if done.status == 0 else " ".join(words)[-200:]
            hint = "`squeue --me -t R` on the login node lists those that do"
            message = f"job {number} of {self._name}: {why}"
            raise InvalidInputError.of("FT5419", message, thing=f"cluster/{self._name}", hint=hint)
        node, end = words
        return RunningJob(number, node, float(end) if end.isdecimal() and int(end) else None)

    def start(self, spec: AgentSpec, name: str, job: RunningJob, identity: Mapping[str, bytes]) -> None:
        """Start an agent called `name` inside the job.

        Raises
        ------
        FabrictoolError
            FT5403 without a Python, FT5406 where its files cannot be written, FT5423 there is one already.
        """
        if self._steps(job.id, name):
            raise self._already(job)
        survey = self._run(shell.survey_program(self._scheduler, brief=False), "ft-survey")
        there = read_survey(survey.stdout.decode(errors="replace"), self._scheduler, thing=f"cluster/{self._name}")
        python, setup = python_of(self._described, self._name, there)
        folder = posixpath.join(there.base, "adopted", self._fabric, name)
        ends = "0" if job.ends_at is None else f"{job.ends_at:.0f}"
        lines = [
            "#!/bin/sh", "umask 077", *environment_lines(self._described.environment), *setup,
            f"export FABRICTOOL_CACHE_DIR={shlex.quote(posixpath.join(there.base, 'cache'))}",
            f"exec {shlex.join([*python, '-P', '-m', 'fabrictool.agent', folder, ends])}",
        ]  # fmt: skip
        files = {**identity, "spec.json": encode_spec(spec) + b"\n", "start.sh": ("\n".join(lines) + "\n").encode()}
        words = {"@JOB@": job.id, "@NODE@": job.node, "@NAME@": name}
        argv = [self._filled(word, words) for word in self._within.run]
        program = shell.program("adopt", prelude=self._scheduler.prelude())
        done = self._run(program, "ft-adopt", name, *argv, stdin=tar({name: files}))
        if done.stdout.split() == [b"running"]:
            raise self._already(job)
        if done.stdout.split() != [b"started"]:
            why = done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.status}"
            hint = "check space, quota and rights there; `folder` in the inventory chooses another place"
            raise UnreachableError.of("FT5406", f"{name}: {why}", thing=f"cluster/{self._name}", hint=hint)

    def look(self, name: str) -> AdoptedAgent:
        """How it is now."""
        done = self._run(shell.program("adopt-look", prelude=""), "ft-adopt-look", name)
        sections = sections_of(done.stdout.decode(errors="replace"))
        health, ending = (object_of("\n".join(sections.get(part, ()))) for part in ("health", "exit"))
        over = str(ending.get("reason", ""))
        if not over and any(line.strip() for line in sections.get("ended", ())):
            over = " ".join(line.strip() for line in sections.get("log", ()) if line.strip())[-300:] or "it ended"
        return AdoptedAgent(health.get("ready") is True, str(health.get("text", "starting")), over)

    def leave(self, job: str, name: str) -> bool:
        """Ask the agent of that name in the job to leave; whether there was one."""
        steps = self._steps(job, name)
        if steps:
            self._shell(self._within.leave, *steps)
        return bool(steps)

    # -- internals --------------------------------------------------------------------------------------------

    def _run(self, program: str, *words: str, stdin: bytes = b"") -> Completed:
        first, *rest = words
        argv = ["sh", "-c", program, first, self._described.folder, self._fabric, *rest]
        return self._connection.run(argv, stdin=stdin)

    def _already(self, job: RunningJob) -> FabrictoolError:
        message = f"an agent runs in job {job.id} already"
        return FabrictoolError.of("FT5423", message, thing=f"cluster/{self._name}")

    def _shell(self, text: str, *words: str) -> Completed:
        return self._connection.run(["sh", "-c", f"{self._scheduler.prelude()}\n{text}", "ft", *words])

    def _steps(self, job: str, name: str) -> list[str]:
        """Raises FT5407 when the scheduler does not say."""
        done = self._shell(self._within.steps, job, name)
        if done.status != 0:
            why = done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.status}"
            message = f"{self._name}: the scheduler does not say what runs in job {job}: {why}"
            raise UnreachableError.of("FT5407", message, hint="run the command again", transient=True)
        return done.stdout.decode(errors="replace").split()

    @staticmethod
    def _filled(word: str, words: Mapping[str, str]) -> str:
        for mark, value in words.items():
            word = word.replace(mark, value)
        return word
