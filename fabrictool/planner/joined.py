"""Nodes that join by themselves: the inventory says how many may be used, the mesh how many are there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import ClusterSpec, Inventory


def as_there(inventory: Inventory, evidence: Evidence) -> Inventory:
    """The inventory with as many nodes in joined clusters as could serve: the idle ones, and those that we assigned.

    A node is told one thing to serve, so a replica has all devices of its node. Clusters that nobody looked at are as
    the inventory says.
    """
    ours = Counter(
        (spec.cluster, spec.partition) for spec in evidence.running_specs().values() if isinstance(spec, AgentSpec)
    )
    clusters = {
        name: _as_there(name, cluster, evidence, ours) if cluster.joined else cluster
        for name, cluster in inventory.clusters.items()
    }
    return inventory.model_copy(update={"clusters": clusters})


def _as_there(name: str, cluster: ClusterSpec, evidence: Evidence, ours: Counter[tuple[str, str]]) -> ClusterSpec:
    facts = evidence.clusters.get(name)
    idle = facts.idle if facts is not None and facts.known else None
    partitions = {}
    for label, partition in cluster.partitions.items():
        there = partition.nodes if idle is None else idle.get(label, 0) + ours[name, label]
        changes = {"whole_nodes": True, "nodes": min(partition.nodes, there)}
        partitions[label] = partition.model_copy(update=changes)
    return cluster.model_copy(update={"partitions": partitions})
