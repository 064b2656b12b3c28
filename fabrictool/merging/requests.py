"""What replicas that merge work on, and what may be chosen of how they do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.merging.groups import ReplicaGroup


SWITCH_S = 0.015
"""To form a group (the paper's table 2). Our reference engine's takes less: docs/explanation/reference-engine.md."""


class Transition(Enum):
    """What becomes of requests that replicas work on when these shall merge (section 5.2)."""

    SEQUENTIAL = "they are finished first"
    SOFT = "they are finished first, and members that are idle already begin the group's requests by themselves"
    HARD = "they pause and keep their blocks"


class Split(Enum):
    """What becomes of a group's requests when its replicas shall work by themselves again."""

    FINISH = "steps of the group and of its members take turns until they are done"
    RECOMPUTE = "their prefixes are computed again by one replica each"
    CHEAPER = "those that are nearly done are finished at once, and the others' prefixes are computed again"


@dataclass(slots=True, eq=False)
class MergingRequest:
    """One request; times in seconds, the rest in tokens."""

    id: int
    prompt: int
    most: int
    """Tokens that its answer may have."""
    began: float
    priority: int = 1
    """The smaller, the sooner; 0 asks for a group of its own at once."""
    emitted: int = 0
    cached: int = 0
    """Tokens of its prefix whose keys and values are there."""
    group: ReplicaGroup | None = None
    """Where its blocks are."""
    blocks: int = 0
    layouts: int = 0
    """How often its blocks were taken from it: whoever keeps their numbers sees by this that they are others."""

    @property
    def context(self) -> int:
        """That its cache must hold with its next token."""
        return self.prompt + self.emitted + 1

    @property
    def left(self) -> int:
        """Of its prefix, to be computed before the next token."""
        return self.prompt + self.emitted - self.cached


@dataclass(frozen=True, slots=True)
class MergedStep:
    """Of one group: tokens to compute for each request."""

    group: ReplicaGroup
    parts: tuple[tuple[MergingRequest, int], ...]
    begins: float
    """Later than now only by what forming the group takes."""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.parts)

    @property
    def context(self) -> int:
        """Cached tokens that are read."""
        return sum(request.cached for request, _ in self.parts)


@dataclass(frozen=True, slots=True)
class MergingOptions:
    """What an operator, or an experiment, may choose."""

    fixed: int | None = None
    """Degree of all groups for ever; None: they form and split."""
    places: int = 64
    """Requests that a group or a replica works on at most."""
    budget: int = 8192
    """Tokens of a step."""
    priority_degree: int = 1
    """Replicas that merge for a request of priority 0."""
    load_transition: Transition = Transition.SOFT
    priority_transition: Transition = Transition.HARD
    split: Split = Split.CHEAPER
    turns: int = 4
    """Steps of its members for each one of a group that is being split, or for which they have paused for long."""
    pause_s: float = 2.0
    """That members' requests wait for a group with priority."""
    switch_s: float = SWITCH_S
    """To form a group."""
    prefill_rate: float = 8000.0
    """Tokens/s that a replica computes, to weigh what splitting takes."""
    decode_rate: float = 40.0
    """Tokens/s of one answer."""
