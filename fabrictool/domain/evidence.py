"""All that a plan is a function of beside the reviewed files: what was seen, when, and what is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fabrictool.domain.observed import ClusterFacts, Observed
from fabrictool.domain.specs import AgentSpec, UnitSpec
from fabrictool.domain.state import State

if TYPE_CHECKING:
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory


ADMIN = "gateway/key_api"
"""Stands among tenants, none of which can have this name, for the key API."""


class KeysSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The tenants' keys as they were: the digest that plans hold, and whose they are."""

    digest: str
    tenants: dict[str, str]
    """Tenant → reference to its key."""

    @classmethod
    def of(cls, blueprint: Blueprint, digest: str) -> KeysSeen:
        return cls(digest=digest, tenants=_references(blueprint))


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a fabric. Signed and in a file it is a bundle."""

    fabric: str
    lineage: str
    at: float
    """Wall seconds."""
    host: str = ""
    """The machine that looked."""
    clusters: dict[str, ClusterFacts]
    specs: dict[str, UnitSpec]
    """Operation → what the living unit was told."""
    state: State
    keys: KeysSeen | None = None
    """None where the keys could not be had."""
    revocations: tuple[str, ...] = ()
    """Signed; what was revoked and has not ended by itself."""
    signs: dict[str, float] = {}
    """Providers whose signing key was there → wall seconds at which its certificate ends."""

    @property
    def observed(self) -> Observed:
        return Observed(clusters=self.clusters)

    def within(self, inventory: Inventory) -> Evidence:
        """Of the clusters that this inventory enables; one that was not looked at is unknown. It states the waits."""
        enabled = {name: cluster for name, cluster in inventory.clusters.items() if cluster.enabled}
        clusters = {
            name: msgspec.structs.replace(self.clusters.get(name) or _unseen(name), stated_waits=cluster.stated_waits)
            for name, cluster in enabled.items()
        }
        return msgspec.structs.replace(self, clusters=clusters)

    def running_specs(self) -> dict[str, UnitSpec]:
        """Operation → what the unit was told, of all that live and whose files are there."""
        living = [unit.operation for units in self.observed.living().values() for _, unit in units if unit.spec_digest]
        return {operation: self.specs[operation] for operation in living}

    def running_agents(self) -> dict[str, AgentSpec]:
        """Replica (``MODEL/NUMBER``) → what its youngest living agent was told."""
        youngest = [self.specs.get(unit.operation) for _, unit in self.observed.running().values()]
        return {spec.replica: spec for spec in youngest if isinstance(spec, AgentSpec)}

    def keys_of(self, blueprint: Blueprint) -> str | None:
        """The digest of the tenants' keys, if they have the references of then still; "" when there are no tenants."""
        tenants = _references(blueprint)
        if not tenants:
            return ""
        return self.keys.digest if self.keys is not None and self.keys.tenants == tenants else None


def _references(blueprint: Blueprint) -> dict[str, str]:
    references = {name: str(tenant.key) for name, tenant in sorted(blueprint.tenants.items())}
    admin = {} if blueprint.key_api is None else {ADMIN: str(blueprint.key_api.key)}
    return references | admin


def _unseen(name: str) -> ClusterFacts:
    hint = "run `fabrictool observe` with this inventory"
    return ClusterFacts(cluster=name, known=False, reason="it is not in the observation", hint=hint)
