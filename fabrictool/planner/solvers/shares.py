"""What a stage that is kept may come to, while later ones are solved: all together, and each model for itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.planner.fairness import FAIRNESS, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.planner.formulation import Formulation

SLACK = 1e-7
"""Beyond it, times the value where that is more than 1: each model may have used its own."""


@dataclass(frozen=True, slots=True)
class KeptStage:
    """A limit, and how the models have it among them."""

    name: str
    most: float
    """Of all models together."""
    shares: Mapping[str, float]
    """By model; all together `most`, or what they came to, where that is more by the slack."""

    @classmethod
    def of(cls, name: str, most: float, values: Mapping[str, float]) -> KeptStage:
        """Shared out by what models do, `values`."""
        total = sum(values.values())
        left = most - total
        if name == FAIRNESS:  # nobody has any of it: it holds for each
            shares = dict.fromkeys(values, most)
        elif left <= 0.0:  # taken from all alike, it would be asked of those that can do no better
            shares = dict(values)
        else:
            shares = {m: value + left * (value / total if total else 1 / len(values)) for m, value in values.items()}
        return cls(name, most, shares)

    def after(self, used: Mapping[str, float]) -> KeptStage:
        """What some models use of each other's shares now, the others no longer have."""
        if self.name == FAIRNESS:
            return self
        left = max(0.0, sum(self.shares[model] for model in used) - sum(used.values())) / len(used)
        return replace(self, shares={**self.shares, **{model: value + left for model, value in used.items()}})

    def keep(self, formulation: Formulation) -> None:
        """In a program of all models."""
        formulation.keep(self.name, self._most_of_all)

    def keep_of(self, formulation: Formulation, models: Iterable[str]) -> None:
        """In a program of some of them: what all may come to less what the others have, so that no sweep over all
        models one after another can use the slack more than once.
        """
        mine = set(models)
        others = 0.0 if self.name == FAIRNESS else sum(v for model, v in self.shares.items() if model not in mine)
        formulation.keep(self.name, self._most_of_all - others)

    @property
    def _most_of_all(self) -> float:
        shares = self.shares.values()
        with_slack = joined(self.name, [share + SLACK * max(1.0, share) for share in shares])
        return self.most + with_slack - joined(self.name, shares)
