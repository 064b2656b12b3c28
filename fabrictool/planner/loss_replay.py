"""What is left of a model after the worst of the losses that it is to survive, played event by event as the whole is.

The tables say how much has to be left; the replay says whether that keeps the SLO, with the weights that the gateways
go on with. Where the tables leave nothing, or the model has no SLO, there is nothing to play.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.domain.plan import Placement
from fabrictool.planner.problem import replica_key
from fabrictool.planner.replay import replay
from fabrictool.planner.survival import after_loss, losses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.problem import ModelNeed, Option, OptionKey, PlacementProblem
    from fabrictool.planner.replay import Played
    from fabrictool.planner.survival import Loss


@dataclass(frozen=True, slots=True)
class PlayedLoss:
    """One model after its worst loss."""

    loss: Loss
    played: Played
    rates: Mapping[OptionKey, float]
    """Requests/s that each replica of a kind then has to take, about."""


# Wide: what is placed where, with which loads, and the seed of the replay.
def played_losses(
    blueprint: Blueprint,
    inventory: Inventory,
    problem: PlacementProblem,
    placement: Placement,
    rates: Mapping[OptionKey, float],
    seed: int,
) -> dict[str, PlayedLoss]:
    """By model, of those that are to survive something and have an SLO. `rates` as `replay` takes them."""
    after: dict[str, PlayedLoss] = {}
    for need in problem.needs:
        if need.survive is None or not need.rate or blueprint.models[need.model].slo is None:
            continue
        options = {problem.options[i].key: problem.options[i] for i in problem.of(need.model)}
        mine = [r for r in placement.replicas if r.model == need.model and replica_key(r) in options]
        loss, left = _worst(problem, need, options, mine)
        gives = {replica.replica: after_loss(options[replica_key(replica)]) for replica in left}
        every = math.fsum(gives.values())
        if loss is None or not every:
            continue
        played = replay(blueprint, inventory, Placement(replicas=tuple(left)), rates, seed, [need.model])
        if need.model in played:
            then = {replica_key(replica): need.rate * gives[replica.replica] / every for replica in left}
            after[need.model] = PlayedLoss(loss, played[need.model], then)
    return after


def _worst(
    problem: PlacementProblem, need: ModelNeed, options: Mapping[OptionKey, Option], mine: Sequence[ReplicaPlacement]
) -> tuple[Loss | None, Sequence[ReplicaPlacement]]:
    """The loss that leaves least of a model's capacity, and who is left; None where no loss takes any of it."""
    pools = {pool.key: pool for pool in problem.pools}
    pools |= {pool.key: pool for replica in mine for pool in options[replica_key(replica)].pools}
    worst: tuple[float, Loss | None, Sequence[ReplicaPlacement]] = (math.inf, None, mine)
    for loss in losses(need.survive, pools.values()) if need.survive is not None else ():
        here = [r for r in mine if any(pool.key in loss.pools for pool in options[replica_key(r)].pools)]
        if loss.node:
            (key,) = loss.pools
            here = _on_one_node(here, options, key, pools[key].devices_per_node)
        gone = {replica.replica for replica in here}
        left = [replica for replica in mine if replica.replica not in gone]
        capacity = math.fsum(after_loss(options[replica_key(replica)]) for replica in left)
        if gone and capacity < worst[0]:
            worst = capacity, loss, left
    return worst[1:]


def _on_one_node(
    here: Sequence[ReplicaPlacement], options: Mapping[OptionKey, Option], key: tuple[str, str], room: int
) -> list[ReplicaPlacement]:
    """The replicas that a scheduler may have put on the same node: those that give most for their devices first."""

    def size(replica: ReplicaPlacement) -> int:
        return max(size for (pool, size), _ in options[replica_key(replica)].blocks.items() if pool == key)

    densest = sorted(here, key=lambda r: (-after_loss(options[replica_key(r)]) / size(r), r.replica))
    together = []
    for replica in densest:
        if size(replica) <= room:
            together.append(replica)
            room -= size(replica)
    return together
