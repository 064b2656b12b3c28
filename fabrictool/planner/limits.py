r"""What may be used at most, as rows of the program and as room for a search.

* limits      :math:`\sum_o g_{ro} k_o \le G_r` for each limited resource r: the devices, the price or the power that a
  replica of option o takes of the pools that the limit is of
* what stands on clusters that do not answer cannot be moved: where it alone is more, nothing may be added to it
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.planner.problem import ResourceLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.limits import Limit
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.problem import Option, PlacementProblem, Pool, PoolKey
    from fabrictool.planner.program import Program, Terms

HOURS_A_MONTH = 730
DUST = 1e-9
"""Of a limit: the last digits of a sum."""


def limits_of(blueprint: Blueprint, inventory: Inventory, pools: Sequence[Pool]) -> tuple[ResourceLimit, ...]:
    """Those of both documents over pools that there are, by name."""
    both = {**inventory.limits, **blueprint.limits}
    return tuple(
        limit
        for name in sorted(both)
        for limit in _of_one(name, both[name], frozenset(_within(both[name], inventory, pools)))
    )


def _within(limit: Limit, inventory: Inventory, pools: Iterable[Pool]) -> Iterator[PoolKey]:
    for pool in pools:
        account = inventory.clusters[pool.cluster].partitions[pool.partition].job.account
        if limit.holds(provider=pool.provider, site=pool.site, cluster=pool.cluster, account=account):
            yield pool.key


def _of_one(name: str, limit: Limit, pools: frozenset[PoolKey]) -> Iterator[ResourceLimit]:
    whose = " ".join(filter(None, limit.scope))
    if limit.devices is not None:
        yield ResourceLimit(name, "devices", "devices", limit.devices, pools, whose, "devices")
    if limit.device_hours_per_month is not None:
        most, unit = limit.device_hours_per_month / HOURS_A_MONTH, "device hours/month"
        yield ResourceLimit(name, "device_hours_per_month", "devices", most, pools, whose, unit, float(HOURS_A_MONTH))
    if limit.power is not None:
        yield ResourceLimit(name, "power", "power", float(limit.power), pools, whose, "W")
    if limit.cost is not None:
        unit = f"{limit.cost.currency}/{limit.cost.per}"
        yield ResourceLimit(name, "cost", "cost", limit.cost.per_hour, pools, whose, unit, limit.cost.hours)


def beside(
    limits: Iterable[ResourceLimit], replicas: Iterable[ReplicaPlacement], pools: Iterable[Pool], inventory: Inventory
) -> tuple[ResourceLimit, ...]:
    """With what is taken by replicas that are remembered, and that no option stands for any more."""
    known = {pool.key: pool for pool in pools}
    nodes = [
        (known[cluster, partition], held / known[cluster, partition].devices_per_node)
        for replica in replicas
        if all((stage.cluster, stage.partition) in known for stage in replica.every_stage)
        for cluster, partition, held in replica.blocks(inventory)
    ]
    return tuple(replace(limit, taken=math.fsum(limit.of(*its) for its in nodes)) for limit in limits)


def limit_rows(
    program: Program, problem: PlacementProblem, chosen: Sequence[int], count: Callable[[int], Terms]
) -> None:
    """Adds a row for each limit; `count`: columns of an option's replicas."""
    for limit in problem.limits:
        uses = {i: limit.used_by(problem.options[i]) for i in chosen}
        terms = [(column, uses[i] * weight) for i in chosen if uses[i] for column, weight in count(i)]
        if terms:
            program.row(-math.inf, most_of(problem, limit), terms)


def most_of(problem: PlacementProblem, limit: ResourceLimit) -> float:
    """What the options may use; where what cannot be moved is more, nothing may be added to it."""
    return max(limit.most - limit.taken, _stuck(problem, limit))


def open_limits(problem: PlacementProblem) -> tuple[ResourceLimit, ...]:
    """With what is left beside the replicas that cannot be moved."""
    left = ((limit, limit.most - limit.taken - _stuck(problem, limit)) for limit in problem.limits)
    return tuple(replace(limit, most=max(0.0, most), taken=0.0) for limit, most in left)


def limits_left(
    problem: PlacementProblem, counts: Mapping[int, int], members: AbstractSet[str]
) -> tuple[ResourceLimit, ...]:
    """What the replicas of all but these models leave."""
    others = {i: count for i, count in counts.items() if problem.options[i].model not in members}
    return tuple(
        replace(limit, most=max(0.0, limit.most - limit.used(problem.options, others)), taken=0.0)
        for limit in problem.limits
    )


def used_up(
    problem: PlacementProblem, counts: Mapping[int, int], options: Iterable[Option]
) -> list[list[ResourceLimit]]:
    """Of each option the limits that leave no room for one replica more."""
    used = [(limit, limit.used(problem.options, counts)) for limit in problem.limits]
    return [
        [limit for limit, its in used if (more := limit.used_by(option)) and its + more > limit.most * (1 + DUST)]
        for option in options
    ]


def _stuck(problem: PlacementProblem, limit: ResourceLimit) -> float:
    fixed = problem.fixed
    return math.fsum(limit.used_by(option) * fixed[option.key] for option in problem.options if option.key in fixed)
