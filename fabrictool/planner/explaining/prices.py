"""What one device more of each partition would be worth: the shadow prices of the linear relaxation.

They are marginal and of the relaxation: good to compare partitions with, not to extrapolate from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.solvers.core import COLUMNS_PER_UNIT
from fabrictool.planner.stages import TIE_BREAK, TOLERANCE, stage_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.planner.problem import PlacementProblem, Solution

INDIFFERENT = ("preference", "moves", "replicas", TIE_BREAK)
"""Stages whose values nobody pays for."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Of the first objective that more devices could improve."""

    stage: str
    devices: Mapping[tuple[str, str], float]
    """(cluster, partition) → by how much that objective would fall per device; only what would help."""


def device_prices(
    problem: PlacementProblem,
    solution: Solution,
    *,
    seconds: float = 60.0,
    seed: int = 0,
    left_s: Callable[[], float] | None = None,
) -> Prices | None:
    """The prices behind a solution; None when more devices would improve nothing.

    Raises FabrictoolError FT2902 where they take long and were not found while `left_s` says that there are seconds
    left: those of most fabrics take no time, and are the same whatever the clock says.
    """
    columns = sum(1 + len(option.levels) for option in problem.options)
    clock = left_s if columns >= COLUMNS_PER_UNIT else None
    if clock is not None and clock() <= 0.0:
        raise FabrictoolError.of("FT2902", "no time was left for prices")
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    values = {stage.name: stage.objective for stage in solution.stages}
    for name in stage_names(problem):
        if name not in values or name in INDIFFERENT or not relaxed.terms(name):
            continue
        answer = relaxed.minimise(name, seconds=seconds, seed=seed, left_s=clock)
        if answer is None:
            return None
        worth = {key: -float(answer.prices[row]) for key, row in relaxed.rows.devices.items()}
        helpful = {key: value for key, value in worth.items() if value > TOLERANCE}
        if helpful:
            return Prices(name, helpful)
        relaxed.keep(name, values[name] + TOLERANCE * max(1.0, abs(values[name])))
    return None
