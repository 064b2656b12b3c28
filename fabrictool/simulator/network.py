"""What lies between two partitions: seconds and octets/s, as far as the inventory describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.catalog import links

if TYPE_CHECKING:
    from fabrictool.domain.inventory import Inventory

    Place = tuple[str, str]
    """(cluster, partition)."""

HAND_LATENCY_S = 2e-3
"""More for a hand-over of a cache, whatever its size: both engines have to agree on it."""
LATENCY_S = 50e-6
"""Between nodes of one site: a TCP round trip on a cluster's network."""
OCTETS_PER_S = 12.5e9
"""Between nodes of one site where the inventory names no `network`: 100 Gbit/s."""


def hop(inventory: Inventory, sender: Place, receiver: Place) -> tuple[float, float] | None:
    """(seconds, octets/s) on the way between two partitions; None where no link joins their sites."""
    sites = {inventory.clusters[sender[0]].site, inventory.clusters[receiver[0]].site}
    if len(sites) == 1:
        return LATENCY_S, min(_network(inventory, sender), _network(inventory, receiver))
    for link in inventory.links:
        if set(link.between) == sites:
            return float(link.latency), float(link.bandwidth)
    return None


def _network(inventory: Inventory, place: Place) -> float:
    network = inventory.clusters[place[0]].partitions[place[1]].network
    return links()[network].bandwidth if network else OCTETS_PER_S
