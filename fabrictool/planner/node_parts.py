"""Which part of a scheduler's partition a replica has that is to be on nodes of its own: see `domain.node_parts`.

Who runs has the part in which it stands, who waits in a queue the one that its job was given, as long as no other has
it. What is left goes to the others, first to those that stand on a node of their own. A partition has as many parts as
replicas of a minimum stand on nodes of it, and never more than nodes; further replicas may be anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.address import Address, number_of
from fabrictool.domain.node_parts import PartitionNodes, devices_of, left_out_by, nodes_of
from fabrictool.domain.specs import AgentSpec, NodePart
from fabrictool.planner.lost_together import deals_parts, may_share_a_node
from fabrictool.planner.succession import Succession

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.specs import UnitSpec


def with_node_parts(
    wanted: Sequence[AgentSpec], blueprint: Blueprint, inventory: Inventory, evidence: Evidence
) -> list[AgentSpec]:
    """`wanted` with the parts of those that need one."""
    groups: dict[tuple[str, str, str], list[AgentSpec]] = defaultdict(list)
    for spec in wanted:
        model = blueprint.models[spec.model]
        described = inventory.clusters[spec.cluster]
        asked = model.place.spread == "node" and model.replicas.min > 1 and spec.phase != "prefill"
        if asked and deals_parts(described, described.partitions[spec.partition]):
            groups[spec.cluster, spec.partition, spec.model].append(spec)
    given: dict[str, NodePart] = {}
    for (*_, name), specs in groups.items():
        most = sorted((spec.on_nodes for spec in specs), reverse=True)[: blueprint.models[name].replicas.min]
        given |= _dealt(specs, sum(most), inventory, evidence)
    return [msgspec.structs.replace(spec, node_part=given.get(spec.replica, msgspec.UNSET)) for spec in wanted]


def _dealt(specs: Sequence[AgentSpec], most: int, inventory: Inventory, evidence: Evidence) -> dict[str, NodePart]:
    """Of one model in one partition, when its minimum stands on so many nodes."""
    described = inventory.clusters[specs[0].cluster]
    partition = described.partitions[specs[0].partition]
    of = min(partition.nodes, most)
    counted = not may_share_a_node(described, partition)
    if of < 2 or (counted and all(partition.is_alone(spec.devices // spec.on_nodes) for spec in specs)):
        return {}
    specs = sorted(specs, key=lambda spec: number_of(spec.replica))
    standing = {spec.replica: _stands_on(spec, evidence) for spec in specs}
    number = _numbers(_nodes(specs[0], inventory, evidence), of)
    free, own = set(range(of)), dict[str, list[int]]()
    for spec in specs:
        here = sorted({number[node] for node in standing[spec.replica] if node in number} & free)[: spec.on_nodes]
        if here:
            own[spec.replica] = here
            free.difference_update(here)
    for spec in specs:
        former = _queued_part(spec, evidence)
        if spec.replica not in own and former is not None and former.of == of and free.issuperset(former.numbers):
            own[spec.replica] = list(former.numbers)
            free.difference_update(former.numbers)
    taken = {node for name in own for node in standing[name]}
    others = sorted(specs, key=lambda spec: (spec.replica not in own, not taken.isdisjoint(standing[spec.replica])))
    for spec in others:
        have = own.pop(spec.replica, [])
        lacking = spec.on_nodes - len(have)
        if lacking <= len(free):
            more = sorted(free)[:lacking]
            own[spec.replica] = have + more
            free.difference_update(more)
        else:
            free.update(have)
    return {name: NodePart(tuple(sorted(parts)), of) for name, parts in own.items()}


def _numbers(nodes: PartitionNodes, of: int) -> dict[str, int]:
    """Node → its part; none where there are fewer nodes than parts."""
    if len(nodes.names) < of:
        return {}
    return {name: number for number, part in enumerate(nodes.parts(of)) for name in part}


def _nodes(spec: AgentSpec, inventory: Inventory, evidence: Evidence) -> PartitionNodes:
    """As the scheduler told them; of two names for one queue it is known by the first."""
    described, facts = inventory.clusters[spec.cluster], evidence.clusters.get(spec.cluster)
    partition = described.partitions[spec.partition]
    queue = partition.queue or spec.partition
    names = [name for name, its in described.partitions.items() if (its.queue or name) == queue]
    told = [facts.queues[name] for name in names if facts is not None and name in facts.queues]
    return nodes_of(told[0], devices_of(partition), left_out_by(partition)) if told else PartitionNodes(())


def _stands_on(spec: AgentSpec, evidence: Evidence) -> set[str]:
    """Nodes of its youngest unit, if that runs in its place."""
    cluster, unit = evidence.observed.running().get(str(Address.of(spec)), ("", None))
    former = None if unit is None else evidence.specs.get(unit.operation)
    if unit is None or unit.state != "running" or cluster != spec.cluster or not isinstance(former, AgentSpec):
        return set()
    return set(filter(None, unit.node.split(","))) if former.partition == spec.partition else set()


def _queued_part(spec: AgentSpec, evidence: Evidence) -> NodePart | None:
    """Of its youngest unit, if that waits for its place."""
    cluster, unit = evidence.observed.running().get(str(Address.of(spec)), ("", None))
    former = None if unit is None else evidence.specs.get(unit.operation)
    if unit is None or unit.state != "pending" or cluster != spec.cluster or not isinstance(former, AgentSpec):
        return None
    same = former.partition == spec.partition and former.on_nodes == spec.on_nodes
    return former.node_part if same and isinstance(former.node_part, NodePart) else None


def with_too_close(
    expiring: Mapping[str, Succession], wanted: Iterable[UnitSpec], evidence: Evidence
) -> dict[str, Succession]:
    """`expiring`, and what is too close. Who ends anyway leaves for the former reason; telling it something else while
    it serves must not keep it where it is.
    """
    ending = {operation: succession for operation, succession in expiring.items() if not succession.in_place}
    return {**expiring, **too_close(wanted, evidence), **ending}


def too_close(wanted: Iterable[UnitSpec], evidence: Evidence) -> dict[str, Succession]:
    """Operation → why it cannot stay where it is: what is to be on nodes of its own, and is not or need not be so."""
    specs = [spec for spec in wanted if isinstance(spec, AgentSpec) and isinstance(spec.node_part, NodePart)]
    running, moving = evidence.observed.running(), dict[str, Succession]()
    there: dict[tuple[str, str, str], str] = {}
    """(cluster, model, node) → the replica that keeps it."""
    for spec in sorted(specs, key=lambda spec: (spec.model, number_of(spec.replica))):
        cluster, unit = running.get(str(Address.of(spec)), ("", None))
        former = None if unit is None else evidence.specs.get(unit.operation)
        if unit is None or cluster != spec.cluster or not isinstance(former, AgentSpec):
            continue
        if unit.state == "pending":
            if former.node_part != spec.node_part:
                why = "its job may start on a node with another replica of its model (`spread: node`)"
                moving[unit.operation] = Succession("nodes", why)
            continue
        nodes = [(cluster, spec.model, node) for node in unit.node.split(",") if node]
        other = next((there[node] for node in nodes if node in there), None)
        if other is not None:
            why = f"it is on one node with {other} of its model (`spread: node`)"
            moving[unit.operation] = Succession("nodes", why)
        else:
            there |= dict.fromkeys(nodes, spec.replica)
    return moving
