"""What facts say about clusters. An observation is present, absent or unknown; unknown is not absent (rule 2)."""

from __future__ import annotations

from typing import Literal

import msgspec

UnitState = Literal["running", "ended", "killed", "prepared"]
"""running: its process lives; ended: it said goodbye; killed: it died without; prepared: it was never started."""


class ObservedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One unit that a cluster knows of."""

    address: str
    """``replica/smollm2-135m/0`` or ``gateway/main``."""
    operation: str
    """The id under which it was started; at most one unit ever bears it."""
    state: UnitState
    spec_digest: str
    pid: int | None = None
    reason: str = ""
    """How it ended."""
    status_url: str = ""
    certificate_ends_at: float | None = None


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster, as far as it could be seen."""

    cluster: str
    known: bool
    """False: it did not answer, so nothing on it is created or deleted."""
    reason: str = ""
    """Why it is unknown."""
    hint: str = ""
    units: tuple[ObservedUnit, ...] = ()

    def unit(self, address: str) -> ObservedUnit | None:
        """The living unit of that address, else the youngest dead one, else None."""
        same = [unit for unit in self.units if unit.address == address]
        living = [unit for unit in same if unit.state == "running"]
        found = living or same
        return found[-1] if found else None


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All clusters of the inventory."""

    clusters: dict[str, ClusterFacts]

    def running(self) -> dict[str, tuple[str, ObservedUnit]]:
        """Address → (cluster, unit) of everything that lives."""
        return {
            unit.address: (name, unit)
            for name, facts in sorted(self.clusters.items())
            for unit in facts.units
            if unit.state == "running"
        }
