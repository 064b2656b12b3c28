"""Which devices of its node a replica gets, so that two replicas never share one without being told.

Devices are numbered as their driver numbers them, from 0 on; a second partition of the same cluster goes on where the
first one ends, in the inventory's order. A running replica keeps its devices as long as nothing else of it changes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from fabrictool.catalog import accelerators
from fabrictool.domain.specs import lasting

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.specs import AgentSpec

_VARIABLES = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "ROCR_VISIBLE_DEVICES"}
"""Vendor → what restricts a process to some devices (CUDA programming guide; ROCm documentation)."""


def visibility_variable(device: str) -> str:
    """The environment variable that shows a process its devices; empty for CPUs and vendors without one here."""
    accelerator = accelerators()[device]
    return "" if accelerator.kind == "cpu" else _VARIABLES.get(accelerator.title.partition(" ")[0], "")


def with_devices(
    wanted: Iterable[AgentSpec],
    inventory: Inventory,
    running: Mapping[str, AgentSpec],
    living: Iterable[AgentSpec],
    renewed: Container[str] = (),
) -> list[AgentSpec]:
    """`wanted` with their devices.

    `running` maps replicas to their youngest living spec, `living` are all of them, `renewed` the replicas that get a
    new session whatever they are told. What starts anew gets devices that nobody holds, as long as there are some;
    then those of its own former; then those of others, which must end first (`fabrictool.planner.diff`).
    """
    groups: dict[tuple[str, str], list[AgentSpec]] = defaultdict(list)
    for spec in wanted:
        groups[spec.cluster, spec.partition].append(spec)
    held: dict[tuple[str, str], set[int]] = defaultdict(set)
    for spec in living:
        held[spec.cluster, spec.partition] |= set(spec.device_indices)
    placed = []
    for (cluster, partition), specs in groups.items():
        nodes = _nodes(inventory, cluster, partition)
        if not nodes:
            placed += specs
            continue
        kept = _kept(specs, running, renewed, nodes)
        chosen = _choose(specs, kept, running, held[cluster, partition], nodes)
        if chosen is None:  # what stays is scattered so that something does not fit beside it
            chosen = _choose(specs, {}, running, held[cluster, partition], nodes) or {}
        placed += [msgspec.structs.replace(spec, device_indices=chosen.get(spec.replica, ())) for spec in specs]
    return placed


def _nodes(inventory: Inventory, cluster: str, partition: str) -> list[list[int]]:
    """Device numbers by node; none for CPUs, which are shared, and where a batch scheduler assigns devices."""
    if not inventory.clusters[cluster].bare:
        return []
    first = 0
    for name, described in inventory.clusters[cluster].partitions.items():
        if accelerators()[described.device].kind == "cpu":
            if name == partition:
                return []
            continue
        if name == partition:
            return _numbered(described, first)
        first += described.nodes * described.devices_per_node
    return []


def _numbered(partition: Partition, first: int) -> list[list[int]]:
    size = partition.devices_per_node
    return [list(range(first + node * size, first + (node + 1) * size)) for node in range(partition.nodes)]


def _alike(now: AgentSpec, spec: AgentSpec) -> bool:
    """Whether an agent would go on as it is, its devices apart."""
    return lasting(msgspec.structs.replace(now, device_indices=())) == lasting(spec)


def _kept(
    specs: list[AgentSpec], running: Mapping[str, AgentSpec], renewed: Container[str], nodes: list[list[int]]
) -> dict[str, tuple[int, ...]]:
    kept: dict[str, tuple[int, ...]] = {}
    taken: set[int] = set()
    for spec in specs:
        now = running.get(spec.replica)
        if now is None or spec.replica in renewed or not _alike(now, spec):
            continue
        mine = set(now.device_indices)
        inside = spec.pp > 1 or any(mine <= set(node) for node in nodes)
        if len(mine) == spec.devices and not mine & taken and inside:
            kept[spec.replica] = now.device_indices
            taken |= mine
    return kept


def _choose(
    specs: list[AgentSpec],
    kept: Mapping[str, tuple[int, ...]],
    running: Mapping[str, AgentSpec],
    held: set[int],
    nodes: list[list[int]],
) -> dict[str, tuple[int, ...]] | None:
    """Largest first, each stage into the fullest node that has room; None when something does not fit."""
    chosen = dict(kept)
    taken = {index for indices in kept.values() for index in indices}
    for spec in sorted(specs, key=lambda spec: (-spec.tp * spec.dp, spec.replica)):
        if spec.replica in chosen:
            continue
        now = running.get(spec.replica)
        here = now is not None and (now.cluster, now.partition) == (spec.cluster, spec.partition)
        own = set(now.device_indices) if now is not None and here else set()
        for blocked in (taken | held, taken | (held - own), taken):
            indices = _blocks(spec.pp, spec.tp * spec.dp, nodes, blocked)
            if indices:
                break
        else:
            return None
        chosen[spec.replica] = indices
        taken |= set(indices)
    return chosen


def _blocks(stages: int, size: int, nodes: list[list[int]], blocked: set[int]) -> tuple[int, ...]:
    """Devices for all stages, or none."""
    indices: tuple[int, ...] = ()
    for _ in range(stages):
        block = _block(size, nodes, blocked | set(indices))
        if not block:
            return ()
        indices += block
    return indices


def _block(size: int, nodes: list[list[int]], blocked: set[int]) -> tuple[int, ...]:
    """The lowest aligned run of free devices, else the lowest free ones, in the fullest node that has enough."""
    free = sorted((len(node), node) for node in ([i for i in node if i not in blocked] for node in nodes))
    for room, node in free:
        if room >= size:
            starts = [i for i in node if i % size == 0 and all(i + step in node for step in range(size))]
            return tuple(range(starts[0], starts[0] + size)) if starts else tuple(node[:size])
    return ()
