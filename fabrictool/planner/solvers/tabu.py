"""Tabu search over groups of devices and their phases: ThunderServe's upper level (paper 002, section 3.2), for many
models at once.

A solution is a multiset of groups; devices in no group are idle. The best neighbour that was not visited lately is
taken, also when it is worse; the best of all is the answer. The start is the linear relaxation's whole part, or, for
one model, the clusters of well-connected nodes, whichever is better; each round begins anew from the relaxation over
all columns that were made until then. The search is limited by evaluations, never by time: same seed, same answer.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.solvers.neighbours import neighbours
from fabrictool.planner.solvers.orchestration import FIELDS
from fabrictool.planner.solvers.search import Search
from fabrictool.planner.stages import stage_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.planner.problem import Problem, Solution

ROUNDS = 4
"""Of search and relaxation over all columns that the search has made; ends with the first that gains nothing."""
EVALUATIONS_PER_SECOND = 500
"""By which a time limit becomes one of evaluations."""
SLACK = 1e-6


class TabuSolver:
    """See the module's docstring."""

    name = "tabu"

    def solve(
        self, problem: Problem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields the start, then the best that was found; both appraised beside the relaxation's bounds."""
        search = Search(problem, random.Random(f"tabu {seed}"))
        left = int(EVALUATIONS_PER_SECOND * deadline_s)
        usage = {i: float(k) for i, k in warm.counts.items()} if warm else _relaxation(problem, deadline_s, seed)
        starts = [search.start(usage)]
        if len(problem.needs) == 1 and warm is None:
            starts.append(search.clustered(problem.needs[0].model))
        best = min(starts, key=lambda state: state.rank)
        yield search.solution(best, self.name, deadline_s, seed)
        first = best
        for _ in range(ROUNDS):
            found, used = search.run(best, neighbours, evaluations=left)
            usage = _relaxation(search.extended, deadline_s, seed)
            again, more = search.run(search.start(usage), neighbours, evaluations=left - used)
            left -= used + more
            former, best = best, min((best, found, again), key=lambda state: state.rank)
            if best is former:
                break
        if best.rank < first.rank:
            yield search.solution(best, self.name, deadline_s, seed)


def _relaxation(problem: Problem, deadline_s: float, seed: int) -> dict[int, float]:
    """Replicas by column as the linear relaxation would have them, for the objectives that users feel."""
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    usage: dict[int, float] = {}
    for name in stage_names(problem):
        if name not in FIELDS or name == "replicas" or not relaxed.terms(name):
            continue
        answer = relaxed.minimise(name, seconds=deadline_s, seed=seed)
        if answer is None:
            raise explain_infeasible(problem)
        usage = relaxed.usage(answer)
        relaxed.keep(name, answer.objective * (1 + SLACK) + SLACK)
    return {i: used for i, used in usage.items() if used > SLACK}
