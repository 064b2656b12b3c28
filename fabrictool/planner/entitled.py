"""Who may be served by whom: for every consumer group and model, that some replica may take its requests.

Routing refuses a request whose group allows none of the providers that have the model (403); a plan says so before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.planner.lost_together import may_share_a_node
from fabrictool.routing.candidates import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Placement, ReplicaPlacement


def unserved_groups(
    blueprint: Blueprint, inventory: Inventory, placement: Placement, *, node_loss: bool = False
) -> Iterator[str]:
    """What fails, in words: groups that a placed model cannot serve, or not without any one node with `node_loss`."""
    trust = TrustPolicy(
        {name: frozenset(group.allow) for name, group in blueprint.trust.groups.items()},
        {name: frozenset(model.trust) for name, model in blueprint.models.items() if model.trust is not None},
    )
    visible = {name: frozenset(model.groups) for name, model in blueprint.models.items() if model.groups is not None}
    by_model: Mapping[str, list[ReplicaPlacement]] = defaultdict(list)
    for replica in placement.replicas:
        by_model[replica.model].append(replica)
    # Without groups a gateway is open, and serves everybody alike.
    groups: list[str | None] = [*sorted(blueprint.trust.groups)] or [None]
    for group in groups:
        who = "anybody" if group is None else f"group {group}"
        for model in sorted(by_model):
            if group is not None and group not in visible.get(model, (group,)):
                continue
            mine = [replica for replica in by_model[model] if trust.permits(replica.provider, model, group, None)]
            if not mine:
                there = ", ".join(sorted({replica.provider for replica in by_model[model]}))
                allowed = ", ".join(sorted(trust.groups.get(group or "", ()))) or "nobody"
                yield f"{who} gets no answer from {model}: it stands with {there}, and the group allows {allowed}"
            elif node_loss and not _outlive(mine, inventory):
                names = ", ".join(replica.replica for replica in mine)
                yield f"{who} gets no answer from {model} without one node: {names} may be on the same"


def _outlive(replicas: Sequence[ReplicaPlacement], inventory: Inventory) -> bool:
    """Whether one of them serves on, whichever node goes: wherever the scheduler may have put them."""
    lost_together = [
        {replica.replica for replica in replicas if (cluster, partition) in _places(replica)}
        if _fit_one_node(replicas, cluster, partition, inventory)
        else set()
        for cluster, partition in {place for replica in replicas for place in _places(replica)}
    ]
    lone = len({replica.replica for replica in replicas if _prefills_not(replica)}) < 2
    return not lone and not any(len(lost) == len(replicas) for lost in lost_together)


def _prefills_not(replica: ReplicaPlacement) -> bool:
    return replica.phase != "prefill"


def _places(replica: ReplicaPlacement) -> set[tuple[str, str]]:
    return {(stage.cluster, stage.partition) for stage in replica.every_stage}


def _exists(place: tuple[str, str], inventory: Inventory) -> bool:
    cluster, partition = place
    return cluster in inventory.clusters and partition in inventory.clusters[cluster].partitions


def _fit_one_node(replicas: Sequence[ReplicaPlacement], cluster: str, name: str, inventory: Inventory) -> bool:
    """Whether a node of a partition could have a part of each of them that has one there."""
    partition = inventory.clusters[cluster].partitions.get(name)
    if partition is None:  # of a cluster that does not answer, and has changed: nothing speaks against it
        return True
    if may_share_a_node(inventory.clusters[cluster], partition):
        return True
    seen = [replica for replica in replicas if all(_exists(place, inventory) for place in _places(replica))]
    parts = [[held for *place, held in replica.blocks(inventory) if place == [cluster, name]] for replica in seen]
    return sum(min(part) for part in parts if part) <= partition.devices_per_node
