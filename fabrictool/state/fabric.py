"""One fabric as the operator's commands see it: its folder, its clusters, its trust material."""

from __future__ import annotations

import hashlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec

from fabrictool.clusters.joined import JoinedCluster
from fabrictool.clusters.kinds import open_cluster
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, Observed
from fabrictool.domain.state import same_lineage
from fabrictool.state.backends.factory import store_elsewhere
from fabrictool.state.controllers import controller_identity
from fabrictool.state.fleetpages import FleetPages
from fabrictool.state.folder import FabricFolder
from fabrictool.state.truststore import TrustStore
from fabrictool.status.client import fetch_fleet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from fabrictool.base.settings import Settings
    from fabrictool.clusters.protocol import Cluster
    from fabrictool.domain.evidence import KeysSeen
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.state import State
    from fabrictool.domain.statebackend import StateBackend
    from fabrictool.mesh.transport.tls import IdentityFiles

OBSERVERS = 8


@dataclass(frozen=True, slots=True)
class Fabric:
    """Opened once a command, as a context: its connections end with it."""

    name: str
    folder: FabricFolder
    trust: TrustStore
    clusters: Mapping[str, Cluster]
    pages: FleetPages | None = None
    """How nodes are seen that joined by themselves; None: the inventory has no cluster of such."""
    stated_waits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Cluster → partition → seconds that a job waits in its queue, as the inventory states it."""

    @classmethod
    def open(
        cls,
        name: str,
        state: StateBackend | None,
        inventory: Inventory,
        settings: Settings,
        environment: Mapping[str, str],
    ) -> Fabric:
        """Nothing is read, written or asked yet; disabled clusters are left out; secrets come from `environment`.

        `state`: where the blueprint keeps its state; None: here.
        """
        path = settings.state_path / name
        folder = FabricFolder(path, store_elsewhere(state, path, environment))
        trust = TrustStore(folder.trust)
        enabled = {cluster: described for cluster, described in inventory.clusters.items() if described.enabled}
        placing = {
            cluster: open_cluster(cluster, name, described, folder.cluster(cluster))
            for cluster, described in enabled.items()
            if not described.joined
        }
        pages = FleetPages(placing) if len(placing) < len(enabled) else None
        clusters: dict[str, Cluster] = {}
        for cluster, described in enabled.items():
            if pages is None or not described.joined:
                clusters[cluster] = placing[cluster]
                continue
            provider = inventory.provider_of(cluster)
            ask = partial(fetch_fleet, described.status) if described.status is not None else pages
            identity = partial(_controller, trust, provider)
            clusters[cluster] = JoinedCluster(cluster, name, provider, described, ask, identity)
        stated_waits = {cluster: described.stated_waits for cluster, described in enabled.items()}
        return cls(name, folder, trust, clusters, pages, stated_waits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for cluster in self.clusters.values():
                stack.callback(cluster.close)
            if self.pages is not None:
                stack.callback(self.pages.close)

    def gather(self, *, now: float, keys: KeysSeen | None = None, patient: bool = True) -> Evidence:
        """All that a plan is a function of; `now` in wall seconds, `keys` None where they cannot be had.

        `patient`: look again where only that can say whether a unit lives. A cluster that does not answer is unknown,
        and never an error.

        Raises
        ------
        FabrictoolError
            FT4001 and others of the state; FT5104 what a living unit was told cannot be read.
        """
        state = self.folder.read_state()
        lineage = self.lineage_of(state)
        observed = self._observe(state, lineage, patient=patient)
        return Evidence(
            fabric=self.name,
            lineage=lineage,
            at=round(now, 3),
            host=socket.gethostname(),
            clusters=observed.clusters,
            specs={
                unit.operation: self.clusters[cluster].spec(unit.operation)
                for units in observed.living().values()
                for cluster, unit in units
                if unit.spec_digest  # without one its files are gone, and only its job is left
            },
            state=state,
            keys=keys,
            revocations=self.trust.revocations(now=now),
            signs=self.trust.signs(),
        )

    def observe(self, *, patient: bool = False) -> Observed:
        """Ask every cluster, side by side, for its facts alone."""
        state = self.folder.read_state()
        return self._observe(state, self.lineage_of(state), patient=patient)

    def lineage_of(self, state: State) -> str:
        """What marks a unit as ours: the state's, and before the first apply the federation root's fingerprint.

        So two fabrics of one name never have an operation in common, and a lost state finds its units again.
        """
        return state.lineage or self.root_lineage

    @property
    def root_lineage(self) -> str:
        """Of the federation's root; "" before there is one."""
        return hashlib.sha256(self.trust.root_pem()).hexdigest()[:16] if self.trust.exists else ""

    def ask_clusters(self, *, patient: bool = False) -> list[ClusterFacts]:
        """Every cluster's own answer, with the units of all lineages; nodes that joined are seen through the others."""
        joined = [cluster for cluster in self.clusters.values() if isinstance(cluster, JoinedCluster)]
        placing = [cluster for cluster in self.clusters.values() if not isinstance(cluster, JoinedCluster)]
        with ThreadPoolExecutor(OBSERVERS) as pool:
            facts = list(pool.map(lambda cluster: cluster.observe(patient=patient), placing))
        if self.pages is not None:
            self.pages.hear(facts)
        return facts + [cluster.observe() for cluster in joined]

    def _observe(self, state: State, lineage: str, *, patient: bool) -> Observed:
        started = {placed.cluster for placed in state.units.values()} & set(state.served_on)
        ours = [without_foreign(facts, lineage) for facts in self.ask_clusters(patient=patient)]
        clusters = {facts.cluster: believed(facts, facts.cluster in started) for facts in ours}
        return Observed(
            clusters={
                name: msgspec.structs.replace(facts, stated_waits=dict(self.stated_waits.get(name, {})))
                for name, facts in clusters.items()
            }
        )


def _controller(trust: TrustStore, provider: str) -> AbstractContextManager[IdentityFiles]:
    return controller_identity(trust, provider, now=time.time())


def believed(facts: ClusterFacts, started: bool) -> ClusterFacts:
    """A cluster on which units were `started` and whose folder of units is gone is unknown: it may not be mounted."""
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
