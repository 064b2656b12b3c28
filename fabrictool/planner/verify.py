"""Does a placement keep the rules? Read off blueprint and inventory, by code that no solver uses.

What it finds is a bug of a solver or of the problem's making, never a user's mistake: nothing of the solvers' columns,
rows or tables is looked at.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines
from fabrictool.engines.adapter import adapter

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.limits import Limit
    from fabrictool.domain.plan import Placement, ReplicaPlacement, StagePlacement


def violations(
    blueprint: Blueprint,
    inventory: Inventory,
    placement: Placement,
    unseen: Container[str] = (),
    now: float = -math.inf,
) -> list[str]:
    """The rules that the placement breaks, in words; none when all is well.

    `unseen` are clusters that do not answer: what stands there was placed earlier and is not judged, but counts.
    Maintenance windows that end before `now` are over.
    """
    broken: list[str] = []
    by_model: dict[str, list[ReplicaPlacement]] = defaultdict(list)
    by_partition: dict[tuple[str, str], list[int]] = defaultdict(list)
    for replica in placement.replicas:
        if replica.cluster in unseen:
            by_model[replica.model].append(replica)
            continue
        nowhere = [f"{s.cluster}/{s.partition}" for s in replica.every_stage if not _exists(inventory, s)]
        if replica.model not in blueprint.models or nowhere:
            place = ", ".join(nowhere) or f"{replica.cluster}/{replica.partition}"
            broken.append(f"{replica.replica}: there is no such model or place ({replica.model} in {place})")
            continue
        by_model[replica.model].append(replica)
        for cluster, name, held in replica.blocks(inventory):
            by_partition[cluster, name].append(held)
        broken += [f"{replica.replica}: {complaint}" for complaint in _misplaced(blueprint, inventory, replica)]
    for name, count in Counter(replica.replica for replica in placement.replicas).items():
        if count > 1:
            broken.append(f"{name} is placed {count} times")
    for (cluster, name), sizes in sorted(by_partition.items()):
        partition = inventory.clusters[cluster].partitions[name]
        if not _packs(sizes, partition.nodes, partition.devices_per_node):
            broken.append(f"{cluster}/{name}: {sum(sizes)} devices in parts of {sorted(sizes)} do not fit its nodes")
    broken += _beyond_limits(blueprint, inventory, placement, unseen)
    for name, wanted in blueprint.models.items():
        ways = wanted.each_variant.values()
        roomy = {site for its in ways for site in _roomy_sites(its, blueprint.architecture(wanted), inventory)}
        counted = _counts(wanted, inventory, by_model[name], unseen, now, roomy)
        broken += [f"{name}: {complaint}" for complaint in counted]
        if wanted.place.spread == "node" and not any(r.cluster in unseen for r in by_model[name]):
            nodes = _most_nodes(inventory, by_model[name])
            if nodes < wanted.replicas.min:
                broken.append(f"{name}: {wanted.replicas.min} nodes are to hold a replica, {nodes} can")
    return broken


def _beyond_limits(
    blueprint: Blueprint, inventory: Inventory, placement: Placement, unseen: Container[str]
) -> Iterable[str]:
    """Limits of which more is used; what cannot be seen cannot be moved, and may be more by itself."""
    for name, limit in (*inventory.limits.items(), *blueprint.limits.items()):
        seen, hidden = (
            dict.fromkeys(("devices", "cost", "power"), 0.0),
            dict.fromkeys(("devices", "cost", "power"), 0.0),
        )
        for replica in placement.replicas:
            into = hidden if replica.cluster in unseen else seen
            there = all(_exists(inventory, stage) for stage in replica.every_stage)
            for cluster, place, held in replica.blocks(inventory) if there else ():
                if _is_of(limit, inventory, cluster, place):
                    partition = inventory.clusters[cluster].partitions[place]
                    designed = accelerators()[partition.device].tdp_w * partition.devices_per_node
                    share = held / partition.devices_per_node
                    into["devices"] += held
                    into["cost"] += share * (partition.price.amount if partition.price is not None else 0.0)
                    into["power"] += share * as_float(partition.power, designed)
        most = {
            "devices": [limit.devices, None if (hours := limit.device_hours_per_month) is None else hours / 730],
            "cost": [None if limit.cost is None else limit.cost.amount / HOURS[limit.cost.per]],
            "power": [None if limit.power is None else float(limit.power)],
        }
        for what, used in seen.items():
            for allowed in most[what]:
                if allowed is not None and used + hidden[what] > max(allowed, hidden[what]) * (1 + 1e-6):
                    yield f"limit {name}: {used + hidden[what]:.6g} of {what}, at most {allowed:.6g} may be used"


HOURS = {"h": 1.0, "day": 24.0, "month": 730.0}


def _is_of(limit: Limit, inventory: Inventory, cluster: str, partition: str) -> bool:
    described = inventory.clusters[cluster]
    options = described.partitions[partition].job.options
    accounts = [options[name] for name in ("account", "A", "P", "project") if name in options]
    return (
        limit.provider in (None, inventory.provider_of(cluster))
        and limit.site in (None, described.site)
        and limit.cluster in (None, cluster)
        and (limit.account is None or limit.account in accounts[:1])
    )


def _exists(inventory: Inventory, stage: StagePlacement) -> bool:
    cluster = inventory.clusters.get(stage.cluster)
    return cluster is not None and stage.partition in cluster.partitions


def _misplaced(blueprint: Blueprint, inventory: Inventory, replica: ReplicaPlacement) -> Iterable[str]:
    whole = blueprint.models[replica.model]
    if replica.variant not in whole.each_variant:
        yield f"{replica.variant or 'no name'} is none of its variants"
    wanted = whole.in_variant(replica.variant)
    first = inventory.clusters[replica.cluster]
    if (replica.provider, replica.site) != (inventory.provider_of(replica.cluster), first.site):
        yield "its provider or site is not that of its partition"
    for stage in dict.fromkeys(replica.every_stage):
        cluster = inventory.clusters[stage.cluster]
        partition = cluster.partitions[stage.partition]
        provider = inventory.sites[cluster.site].provider
        if not cluster.enabled:
            yield f"{stage.cluster} is not enabled"
        if stage.device != partition.device:
            yield f"{stage.cluster}/{stage.partition} has no {stage.device}"
        if wanted.trust is not None and provider not in wanted.trust:
            yield f"{provider} is not trusted with it"
        if partition.tier == "scavenger" and wanted.tier != "scavenger":
            yield f"{stage.cluster}/{stage.partition} is scavenger capacity"
        if cluster.software.engines and wanted.engine not in cluster.software.engines:
            yield f"{wanted.engine} is not installed on {stage.cluster}"
    yield from _badly_cut(wanted, inventory, replica)
    if (replica.phase == "unified") == (wanted.phases == "split") and wanted.phases != "any":
        yield f"its phase is {replica.phase}, the blueprint says {wanted.phases}"
    yield from _too_large(wanted, blueprint.architecture(wanted), inventory, replica)
    for name, architecture in blueprint.companions(wanted).items():
        yield from (f"{name}: {why}" for why in _too_large(wanted, architecture, inventory, replica))
    if wanted.companions and replica.devices > 1:
        yield f"{', '.join(wanted.companions)} can share one device with it, not {replica.devices}"


def _badly_cut(wanted: Model, inventory: Inventory, replica: ReplicaPlacement) -> Iterable[str]:
    declared, capabilities = wanted.parallelism, adapter(wanted.engine).capabilities
    for stage in dict.fromkeys(replica.every_stage):
        per_node = inventory.clusters[stage.cluster].partitions[stage.partition].devices_per_node
        if stage.tp > per_node and stage.tp != declared.tp:
            yield f"{stage.tp} devices are more than a node has"
        elif stage.tp > per_node and stage.tp % per_node:
            yield f"{stage.tp} devices are no whole nodes of {per_node}"
        if declared.tp not in (None, stage.tp):
            yield f"its tp is {stage.tp}, the blueprint says {declared.tp}"
    if declared.pp not in (None, replica.pp):
        yield f"its pp is {replica.pp}, the blueprint says {declared.pp}"
    yield from _badly_merging(wanted, inventory, replica)
    if replica.pp > 1 and not capabilities.pipeline_parallel:
        yield f"{wanted.engine} has no pipeline"
    if not capabilities.several_nodes and len(replica.blocks(inventory)) > 1:
        yield f"{wanted.engine} runs on one node only"


def _badly_merging(wanted: Model, inventory: Inventory, replica: ReplicaPlacement) -> Iterable[str]:
    declared = wanted.parallelism.dp
    if declared not in (None, replica.dp):
        yield f"its dp is {replica.dp}, the blueprint says {declared}"
    if replica.dp == 1:
        return
    per_node = inventory.clusters[replica.cluster].partitions[replica.partition].devices_per_node
    if replica.dp not in adapter(wanted.engine).capabilities.live_tp_switch:
        yield f"{wanted.engine} does not merge {replica.dp} engines"
    if replica.pp > 1 or replica.phase != "unified":
        yield "engines that merge are no pipeline, and do all of serving"
    if replica.dp * replica.tp > per_node:
        yield f"{replica.dp} engines of {replica.tp} devices do not stand on one node"


def _too_large(
    wanted: Model, architecture: ModelArchitecture | None, inventory: Inventory, replica: ReplicaPlacement
) -> Iterable[str]:
    """The plainest account of memory: the published number of parameters, of which each of the engines that merge has
    all.
    """
    if architecture is None:
        return
    memory, engine = 0.0, engines()[wanted.engine]
    for stage in replica.every_stage:
        partition = inventory.clusters[stage.cluster].partitions[stage.partition]
        device = accelerators()[partition.device]
        per_device = device.memory
        if device.kind == "cpu" and partition.memory_per_node is not None:
            per_device = as_float(partition.memory_per_node) / partition.devices_per_node
        memory += stage.tp * per_device
        devices = stage.tp * replica.dp
        held = engine.merged(architecture, devices) if replica.dp > 1 else architecture
        why = engine.unsplittable(held, devices, 1, wanted.variant.precision)
        if why:
            yield why
    width = engine.weight_bytes[wanted.variant.precision]
    weights = architecture.published_parameters * min(width, 4.0) * PLAIN_SHARE
    if weights > memory * DRIVER_SHARE:
        yield f"{weights / 1e9:.0f} GB of weights do not fit {replica.devices // replica.dp} × {replica.device}"


PLAIN_SHARE = 0.95
"""Of the published parameters times the width: rounded numbers, and tensors that a checkpoint holds twice."""
DRIVER_SHARE = 1.08
"""Of the datasheet's memory: stacked memory is sold in decimal and reported in larger units."""


