"""When jobs end: by the walltimes that the inventory and schedulers state, and by what was seen of those that run."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.clusters.allocation import usual_lengths
from fabrictool.domain.specs import AgentSpec
from fabrictool.planner.renewals import JobEnds
from fabrictool.planner.situation import running_options

if TYPE_CHECKING:
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import ClusterSpec, Inventory
    from fabrictool.domain.observed import ClusterFacts, ObservedUnit
    from fabrictool.planner.problem import OptionKey


def job_ends(blueprint: Blueprint, inventory: Inventory, evidence: Evidence, begin: float) -> JobEnds:
    """Of a horizon that begins then, in seconds since 1970.

    Nodes that joined by themselves are left out: when their time is over is their owners' business, and nothing that we
    start follows them.
    """
    clusters = {name: cluster for name, cluster in inventory.clusters.items() if not cluster.joined}
    lengths = {
        (name, partition): length
        for name, cluster in clusters.items()
        for partition, length in _lengths(cluster, evidence.clusters.get(name)).items()
    }
    # A scheduler is asked for the next job; elsewhere it is missed first.
    unasked = {
        (name, partition)
        for name, cluster in clusters.items()
        if not (cluster.queues or cluster.kind == "kubernetes")
        for partition in cluster.partitions
    }
    known: dict[OptionKey, list[float]] = defaultdict(list)
    options = running_options(blueprint, evidence)
    for name, unit in evidence.observed.running().values():
        spec = evidence.specs.get(unit.operation)
        if name in clusters and isinstance(spec, AgentSpec) and spec.replica in options:
            length = usual_lengths(lengths.get((name, spec.partition), math.inf), 1)[0]
            end = _end(unit, evidence.clusters[name], evidence.at, length)
            if end < begin:  # by then others have followed it
                end += math.ceil((begin - end) / length) * length if length < math.inf else math.inf
            if end < math.inf:
                known[options[spec.replica]].append(end)
    return JobEnds(lengths, {key: tuple(sorted(ends)) for key, ends in known.items()}, frozenset(unasked))


def _lengths(cluster: ClusterSpec, facts: ClusterFacts | None) -> dict[str, float]:
    """Partition → the longest job there, in seconds; where there is any."""
    lengths = {}
    for name, partition in cluster.partitions.items():
        queue = None if facts is None else facts.queues.get(name)
        stated = None if partition.walltime is None else float(partition.walltime)
        limits = [limit for limit in (stated, None if queue is None else queue.longest_s) if limit]
        if limits:
            lengths[name] = min(limits)
    return lengths


def _end(unit: ObservedUnit, facts: ClusterFacts, at: float, length_s: float) -> float:
    """By our clock, in seconds since 1970; infinite where nothing says so. A job in a queue begins soon."""
    ahead_s = 0.0 if facts.now is None else facts.now - at
    if unit.ends_at is not None:
        return unit.ends_at - ahead_s
    if unit.state != "pending":
        return math.inf
    return max(at, at if unit.begins_at is None else unit.begins_at - ahead_s) + length_s
