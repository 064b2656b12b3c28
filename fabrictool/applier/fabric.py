"""One fabric as the operator's commands see it: its folder, its clusters, its trust material."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool.applier.state import FabricFolder, State, operation_id
from fabrictool.applier.truststore import TrustStore
from fabrictool.clusters.kinds import open_cluster
from fabrictool.domain.observed import ClusterFacts, Observed, generation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.applier.stores.protocol import StateStore
    from fabrictool.base.settings import Settings
    from fabrictool.clusters.protocol import Cluster
    from fabrictool.domain.inventory import Inventory

OBSERVERS = 8


@dataclass(frozen=True, slots=True)
class Fabric:
    """A fabric's folder, trust material and clusters."""

    name: str
    folder: FabricFolder
    trust: TrustStore
    clusters: Mapping[str, Cluster]

    @classmethod
    def open(
        cls, name: str, inventory: Inventory, settings: Settings, *, elsewhere: StateStore | None = None
    ) -> Fabric:
        """Nothing is read or written yet; disabled clusters are left out; `elsewhere` is where the state lies."""
        folder = FabricFolder.of(settings, name, elsewhere)
        enabled = [cluster for cluster in inventory.clusters if inventory.clusters[cluster].enabled]
        clusters = {
            cluster: open_cluster(cluster, name, inventory.clusters[cluster], folder.cluster(cluster))
            for cluster in enabled
        }
        return cls(name, folder, TrustStore(folder.trust), clusters)

    @property
    def lineage(self) -> str:
        """What marks a unit as ours: the state's, and before the first apply the federation root's fingerprint.

        So two fabrics of one name never have an operation in common, and a lost state finds its units again.
        """
        return self.folder.read_state().lineage or self.root_lineage

    @property
    def root_lineage(self) -> str:
        """Of the federation's root; "" before there is one."""
        return hashlib.sha256(self.trust.root().chain_pem()).hexdigest()[:16] if self.trust.exists else ""

    def observe(self) -> Observed:
        """Ask every cluster, side by side; one that does not answer is unknown and never an error."""
        lineage = self.lineage
        with ThreadPoolExecutor(OBSERVERS) as pool:
            facts = list(pool.map(lambda cluster: cluster.observe(), self.clusters.values()))
        state = self.folder.read_state()
        started = {placed.cluster for placed in state.units.values()} & set(state.served_on)
        seen = [without_foreign(each, lineage) for each in facts]
        return Observed(clusters={each.cluster: _believed(each, each.cluster in started) for each in seen})

    def close(self) -> None:
        """End all connections."""
        for cluster in self.clusters.values():
            cluster.close()


def _believed(facts: ClusterFacts, started: bool) -> ClusterFacts:
    """A cluster on which units were started and whose folder of units is gone is unknown: it may not be mounted."""
    if facts.here or not started or not facts.known:
        return facts
    reason = "units were started there, and their folder is not there now"
    hint = (
        "is its file system mounted on the login node? If the folder was removed for good: `fabrictool state rebuild`"
    )
    return ClusterFacts(cluster=facts.cluster, known=False, reason=reason, hint=hint)


def without_foreign(facts: ClusterFacts, lineage: str) -> ClusterFacts:
    """Units of other lineages, which bear the same fabric's name by chance, are named and otherwise left out."""
    ours = tuple(unit for unit in facts.units if not unit.lineage or same_lineage(unit.lineage, lineage))
    foreign = tuple(unit.operation for unit in facts.units if unit not in ours)
    return msgspec.structs.replace(facts, units=ours, foreign=foreign) if foreign else facts


def next_operation(state: State, observed: Observed, address: str, lineage: str) -> str:
    """The id of an address's next unit: past every generation that the state or a cluster knows of."""
    start = address.replace("/", "-") + "-g"  # a damaged folder still bears its id
    units = [unit for facts in observed.clusters.values() for unit in facts.units]
    known = [generation(unit.operation) for unit in units if unit.operation.startswith(start)]
    return operation_id(lineage, address, max([state.generations.get(address, 0), *known]) + 1)


def same_lineage(mark: str, lineage: str) -> bool:
    """Whether a unit's mark is that lineage: job comments have room for the beginning of a lineage only."""
    return bool(lineage) and (mark == lineage or (len(mark) >= 8 and lineage.startswith(mark)))