def _counts(
    wanted: Model,
    inventory: Inventory,
    mine: Sequence[ReplicaPlacement],
    unseen: Container[str],
    now: float,
    roomy: set[str],
) -> Iterable[str]:
    stable = [r for r in mine if r.phase != "prefill" and (r.cluster in unseen or _owned(inventory, r))]
    least = max(wanted.replicas.min, int(wanted.protect))
    if len(stable) < least:
        yield f"{len(stable)} replicas on owned capacity, at least {least} are wanted"
    begins = {
        float(window.begin)
        for cluster in inventory.clusters.values()
        for partition in cluster.partitions.values()
        for window in partition.maintenance
        if float(window.end) > now
    }
    for when in sorted(begins):
        left = [r for r in stable if r.cluster in unseen or not _away(inventory, r, max(when, now))]
        if len(left) < least:
            yield f"{len(left)} replicas are left in a maintenance window, at least {least} are wanted"
            break
    phases = Counter(r.phase for r in mine if r.cluster not in unseen)
    if bool(phases["prefill"]) != bool(phases["decode"]):
        yield f"{phases['prefill']} replicas for prefill and {phases['decode']} for decode are of no use"
    if len([r for r in mine if r.cluster not in unseen]) > wanted.replicas.max:
        yield f"{len(mine)} replicas, at most {wanted.replicas.max} are wanted"
    for pin in wanted.place.pin:
        there = [r for r in mine if r.cluster == pin.cluster and pin.partition in (None, r.partition)]
        if pin.cluster not in unseen and len(there) != pin.replicas:
            yield f"{len(there)} replicas in {pin.cluster}, {pin.replicas} are pinned there"
    sites = Counter(r.site for r in mine)
    if wanted.place.spread == "site" and not any(r.cluster in unseen for r in mine):
        over = max(len(sites), len(roomy))
        even = math.ceil(len(mine) / max(1, over))
        for site, count in sites.items():
            if count > even:
                yield f"{count} of {len(mine)} replicas at {site}, spread over {over} sites"


