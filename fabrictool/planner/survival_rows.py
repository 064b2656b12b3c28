"""The rows that say what each loss leaves unserved of a model (`planner.survival`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.planner.survival import losses, lost_with_a_node, reserves, stands_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.formulation import Formulation
    from fabrictool.planner.problem import ModelNeed, Pool
    from fabrictool.planner.program import Terms
    from fabrictool.planner.survival import Reserve


def survival_rows(
    formulation: Formulation, need: ModelNeed, mine: Sequence[int], given: Mapping[int, int] | None
) -> Iterator[tuple[int, float]]:
    """Adds a column for what each loss leaves unserved of each thing that has to be left; yields it and its weight.

    `mine`: the options of the model that take part; `given`: their counts, where these are known.
    """
    if need.survive is None:
        return
    problem = formulation.problem
    # Also those that are not chosen: what cannot survive does not hang on what a search looks at.
    options = {i: problem.options[i] for i in problem.of(need.model)}
    pools = {pool.key: pool for pool in problem.pools}
    pools |= {pool.key: pool for option in options.values() for pool in option.pools}
    chosen = set(mine)
    for reserve in reserves(need, options):
        every = {i: _weighed(formulation, i, weight) for i, weight in reserve.weights.items() if i in chosen}
        for loss in losses(need.survive, pools.values()):
            if not reserve.can_survive(options, loss):
                continue
            column = formulation.column(need.model, 0, math.inf)
            yield column, need.priority
            lacking = [(column, 1.0 / reserve.unit)]
            if not loss.node:
                left = [term for i, terms in every.items() if not stands_in(options[i], loss) for term in terms]
                formulation.program.row(reserve.target, math.inf, [*left, *lacking])
                continue
            (key,) = loss.pools
            if given is None:
                _node_rows(formulation, need, reserve, pools[key], every, lacking)
            else:
                _node_row(formulation, given, reserve, pools[key], every, lacking)


# Wide: what is lost of what, and what then lacks.
def _node_row(
    formulation: Formulation,
    given: Mapping[int, int],
    reserve: Reserve,
    pool: Pool,
    every: Mapping[int, Terms],
    lacking: Terms,
) -> None:
    """Of given counts it is known whether less is lost with what the node can hold or with all that its pool has."""
    options, target = formulation.problem.options, reserve.target
    here = _sizes(formulation, every, pool)
    placed = {i: options[i] for i in every if given.get(i)}
    held = math.fsum(reserve.weights[i] * given.get(i, 0) for i in here)
    most = lost_with_a_node(replace(reserve, weights={i: reserve.weights[i] for i in placed}), placed, pool)
    if held >= most:
        whole = [term for terms in every.values() for term in terms]
        formulation.program.row(target + most, math.inf, [*whole, *lacking])
    else:
        left = [term for i, terms in every.items() if i not in here for term in terms]
        formulation.program.row(target, math.inf, [*left, *lacking])


# Wide: what is lost of what, and what then lacks.
def _node_rows(
    formulation: Formulation,
    need: ModelNeed,
    reserve: Reserve,
    pool: Pool,
    every: Mapping[int, Terms],
    lacking: Terms,
) -> None:
    """All but what a node can hold is left, or what is elsewhere, whichever is more.

    What a node can hold is bounded by the densest option that has a replica there.
    """
    program, target = formulation.program, reserve.target
    here = _sizes(formulation, every, pool)
    whole = [term for terms in every.values() for term in terms]
    left = [term for i, terms in every.items() if i not in here for term in terms]
    dense = {i: reserve.weights[i] * pool.devices_per_node / size for i, size in here.items()}
    most = max(dense.values(), default=0.0)
    side = formulation.column(need.model, 0, 1, whole=True)
    gone = formulation.column(need.model, 0, most)
    for i, held in dense.items():
        there = formulation.column(need.model, 0, 1, whole=True)
        program.row(0, math.inf, [(there, float(need.maximum)), *[(c, -w) for c, w in formulation.count(i)]])
        program.row(0, math.inf, [(gone, 1.0), (there, -held)])
    program.row(target, math.inf, [*left, *lacking, (side, target)])
    program.row(-most, math.inf, [*whole, *lacking, (gone, -1.0), (side, -(target + most))])


def _sizes(formulation: Formulation, every: Mapping[int, Terms], pool: Pool) -> dict[int, int]:
    """Devices of a block, of the options that have one in the pool."""
    options = formulation.problem.options
    return {i: size for i in every for (key, size), _ in options[i].blocks.items() if key == pool.key}


def _weighed(formulation: Formulation, i: int, weight: float) -> Terms:
    return [(column, weight * its) for column, its in formulation.count(i)]
