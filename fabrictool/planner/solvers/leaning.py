"""What a placement leans to while its first stage is lowered: of all that serves about as much, what the next wants.

By its capacity alone a placement of overloaded devices says nothing of latency, and once it serves what it can, no
exchange between a few models leads from one kind of placement to another. So where something has to go unserved, the
next stage that would gain by it is relaxed with a little more of it than there has to be. A replica of what that does
not use would cost something, in units of the next stage, and a request/s more unserved would gain something, in the
same: the one over the other is what a replica is to cost while the first stage is lowered.

On three fabrics of 10,000 devices with a demand of 1.1 times what they can serve, with the same work: latency came from
4.4, 3.3 and 2.2 % above its bound to 1.7, 2.9 and 1.6 %, what is unserved from 1.0, 1.0 and 0.8 to 1.5, 1.0 and 1.2 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import BY_CAPACITY
from fabrictool.planner.stages import TOLERANCE, clean, residual, rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.planner.formulation import Formulation
    from fabrictool.planner.program import ProgramSolution, Terms

SPARED = 0.01
"""The share of its least that the first stage may come to beyond it. With none at all the gain of a request/s more is
that of the one point where nothing can be served instead, and ten times too high."""


@dataclass(frozen=True, slots=True)
class Leaning:
    """Towards what a later stage uses."""

    stage: str
    """The one that is lowered meanwhile."""
    costs: Mapping[int, float]
    """By option: of a replica, in units of the stage; none of what the later one uses."""
    usage: Mapping[int, float]
    """By option: counts of the later one's relaxation."""
    distance: Mapping[int, float]
    """By option: what a request/s on it would cost the later stage."""

    def terms(self, program: Formulation, name: str, indices: Sequence[int] | None = None) -> Terms:
        """Costs beside the objective called `name`; `indices`: by the program's options what they are here."""
        if name != self.stage:
            return []
        return [
            (column, part * cost)
            for i in program.chosen
            if (cost := self.costs.get(i if indices is None else indices[i], 0.0))
            for column, part in program.count(i)
        ]

    def cost(self, name: str, counts: Mapping[int, int]) -> float:
        """Of counts by option, in the objective called `name`."""
        return sum(self.costs.get(i, 0.0) * count for i, count in counts.items()) if name == self.stage else 0.0


UPRIGHT = Leaning("", {}, {}, {})
"""Where there is nothing to lean to: as if there were no leaning."""


def leaning(
    relaxed: Formulation,
    felt: Sequence[str],
    lowest: Mapping[str, float],
    solved: Callable[[str], ProgramSolution | None],
) -> Leaning:
    """`felt`: the stages that users feel. Upright where the first can come to nothing, or one follows it that does not
    look at loads either, or nothing would gain by more of it; or there is no time.
    """
    first, *later = felt
    least = lowest[first]
    by_load = later and later[0] not in BY_CAPACITY
    if first not in BY_CAPACITY or not by_load or least <= residual(relaxed.problem, first, least):
        return UPRIGHT
    try:
        relaxed.keep(first, (1.0 + SPARED) * least)
        for name in later:
            answer = solved(name)
            if answer is None:
                break
            gain = relaxed.gain(first, answer)
            if gain > TOLERANCE:
                return _towards(relaxed, first, answer, gain)
            relaxed.keep(name, answer.objective + rounding(answer.objective))
    except FabrictoolError:  # no numbers that can be trusted, of what nobody needs
        pass
    finally:
        for name in felt:
            relaxed.keep(name, math.inf)
    return UPRIGHT


def _towards(relaxed: Formulation, first: str, answer: ProgramSolution, gain: float) -> Leaning:
    """`gain`: of one more request/s unserved, in what `answer` is lowest in."""
    problem = relaxed.problem
    priority = {need.model: need.priority for need in problem.needs}
    costs = {}
    for i in relaxed.chosen:
        option = problem.options[i]
        price = min(float(answer.reduced[column]) for column in relaxed.ladder(i)[1:])
        # What is left out wholly has any price: more than it could serve would keep it out for good.
        costs[i] = clean(min(max(0.0, price) / gain, priority[option.model] * option.levels[-1].rate))
    return Leaning(
        first,
        {i: cost for i, cost in costs.items() if cost},
        relaxed.usage(answer),
        {i: relaxed.distance(answer, i) for i in relaxed.chosen},
    )