def _most_nodes(inventory: Inventory, replicas: Iterable[ReplicaPlacement]) -> int:
    """On how many nodes they are for certain, if those that we choose are chosen so."""
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for replica in (r for r in replicas if r.phase != "prefill" and _owned(inventory, r)):
        for cluster, name, held in replica.blocks(inventory):
            blocks[cluster, name].append(held)
    number = 0
    for (cluster, name), sizes in blocks.items():
        described = inventory.clusters[cluster]
        partition = described.partitions[name]
        by_us = described.bare and accelerators()[partition.device].kind != "cpu"
        by_us |= described.leaves_out_nodes and not partition.job.names_nodes
        alone = [size for size in sizes if 2 * size > partition.devices_per_node]
        if accelerators()[partition.device].kind == "cpu" and not partition.whole_nodes:
            alone = []
        number += min(partition.nodes, len(sizes) if by_us else max(1, len(alone)))
    return number


def _roomy_sites(wanted: Model, architecture: ModelArchitecture | None, inventory: Inventory) -> set[str]:
    """Where the model may stand and would have room to spare on one node: no solver needs to be asked for these."""
    if architecture is None or not adapter(wanted.engine).capabilities.pipeline_parallel:
        return set()
    cache = 4.0 * architecture.layers * architecture.kv_heads * architecture.head_dim
    context = float(wanted.variant.context or architecture.max_context)
    width = min(engines()[wanted.engine].weight_bytes[wanted.variant.precision], 4.0)
    sites = set()
    for cluster in inventory.clusters.values():
        provider = inventory.sites[cluster.site].provider
        trusted = wanted.trust is None or provider in wanted.trust
        installed = not cluster.software.engines or wanted.engine in cluster.software.engines
        for partition in cluster.partitions.values():
            device = accelerators()[partition.device]
            usual = device.kind != "cpu" and partition.walltime is None and not partition.maintenance
            lasting = partition.tier == "owned" or wanted.tier == "scavenger"
            roomy = device.memory > ROOMY * (architecture.published_parameters * width + cache * context)
            if cluster.enabled and trusted and installed and lasting and usual and roomy:
                sites.add(cluster.site)
    return sites


ROOMY = 2.0
"""Times its weights and its longest context on a single device."""


def _owned(inventory: Inventory, replica: ReplicaPlacement) -> bool:
    return all(inventory.clusters[s.cluster].partitions[s.partition].tier == "owned" for s in replica.every_stage)


def _away(inventory: Inventory, replica: ReplicaPlacement, when: float) -> bool:
    return any(
        float(window.begin) <= when < float(window.end)
        for stage in replica.every_stage
        for window in inventory.clusters[stage.cluster].partitions[stage.partition].maintenance
    )


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
