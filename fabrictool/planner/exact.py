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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import Problem, Solution, StageResult
from fabrictool.planner.rounding import rounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


TIE_BREAK = "tie-break"


class ExactSolver:
    """See the module's docstring."""

    name = "exact"

    def solve(
        self, problem: Problem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields ever better solutions, the last one is the answer; a stage has `deadline_s` seconds at most."""
        for need in problem.needs:
            if not problem.of(need.model) and (need.minimum or any(need.pins.values())):
                raise explain_infeasible(problem)
        search = _Search(problem, deadline_s, seed)
        for name in stage_names(problem):
            # Equals are settled for good where that can be proved; on large problems it would only take time.
            if search.whole.terms(name) and (search.complete or name != TIE_BREAK):
                yield from search.stage(name)


def appraise(problem: Problem, counts: dict[int, int], solver: str, deadline_s: float, seed: int) -> Solution:
    """What given counts are worth: loads and stages as the exact solver would have them, beside the same bounds.

    Raises InfeasibleError FT2001 when they break a rule.
    """
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    known = problem.current.keys() | problem.fixed.keys()
    chosen = [i for i, option in enumerate(problem.options) if counts.get(i) or option.key in known]
    loads = Formulation(problem, chosen, whole=False, given=counts)
    stages: list[StageResult] = []
    answer: Answer | None = None
    for name in stage_names(problem):
        if name == TIE_BREAK or not loads.terms(name):
            continue
        answer = loads.minimise(name, seconds=deadline_s, seed=seed)
        below = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None or below is None:
            raise explain_infeasible(problem)
        value = loads.value(name, answer)
        stages.append(StageResult(name, _clean(value), _clean(min(value, below.objective))))
        for formulation in (loads, relaxed):
            formulation.keep(name, value + _slack(name, value))
    served = loads.loads(answer) if answer is not None else {}
    return Solution({i: k for i, k in counts.items() if k}, served, tuple(stages), solver, optimal=False)


class _Search:
    """One run: the integer program, its relaxation, and what is known so far."""

    def __init__(self, problem: Problem, deadline_s: float, seed: int) -> None:
        every = range(len(problem.options))
        self._problem, self._seconds, self._seed = problem, deadline_s, seed
        self.complete = len(every) <= SMALL
        names = stage_names(problem)
        self._core = _Core(every, {}, {}) if self.complete else _core(problem, names, deadline_s, seed)
        self._relaxed = Formulation(problem, every, whole=False)
        self.whole = Formulation(problem, self._core.options, whole=True)
        self._answer: Answer | None = None
        self._bounds: dict[str, float] = {}
        self._optimal = self.complete
        self._searched = False

    def stage(self, name: str) -> Iterator[Solution]:
        """Minimises one objective, and keeps it from then on."""
        self._bounds[name] = self._bound(name)
        if self._core.rounded and not self._searched:
            near = self.whole.minimise(name, seconds=self._seconds, seed=self._seed, counts=self._core.rounded)
            if near is not None:
                self._answer = near
                yield self._solution(near)
        answer = self._answer
        if answer is None or self.whole.value(name, answer) > self._bounds[name] + _slack(name, self._bounds[name]):
            answer = self._improve(name)
        self._answer = answer
        value = self.whole.value(name, answer)
        for formulation in (self.whole, self._relaxed):
            formulation.keep(name, value + _slack(name, value))
        yield self._solution(answer)

    def _bound(self, name: str) -> float:
        """What no solution can be better than, with the earlier stages where they are."""
        known = name in self._core.lowest and all(
            self._answer is not None and self.whole.value(n, self._answer) <= low + _slack(n, low)
            for n, low in self._bounds.items()
        )
        if known:  # each stage before is at its own least
            return self._core.lowest[name]
        below = self._relaxed.minimise(name, seconds=self._seconds, seed=self._seed)
        if below is None:
            raise explain_infeasible(self._problem)
        return below.objective

    def _improve(self, name: str) -> Answer:
        self._searched = True
        gap = 0.0 if self.complete else CLOSE
        found = self.whole.minimise(name, seconds=self._seconds, seed=self._seed, gap=gap, start=self._answer)
        if found is None:
            raise explain_infeasible(self._problem)
        self._optimal = self._optimal and found.optimal
        if self.complete:
            self._bounds[name] = max(self._bounds[name], found.bound)
        return found

    def _solution(self, answer: Answer) -> Solution:
        """Objectives of all stages so far, as the answer stands now: a later one may have used a tolerance."""
        values = {name: self.whole.value(name, answer) for name in self._bounds}
        return Solution(
            self.whole.counts(answer),
            self.whole.loads(answer),
            tuple(StageResult(n, _clean(v), _clean(min(v, self._bounds[n]))) for n, v in values.items()),
            "exact (SCIP and GLOP in OR-Tools)",
            self._optimal,
        )


def stage_names(problem: Problem) -> list[str]:
    """The objectives, first things first."""
    objective = list(problem.objective)
    objective.insert(1 if objective[:1] == ["slo"] else 0, "preference")
    return ["served", *objective, "moves", "replicas", TIE_BREAK]


def _slack(name: str, value: float) -> float:
    slack = TOLERANCE * max(1.0, abs(value))
    return max(slack, LATENCY_TOLERANCE * value) if name == "latency" else slack


@dataclass(frozen=True, slots=True)
class _Core:
    """What the relaxation says of a large problem."""

    options: Sequence[int]
    """Those that it uses in any stage, those that it nearly uses, and those that rules or habit name."""
    lowest: dict[str, float]
    """By stage: what it reaches at best when each stage before is at its own least."""
    rounded: dict[int, int]
    """By option: whole counts near those of its last stage."""


def _core(problem: Problem, names: list[str], deadline_s: float, seed: int) -> _Core:
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    core = {i for i, o in enumerate(problem.options) if o.key in problem.fixed or o.key in problem.current}
    for need in problem.needs:
        core |= {i for i in problem.of(need.model) if any(problem.options[i].pool.within(*pin) for pin in need.pins)}
    lowest: dict[str, float] = {}
    distance: dict[int, float] = {}
    answer: Answer | None = None
    for name in names:
        if name == TIE_BREAK or not relaxed.terms(name):
            continue
        answer = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None:
            raise explain_infeasible(problem)
        lowest[name] = answer.objective
        core |= {i for i, used in relaxed.usage(answer).items() if used > TOLERANCE}
        distance = {i: relaxed.distance(answer, i) for i in relaxed.chosen}
        nearest: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for i, option in enumerate(problem.options):
            nearest[option.model].append((distance[i], i))
        for options in nearest.values():
            core |= {i for _, i in sorted(options)[:NEAREST]}
        relaxed.keep(name, answer.objective + _slack(name, answer.objective))
    chosen = sorted(core)
    usage = relaxed.usage(answer) if answer is not None else {}
    near = rounded(problem, {i: usage.get(i, 0.0) for i in chosen}, distance)
    return _Core(chosen, lowest, near)


def _clean(value: float) -> float:
    """Without the solver's last digits, which differ between machines."""
    return round(value, 6) + 0.0
