"""What is left of a model after the worst of the losses that it is to survive, played event by event as the whole is.

The tables say how much has to be left; the replay says whether that keeps the SLO, with the weights that the gateways
go on with. Where the tables leave nothing, or the model has no SLO, there is nothing to play.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from fabrictool.domain.plan import Placement
from fabrictool.planner.other_end import OtherEnd
from fabrictool.planner.played import PlayedLoss
from fabrictool.planner.problem import replica_key
from fabrictool.planner.replay import MANY, replay
from fabrictool.planner.survival import SIDES, after_loss, losses

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.planner.problem import ModelNeed, Option, OptionKey, PlacementProblem, PoolKey
    from fabrictool.planner.survival import Loss
    from fabrictool.planner.weights import GroupRates


# Wide: what is placed where, with which loads, the seed of the replay, and of whom.
def played_losses(
    blueprint: Blueprint,
    inventory: Inventory,
    problem: PlacementProblem,
    placement: Placement,
    rates: Mapping[OptionKey, float],
    seed: int,
    only: Container[str],
    flows: GroupRates = MappingProxyType({}),
) -> dict[str, PlayedLoss]:
    """By model, of those of `only` that are to survive something and have an SLO. `rates` and `flows` as `replay` takes
    them.
    """
    needs = [
        need
        for need in problem.needs
        if need.model in only
        and need.survive is not None
        and need.rate
        and blueprint.models[need.model].slo is not None
    ]

    def play(need: ModelNeed) -> PlayedLoss | None:
        options = {problem.options[i].key: problem.options[i] for i in problem.of(need.model)}
        mine = [r for r in placement.replicas if r.model == need.model and replica_key(r) in options]
        loss, left = _worst(problem, need, options, mine)
        left = _with_partners(problem, left)
        then = _rates(need.rate, left, options)
        if loss is None or not then:
            return None
        played = replay(blueprint, inventory, Placement(replicas=tuple(left)), rates, seed, [need.model], flows)
        return PlayedLoss(loss, played[need.model], then) if need.model in played else None

    with OtherEnd(needs, play, wanted=len(needs) >= MANY) as other_end:
        after = {need.model: other_end.done(at) or play(need) for at, need in enumerate(needs)}
    return {model: its for model, its in after.items() if its is not None}


# Wide: who is where.
def _worst(
    problem: PlacementProblem,
    need: ModelNeed,
    options: Mapping[OptionKey, Option],
    mine: Sequence[ReplicaPlacement],
) -> tuple[Loss | None, Sequence[ReplicaPlacement]]:
    """The loss that leaves least of what a model can take, and who is left; None where no loss takes any of it.

    Of pairs each half is lost by itself: what is left takes what its weaker side does.
    """
    pools = {pool.key: pool for pool in problem.pools}
    pools |= {pool.key: pool for replica in mine for pool in options[replica_key(replica)].pools}
    worst: tuple[float, Loss | None, Sequence[ReplicaPlacement]] = (math.inf, None, mine)
    whole = all(options[replica_key(replica)].phase == "unified" for replica in mine)
    sides = [_gives(mine, options, side) for side in SIDES[: 1 if whole else None]]
    for loss in losses(need.survive, pools.values()) if need.survive is not None else ():
        here = [r for r in mine if any(pool.key in loss.pools for pool in options[replica_key(r)].pools)]
        for gives in sides:
            gone = frozenset(replica.replica for replica in here)
            if loss.node:
                (key,) = loss.pools
                sizes = {r.replica: _size(options[replica_key(r)], key) for r in here}
                gone = _on_one_node(sizes, gives, pools[key].devices_per_node)
            left = [replica for replica in mine if replica.replica not in gone]
            capacity = math.fsum(gives[replica.replica] for replica in left)
            if gone and capacity < worst[0]:
                worst = capacity, loss, left
    return worst[1:]


def _gives(replicas: Sequence[ReplicaPlacement], options: Mapping[OptionKey, Option], side: str) -> dict[str, float]:
    """Requests/s of which a replica does that side within the SLO."""
    kinds = {replica.replica: options[replica_key(replica)] for replica in replicas}
    return {name: after_loss(its) if its.phase in ("unified", side) else 0.0 for name, its in kinds.items()}


def _with_partners(problem: PlacementProblem, left: Sequence[ReplicaPlacement]) -> list[ReplicaPlacement]:
    """Without halves of pairs that reach no other half any more: nobody asks them."""
    halves = [replica for replica in left if replica.phase != "unified"]
    alone = {
        mine.replica
        for mine in halves
        if not any(other.phase != mine.phase and _handed(mine, other) in problem.transfers for other in halves)
    }
    return [replica for replica in left if replica.replica not in alone]


def _handed(mine: ReplicaPlacement, other: ReplicaPlacement) -> tuple[str, PoolKey, PoolKey]:
    sender, receiver = (mine, other) if mine.phase == "prefill" else (other, mine)
    return sender.model, (sender.cluster, sender.partition), (receiver.cluster, receiver.partition)


def _rates(
    rate: float, left: Sequence[ReplicaPlacement], options: Mapping[OptionKey, Option]
) -> dict[OptionKey, float]:
    """What each takes of a model's requests/s when all are loaded alike; nothing where they can take none."""
    gives = dict.fromkeys(("unified", *SIDES), 0.0)
    for replica in left:
        gives[replica.phase] += after_loss(options[replica_key(replica)])
    pairs = min(gives[side] for side in SIDES)
    every = gives["unified"] + pairs
    share = {"unified": 1.0} | {side: pairs / gives[side] for side in SIDES if gives[side]}
    return {
        replica_key(replica): rate * share[replica.phase] * after_loss(options[replica_key(replica)]) / every
        for replica in left
        if every and replica.phase in share
    }


def _size(option: Option, key: PoolKey) -> int:
    """Devices that it takes of one node there."""
    return max(size for (pool, size), _ in option.blocks.items() if pool == key)


def _on_one_node(sizes: Mapping[str, int], gives: Mapping[str, float], room: int) -> frozenset[str]:
    """The replicas that give most of those that a scheduler may have put on the same node of so many devices."""
    best: list[tuple[float, frozenset[str]]] = [(0.0, frozenset())] * (room + 1)
    for name in sorted(sizes):
        for devices in range(room, sizes[name] - 1, -1):
            value, others = best[devices - sizes[name]]
            if value + gives[name] > best[devices][0]:
                best[devices] = value + gives[name], others | {name}
    return best[room][1]
