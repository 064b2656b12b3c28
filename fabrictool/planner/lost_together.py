"""What is lost together wherever the planner places replicas: those on a shared node, and all behind one entrance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.catalog import accelerators

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import ClusterSpec, Inventory, Partition
    from fabrictool.domain.plan import Forecast, Placement


def may_share_a_node(cluster: ClusterSpec, partition: Partition) -> bool:
    """Whether all replicas of a partition may stand on one node, however many devices the inventory says it has.

    Schedulers count accelerators. A job or pod without any is put beside others as long as a node has cores left,
    unless it asks for the whole node, which neither a pod nor a process without a scheduler can.
    """
    counted = accelerators()[partition.device].kind != "cpu"
    return not (counted or (partition.whole_nodes and (cluster.queues or cluster.joined)))


def keeps_apart(cluster: ClusterSpec, partition: Partition) -> bool:
    """Whether replicas of a model are on different nodes of a partition if the blueprint wants that.

    The planner sees to it where it gives devices away. Batch schedulers put jobs wherever there is room, as close
    together as they can, unless jobs say where they must not be.
    """
    return (cluster.bare and not may_share_a_node(cluster, partition)) or deals_parts(cluster, partition)


def deals_parts(cluster: ClusterSpec, partition: Partition) -> bool:
    """Whether each of such replicas has a part of the partition's nodes (`domain.node_parts`)."""
    return cluster.leaves_out_nodes and partition.tier == "owned" and not partition.job.names_nodes


def unkept_losses(
    blueprint: Blueprint, inventory: Inventory, placement: Placement, forecast: Forecast
) -> Iterator[str]:
    """What speaks against the loss that models are to survive, in words."""
    yield from _shared_nodes(inventory, placement, forecast)
    yield from _lone_entrances(blueprint, inventory)


def _shared_nodes(inventory: Inventory, placement: Placement, forecast: Forecast) -> Iterator[str]:
    """Partitions that keep no reserve against a node because nothing keeps replicas apart on them."""
    for model in forecast.models:
        if model.survival is None or model.survival.loss != "node" or not model.survival.worst:
            continue
        stages = [stage for r in placement.replicas if r.model == model.model for stage in r.every_stage]
        for cluster, name in sorted({(stage.cluster, stage.partition) for stage in stages}):
            described = inventory.clusters[cluster]
            partition = described.partitions.get(name)
            if partition is None or partition.nodes == 1 or not may_share_a_node(described, partition):
                continue
            where = f"{model.model} is to survive the loss of any node, but all replicas on {cluster}/{name} may be on"
            if described.queues:
                yield f"{where} the same: `whole_nodes: true` of the partition gives each a node of its own"
            else:
                yield f"{where} the same: a cluster of kind {described.kind} keeps none apart without accelerators"


def _lone_entrances(blueprint: Blueprint, inventory: Inventory) -> Iterator[str]:
    """Models that are to survive what every gateway for clients would be lost with."""
    places = {gateway.cluster for gateway in blueprint.every_gateway.values() if gateway.listen is not None}
    sites = {inventory.clusters[name].site for name in places}
    providers = {inventory.sites[site].provider for site in sites}
    for name, model in sorted(blueprint.models.items()):
        among = {"site": sites, "provider": providers}.get(model.survive or "")
        if among is not None and len(among) == 1:
            where = f"every gateway for clients is with {min(among)}"
            yield f"{name} is to survive the loss of any {model.survive}, but {where}"
