"""Which devices of which node a replica gets, so that two replicas never share one without being told.

Devices are numbered as their driver numbers them, from 0 on; a second partition of the same cluster goes on where the
first one ends, in the inventory's order. A running replica keeps its devices as long as nothing else of it changes, and
no rule wants it on a node without others of its model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from fabrictool.catalog import accelerators
from fabrictool.domain.specs import lasting
from fabrictool.planner.device_choice import NO_NODES, DeviceChoice, WantedNodes
from fabrictool.planner.lost_together import keeps_apart, may_share_a_node
from fabrictool.planner.packing import as_far_apart

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.specs import AgentSpec

PlaceKey = tuple[str, str]
"""(cluster, partition)."""

_VARIABLES = {"NVIDIA": "CUDA_VISIBLE_DEVICES", "AMD": "ROCR_VISIBLE_DEVICES"}
"""Vendor → what restricts a process to some devices (CUDA programming guide; ROCm documentation)."""


def visibility_variable(device: str) -> str:
    """The environment variable that shows a process its devices; empty for CPUs and vendors without one here."""
    accelerator = accelerators()[device]
    return "" if accelerator.kind == "cpu" else _VARIABLES.get(accelerator.title.partition(" ")[0], "")


# Wide: what is wanted, where it may be, and what is there.
def with_devices(
    wanted: Iterable[AgentSpec],
    inventory: Inventory,
    running: Mapping[str, AgentSpec],
    living: Iterable[AgentSpec],
    renewed: Container[str] = (),
    nodes_wanted: WantedNodes = NO_NODES,
) -> list[AgentSpec]:
    """`wanted` with their devices.

    `running` maps replicas to their youngest living spec, `living` are all of them, `renewed` the replicas that get a
    new session whatever they are told. What starts anew gets devices that nobody holds, as long as there are some;
    then those of its own former; then those of others, which must end first (`fabrictool.planner.diff`).
    """
    groups: dict[PlaceKey, list[AgentSpec]] = defaultdict(list)
    for spec in wanted:
        groups[spec.cluster, spec.partition].append(spec)
    held: dict[PlaceKey, set[int]] = defaultdict(set)
    for spec in living:
        held[spec.cluster, spec.partition] |= set(spec.device_indices)
    choices = {
        place: DeviceChoice(specs, running, held[place], nodes, NO_NODES)
        for place, specs in groups.items()
        if (nodes := _nodes(inventory, *place))
    }
    at_most = {place: _nodes_at_most(inventory, place, specs) for place, specs in groups.items()}
    sure, chosen = dict(at_most), dict[str, tuple[int, ...]]()

    def give(place: PlaceKey, here: WantedNodes) -> None:
        counts = inventory.clusters[place[0]].partitions[place[1]].tier == "owned"
        choice = replace(choices[place], wanted=here if counts else replace(here, needed={}))
        given = choice.devices(_kept(choice.specs, running, renewed, choice.nodes))
        sure[place] = Counter({spec.model: len(choice.used(spec.model, given)) for spec in choice.specs if counts})
        chosen.update({spec.replica: given.get(spec.replica, ()) for spec in choice.specs})

    for place in choices:
        elsewhere = sum((number for other, number in sure.items() if other != place), Counter[str]())
        give(place, nodes_wanted.beside(elsewhere))
    every = sum(sure.values(), Counter[str]())
    if len(choices) > 1 and any(every[model] < least for model, least in nodes_wanted.needed.items()):
        # Those before had left to one after them what had no room there.
        for place, its in _shares(choices, at_most, nodes_wanted.needed).items():
            give(place, replace(nodes_wanted, needed=its))
    return [
        msgspec.structs.replace(spec, device_indices=chosen[spec.replica]) if spec.replica in chosen else spec
        for specs in groups.values()
        for spec in specs
    ]


def _shares(
    choices: Mapping[PlaceKey, DeviceChoice], at_most: Mapping[PlaceKey, Counter[str]], needed: Mapping[str, int]
) -> dict[PlaceKey, dict[str, int]]:
    """Nodes by model that each partition is to have, so that they are enough together; none where no way was seen.

    Shared out as `planner.node_spread` does that allowed the placement.
    """
    every = sum(at_most.values(), Counter[str]())
    spare = {model: every[model] - least for model, least in needed.items() if every[model] >= least}
    shares: dict[PlaceKey, dict[str, int]] = {}
    for place, choice in sorted(choices.items(), key=lambda its: its[0]):
        here = {model: nodes for model, nodes in at_most[place].items() if model in spare}
        share = as_far_apart(here, spare, choice.fits)
        if share is None:
            return {}
        shares[place] = share
    return shares


def _nodes_at_most(inventory: Inventory, place: PlaceKey, specs: Iterable[AgentSpec]) -> Counter[str]:
    """By model: nodes of a partition on which its replicas are for certain, if those that we choose are chosen so.

    Of what counts towards a minimum alone.
    """
    described = inventory.clusters[place[0]]
    partition = described.partitions[place[1]]
    apart, number = keeps_apart(described, partition), Counter[str]()
    for spec in specs if partition.tier == "owned" else ():
        if spec.phase == "prefill":
            continue
        alone = partition.is_alone(spec.devices // spec.on_nodes)
        single = apart or described.joined or (alone and not may_share_a_node(described, partition))
        number[spec.model] = number[spec.model] + spec.on_nodes if single else max(1, number[spec.model])
    return Counter({model: min(partition.nodes, its) for model, its in number.items()})


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
    specs: Iterable[AgentSpec], running: Mapping[str, AgentSpec], renewed: Container[str], nodes: list[list[int]]
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
