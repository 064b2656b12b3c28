"""The exact solver: one objective after another, each solved as an integer program beside its linear relaxation.

Objectives in order, each kept while the next is minimised: unserved demand by priority, then those of the
blueprint with the wishes of `place` after its SLO, then moves against what runs, then the number of replicas, then a
fixed tie-break. ``latency`` is the mean number of requests in the system: the mean latency times the rate, by Little's
law. It is kept within 1 %: its figures are not that exact, and nothing is moved for less.

Objectives are recomputed in floating point; a stage's bound is the better one of the relaxation's and of the integer
solver's, and never above the value. On large problems only the options that the relaxation uses or nearly uses take
part in the integer program, which then stops a little before the proof; the relaxation's bound holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import Problem, Solution, StageResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.planner.program import Answer

TOLERANCE = 1e-6
"""Slack with which a solved stage is kept, relative to its value (and absolute near zero)."""
LATENCY_TOLERANCE = 0.01
"""Slack of the latency stage; the forecast's own band is far wider (`fabrictool.simulator.calibration`)."""
SMALL = 1500
"""Options up to which all take part in the integer program, and it is solved to the proof."""
NEAREST = 12
"""On larger problems: options a model beyond those that the relaxation uses, the ones that it would cost least."""
CLOSE = 0.002
"""On larger problems: relative gap at which the integer solver stops."""


class ExactSolver:
    """See the module's docstring."""

    name = "exact"

    def solve(
        self, problem: Problem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields a solution after each stage, the last one is the answer; a stage has `deadline_s` seconds at most."""
        for need in problem.needs:
            if not problem.of(need.model) and (need.minimum or any(need.pins.values())):
                raise explain_infeasible(problem)
        every = range(len(problem.options))
        names = stage_names(problem)
        chosen = every if len(every) <= SMALL else _core(problem, names, deadline_s, seed)
        complete = len(chosen) == len(every)
        relaxed, whole = Formulation(problem, every, whole=False), Formulation(problem, chosen, whole=True)
        answer: Answer | None = None
        bounds: dict[str, float] = {}
        optimal = complete
        for name in names:
            if not whole.terms(name):
                continue
            below = relaxed.minimise(name, seconds=deadline_s, seed=seed)
            if below is None:
                raise explain_infeasible(problem)
            bounds[name] = below.objective
            if answer is None or whole.value(name, answer) > below.objective + _slack(name, below.objective):
                found = whole.minimise(
                    name, seconds=deadline_s, seed=seed, gap=0.0 if complete else CLOSE, start=answer
                )
                if found is None:
                    raise explain_infeasible(problem)
                answer = found
                optimal = optimal and found.optimal
                if complete:
                    bounds[name] = max(bounds[name], found.bound)
            value = whole.value(name, answer)
            for formulation in (whole, relaxed):
                formulation.keep(name, value + _slack(name, value))
            yield _solution(whole, answer, bounds, optimal=optimal)


def stage_names(problem: Problem) -> list[str]:
    """The objectives, first things first."""
    objective = list(problem.objective)
    objective.insert(1 if objective[:1] == ["slo"] else 0, "preference")
    return ["served", *objective, "moves", "replicas", "tie-break"]


def _slack(name: str, value: float) -> float:
    slack = TOLERANCE * max(1.0, abs(value))
    return max(slack, LATENCY_TOLERANCE * value) if name == "latency" else slack


def _core(problem: Problem, names: list[str], deadline_s: float, seed: int) -> list[int]:
    """The options that the relaxation uses in any stage, those it nearly uses, and those that rules or habit name."""
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    core = {i for i, o in enumerate(problem.options) if o.key in problem.fixed or o.key in problem.current}
    for need in problem.needs:
        core |= {i for i in problem.of(need.model) if any(problem.options[i].pool.within(*pin) for pin in need.pins)}
    nearest: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for name in names[:-1]:
        if not relaxed.terms(name):
            continue
        answer = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None:
            raise explain_infeasible(problem)
        core |= {i for i, used in relaxed.usage(answer).items() if used > TOLERANCE}
        for i, option in enumerate(problem.options):
            nearest[name, option.model].append((relaxed.distance(answer, i), i))
        relaxed.keep(name, answer.objective + _slack(name, answer.objective))
    for options in nearest.values():
        core |= {i for _, i in sorted(options)[:NEAREST]}
    return sorted(core)


def _solution(whole: Formulation, answer: Answer, bounds: dict[str, float], *, optimal: bool) -> Solution:
    """Objectives of all stages so far, as the answer stands now: a later one may have used a tolerance."""
    values = {name: whole.value(name, answer) for name in bounds}
    return Solution(
        whole.counts(answer),
        whole.loads(answer),
        tuple(StageResult(n, _clean(v), _clean(min(v, bounds[n]))) for n, v in values.items()),
        "exact (SCIP and GLOP in OR-Tools)",
        optimal,
    )


def _clean(value: float) -> float:
    """Without the solver's last digits, which differ between machines."""
    return round(value, 6) + 0.0
