"""A search whose placement can be put into nodes: searched again where replicas that are to be apart have no room so.

The rows of `planner.node_spread` miss some of what nodes have no room for. Where they did, more and more devices of
such a pool stay free, one at a time at first. So what is found is a little off what the rows allow, and nobody knows by
how much of it no other was possible: what bounds it is the first search, which had no such rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import InfeasibleError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.planner.node_spread import crowded, is_spread
from fabrictool.planner.stages import TIDYING, rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.planner.problem import PlacementProblem, PoolKey, Solution, StageResult

SINGLY = 8
"""So many devices stay free one at a time; then each repeat leaves twice as many."""


def searched_apart(
    problem: PlacementProblem, search: Callable[[PlacementProblem, float], tuple[Solution, bool]]
) -> tuple[PlacementProblem, Solution, bool]:
    """The problem with the columns of its solution, the solution, and whether Ctrl-C stopped the search.

    `search` gives a problem's last solution and whether it was stopped; it is told how much work was done before.

    Raises
    ------
    InfeasibleError
        FT200x as the search does, and FT2001 where no repeat came to a placement that has room.
    KeyboardInterrupt
        When it was stopped before there was one.
    """
    first, stopped = search(problem, 0.0)
    solution, whole = first, first.whole(problem)
    work, ended, asked = first.work, first.ended, problem
    while tight := crowded(whole, solution.counts):
        if stopped:  # what there is has no room, and nobody waits for another one
            raise KeyboardInterrupt
        free = {key: _left(whole, solution, key) for key in tight}
        if any(free[key] < asked.crowded.get(key, 0) for key in tight):  # whoever searches does not look at rows
            raise _no_room(problem)
        more = {key: max(_more(asked.crowded.get(key, 0)), free[key] + 1) for key in tight}
        asked = replace(problem, crowded={**asked.crowded, **more})
        try:
            solution, stopped = search(asked, work)
        except InfeasibleError as error:
            raise _no_room(problem) from error
        whole = solution.whole(asked)
        work, ended = round(work + solution.work, 2), ended or solution.ended
    if solution is not first:
        solution = _as_proved(solution, first)
    return whole, replace(solution, work=work, ended=ended), stopped


def _more(free: int) -> int:
    return free + 1 if free < SINGLY else 2 * free


def _left(problem: PlacementProblem, solution: Solution, key: PoolKey) -> int:
    """Devices of a pool that a solution leaves free."""
    blocks = ((problem.options[i].blocks, count) for i, count in solution.counts.items())
    used = sum(size * number * count for its, count in blocks for (at, size), number in its.items() if at == key)
    return next(pool.nodes * pool.devices_per_node for pool in problem.pools if pool.key == key) - used


def _as_proved(solution: Solution, first: Solution) -> Solution:
    """With no bound but those of the first search: each holds where the stages before are no worse than they were."""
    before: Mapping[str, StageResult] = {stage.name: stage for stage in first.stages}
    stages, alike, optimal = [], True, first.optimal
    for stage in solution.stages:
        known = before.get(stage.name)
        bound = known.bound if alike and known is not None else 0.0
        stages.append(replace(stage, bound=min(stage.objective, bound)))
        alike &= known is not None and stage.objective <= known.objective + rounding(known.objective)
        optimal &= alike or stage.name in TIDYING
    return replace(solution, stages=tuple(stages), optimal=optimal)


def _no_room(problem: PlacementProblem) -> InfeasibleError:
    """Of replicas that rows had room for: it is not proved that no nodes have it."""
    models = ", ".join(need.model for need in problem.needs if is_spread(need))
    message = f"no way was seen to have the minimum replicas of all models with those of {models} on different nodes"
    hint = "lower replicas.min of one of them, or add devices to a partition"
    return InfeasibleError([Complaint("FT2001", message, Place(), hint)])
