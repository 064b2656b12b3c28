"""What it takes to hand a request's key-value cache from a prefill replica to a decode replica: alpha plus size/beta.

All layers, grouped-query heads as they are, at the precision that the blueprint chooses for the way (ThunderServe,
paper 002, section 3.3, whose formula leaves out the number of layers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.catalog import model
from fabrictool.planner.problem import Transfer
from fabrictool.simulator.network import HAND_LATENCY_S
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.stepmodel import KV_OCTETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.planner.columns import Columns
    from fabrictool.planner.problem import Pool, PoolKey
    from fabrictool.simulator.capacity import Demand


def transfers(
    blueprint: Blueprint,
    demands: Mapping[str, Demand],
    columns: Mapping[str, Columns],
    pools: Sequence[Pool],
    ways: Mapping[tuple[PoolKey, PoolKey], tuple[float, float]],
) -> dict[tuple[str, PoolKey, PoolKey], Transfer]:
    """All pairs of pools of each model that is served in two phases, where a network between them is described.

    Of a pipeline over several pools, the first one stands for all.
    """
    found: dict[tuple[str, PoolKey, PoolKey], Transfer] = {}
    for name, of_model in columns.items():
        architecture = model(blueprint.models[name].architecture_id)
        if architecture is None or of_model.phases == ("unified",):
            continue
        elements = kv_elements_per_token(architecture, Parallelism()) * demands[name].input
        octets = elements * KV_OCTETS[blueprint.models[name].handover]
        usable = [pool for pool in pools if of_model.degrees(pool)]
        for sender in usable:
            for receiver in usable:
                way = ways.get((sender.key, receiver.key))
                if way is None:
                    continue
                latency, bandwidth = way
                link = None if sender.site == receiver.site else ordered(sender.site, receiver.site)
                seconds = HAND_LATENCY_S + latency + octets / bandwidth
                found[name, sender.key, receiver.key] = Transfer(seconds, octets, link)
    return found


def ordered(one: str, other: str) -> tuple[str, str]:
    """Two sites as the key of the link between them."""
    return (one, other) if one < other else (other, one)
