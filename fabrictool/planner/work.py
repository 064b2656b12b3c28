"""A time limit as work: what a search may do and has done, counted so that it is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

from fabrictool.planner.stages import TIDYING

SHARE, TIDYING_SHARE = 1 / 2, 1 / 8
"""Of what is left, for one stage: so some is left for every later one. Raising the first gives more to the first hard
stage; nobody feels what tidying up gains."""


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
