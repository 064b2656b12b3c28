"""What a model loses with a node, a partition, a site or a provider, and what of its demand is then unserved.

Every loss that can happen is looked at, and the worst one counts. What is left has to take the model's whole demand, at
loads that keep its SLO, and to have a replica for each consumer group. Nobody knows beforehand where the scheduler puts
replicas: with a node a partition loses as much as a node can hold of the model, or all that it has of it. The latter,
too, where nothing keeps replicas off the same node (`planner.lost_together`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from fabrictool.domain.plan import LossKind
from fabrictool.planner.consumers import may_use, providers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, PoolKey

KINDS: tuple[LossKind, ...] = get_args(LossKind)
SIDES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
"""Of a request: each has to be left, by replicas of that phase or by such that do both."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What is away at once."""

    words: str
    pools: frozenset[PoolKey]
    node: bool = False
    """Only one node of the one pool, and what its devices can hold."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """That so much of a model is left, whichever of its losses happens: demand, or a replica for a group."""

    weights: Mapping[int, float]
    """Option → what one replica gives: requests/s, or 1."""
    target: float
    unit: float
    """Requests/s that count as unserved for each unit that lacks."""
    whose: str = ""
    """Of groups of consumers: the providers that may serve them; "": it is the demand of all."""

    def can_survive(self, options: Mapping[int, Option], loss: Loss) -> bool:
        """Whether any placement can: a group that only one provider may serve has nobody left without it."""
        return loss.node or any(not stands_in(options[i], loss) for i in self.weights)


def losses(kind: LossKind, pools: Iterable[Pool]) -> list[Loss]:
    """Every loss of that kind."""
    if kind == "node":
        return [
            Loss(
                f"a node of {'/'.join(pool.key)}", frozenset({pool.key}), node=pool.nodes > 1 and not pool.shares_nodes
            )
            for pool in sorted(pools, key=lambda pool: pool.key)
        ]
    together: dict[str, set[PoolKey]] = {}
    for pool in pools:
        name = "/".join(pool.key) if kind == "partition" else pool.site if kind == "site" else pool.provider
        together.setdefault(name, set()).add(pool.key)
    return [Loss(f"{kind} {name}", frozenset(keys)) for name, keys in sorted(together.items())]


def reserves(need: ModelNeed, options: Mapping[int, Option]) -> Iterator[Reserve]:
    """What has to be left of a model with these options."""
    rate = need.rate or 1.0
    unified = all(option.phase == "unified" for option in options.values())
    for side in SIDES[: 1 if unified else None]:
        mine = {i: option for i, option in options.items() if option.phase in ("unified", side)}
        if need.rate:
            gives = {i: after_loss(option) for i, option in mine.items()}
            yield Reserve(gives, need.rate, 1.0)
            yield from _of_groups(need, options, gives)
        for allowed in need.groups or ((None,) if not need.rate else ()):
            permitted = {
                i: 1.0
                for i, option in mine.items()
                if allowed is None or all(pool.provider in allowed for pool in option.pools)
            }
            if permitted:  # a group that nobody may serve is told of elsewhere, whatever is lost
                yield Reserve(permitted, 1.0, rate, "" if allowed is None else ", ".join(sorted(allowed)))


def _of_groups(need: ModelNeed, options: Mapping[int, Option], gives: Mapping[int, float]) -> Iterator[Reserve]:
    """For every set of groups, what they ask for together, of all that any of them may use: by Hall's theorem all of
    them are served where each of these is there.
    """
    usable = [frozenset(i for i in gives if may_use(group, providers_of(options[i]))) for group in need.parts]
    together = {frozenset[int]()}
    for mine in dict.fromkeys(usable):
        together |= {mine | others for others in together}
    for some in sorted(together, key=sorted):
        asking = [group for group, mine in zip(need.parts, usable, strict=True) if mine and mine <= some]
        # Of all replicas the whole demand is asked for already.
        if asking and len(some) < len(gives):
            allowed = frozenset[str]().union(*(group.allowed or () for group in asking))
            rate = need.rate * sum(group.share for group in asking)
            yield Reserve({i: gives[i] for i in sorted(some)}, rate, 1.0, ", ".join(sorted(allowed)))


def after_loss(option: Option) -> float:
    """Requests/s that a replica takes within the SLO when others are gone; 0: it keeps that under no load."""
    return max((level.rate for level in option.levels if level.attains), default=0.0)


def lost_with_a_node(reserve: Reserve, options: Mapping[int, Option], pool: Pool) -> float:
    """The most that one node of a pool can hold of what is required."""
    parts = [
        (size, reserve.weights[i])
        for i in reserve.weights
        for (key, size), _ in options[i].blocks.items()
        if key == pool.key
    ]
    best = [0.0] * (pool.devices_per_node + 1)
    for devices in range(1, pool.devices_per_node + 1):
        best[devices] = max(
            [best[devices - 1], *(best[devices - size] + weight for size, weight in parts if size <= devices)]
        )
    return best[-1]


def stands_in(option: Option, loss: Loss) -> bool:
    """Whether a replica of it may be gone with that."""
    return any(pool.key in loss.pools for pool in option.pools)


def worst_loss(problem: PlacementProblem, need: ModelNeed, counts: Mapping[int, int]) -> tuple[Loss | None, float]:
    """The loss that leaves most of a model's demand unserved, and requests/s of that; None: none leaves any."""
    options = {i: problem.options[i] for i in problem.of(need.model) if counts.get(i)}
    pools = {pool.key: pool for pool in problem.pools} | {
        pool.key: pool for option in options.values() for pool in option.pools
    }
    worst: tuple[Loss | None, float] = (None, 0.0)
    for loss in losses(need.survive, pools.values()) if need.survive is not None else ():
        for reserve in reserves(need, options):
            short = unserved(reserve, options, counts, loss, pools)
            if short > worst[1] + 1e-9:
                for_whom = f", for those whom only {reserve.whose} may serve," if reserve.whose else ""
                worst = replace(loss, words=loss.words + for_whom), min(short, need.rate or math.inf)
    return worst


def exposure(problem: PlacementProblem, need: ModelNeed, counts: Mapping[int, int]) -> float:
    """Requests/s, by priority, that all losses together leave unserved, each by itself: the stage ``survived``."""
    if need.survive is None:
        return 0.0
    options = {i: problem.options[i] for i in problem.of(need.model)}
    placed = {i: option for i, option in options.items() if counts.get(i)}
    pools = {pool.key: pool for pool in problem.pools}
    pools |= {pool.key: pool for option in options.values() for pool in option.pools}
    every = losses(need.survive, pools.values())
    total = 0.0
    for reserve in reserves(need, options):
        mine = replace(reserve, weights={i: weight for i, weight in reserve.weights.items() if i in placed})
        total += math.fsum(
            unserved(mine, placed, counts, loss, pools) for loss in every if reserve.can_survive(options, loss)
        )
    return need.priority * total


def unserved(
    reserve: Reserve,
    options: Mapping[int, Option],
    counts: Mapping[int, int],
    loss: Loss,
    pools: Mapping[PoolKey, Pool],
) -> float:
    """Requests/s that a loss leaves unserved of what is required."""
    weights = reserve.weights
    every = math.fsum(weights[i] * counts[i] for i in weights)
    here = math.fsum(weights[i] * counts[i] for i in weights if stands_in(options[i], loss))
    gone = here
    if loss.node:
        (key,) = loss.pools
        gone = min(here, lost_with_a_node(reserve, options, pools[key]))
    return reserve.unit * max(0.0, reserve.target - (every - gone))
