"""Who may serve a request: model, trust, readiness, context; in that order, so that a refusal says the true reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


class RoutableReplica(Protocol):
    """What routing needs to know of a replica; gateway and simulator bring their own objects."""

    @property
    def model(self) -> str: ...

    @property
    def provider(self) -> str: ...

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be accepted."""

    @property
    def context(self) -> int:
        """Tokens that one request may hold; 0 when unknown."""

    @property
    def load(self) -> float:
        """Requests in it or waiting for it; comparable between replicas."""

    @property
    def weight(self) -> float:
        """Its share of traffic under equal load; 1 unless the planner says otherwise."""

    @property
    def group_weights(self) -> Mapping[str, float]:
        """Consumer group → that share of its requests, "" for groups that are not named; empty where the model's demand
        is not divided.
        """


Refusal = Literal["unknown-model", "not-allowed", "not-ready"]


@dataclass(frozen=True, slots=True, eq=False)
class TrustPolicy:
    """Which providers may serve whose requests; each is its own key in a dictionary.

    `groups` maps a consumer group to its allowlist; `models` maps a model to the providers that may serve it at
    all. A group that is not in the map may use nobody; None as the group means an open gateway.
    """

    groups: dict[str, frozenset[str]]
    models: dict[str, frozenset[str]]
    visible: dict[str, frozenset[str]] = field(default_factory=dict)
    """Model → the groups for which it is there; one that is not in the map is there for all."""

    def sees(self, group: str | None, model: str) -> bool:
        """Whether a model is there for a group; for another it does not exist."""
        return group is None or model not in self.visible or group in self.visible[model]

    def permits(self, provider: str, model: str, group: str | None, requested: Collection[str] | None) -> bool:
        """Whether `provider` may see this request; `requested` narrows and never widens."""
        if requested is not None and provider not in requested:
            return False
        if model in self.models and provider not in self.models[model]:
            return False
        if not self.sees(group, model):
            return False
        return group is None or provider in self.groups.get(group, frozenset())


R = TypeVar("R", bound=RoutableReplica)


class Selection(Generic[R]):
    """The candidates, or why there are none."""

    def __init__(self, candidates: tuple[R, ...], refusal: Refusal | None = None) -> None:
        self.candidates = candidates
        self.refusal: Refusal | None = refusal


def entitled(
    replicas: Iterable[R],
    *,
    model: str,
    trust: TrustPolicy,
    group: str | None = None,
    requested: Collection[str] | None = None,
) -> tuple[R, ...] | Refusal:
    """The replicas of `model` that may see such a request, ready or not: the same until a replica or a rule changes.

    `requested` is the client's own allowlist.
    """
    serving: Sequence[R] = [replica for replica in replicas if replica.model == model]
    if not serving or not trust.sees(group, model):
        return "unknown-model"
    return tuple(r for r in serving if trust.permits(r.provider, model, group, requested)) or "not-allowed"


def ready(replicas: Iterable[R], exclude: Collection[R] = ()) -> list[R]:
    """Those that a request can be sent to now; `exclude` were tried already."""
    if exclude:
        return [replica for replica in replicas if replica.ready and replica not in exclude]
    return [replica for replica in replicas if replica.ready]


def select(
    replicas: Iterable[R],
    *,
    model: str,
    trust: TrustPolicy,
    group: str | None = None,
    requested: Collection[str] | None = None,
    exclude: Collection[R] = (),
) -> Selection[R]:
    """The replicas that may serve a request for `model` now: `entitled` and `ready`."""
    allowed = entitled(replicas, model=model, trust=trust, group=group, requested=requested)
    if isinstance(allowed, str):
        return Selection((), allowed)
    candidates = tuple(ready(allowed, exclude))
    return Selection(candidates, None if candidates else "not-ready")
