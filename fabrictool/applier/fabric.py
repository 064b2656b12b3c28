"""One fabric as the operator's commands see it: its folder, its clusters, its trust material."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.applier.state import FabricFolder, State, operation_id
from fabrictool.applier.truststore import TrustStore
from fabrictool.clusters.local import LocalCluster
from fabrictool.clusters.ssh import Login, SshCluster
from fabrictool.domain.observed import Observed, generation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
    def open(cls, name: str, inventory: Inventory, settings: Settings) -> Fabric:
        """Nothing is read or written yet; disabled clusters are left out."""
        folder = FabricFolder.of(settings, name)
        enabled = [cluster for cluster in inventory.clusters if inventory.clusters[cluster].enabled]
        clusters = {cluster: _cluster(cluster, inventory, folder.cluster(cluster)) for cluster in enabled}
        return cls(name, folder, TrustStore(folder.trust), clusters)

    def observe(self) -> Observed:
        """Ask every cluster, side by side; one that does not answer is unknown and never an error."""
        with ThreadPoolExecutor(OBSERVERS) as pool:
            facts = list(pool.map(lambda cluster: cluster.observe(), self.clusters.values()))
        return Observed(clusters={each.cluster: each for each in facts})


def next_operation(state: State, observed: Observed, address: str) -> str:
    """The id of an address's next unit: past every generation that the state or a cluster knows of."""
    start = address.replace("/", "-") + "-g"  # a damaged folder still bears its id
    units = [unit for facts in observed.clusters.values() for unit in facts.units]
    known = [generation(unit.operation) for unit in units if unit.operation.startswith(start)]
    return operation_id(state.lineage, address, max([state.generations.get(address, 0), *known]) + 1)


def _cluster(name: str, inventory: Inventory, root: Path) -> Cluster:
    described = inventory.clusters[name]
    if described.kind == "local":
        venv = described.software.python.venv
        return LocalCluster(name, root, python=f"{venv}/bin/python" if venv else "")
    logins = tuple(Login(login.host, login.port, str(login.user), login.host_keys) for login in described.login)
    return SshCluster(name, described.kind, logins)
