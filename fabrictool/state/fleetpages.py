"""The mesh as one of the fabric's own units shows it: whose pages can be reached from here, gateways first."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.domain.address import Address
from fabrictool.domain.observed import Observed
from fabrictool.status.client import fetch_fleet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.clusters.protocol import Cluster
    from fabrictool.domain.observed import ClusterFacts
    from fabrictool.status.fleet import FleetStatus

ASK_S = 3.0


@dataclass(frozen=True, slots=True)
class ReachedUnit:
    """A unit that runs, and where its pages are."""

    name: str
    url: str
    """Empty where it cannot be reached from here, such as on a node that a scheduler gave."""


def reached_units(
    clusters: Mapping[str, Cluster], observed: Observed, ways: contextlib.ExitStack
) -> Iterable[ReachedUnit]:
    """Units that run, gateways first; ways through login nodes stay open as long as `ways`."""
    running = [(a, place) for a, place in observed.running().items() if place[1].state == "running"]
    running.sort(key=lambda entry: (Address.parse(entry[0]).kind != "gateway", entry[0]))
    for address, (cluster, unit) in running:
        try:
            page = ways.enter_context(clusters[cluster].page(unit.operation))
        except FabrictoolError:
            page = ""
        yield ReachedUnit(address, page)


class FleetPages:
    """Ask by calling it. Who answered once is asked again; after a question without an answer somebody else is."""

    def __init__(self, clusters: Mapping[str, Cluster]) -> None:
        """`clusters`: those whose units have pages."""
        self._clusters = clusters
        self._facts: dict[str, ClusterFacts] = {}
        """Heard, and not used yet."""
        self._url = ""
        self._way = contextlib.ExitStack()
        self._lock = threading.Lock()

    def hear(self, facts: Iterable[ClusterFacts]) -> None:
        """What the clusters said just now, so that they need not be asked again."""
        with self._lock:
            self._facts = {answer.cluster: answer for answer in facts}

    def __call__(self) -> FleetStatus:
        """The fleet.

        Raises
        ------
        FabrictoolError
            FT5204 when there is nobody to ask, else what the first said instead.
        """
        with self._lock:
            if self._url:
                try:
                    return fetch_fleet(self._url, timeout_s=ASK_S)
                except FabrictoolError:
                    self._way.close()
                    self._url = ""
            return self._somebody()

    def close(self) -> None:
        self._way.close()

    def _somebody(self) -> FleetStatus:
        facts = self._facts or {name: cluster.observe(brief=True) for name, cluster in self._clusters.items()}
        self._facts = {}
        refusal: FabrictoolError | None = None
        for unit in reached_units(self._clusters, Observed(clusters=facts), self._way):
            if unit.url:
                try:
                    fleet = fetch_fleet(unit.url, timeout_s=ASK_S)
                except FabrictoolError as error:
                    refusal = refusal or error
                    continue
                self._url = unit.url
                return fleet
        self._way.close()
        message = "no unit of this fabric runs that could be asked for nodes that joined"
        hint = "they are seen through a gateway: apply one first, or name a member of the mesh with `status`"
        raise refusal or UnreachableError.of("FT5204", message, hint=hint)
