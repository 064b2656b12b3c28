"""A model's pools as each of its columns asks for them: looked at once, whatever the number of cuts and phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.catalog import engines
from fabrictool.engines.adapter import adapter
from fabrictool.planner.loads import start_s
from fabrictool.planner.permitted import permitted, preference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.planner.problem import Pool

DEGREES = (1, 2, 4, 8, 16)
"""Tensor-parallel degrees that are tried, inside one node."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A pool for a model."""

    degrees: tuple[int, ...]
    """Tensor-parallel: inside a node, or what the blueprint says; none where the model must not stand."""
    partition: Partition
    preference: float
    """0 where `place` has the model, more where it does not."""
    start_s: float | None
    """What starts of the model took there; None: none was measured."""
    kind: tuple[object, ...]
    """Where it is the same, replicas that are cut alike do the same."""


class Spots:
    """What all pools are to a model; each is looked at when it is first asked for."""

    # Wide: a model, where it may stand, and what is known of it.
    def __init__(
        self,
        name: str,
        wanted: Model,
        architecture: ModelArchitecture,
        inventory: Inventory,
        loads: Mapping[str, Sequence[float]],
    ) -> None:
        self._name, self._wanted, self._architecture = name, wanted, architecture
        self._inventory, self._loads = inventory, loads
        self._capabilities = adapter(wanted.engine).capabilities
        self._known: dict[Pool, Spot] = {}

    def at(self, pool: Pool) -> Spot:
        spot = self._known.get(pool)
        if spot is None:
            spot = self._known[pool] = self._look(pool)
        return spot

    def _look(self, pool: Pool) -> Spot:
        place = self._inventory.clusters[pool.cluster].partitions[pool.partition]
        start = start_s(self._loads, self._wanted, self._name, pool.cluster)
        kind = (*kind_of(place), place.walltime, start)
        return Spot(tuple(self._degrees(pool)), place, preference(self._wanted, pool), start, kind)

    def _degrees(self, pool: Pool) -> list[int]:
        if not permitted(self._wanted, pool, self._inventory):
            return []
        most = pool.devices_per_node if self._capabilities.tensor_parallel else 1
        declared = self._wanted.parallelism.tp
        if declared is not None and declared > most and self._over_nodes(pool, declared):
            most = declared
        engine, precision = engines()[self._wanted.engine], self._wanted.variant.precision
        degrees = DEGREES if declared is None else (declared,)
        return [tp for tp in degrees if tp <= most and not engine.unsplittable(self._architecture, tp, 1, precision)]

    def _over_nodes(self, pool: Pool, tp: int) -> bool:
        """Whether a layer can be cut over whole nodes of a pool."""
        whole = tp % pool.devices_per_node == 0 and tp // pool.devices_per_node <= pool.nodes
        return whole and self._capabilities.several_nodes and self._capabilities.tensor_parallel and not pool.joined


def kind_of(place: Partition) -> tuple[object, ...]:
    """Partitions of the same kind have the same devices, and as many in a node."""
    return (place.device, place.link, place.network, place.memory_per_node, place.devices_per_node)
