"""Routing policies that choose inside the loop: their state on its way there and back.

The loop chooses as the policy would have done, to the last draw of its random source (a test plays both), and without
a call of Python for each request. Policies that learn, and those that are installed, are asked in Python.
"""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.dealing import part_of
from fabrictool.routing.policies import (
    CREDITS_KEPT,
    LeastLoadedPolicy,
    RandomPolicy,
    RoundRobinPolicy,
    WeightedPolicy,
)
from fabrictool.routing.protocol import Candidate
from fabrictool.simulator import kernel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from fabrictool.domain.specs import Phase
    from fabrictool.routing.protocol import RoutingPolicy
    from fabrictool.simulator.demanded import GroupDemand

    Ints = np.ndarray[Any, np.dtype[np.int64]]

_BY = {
    LeastLoadedPolicy: kernel.LEAST_LOADED,
    RandomPolicy: kernel.RANDOM,
    RoundRobinPolicy: kernel.ROUND_ROBIN,
    WeightedPolicy: kernel.WEIGHTED,
}


class Rival(Candidate, Protocol):
    """A candidate of which it is known what it does of serving."""

    @property
    def role(self) -> Phase: ...


V = TypeVar("V", bound=Rival)


def rivals(groups: Sequence[GroupDemand], views: Sequence[V]) -> dict[str | None, tuple[list[V], list[V]]]:
    """Consumer group, in the same order, → whom its requests can go to, by the rule that gateways have: before their
    cache is handed over, and after. Without groups None stands for all requests, which may go to anybody.
    """
    late = [view for view in views if view.role == "decode"]
    early = [view for view in views if view.role != "decode"]
    if not groups:
        return {None: (early, late)}
    trust = TrustPolicy({its.group: its.allowed for its in groups if its.allowed is not None}, {})
    sides: dict[str | None, tuple[list[V], list[V]]] = {}
    for its in groups:
        asking = None if its.allowed is None else its.group
        able = [view for view in views if trust.permits(view.provider, view.model, asking, None)]
        pairs = {view.model for view in able if view.role == "decode"}
        # A prompt that nobody would take on is not computed.
        first = [view for view in able if view.role == "unified" or (view.role == "prefill" and view.model in pairs)]
        sides[its.group] = first, [view for view in able if view.role == "decode"]
    return sides


# Wide: whose requests they are, and who is there for them.
def routing_by(
    policy: RoutingPolicy,
    model: Ints | None,
    group: Ints | None,
    requests: int,
    among: Mapping[str | None, Sequence[Sequence[Candidate]]],
    views: Sequence[Candidate],
) -> kernel.RoutingState:
    """What the loop needs to choose as `policy` does; `model` and `group` as in `fleet.Stream`.

    `among`: the `rivals` of these views.
    """
    replicas = len(views)
    by = _BY.get(type(policy), kernel.BY_CALLER)
    own_source = type(getattr(policy, "rng", None)) not in (random.Random, type(None))
    kept = max(map(len, policy.credits.values()), default=0) if isinstance(policy, WeightedPolicy) else -math.inf
    crowded = kept + replicas > CREDITS_KEPT
    state = kernel.RoutingState(
        by=np.full(1, kernel.BY_CALLER if own_source or crowded else by),
        turn=np.zeros(1, dtype=np.int64),
        words=np.zeros(kernel.MT_WORDS + 1, dtype=np.int64),
        model=_numbers(model, requests),
        group=_numbers(group, requests),
        allowed=np.zeros((len(among), replicas), dtype=np.bool_),
        weights=np.zeros((len(among), replicas)),
        part=np.zeros((len(among), replicas), dtype=np.int64),
        credit=np.zeros((len(_parts(among)), replicas)),
        candidates=np.zeros(replicas, dtype=np.int64),
        shares=np.zeros(replicas),
        loads=np.zeros(replicas),
    )
    numbers = {view: number for number, view in enumerate(views)}
    for g, (name, sides) in enumerate(among.items()):
        for those in (mine for side in sides for mine in _by_model(side)):
            part = part_of(those, name)
            for view in those:
                r = numbers[view]
                state.allowed[g, r] = True
                state.weights[g, r] = view.weight if part is None else view.group_weights.get(part, view.weight)
                state.part[g, r] = _parts(among).index(part)
    return state


def _by_model(views: Sequence[Candidate]) -> list[list[Candidate]]:
    return [[view for view in views if view.model == model] for model in dict.fromkeys(view.model for view in views)]


def _numbers(given: Ints | None, requests: int) -> Ints:
    return np.zeros(requests, dtype=np.int64) if given is None else np.ascontiguousarray(given, dtype=np.int64)


def _parts(groups: Collection[str | None]) -> list[str | None]:
    """Of which `WeightedPolicy` may keep credits."""
    return list(dict.fromkeys((None, "", *groups)))


@contextmanager
def lent(
    policy: RoutingPolicy,
    routing: kernel.RoutingState,
    groups: Collection[str | None],
    views: Sequence[Candidate],
) -> Iterator[None]:
    """The policy's state is the loop's until the context ends; `views` are the replicas as the policy knows them."""
    in_loop = routing.by[0] != kernel.BY_CALLER
    if in_loop:
        _lend(policy, routing, _parts(groups), views)
    try:
        yield
    finally:
        if in_loop:
            _give_back(policy, routing, _parts(groups), views)


def _lend(
    policy: RoutingPolicy, routing: kernel.RoutingState, parts: Sequence[str | None], views: Sequence[Candidate]
) -> None:
    if isinstance(policy, LeastLoadedPolicy | RandomPolicy):
        routing.words[:] = policy.rng.getstate()[1]
    if isinstance(policy, RoundRobinPolicy):
        routing.turn[0] = policy.turn
    if isinstance(policy, WeightedPolicy):
        for row, part in zip(routing.credit, parts, strict=True):
            credit = policy.credits.get(part, {})
            row[:] = [credit.get(view, 0.0) for view in views]


def _give_back(
    policy: RoutingPolicy, routing: kernel.RoutingState, parts: Sequence[str | None], views: Sequence[Candidate]
) -> None:
    if isinstance(policy, LeastLoadedPolicy | RandomPolicy):
        version, _, rest = policy.rng.getstate()
        policy.rng.setstate((version, tuple(routing.words.tolist()), rest))
    if isinstance(policy, RoundRobinPolicy):
        policy.turn = int(routing.turn[0])
    if isinstance(policy, WeightedPolicy):
        for row, part in zip(routing.credit, parts, strict=True):
            if part in policy.credits or row.any():
                policy.credits.setdefault(part, {}).update(zip(views, row.tolist(), strict=True))
