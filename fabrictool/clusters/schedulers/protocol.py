"""What a scheduler's file has to say: how its facts are asked for and read, and what is run to carry a wish out.

Nothing here does I/O, so a behaviour is a case in a file: facts and a wish, and the exact commands that follow.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.observed import Away, Blocked, Queue
    from fabrictool.domain.specs import NodePart

JobState = Literal["pending", "running", "ended"]

TAG = "ft1"
"""First word of our job comments; another number would be another format."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job of ours that the scheduler knows of."""

    id: str
    state: JobState
    native: str
    """The scheduler's own word for its state."""
    name: str = ""
    comment: str = ""
    partition: str = ""
    node: str = ""
    reason: str = ""
    blocked: Blocked = ""
    leaving: bool = False
    """Its processes have ended or are being ended; only the scheduler is not done with it."""
    paused: str = ""
    """Why its processes do nothing though they are there; "": they run."""
    submitted_at: float | None = None
    begins_at: float | None = None
    ends_at: float | None = None
    """Wall seconds, of the login node's clock; None when the scheduler does not say."""


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """What a scheduler said."""

    version: tuple[int, ...] = ()
    name: str = ""
    """With its version, for people."""
    jobs: tuple[JobFacts, ...] = ()
    queues: Mapping[str, Queue] = field(default_factory=dict)
    away: tuple[Away, ...] = ()
    programs: str = ""
    """Folder of the scheduler's commands, for the path of jobs."""
    now: float = 0.0
    """Wall seconds, of the clock by which the scheduler says all times; 0: the login node's."""
    utc_offset: str = "+0000"
    """Of its time zone, as `date +%z` writes it."""


@dataclass(frozen=True, slots=True)
class Apart:
    """What keeps a replica from others of its model."""

    part: NodePart
    devices: int
    """That a node of the partition has at least; 0 where they are not counted."""
    left_out: frozenset[str] = frozenset()
    """Nodes on which no job of the partition may be, by the inventory."""
    beside: frozenset[str] = frozenset()
    """Where others of its model run that have parts, too."""
    near: frozenset[str] = frozenset()
    """Where others of its model run that may be anywhere."""


@dataclass(frozen=True, slots=True)
class Job:
    """One unit that shall run, in no scheduler's words."""

    operation: str
    address: str
    fabric: str
    lineage: str
    serial: int
    folder: str
    """Its run folder, absolute."""
    home: str
    command: tuple[str, ...]
    """What to run; `ENDS_AT` in it is replaced by the wall second at which the allocation ends, 0 if none."""
    partition: str = ""
    nodes: int = 1
    """On each of which the command runs."""
    devices: int = 0
    """Accelerators of each node."""
    device: str = ""
    """Their type in the scheduler's words; "": any."""
    devices_as: str = "gres"
    """See `JobRequest`."""
    whole_node: bool = False
    cpus: int | None = None
    """Of each node, as is `memory`; None: the site's default."""
    memory: int | None = None
    """Octets."""
    walltime_s: float | None = None
    begin_in_s: float = 0.0
    """Not before that many seconds from now."""
    warning_s: float = 150.0
    """TERM comes that long before the walltime's end."""
    setup: tuple[str, ...] = ()
    """Shell lines that come before the command, such as ``module load python/3.11``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Passed through: option (without dashes) → value."""
    apart: Apart | None = None
    """Of a replica that is to be on nodes without others of its model, where the scheduler is told which; else None."""
    step_options: Mapping[str, str] = field(default_factory=dict)
    """The same for what starts the agent in the job, where a scheduler has that."""

    @property
    def name(self) -> str:
        """Of the job; unique, so that a job is found even where comments are stripped."""
        return f"ft-{self.operation}"

    @property
    def shape(self) -> tuple[object, ...]:
        """On which it depends when a scheduler can start it."""
        size = (self.partition, self.nodes, self.devices, self.whole_node, self.cpus, self.memory)
        return (*size, self.begin_in_s > 0, self.apart)

    @property
    def comment(self) -> str:
        """Whose it is and what, without a secret."""
        lineage = self.lineage[:8]
        return f"{TAG};lin={lineage};dep={self.fabric};rep={self.address};ser={self.serial};op={self.operation}"


