"""Parts of a scheduler's partition, one for each replica that is to be on nodes of its own (`spread: node`).

Slurm chooses nodes by itself, and no job can ask to be away from another one. What a job can say is where it must not
be. So of n replicas of a model in a partition each has a part of its nodes, and its job leaves out all others. Nobody
has to agree on anything: a part is a number, and who knows the nodes' names knows which nodes it is.

Certain is: replicas whose jobs were submitted while the partition had the same nodes, and the same of them were away in
so far as a part depends on it, are on different nodes, wherever Slurm puts them and whenever they start. Parts are
disjoint, none is empty, and together they are all nodes that count.

Not certain is it when nodes came or went between two submissions: nodes are numbered in the order of their names, so
some of them change parts then. Nothing that runs is moved for that. A job that is submitted also leaves out the nodes
on which others of its model are by then, and each plan gives a replica the part in which it stands. Only a job that
still waits in the queue with parts of before, or one in another partition with the same nodes, can come beside another:
the next plan or healing sees that, and moves one of the two.

It costs room: a job waits for its own part even if another one has a free node, and so does its successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.domain.hostlist import hostlist

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from fabrictool.domain.inventory import Partition
    from fabrictool.domain.observed import Queue


@dataclass(frozen=True, slots=True)
class PartitionNodes:
    """Those of a partition's nodes that are dealt out."""

    names: tuple[str, ...]
    """In order."""
    away: frozenset[str] = frozenset()
    """Those that are down or drained now."""
    others: frozenset[str] = frozenset()
    """Nodes of the partition on which no replica has room."""

    def parts(self, of: int) -> list[tuple[str, ...]]:
        """So many, as even as can be; empty ones only where there are fewer nodes.

        Nodes that are away count, so that parts stay when they go and come back. Where a part would have no other
        ones, and there are enough, only those that are there are dealt out.
        """
        parts = [self.names[number::of] for number in range(of)]
        there = tuple(name for name in self.names if name not in self.away)
        if len(there) >= of and any(self.away.issuperset(part) for part in parts):
            return [there[number::of] for number in range(of)]
        return parts

    def nodes_of(self, numbers: Iterable[int], of: int) -> frozenset[str]:
        """Of some of so many parts."""
        parts = self.parts(of)
        return frozenset(name for number in numbers for name in parts[number])


def nodes_of(queue: Queue, devices: int, left_out: AbstractSet[str] = frozenset()) -> PartitionNodes:
    """Those with as many devices as the inventory says, without those that somebody leaves out anyway."""
    every = {name: kind for kind in queue.kinds for name in hostlist(kind.nodes)}
    typed = queue.device if devices else ""  # which jobs ask for where nodes have several types
    able = {
        name: kind
        for name, kind in every.items()
        if name not in left_out and kind.devices >= devices and typed in ("", kind.device)
    }
    away = frozenset(name for name, kind in able.items() if kind.away)
    return PartitionNodes(tuple(sorted(able)), away, frozenset(every.keys() - able.keys()))


def devices_of(partition: Partition) -> int:
    """That a node must have to count; 0 where schedulers count none."""
    return 0 if partition.device == "cpu" else partition.devices_per_node


def left_out_by(partition: Partition) -> frozenset[str]:
    """What the inventory's own ``exclude`` keeps its jobs from."""
    return frozenset(hostlist(partition.job.options.get("exclude", "")))
