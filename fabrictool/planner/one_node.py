"""Models of which several replicas are asked for, and a single node's loss takes all or too many: read off the units.

What the units say is what will run: nothing of the solver's rows, nor of how devices were chosen, is looked at.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.catalog import accelerators
from fabrictool.domain.specs import AgentSpec, NodePart

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.specs import UnitSpec

PartitionKey = tuple[str, str]


def one_node_sentences(
    blueprint: Blueprint, inventory: Inventory, specs: Iterable[UnitSpec], unseen: Container[str] = ()
) -> Iterator[str]:
    """What a plan says of them, a line for each model; `unseen` are clusters that do not answer. `survive: node` has
    words of its own.
    """
    by_model = _answering(specs)
    for name, model in sorted(blueprint.models.items()):
        mine, least = by_model[name], model.replicas.min
        if least > 1 and model.place.spread == "node":
            for text in _short(inventory, name, mine, least):
                hidden = sorted(_hidden(model, mine, unseen))
                verb = "does" if len(hidden) == 1 else "do"
                yield f"{text}: {', '.join(hidden)} {verb} not answer" if hidden else text
        elif least > 1 and len(mine) > 1 and model.survive is None:
            yield from _together(inventory, name, mine)
        elif model.place.spread == "node":
            yield f"{name}: `spread: node` asks for as many nodes as `replicas.min`, and that is {least}"


def broken_spreads(
    blueprint: Blueprint, inventory: Inventory, specs: Iterable[UnitSpec], unseen: Container[str]
) -> Iterator[str]:
    """What is on too few nodes though we give away all devices, and what runs moves for the rule. Where a scheduler
    gives some away there are none: what is left elsewhere is then counted in another way than devices are chosen.
    """
    if not all(cluster.bare for cluster in inventory.clusters.values()):
        return
    by_model = _answering(specs)
    for name, model in sorted(blueprint.models.items()):
        mine, least = by_model[name], model.replicas.min
        if least > 1 and model.place.spread == "node" and not _hidden(model, mine, unseen):
            yield from _short(inventory, name, mine, least)


def _answering(specs: Iterable[UnitSpec]) -> dict[str, list[AgentSpec]]:
    by_model: dict[str, list[AgentSpec]] = defaultdict(list)
    for spec in specs:
        if isinstance(spec, AgentSpec) and not spec.is_extra and spec.phase != "prefill":
            by_model[spec.model].append(spec)
    return by_model


def _short(inventory: Inventory, name: str, mine: list[AgentSpec], least: int) -> Iterator[str]:
    nodes = least_nodes(inventory, mine) if _all_there(inventory, mine) else least
    if nodes < least:
        number = f"{nodes} node{'s' if nodes != 1 else ''}"
        yield f"{name}: its replicas are on {number} for certain, and `spread: node` wants them on {least}"


def _hidden(model: Model, mine: Iterable[AgentSpec], unseen: Container[str]) -> set[str]:
    """Clusters that do not answer and have replicas of a model, or may have some: those that are pinned there."""
    places = {spec.cluster for spec in mine} | {pin.cluster for pin in model.place.pin}
    return {cluster for cluster in places if cluster in unseen}


def _all_there(inventory: Inventory, mine: Iterable[AgentSpec]) -> bool:
    """Whether the inventory still has their partitions; of a cluster that does not answer units may outlive these."""
    return all(spec.partition in inventory.clusters[spec.cluster].partitions for spec in mine)


def _together(inventory: Inventory, name: str, mine: list[AgentSpec]) -> Iterator[str]:
    places = {(spec.cluster, spec.partition) for spec in mine}
    if len(places) > 1 or not _all_there(inventory, mine):
        return
    ((cluster, label),) = places
    described = inventory.clusters[cluster]
    partition = described.partitions[label]
    shared = accelerators()[partition.device].kind == "cpu"
    room = shared or sum(partition.held(spec.devices) for spec in mine) <= partition.devices_per_node
    if partition.nodes == 1 or least_nodes(inventory, mine) > 1 or (shared and described.bare):
        return
    if described.bare:
        yield f"{name}: its {len(mine)} replicas are on one node of {cluster}/{label}, and lost with it: {STAYS}"
    elif room and not partition.whole_nodes:
        yield f"{name}: its {len(mine)} replicas may be on one node of {cluster}/{label}, and lost with it: {CHOSEN}"


STAYS = "what runs stays where it is, or no other has room; `place: {spread: node}` makes it a rule that they are not"
CHOSEN = "its scheduler chooses; `place: {spread: node}` makes it a rule that they are not"


def least_nodes(inventory: Inventory, specs: Iterable[AgentSpec]) -> int:
    """On how many different nodes these are, wherever a scheduler that chooses nodes may put them."""
    by_place: dict[PartitionKey, list[AgentSpec]] = defaultdict(list)
    for spec in specs:
        by_place[spec.cluster, spec.partition].append(spec)
    return sum(_least_nodes(inventory, place, its) for place, its in by_place.items())


def _least_nodes(inventory: Inventory, place: PartitionKey, specs: list[AgentSpec]) -> int:
    described = inventory.clusters[place[0]]
    partition = described.partitions[place[1]]
    if partition.tier != "owned":
        return 0
    indices = sorted({index for spec in specs for index in spec.device_indices})
    if described.bare and indices:
        first = _first_device(inventory, place)
        return len({(index - first) // partition.devices_per_node for index in indices})
    shared = accelerators()[partition.device].kind == "cpu" and not partition.whole_nodes
    alone = [spec for spec in specs if partition.is_alone(spec.devices // spec.on_nodes)]
    parted = sum(spec.on_nodes for spec in specs if isinstance(spec.node_part, NodePart))
    return max(1, parted, 0 if shared else min(partition.nodes, sum(spec.on_nodes for spec in alone)))


def _first_device(inventory: Inventory, place: PartitionKey) -> int:
    """The number of the first device of a partition whose nodes' devices we give away."""
    before = 0
    for name, partition in inventory.clusters[place[0]].partitions.items():
        if name == place[1]:
            break
        if accelerators()[partition.device].kind != "cpu":
            before += partition.nodes * partition.devices_per_node
    return before
