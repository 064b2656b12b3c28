"""What given counts are worth: loads and objectives as the exact solver would have them, beside the same bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.moving import moves_in
from fabrictool.planner.problem import PlacementProblem, Solution, StageResult
from fabrictool.planner.stages import TIE_BREAK, clean, kept, rounding, stage_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.planner.program import ProgramSolution


def appraise(problem: PlacementProblem, counts: dict[int, int], solver: str, deadline_s: float, seed: int) -> Solution:
    """The solution that has just these counts, by option.

    Raises InfeasibleError FT2001 when they break a rule.
    """
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    loads = Formulation.of_counts(problem, counts)
    stages: list[StageResult] = []
    answer: ProgramSolution | None = None
    for name in stage_names(problem):
        if name == TIE_BREAK or not loads.terms(name):
            continue
        answer = loads.minimise(name, seconds=deadline_s, seed=seed)
        below = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None or below is None:
            raise explain_infeasible(problem)
        value = loads.value(name, answer)
        stages.append(StageResult(name, clean(value), clean(min(value, below.objective))))
        for formulation in (loads, relaxed):
            formulation.keep(name, kept(problem, name, value, below.objective))
    served = loads.loads(answer) if answer is not None else {}
    return Solution({i: k for i, k in counts.items() if k}, served, tuple(stages), solver, optimal=False)


LOADED = (FAIRNESS, "served", "slo", "excess", "quality", "latency")
"""Stages whose values depend on loads, beside the counts."""
SLACK = 1e-9
"""With which a stage is kept, relative to its value, where nothing but loads is left to be chosen."""


def settled(problem: PlacementProblem, solution: Solution, seed: int) -> Solution:
    """The same counts, loaded once more from the first stage on without the slack that every stage of a search had.

    `problem` has the columns that the solution speaks of. A stage that cannot be kept so tightly has its slack again.
    """
    known = {stage.name: stage for stage in solution.stages}
    counts = {i: k for i, k in solution.counts.items() if k}
    # Without what runs but has no count: the same counts have the same loads, whatever ran before.
    loads = Formulation(replace(problem, current={}), sorted(counts), whole=False, given=counts)
    answer: ProgramSolution | None = None
    values: dict[str, float] = {}
    for name in stage_names(problem):
        if name not in LOADED or name not in known or not loads.terms(name):
            continue
        reloaded = loads.minimise(name, seconds=60.0, seed=seed)
        if reloaded is None:
            break
        answer = reloaded
        values[name] = max(0.0, loads.value(name, answer))
        loads.keep(name, values[name] + SLACK * max(1.0, values[name]))
    moving = {name: moves_in(problem, counts, name) for name in values}
    values = {name: value + moving[name] for name, value in values.items()}
    if answer is None or not _better({name: known[name].objective for name in values}, values):
        return solution  # such as of a search that was cut short, whose rules hold within its tolerance only
    values = {name: max(0.0, loads.value(name, answer)) + moving[name] for name in values}
    stages = tuple(
        replace(stage, objective=clean(value), bound=clean(min(value, stage.bound)))
        if (value := values.get(stage.name)) is not None
        else stage
        for stage in solution.stages
    )
    return replace(solution, loads=_even(problem, counts, loads.loads(answer)), stages=stages)


def _even(problem: PlacementProblem, counts: Mapping[int, int], loads: Mapping[int, float]) -> dict[int, float]:
    """The same loads, dealt out evenly among replicas that are alike wherever they stand: no split of theirs is better,
    and where a fabric is nearly idle a solver puts all of it on one of them.
    """
    groups: dict[object, list[int]] = {}
    divided = {need.model for need in problem.needs if need.parts}  # whom a group allows is a provider
    for i in counts:
        option = problem.options[i]
        if option.phase == "unified" and not option.others:
            provider = option.pool.provider if option.model in divided else ""
            groups.setdefault((option.kind, provider), []).append(i)
    even = dict(loads)
    for alike in groups.values():
        share = sum(loads.get(i, 0.0) for i in alike) / sum(counts[i] for i in alike)
        even |= {i: share * counts[i] for i in alike}
    return even


def _better(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether the first stage that differs is lower, or none does; a last digit of an earlier one is worth a later."""
    for name, value in after.items():
        if value < before[name]:
            return True
        if value > before[name] + rounding(before[name]):
            return False
    return True
