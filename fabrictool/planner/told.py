"""A program of counts alone that is told what loads cost at least (`planner.tangents`): of all stages, without a column
for any load.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.tangents import BY_LOAD, DUST, LoadPrices, worth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.planner.problem import PlacementProblem
    from fabrictool.planner.program import Terms


class ToldFormulation(Formulation):
    """In whole numbers. Where nothing flows between replicas (no phases, no consumer groups), as tangents suppose."""

    restarts = False
    """They took twice the time, and brought little."""

    def __init__(self, problem: PlacementProblem, chosen: Sequence[int]) -> None:
        super().__init__(problem, chosen, whole=True, by_capacity=True)
        self._comes_to: dict[tuple[str, str], int] = {}
        """(model, stage) → the column of what its loads come to."""
        self._told: set[tuple[object, ...]] = set()

    def tell(self, prices: LoadPrices) -> bool:
        """What loads cost at least, by these prices; whether that is news.

        What was told holds as long as stages that were kept at nothing then still are.
        """
        felt = [stage for stage in prices.stages if self.nothing(stage) is None and self.terms(stage)]
        if not felt:  # loads are free, up to where they miss what may not be missed: that is all there is to say
            none = [stage for stage in self._kept if stage in BY_LOAD and self.nothing(stage) is not None]
            prices = LoadPrices(dict.fromkeys(prices.demand, 1.0), dict.fromkeys(none, 2.0))
        says = [n for n in self.problem.needs if prices.demand[n.model] > DUST or "quality" in prices.stages]
        news = [need for need in says if prices.of(need.model) not in self._told]
        for need in news:
            self._told.add(prices.of(need.model))
            price, unserved = prices.demand[need.model], self.nothing("served")
            mine = [i for i in self.chosen if self.problem.options[i].model == need.model]
            terms = [(self._count[i], worth(self.problem.options[i], price, prices.stages)) for i in mine]
            terms += [(self._comes_to[need.model, stage], prices.stages[stage]) for stage in felt]
            if unserved is None:
                terms.append((self._unserved[need.model], price))
            # What is kept at nothing has no column here, which HiGHS cuts from the better: there is its slack at most.
            slack = max(0.0, price) / need.priority * (unserved or 0.0)
            slack += sum(weight * (self.nothing(stage) or 0.0) for stage, weight in prices.stages.items())
            self.program.row(price * need.rate - slack, math.inf, terms)
            if not felt:  # says more than the row of the demand
                self.program.set_least(self.rows.demand[need.model], -math.inf)
        return bool(news)

    def _levelled(self, name: str) -> Terms:
        """What the models come to."""
        for need in self.problem.needs:
            self._comes_to[need.model, name] = self._column(need.model, 0, math.inf)
        return [(self._comes_to[need.model, name], 1.0) for need in self.problem.needs]
