"""Tabu search over groups of devices and their phases: ThunderServe's upper level (paper 002, section 3.2), for many
models at once.

A solution is a multiset of groups; devices in no group are idle. The best neighbour that was not visited lately is
taken, also when it is worse; the best of all is the answer. The start is the linear relaxation's whole part, or, for
one model, the clusters of well-connected nodes, whichever is better; each round ends with whole replicas of the best
columns that were made until then, by a small integer program, and the next goes on from the best. The search is limited
by evaluations, never by time: same seed, same answer.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible, require_options
from fabrictool.planner.solvers.neighbours import neighbours
from fabrictool.planner.solvers.orchestration import FIELDS
from fabrictool.planner.solvers.search import TabuSearch
from fabrictool.planner.stages import stage_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from fabrictool.planner.problem import PlacementProblem, Solution
    from fabrictool.planner.program import ProgramSolution
    from fabrictool.planner.solvers.search import TabuState

EVALUATIONS_PER_SECOND = 500
"""By which a time limit becomes one of evaluations."""
SLACK = 1e-6
ROUNDS = 4
"""Of search and integer program; ends with the first that gains nothing."""
FIRST = ("served", "slo", "latency")
"""Stages of the integer program."""
NEAREST = 50
"""Columns beyond those that the relaxation uses, in each of these stages."""
GAP, NODES = 5e-3, 100
"""Limits of the integer program over them."""


class TabuSolver:
    """See the module's docstring."""

    name = "tabu"

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields the start, then the best that was found; both appraised beside the relaxation's bounds."""
        require_options(problem)
        if any(option.variant for option in problem.options):
            message = "the tabu search does not choose among variants of a model"
            raise FabrictoolError.of("FT2030", message, hint="`--solver exact` does")
        search = TabuSearch(problem, random.Random(f"tabu {seed}"))
        left = most = int(EVALUATIONS_PER_SECOND * deadline_s)
        usage = {i: float(k) for i, k in warm.counts.items()} if warm else _relaxation(problem, deadline_s, seed)
        starts = [search.start(usage)]
        if len(problem.needs) == 1 and warm is None:
            starts.append(search.clustered(problem.needs[0].model))
        best = min(starts, key=lambda state: state.rank)
        solution = None if best.broken else search.solution(best, self.name, deadline_s, seed)
        if solution is not None:
            yield solution
        first = best
        for _ in range(ROUNDS):
            walked, used = search.run(best, neighbours, evaluations=left)
            columns = _nearest(search.extended, deadline_s, seed) | search.used(walked)
            whole = search.of_counts(_whole(search.extended, columns, deadline_s, seed))
            left -= used
            former, best = best, min((best, walked, whole), key=_rank)
            if best is former or left <= 0:
                break
        if best.broken:
            raise FabrictoolError.of(
                "FT2902",
                "the search found no placement that keeps all rules",
                hint="`--solver exact` says whether there is one",
            )
        if solution is None or best.rank < first.rank:
            solution = search.solution(best, self.name, deadline_s, seed)
        yield replace(solution, work=(most - left) / EVALUATIONS_PER_SECOND)


def _rank(state: TabuState) -> tuple[float, ...]:
    return state.rank


def _relaxed(
    problem: PlacementProblem, names: Sequence[str], deadline_s: float, seed: int
) -> Iterator[tuple[Formulation, ProgramSolution]]:
    """The linear relaxation with its answer to one stage after another, each kept at its least."""
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    for name in (name for name in names if relaxed.terms(name)):
        answer = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None:
            raise explain_infeasible(problem)
        yield relaxed, answer
        relaxed.keep(name, answer.objective * (1 + SLACK) + SLACK)


def _relaxation(problem: PlacementProblem, deadline_s: float, seed: int) -> dict[int, float]:
    """Replicas by column as the linear relaxation would have them, for all stages that the search weighs."""
    names = [name for name in stage_names(problem) if name in FIELDS and name != "replicas"]
    *_, (relaxed, answer) = _relaxed(problem, names, deadline_s, seed)
    return {i: used for i, used in relaxed.usage(answer).items() if used > SLACK}


def _nearest(problem: PlacementProblem, deadline_s: float, seed: int) -> set[int]:
    """The columns that the relaxation uses or nearly uses in its first stages."""
    columns: set[int] = set()
    for relaxed, answer in _relaxed(problem, FIRST, deadline_s, seed):
        distance = {i: relaxed.distance(answer, i) for i in relaxed.chosen}
        columns |= {i for i, used in relaxed.usage(answer).items() if used > SLACK}
        columns |= set(sorted(relaxed.chosen, key=lambda i: (distance[i], i))[:NEAREST])
    return columns


def _whole(problem: PlacementProblem, columns: AbstractSet[int], deadline_s: float, seed: int) -> dict[int, int]:
    """Whole replicas of some columns, by an integer program that is not solved to its end."""
    program = Formulation(problem, sorted(columns), whole=True)
    counts: dict[int, int] = {}
    for name in (name for name in FIRST if program.terms(name)):
        try:
            answer = program.minimise(name, seconds=deadline_s, seed=seed, gap=GAP, nodes=NODES)
        except FabrictoolError:  # nothing within these limits
            break
        if answer is None:
            break
        counts = program.counts(answer)
        value = program.value(name, answer)
        program.keep(name, value + SLACK * max(1.0, value))
    return counts
