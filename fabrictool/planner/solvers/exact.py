"""The exact solver: one objective after another, each solved as an integer program beside its linear relaxation.

Objectives in order, each kept while the next is minimised: unserved demand by priority, then those of the
blueprint with the wishes of `place` after its SLO, then moves against what runs, then the number of replicas, then a
fixed tie-break. ``latency`` is the mean number of requests in the system: the mean latency times the rate, by Little's
law. It is kept within 1 %: its figures are not that exact, and nothing is moved for less.

Objectives are recomputed in floating point; a stage's bound is the better one of the relaxation's and of the integer
solver's, and never above the value. What is too large for one integer program goes to `large`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible, require_options
from fabrictool.planner.problem import PlacementProblem, Solution, StageResult
from fabrictool.planner.solvers.large import LargeSearch
from fabrictool.planner.stages import TIE_BREAK, clean, rounding, stage_names, tolerance
from fabrictool.planner.work import SearchWork

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.planner.program import ProgramSolution

SMALL = 1500
"""Options up to which all take part in one integer program, and it is solved to the proof."""
NODES_PER_SECOND = 150
"""By which a time limit becomes one of the search tree's nodes, which are the same on every machine. A
choice, not a measurement: programs differ by far in what a node costs them."""
NAME = "exact (SCIP and GLOP in OR-Tools)"


class ExactSolver:
    """See the module's docstring."""

    name = "exact"

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields ever better solutions, the last one is the answer."""
        require_options(problem)
        small = len(problem.options) <= SMALL
        search = _Search(problem, deadline_s, seed) if small else LargeSearch(problem, NAME, deadline_s, seed)
        for name in stage_names(problem):
            # Equals are settled for good where that can be proved; on large problems it would only take time.
            if search.whole.terms(name) and (small or name != TIE_BREAK):
                yield from search.stage(name)


class _Search:
    """One run: the integer program, its relaxation, and what is known so far."""

    def __init__(self, problem: PlacementProblem, deadline_s: float, seed: int) -> None:
        every = range(len(problem.options))
        self._problem, self._seconds, self._seed = problem, deadline_s, seed
        self._work = SearchWork(deadline_s)
        self._relaxed = Formulation(problem, every, whole=False)
        self.whole = Formulation(problem, every, whole=True)
        self._answer: ProgramSolution | None = None
        self._bounds: dict[str, float] = {}
        self._optimal = self._repeatable = True

    def stage(self, name: str) -> Iterator[Solution]:
        """Minimises one objective, and keeps it from then on."""
        below = self._relaxed.minimise(name, seconds=self._seconds, seed=self._seed)
        if below is None:
            raise explain_infeasible(self._problem)
        self._bounds[name] = below.objective
        answer = self._answer
        # Not the stage's tolerance: that is kept above the least value, and must not be spent before.
        if answer is None or self.whole.value(name, answer) > below.objective + rounding(below.objective):
            answer = self._improve(name)
        self._answer = answer
        value = self.whole.value(name, answer)
        for formulation in (self.whole, self._relaxed):
            formulation.keep(name, value + tolerance(name, value))
        yield self._solution(answer)

    def _improve(self, name: str) -> ProgramSolution:
        seconds = self._work.share(name)
        nodes = max(1, int(NODES_PER_SECOND * seconds))
        answer = self.whole.minimise(name, seconds=self._seconds, seed=self._seed, nodes=nodes, start=self._answer)
        if answer is None:
            raise explain_infeasible(self._problem)
        self._work.spent += 0.0 if answer.optimal else seconds
        self._optimal = self._optimal and answer.optimal
        self._repeatable = self._repeatable and answer.in_time
        self._bounds[name] = max(self._bounds[name], answer.bound)
        return answer

    def _solution(self, answer: ProgramSolution) -> Solution:
        """Objectives of all stages so far, as the answer stands now: a later one may have used a tolerance."""
        values = {name: self.whole.value(name, answer) for name in self._bounds}
        return Solution(
            self.whole.counts(answer),
            self.whole.loads(answer),
            tuple(StageResult(n, clean(v), clean(min(v, self._bounds[n]))) for n, v in values.items()),
            NAME,
            self._optimal,
            self._repeatable,
            work=self._work.spent,
        )
