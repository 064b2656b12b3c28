"""What a wave hears, and what it asks for: the words between `wave` and its driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.applier.course import Course
    from fabrictool.base.errors import FabrictoolError
    from fabrictool.domain.observed import ClusterFacts
    from fabrictool.domain.plan import Action

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; `presses`: how often Ctrl-C was pressed."""

    presses: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """A cluster was looked at."""

    facts: ClusterFacts


@dataclass(frozen=True, slots=True)
class Started:
    """A cluster was told to start units; the failed operations with their errors."""

    cluster: str
    operations: tuple[str, ...]
    failed: Mapping[str, FabrictoolError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Updated:
    """A cluster was told to give units another spec; the failed operations with their errors."""

    operations: tuple[str, ...]
    failed: Mapping[str, FabrictoolError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TellFailed:
    """A cluster could not be told something about these operations."""

    operations: tuple[str, ...]
    error: FabrictoolError


@dataclass(frozen=True, slots=True)
class TailRead:
    """The last lines of the log of a unit that died."""

    operation: str
    tail: str


Event = Ticked | Looked | Started | Updated | TellFailed | TailRead


# -- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start the new units of these actions, all of one cluster."""

    cluster: str
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Give the units of these actions, all of one cluster, another spec while they run."""

    cluster: str
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a cluster to end units, or to forget those that have ended."""

    verb: Literal["stop", "kill", "forget"]
    cluster: str
    operations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Look at a cluster."""

    cluster: str


@dataclass(frozen=True, slots=True)
class ReadTail:
    """Read the end of a dead unit's log."""

    cluster: str
    operation: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Something to be said: ``started``, ``waiting``."""

    action: Action
    kind: Literal["started", "waiting"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """An action is over."""

    course: Course


Effect = Start | Update | Tell | Look | ReadTail | Notify | Ended
