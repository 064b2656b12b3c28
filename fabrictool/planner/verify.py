"""Does a placement keep the rules? Read off blueprint and inventory, by code that no solver uses.

What it finds is a bug of a solver or of the problem's making, never a user's mistake: nothing of the solvers' columns,
rows or tables is looked at.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines, model

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.plan import Placement, ReplicaPlacement


def violations(
    blueprint: Blueprint, inventory: Inventory, placement: Placement, unseen: Container[str] = ()
) -> list[str]:
    """The rules that the placement breaks, in words; none when all is well.

    `unseen` are clusters that do not answer: what stands there was placed earlier and is not judged, but counts.
    """
    found: list[str] = []
    by_model: dict[str, list[ReplicaPlacement]] = defaultdict(list)
    by_partition: dict[tuple[str, str], list[int]] = defaultdict(list)
    for replica in placement.replicas:
        if replica.cluster in unseen:
            by_model[replica.model].append(replica)
            continue
        there = inventory.clusters.get(replica.cluster)
        if replica.model not in blueprint.models or there is None or replica.partition not in there.partitions:
            place = f"{replica.cluster}/{replica.partition}"
            found.append(f"{replica.replica}: there is no such model or place ({replica.model} in {place})")
            continue
        by_model[replica.model].append(replica)
        by_partition[replica.cluster, replica.partition].append(replica.tp)
        found += [f"{replica.replica}: {complaint}" for complaint in _misplaced(blueprint, inventory, replica)]
    for name, count in Counter(replica.replica for replica in placement.replicas).items():
        if count > 1:
            found.append(f"{name} is placed {count} times")
    for (cluster, name), sizes in sorted(by_partition.items()):
        partition = inventory.clusters[cluster].partitions[name]
        if not _packs(sizes, partition.nodes, partition.devices_per_node):
            found.append(f"{cluster}/{name}: {sum(sizes)} devices in parts of {sorted(sizes)} do not fit its nodes")
    for name, wanted in blueprint.models.items():
        found += [f"{name}: {complaint}" for complaint in _counts(wanted, inventory, by_model[name], unseen)]
    return found


def _misplaced(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement) -> Iterable[str]:
    wanted, cluster = blueprint.models[replica.model], inventory.clusters[replica.cluster]
    partition = cluster.partitions[replica.partition]
    provider = inventory.sites[cluster.site].provider
    if not cluster.enabled:
        yield f"{replica.cluster} is not enabled"
    if (replica.provider, replica.site, replica.device) != (provider, cluster.site, partition.device):
        yield "its provider, site or device is not that of its partition"
    if wanted.trust is not None and provider not in wanted.trust:
        yield f"{provider} is not trusted with it"
    if partition.tier == "scavenger" and wanted.tier != "scavenger":
        yield f"{replica.cluster}/{replica.partition} is scavenger capacity"
    if cluster.software.engines and wanted.engine not in cluster.software.engines:
        yield f"{wanted.engine} is not installed on {replica.cluster}"
    if replica.tp > partition.devices_per_node:
        yield f"{replica.tp} devices are more than a node has"
    yield from _too_large(wanted, partition, replica.tp)


def _too_large(wanted: Model, partition: Partition, tp: int) -> Iterable[str]:
    """The plainest account of memory: the published number of parameters, and one context of cache."""
    architecture = model(wanted.architecture_id)
    if architecture is None:
        return
    device = accelerators()[partition.device]
    memory = device.memory
    if device.kind == "cpu" and partition.memory_per_node is not None:
        memory = as_float(partition.memory_per_node) / partition.devices_per_node
    width = engines()[wanted.engine].weight_bytes[wanted.variant.precision]
    weights = architecture.published_parameters * min(width, 4.0) * PLAIN_SHARE
    if weights > tp * memory * DRIVER_SHARE:
        yield f"{weights / 1e9:.0f} GB of weights do not fit {tp} × {partition.device}"
    if architecture.heads % tp:
        yield f"{architecture.heads} heads are not dealt out evenly over {tp} devices"


PLAIN_SHARE = 0.95
"""Of the published parameters times the width: rounded numbers, and tensors that a checkpoint holds twice."""
DRIVER_SHARE = 1.08
"""Of the datasheet's memory: stacked memory is sold in decimal and reported in larger units."""


def _counts(
    wanted: Model, inventory: Inventory, mine: Sequence[ReplicaPlacement], unseen: Container[str]
) -> Iterable[str]:
    stable = [
        r for r in mine if r.cluster in unseen or inventory.clusters[r.cluster].partitions[r.partition].tier == "owned"
    ]
    least = max(wanted.replicas.min, int(wanted.protect))
    if len(stable) < least:
        yield f"{len(stable)} replicas on owned capacity, at least {least} are wanted"
    if len([r for r in mine if r.cluster not in unseen]) > wanted.replicas.max:
        yield f"{len(mine)} replicas, at most {wanted.replicas.max} are wanted"
    for pin in wanted.place.pin:
        there = [r for r in mine if r.cluster == pin.cluster and pin.partition in (None, r.partition)]
        if pin.cluster not in unseen and len(there) != pin.replicas:
            yield f"{len(there)} replicas in {pin.cluster}, {pin.replicas} are pinned there"
    sites = Counter(r.site for r in mine)
    if wanted.place.spread == "site" and len(sites) > 1 and not any(r.cluster in unseen for r in mine):
        even = math.ceil(len(mine) / len(sites))
        for site, count in sites.items():
            if count > even:
                yield f"{count} of {len(mine)} replicas at {site}, spread over {len(sites)} sites"


def _packs(sizes: Sequence[int], nodes: int, per_node: int) -> bool:
    """Whether so many devices together can be had inside nodes; largest first is exact for powers of two."""
    free = Counter({per_node: nodes})
    for size in sorted(sizes, reverse=True):
        room = min((left for left, count in free.items() if count and left >= size), default=None)
        if room is None:
            return False
        free[room] -= 1
        free[room - size] += 1
    return True
