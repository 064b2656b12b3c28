"""What a search may do and has done, counted so that it is the same on every machine; a clock may end it sooner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.stages import TIDYING

if TYPE_CHECKING:
    from collections.abc import Callable

SHARE, TIDYING_SHARE = 1 / 2, 1 / 8
"""Of what is left, for one stage: so some is left for every later one. Raising the first gives more to the first hard
stage; nobody feels what tidying up gains."""
PER_SECOND = 100
"""Units of work in a second of one core, about: searches differ, and machines more."""


def units(seconds: float) -> int:
    """As plans and the command line say it."""
    return round(PER_SECOND * seconds)


def never() -> float:
    """Seconds that are left where no clock runs."""
    return math.inf


@dataclass
class SearchWork:
    """Seconds of about one core's work, of which each stage gets a part."""

    limit: float
    spent: float = 0.0
    """By stages that went to their limit; one that ends by its proof before is not counted, as how much it did is not
    known."""

    @property
    def left(self) -> float:
        return max(0.0, self.limit - self.spent)

    def share(self, stage: str) -> float:
        """Seconds that a stage may take."""
        return self.left * (TIDYING_SHARE if stage in TIDYING else SHARE)


@dataclass
class StepwiseWork:
    """A search in steps that are done or not done: where it ends is a number of units, whatever ended it.

    No step depends on what is left. So the same search with the number that it ended at for its limit ends there again,
    on any machine, also where it was the clock or Ctrl-C that ended it.
    """

    limit: int
    left_s: Callable[[], float] = never
    """Seconds until the clock ends it."""
    closing_s: float = 0.0
    """Of these, what is left to be done then takes so long, about."""
    spent: int = 0
    ended: bool = False
    """By limit or clock: there was more to be tried."""

    def more(self, late_s: float = 0.0) -> bool:
        """Whether there may be another step; `late_s`: one that may end so long after the others."""
        if self.ended or self.spent >= self.limit or self.for_steps_s() + late_s <= 0.0:
            self.ended = True
        return not self.ended

    def for_steps_s(self) -> float:
        """Seconds until the clock ends the step that is being done."""
        return self.left_s() - self.closing_s

    def done(self, units: int) -> None:
        """One step is complete."""
        self.spent += max(1, units)

    def cut(self) -> None:
        """The clock ended a step: what it had found does not count."""
        self.ended = True
