"""What decides over every request of a gateway, until it is told anew."""

from __future__ import annotations

# The types of a compiled dataclass are looked at when it is made.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from fabrictool.domain.specs import PatienceRule  # noqa: TC001
from fabrictool.mesh.evidence import Attestation, NoAttestation
from fabrictool.routing.admission import PRIORITIES, STANDARD, Priority
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.headroom import HeadroomPolicy
from fabrictool.routing.policies import RandomPolicy, RoundRobinPolicy, WeightedPolicy
from fabrictool.routing.protocol import RoutingPolicy  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)  # with slots it would be no native class
class RoutingRules:
    """How a gateway chooses among replicas, and who goes first."""

    routing_policy: RoutingPolicy
    trust: TrustPolicy
    retries: int
    """Attempts after slow failures."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By `weight_key`; what is not there has 1."""
    group_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By `weight_key`, then consumer group; see `routing.dealing`."""
    attestation: Attestation = field(default_factory=NoAttestation)
    affinity: bool = False
    """Whether conversations stay with a replica (`routing.affinity`)."""
    admission: bool = True
    """Whether requests wait while all replicas are full (`routing.admission`)."""
    priorities: Mapping[str, Priority] = field(default_factory=dict)
    """Tenant → the most important class that its requests may have."""

    patience: Mapping[str, PatienceRule] = field(default_factory=dict)
    """Models of which something is declared; see `Patience`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name → the model that it means."""

    @property
    def makes_room(self) -> HeadroomPolicy | None:
        """The policy, if it knows how long steps take: then streams may be moved for others."""
        return self.routing_policy if isinstance(self.routing_policy, HeadroomPolicy) else None

    @property
    def by_weight(self) -> bool:
        """Whether the policy looks at no load: then conversations have their homes by weight, too."""
        return isinstance(self.routing_policy, RandomPolicy | RoundRobinPolicy | WeightedPolicy)

    def priority_limit(self, tenant: str) -> int:
        return PRIORITIES.index(self.priorities[tenant]) if tenant in self.priorities else STANDARD


# Wide: a line for each rule.
def routing_rules(
    policy: RoutingPolicy,
    groups: Mapping[str, Iterable[str]],
    model_providers: Mapping[str, Iterable[str]],
    retries: int,
    weights: Mapping[str, float] = MappingProxyType({}),
    visible: Mapping[str, Iterable[str]] = MappingProxyType({}),
    group_weights: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> RoutingRules:
    """Of a spec, or of a static list, in the words that these have."""
    trust = TrustPolicy(
        {group: frozenset(names) for group, names in groups.items()},
        {model: frozenset(names) for model, names in model_providers.items()},
        {model: frozenset(names) for model, names in visible.items()},
    )
    return RoutingRules(policy, trust, retries, weights, group_weights)
