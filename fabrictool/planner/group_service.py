"""What a placement does for each consumer group with a part of a model's demand: read off its counts and loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.planner.consumers import may_use, providers_of
from fabrictool.planner.group_flows import group_flows
from fabrictool.planner.survival import Reserve, losses, lost_with_a_node, stands_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.planner.group_flows import GroupFlow
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, PoolKey, Solution
    from fabrictool.planner.survival import Loss


@dataclass(frozen=True, slots=True)
class GroupService:
    """One group's part of a model's service."""

    flow: GroupFlow
    replicas: int
    """That may answer it."""
    left: int | None = None
    """Of these, after the worst loss of the kind that the model is to survive; None: it is to survive none."""


def services(problem: PlacementProblem, need: ModelNeed, solution: Solution) -> list[GroupService]:
    """Of each group with a part of the demand, and of all others together; none where it is not divided."""
    if not need.parts:
        return []
    options = {i: problem.options[i] for i in problem.of(need.model) if solution.counts.get(i)}
    told = []
    for flow in group_flows(problem, need, solution):
        mine = {i: o for i, o in options.items() if o.serves and may_use(flow.group, providers_of(o))}
        left = None if need.survive is None else _left(problem, need, mine, solution.counts)
        told.append(GroupService(flow, sum(solution.counts[i] for i in mine), left))
    return told


def _left(
    problem: PlacementProblem, need: ModelNeed, options: Mapping[int, Option], counts: Mapping[int, int]
) -> int | None:
    """Replicas after the worst loss."""
    if need.survive is None:
        return None
    pools = {pool.key: pool for pool in problem.pools}
    pools |= {pool.key: pool for option in options.values() for pool in option.pools}
    every = sum(counts[i] for i in options)
    return every - max([0, *(_gone(loss, options, counts, pools) for loss in losses(need.survive, pools.values()))])


def _gone(loss: Loss, options: Mapping[int, Option], counts: Mapping[int, int], pools: Mapping[PoolKey, Pool]) -> int:
    here = sum(counts[i] for i, option in options.items() if stands_in(option, loss))
    if not loss.node:
        return here
    (key,) = loss.pools
    return min(here, round(lost_with_a_node(Reserve(dict.fromkeys(options, 1.0), 0.0, 1.0), options, pools[key])))
