"""Counts → named replicas in places: what runs keeps its place and its number, so that re-plans stay small."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fabrictool.domain.address import model_of, number_of
from fabrictool.domain.plan import Placement, ReplicaPlacement, StagePlacement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.problem import Option, OptionKey, PlacementProblem, Pool, Solution


def assign(
    problem: PlacementProblem,
    solution: Solution,
    running: Mapping[str, OptionKey],
    unseen: Sequence[ReplicaPlacement] = (),
) -> Placement:
    """Name each replica ``MODEL/N`` with the smallest free N.

    `running` maps living replicas to the key of their option; one of those keeps its name where that option still has a
    count for it. `unseen` replicas, on clusters that do not answer, stay as they are.
    """
    placed: list[ReplicaPlacement] = list(unseen)
    taken = {replica.replica for replica in unseen} | set(running)
    for need in problem.needs:
        model = need.model
        mine = {name: at for name, at in running.items() if model_of(name) == model}
        free = {
            problem.options[i].key: count
            for i, count in solution.counts.items()
            if problem.options[i].model == model and problem.options[i].key not in problem.fixed
        }
        options = {problem.options[i].key: problem.options[i] for i in problem.of(model)}
        for name in sorted(mine, key=number_of):
            place = mine[name]
            if free.get(place, 0) > 0:
                free[place] -= 1
                placed.append(_placement(name, options[place]))
        numbers = (n for n in itertools.count() if f"{model}/{n}" not in taken)
        for place in sorted(free):
            placed += [_placement(f"{model}/{next(numbers)}", options[place]) for _ in range(free[place])]
    return Placement(replicas=tuple(sorted(placed, key=lambda r: (r.model, number_of(r.replica)))))


def _placement(name: str, option: Option) -> ReplicaPlacement:
    pool = option.pool
    return ReplicaPlacement(
        replica=name,
        model=option.model,
        provider=pool.provider,
        site=pool.site,
        cluster=pool.cluster,
        partition=pool.partition,
        device=pool.device,
        tp=option.tp,
        pp=len(option.stages),
        dp=option.dp,
        phase=option.phase,
        stages=tuple(_stage(pool, tp) for pool, tp in option.stages) if option.others else (),
        variant=option.variant,
    )


def _stage(pool: Pool, tp: int) -> StagePlacement:
    return StagePlacement(cluster=pool.cluster, partition=pool.partition, device=pool.device, tp=tp)
