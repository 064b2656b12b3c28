"""One action under way: how far it is, and what is known of its units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.base.errors import FabrictoolError
    from fabrictool.domain.observed import ObservedUnit
    from fabrictool.domain.plan import Action

Phase = Literal[
    "making-room", "to-start", "submitted", "queued", "booting", "alone", "retiring", "stopping",
    "to-update", "updating", "done", "left-in-queue", "failed", "left",
]  # fmt: skip
"""See the table in `wave`."""

OVER: frozenset[Phase] = frozenset({"done", "left-in-queue", "failed", "left"})
STARTING: frozenset[Phase] = frozenset({"submitted", "queued", "booting", "alone"})
LEAVING: frozenset[Phase] = frozenset({"making-room", "retiring", "stopping"})


@dataclass(slots=True)
class Course:
    """One action under way."""

    action: Action
    former: str
    """Name of the cluster of the unit to be stopped; "": there is none."""
    phase: Phase
    deadline: float = 0.0
    text: str = ""
    """What was said of it last."""
    asked: bool = False
    """Its former unit was told to leave."""
    killed: bool = False
    error: FabrictoolError | None = None
    death: str = ""
    """Why its new unit ended, until the tail of its log is there."""
    ready: ObservedUnit | None = None
    """The new unit, as it was seen when it first served."""
    ready_at: float | None = None
    """When that was, by the cluster's own clock; None: by ours."""

    @classmethod
    def of(cls, action: Action, homes: Mapping[str, str]) -> Course:
        """Its beginning; `homes` says on which cluster an operation is."""
        if action.kind == "delete":
            return cls(action, action.cluster, "stopping")
        if action.kind == "update":
            return cls(action, "", "to-update")
        former = homes.get(action.former, "") if action.former else ""
        return cls(action, former, "making-room" if action.stop_first and former else "to-start")

    @property
    def over(self) -> bool:
        return self.phase in OVER

    def underway(self) -> bool:
        """Whether a look decides how it goes on: it was started, or its unit was asked to leave."""
        return self.phase in STARTING or self.phase == "updating" or (self.phase in LEAVING and self.asked)

    @property
    def watched(self) -> str:
        return self.former if self.phase in LEAVING else self.action.cluster

    @property
    def awaited(self) -> str:
        return self.action.former if self.phase in LEAVING else self.action.operation
