"""What replays of a placement showed: apart from what plays them, whose compiler takes long to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.plan import Replay
    from fabrictool.planner.problem import OptionKey
    from fabrictool.planner.survival import Loss
    from fabrictool.simulator.estimates import Percentile


@dataclass(frozen=True, slots=True)
class Played:
    """What the replay of one model showed."""

    figures: Replay
    p95: Mapping[str, Percentile]
    """By metric: its 95 % interval is what chance leaves open."""
    full: bool
    """False where it ended while the replicas still filled: what comes later is worse."""
    misses: tuple[str, ...]
    """SLO targets, in words; none without an SLO."""
    undecided: tuple[str, ...]
    """Where none is missed: SLO targets that are not shown to be met either, in words."""
    short: Mapping[OptionKey, float]
    """Of a model that misses: by how large a share of its requests each kind of replica falls short of the target; of
    one that is undecided: by how much it may."""


@dataclass(frozen=True, slots=True)
class PlayedLoss:
    """One model after its worst loss."""

    loss: Loss
    played: Played
    rates: Mapping[OptionKey, float]
    """Requests/s that each replica of a kind then has to take, about."""
