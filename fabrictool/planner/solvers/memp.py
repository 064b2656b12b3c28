"""The papers' memory-proportional heuristic (OpenTela, paper 001, section 4): the baseline that a solver has to beat.

Each model gets devices in proportion to its rate times its size; the largest model chooses first, and takes the devices
with the most memory. Table 1 of the paper comes out when shares are counts of devices, not of their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.catalog import accelerators
from fabrictool.planner.limits import open_limits
from fabrictool.planner.solvers.appraisal import appraise
from fabrictool.planner.solvers.rounding import FreeDevices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.planner.problem import ModelNeed, PlacementProblem, Solution


class MempSolver:
    """See the module's docstring. Pins and spreading are not looked at: where they do not hold, FT2001."""

    name = "memp"

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields the one placement that the rule gives, appraised by the exact solver's program."""
        yield appraise(problem, _counts(problem), "memp (share of devices by rate and size)", deadline_s, seed)


def _counts(problem: PlacementProblem) -> dict[int, int]:
    size = {need.model: _size(problem, need) for need in problem.needs}
    weight = {need.model: need.rate * size[need.model] for need in problem.needs}
    devices = sum(pool.nodes * pool.devices_per_node for pool in problem.pools)
    whole = sum(weight.values())
    room = FreeDevices(problem.pools, problem.options, open_limits(problem))
    counts = {i: problem.fixed.get(option.key, 0) for i, option in enumerate(problem.options)}
    left: dict[str, float] = {}
    for need in sorted(problem.needs, key=lambda need: (-size[need.model], need.model)):
        left[need.model] = devices * weight[need.model] / whole if whole else 0.0
        for i in _order(problem, need):
            option = problem.options[i]
            while _may(problem, need, counts, left[need.model] / option.devices) and room.take(option):
                counts[i] += 1
                left[need.model] -= option.devices
    # What is left goes to those who got least of their share, one replica each.
    for need in sorted(problem.needs, key=lambda need: (-left[need.model] / _fewest(problem, need), need.model)):
        for i in _order(problem, need):
            if left[need.model] > 0 and _may(problem, need, counts, 1.0) and room.take(problem.options[i]):
                counts[i] += 1
                break
    return counts


def _order(problem: PlacementProblem, need: ModelNeed) -> list[int]:
    """Devices with the most memory first, and on each the fewest that hold the model."""
    options = problem.options
    mine = [i for i in problem.of(need.model) if options[i].key not in problem.fixed and options[i].phase == "unified"]
    fewest = {
        i
        for i in mine
        if options[i].devices == min(options[j].devices for j in mine if options[j].pool.key == options[i].pool.key)
    }
    return sorted(fewest, key=lambda i: (-_memory(problem, i), options[i].devices, i))


def _fewest(problem: PlacementProblem, need: ModelNeed) -> int:
    return min((problem.options[i].devices for i in problem.of(need.model)), default=1)


def _may(problem: PlacementProblem, need: ModelNeed, counts: dict[int, int], share: float) -> bool:
    """Whether the model may have one replica more, of which its share is left."""
    placed = sum(counts[i] for i in problem.of(need.model))
    return placed < need.maximum and (share >= 1.0 or placed < need.minimum)


def _size(problem: PlacementProblem, need: ModelNeed) -> float:
    return max((problem.options[i].figures.weights for i in problem.of(need.model)), default=0.0)


def _memory(problem: PlacementProblem, i: int) -> float:
    return accelerators()[problem.options[i].pool.device].memory
