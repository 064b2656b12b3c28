"""Replicas that a little more demand would need again stay where they run, though the demand of now does not need them.

Demand goes up and down by some per cent from one plan to the next. A replica that is stopped for that is loaded again
for that. So a model that only gives up replicas keeps as many of them as some more demand would need (the blueprint's
`hysteresis`), as far as nobody else is served worse for it, and every rule holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.moving import changed
from fabrictool.planner.problem import StageResult
from fabrictool.planner.stages import TIE_BREAK, clean, in_order, tolerance
from fabrictool.planner.survival import SIDES, after_loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Solution

MOST = 0.5
"""Devices that stand by for a model, of those that it needs: who has one replica does not pay for two all the time."""
DEARER = frozenset({"cost", "energy", "carbon", "moves", "replicas"})
"""What may rise for that."""
SECONDS = 60.0


def steadied(
    problem: PlacementProblem, solution: Solution, growth: float, seed: int
) -> tuple[Solution, dict[str, int]]:
    """The solution with what stays for so much more demand, and by model how many replicas that are."""
    back = {need.model: _needed_again(problem, need, solution.counts, growth) for need in problem.needs}
    back = {model: counts for model, counts in back.items() if counts}
    every = solution if not back else _with(problem, solution, sum(back.values(), Counter()), seed)
    if every is not None:
        return every, {model: counts.total() for model, counts in back.items()}
    kept: dict[str, int] = {}
    for model, counts in back.items():
        larger = _with(problem, solution, counts, seed)
        if larger is not None:
            solution, kept[model] = larger, counts.total()
    return solution, kept


def standing_sentences(standing_by: Mapping[str, int], growth: float) -> tuple[str, ...]:
    """Why a plan has them, a sentence for each model."""
    return tuple(
        f"{model}: {count} replica{'s stay' if count > 1 else ' stays'} that the demand of now does not need: with"
        f" {growth:.0%} more it would need {'them' if count > 1 else 'it'} again (`hysteresis`; `plan"
        f" --improve` stops {'them' if count > 1 else 'it'})"
        for model, count in sorted(standing_by.items())
    )


def _needed_again(problem: PlacementProblem, need: ModelNeed, counts: Mapping[int, int], growth: float) -> Counter[int]:
    """By option, of what a model gives up: what more demand would need again."""
    mine, running, options = set(problem.of(need.model)), problem.running, problem.options
    moved = [change for option, change in changed(problem, counts) if option.model == need.model]
    back = Counter[int]()
    if not moved or max(moved) > 0 or not need.rate:
        return back
    for side in SIDES:
        gives = {i: _gives(options[i]) for i in mine if options[i].phase in ("unified", side)}
        before = sum(running.get(i, 0) * rate for i, rate in gives.items())
        wanted = min((1.0 + growth) * need.rate, before)
        left = sum((counts.get(i, 0) + back[i]) * rate for i, rate in gives.items())
        # Those that give most for a device first: fewer stand by.
        for i in sorted(gives, key=lambda i: (-gives[i] / options[i].devices, i)):
            while gives[i] and left < wanted * (1.0 - 1e-9) and counts.get(i, 0) + back[i] < running.get(i, 0):
                back[i] += 1
                left += gives[i]
    devices = sum(options[i].devices * counts.get(i, 0) for i in mine)
    standing = sum(options[i].devices * count for i, count in back.items())
    return back if standing <= MOST * devices else Counter()


def _gives(option: Option) -> float:
    """Requests/s of one replica, within the SLO where it can keep that at all."""
    return after_loss(option) or option.levels[-1].rate


def _with(problem: PlacementProblem, solution: Solution, more: Counter[int], seed: int) -> Solution | None:
    """With so many replicas more; None where a rule forbids it, or users would be served worse."""
    counts = {i: solution.counts.get(i, 0) + more[i] for i in sorted({*solution.counts, *more})}
    known = {stage.name: stage for stage in solution.stages}
    loads = Formulation.of_counts(problem, counts)
    result = in_order(loads, [name for name in known if name != TIE_BREAK], seconds=SECONDS, seed=seed)
    if result is None:
        return None
    values, answer = result
    stages = []
    for name, stage in known.items():
        value = values.get(name, stage.objective)
        rises = value > stage.objective + tolerance(name, stage.objective)
        if rises and name not in DEARER:
            return None
        stages.append(
            StageResult(name, clean(value), min(clean(value), stage.bound), stage.searched if rises else stage.reached)
        )
    return replace(solution, counts=counts, loads=loads.loads(answer), stages=tuple(stages))
