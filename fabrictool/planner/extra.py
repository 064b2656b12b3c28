"""Replicas beyond those that a plan has room for: they start while requests wait and nodes are idle, and end when idle.

Nothing that runs makes room for them: they are jobs in the queue of a partition where the plan has placed replicas of
their model, and only where a node of it is idle.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.clock import duration_text
from fabrictool.domain.address import number_of
from fabrictool.domain.specs import AgentSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Placement, ReplicaPlacement
    from fabrictool.domain.specs import UnitSpec


def extra_replicas(
    blueprint: Blueprint, inventory: Inventory, placement: Placement, evidence: Evidence
) -> list[ReplicaPlacement]:
    """Named after the planned ones; those that live keep their names and places."""
    taken = {replica.replica for replica in placement.replicas}
    running = {name: spec for name, spec in evidence.running_agents().items() if spec.is_extra and name not in taken}
    extras = []
    for model, described in sorted(blueprint.models.items()):
        places = _places(model, inventory, placement)
        if not places or not described.replicas.extra:
            continue
        names = sorted((name for name, spec in running.items() if spec.model == model), key=number_of)
        living = [
            msgspec.structs.replace(place, replica=name)
            for name in names
            if (place := places.get((running[name].cluster, running[name].partition))) is not None
        ][: described.replicas.extra]
        used = taken | set(names)
        free = (name for n in itertools.count() if (name := f"{model}/{n}") not in used)
        further = itertools.islice(itertools.cycle(places.values()), described.replicas.extra - len(living))
        extras += [*living, *(msgspec.structs.replace(place, replica=next(free)) for place in further)]
    return extras


def extra_sentences(specs: Iterable[UnitSpec]) -> Iterator[str]:
    """What a plan says of them, a line for each model."""
    extras = sorted(
        (spec for spec in specs if isinstance(spec, AgentSpec) and spec.is_extra), key=lambda spec: spec.model
    )
    for model, group in itertools.groupby(extras, key=lambda spec: spec.model):
        mine = list(group)
        where = ", ".join(sorted({f"{spec.cluster}/{spec.partition}" for spec in mine}))
        idle_s = mine[0].idle_after_s
        after = "" if isinstance(idle_s, msgspec.UnsetType) else f" after {duration_text(idle_s)} without a request"
        yield (
            f"{model}: {len(mine)} more start one by one while requests wait and nodes of {where} are idle, and end"
            f"{after}; no figure counts them"
        )


def _places(model: str, inventory: Inventory, placement: Placement) -> dict[tuple[str, str], ReplicaPlacement]:
    """(cluster, partition) → a planned replica there, where a scheduler has a queue for more."""
    return {
        (replica.cluster, replica.partition): replica
        for replica in placement.replicas
        if replica.model == model and replica.phase == "unified" and inventory.clusters[replica.cluster].queues
    }