ENDS_AT = "@ENDS_AT@"

STOPPED = "its process is stopped (SIGSTOP); `kill -CONT` lets it go on"


@dataclass(frozen=True, slots=True)
class Submission:
    """A job in one scheduler's words."""

    argv: tuple[str, ...]
    """Prints the new job's id in its last line."""
    script: str
    """The job itself."""

    @property
    def line(self) -> str:
        return shlex.join(self.argv)


class Scheduler(Protocol):
    """One kind of batch scheduler, or none; what most of them have in common is said here."""

    kind: str
    """As the inventory names it."""
    commands: tuple[str, ...] = ()
    """Programs that a login node must have on its path; empty where nobody has tried what is needed."""
    oldest: tuple[int, int] | None = None
    """Release before which it is not used; None: any."""
    several_nodes: bool = False
    """Whether a job can run its command on several nodes, and tell each which of them it is."""
    from_inside: bool = False
    """Whether a job can be submitted from inside another one, on its node."""
    accounting: str = ""
    """The command that remembers jobs which are over; "": there is none."""

    def prelude(self) -> str:
        """Shell text that comes before all others, such as a profile that the commands need."""
        return ""

    @abstractmethod
    def survey(self, *, brief: bool) -> str:
        """Shell text that prints the scheduler's facts in sections ``@NAME``; `brief`: only those that jobs need."""

    @abstractmethod
    def facts(self, sections: Mapping[str, Sequence[str]], now: float) -> SchedulerFacts:
        """Read what `survey` printed; raises FT5401 for what cannot be read."""

    @abstractmethod
    def lookup(self) -> str:
        """Shell text that prints ``ID NAME COMMENT`` a line, of all our jobs that are known; fails if it cannot."""

    def living(self) -> str:
        """Like `lookup`, of at least those that are not over."""
        return self.lookup()

    @abstractmethod
    def submission(self, facts: SchedulerFacts, job: Job) -> Submission:
        """The command that starts the job, and the job's script."""

    @abstractmethod
    def stop(self) -> str:
        """Shell text: TERM to what runs, and an end to what waits, of the job ``$1`` with the name ``$2``."""

    @abstractmethod
    def kill(self) -> str:
        """Shell text: the end of the job ``$1`` with the name ``$2``."""

    def within(self) -> Within | None:
        """None where a scheduler starts nothing inside a job of somebody else's making."""
        return None

    def estimate(self, facts: SchedulerFacts, job: Job) -> tuple[str, ...] | None:
        """A command that predicts the job's start and submits nothing; None where there is none."""
        return None

    def estimated(self, stdout: str, stderr: str) -> float | None:
        """Wall seconds that `estimate` printed, if it says a time."""
        return None


@dataclass(frozen=True, slots=True)
class Within:
    """How something is started beside what a job does, which somebody else submitted from the same account."""

    running: str
    """Shell text: prints ``NODE END`` of the running job ``$1`` of this account, and nothing of any other; END is the
    wall second at which it ends, or something else. Fails where the scheduler does not answer.
    """
    run: tuple[str, ...]
    """What comes before a command that runs inside the job ``@JOB@``, on its node ``@NODE@``, called ``@NAME@``."""
    steps: str
    """Shell text: prints the ids of what was so started in the job ``$1`` with the name ``$2`` and runs, one a line."""
    leave: str
    """Shell text: TERM to those with the ids ``$@``."""


def parse_comment(comment: str) -> dict[str, str]:
    """The fields of one of our comments; empty for anybody else's."""
    head, *rest = comment.strip().split(";")
    if head != TAG:
        return {}
    return dict(part.split("=", 1) for part in rest if "=" in part)


def first_line(sections: Mapping[str, Sequence[str]], name: str, default: str = "") -> str:
    """What was printed under ``@NAME``, as far as one line of it counts."""
    return next(iter(sections.get(name, ())), default)
