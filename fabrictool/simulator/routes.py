"""Routing policies that choose inside the loop: their state on its way there and back.

The loop chooses as the policy would have done, to the last draw of its random source (a test plays both), and without
a call of Python for each request. Policies that learn, and those that are installed, are asked in Python.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.routing.policies import (
    CREDITS_KEPT,
    LeastLoadedPolicy,
    RandomPolicy,
    RoundRobinPolicy,
    WeightedPolicy,
)
from fabrictool.simulator import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.routing.protocol import Candidate, RoutingPolicy

    Ints = np.ndarray[Any, np.dtype[np.int64]]

_BY = {
    LeastLoadedPolicy: kernel.LEAST_LOADED,
    RandomPolicy: kernel.RANDOM,
    RoundRobinPolicy: kernel.ROUND_ROBIN,
    WeightedPolicy: kernel.WEIGHTED,
}


def routing_by(policy: RoutingPolicy, model: Ints | None, requests: int, replicas: int) -> kernel.RoutingState:
    """What the loop needs to choose as `policy` does; `model` as in `fleet.Stream`."""
    by = _BY.get(type(policy), kernel.BY_CALLER)
    own_source = type(getattr(policy, "rng", None)) not in (random.Random, type(None))
    crowded = isinstance(policy, WeightedPolicy) and len(policy.credit) + replicas > CREDITS_KEPT
    return kernel.RoutingState(
        by=np.full(1, kernel.BY_CALLER if own_source or crowded else by),
        turn=np.zeros(1, dtype=np.int64),
        words=np.zeros(kernel.MT_WORDS + 1, dtype=np.int64),
        model=np.zeros(requests, dtype=np.int64) if model is None else np.ascontiguousarray(model, dtype=np.int64),
        candidates=np.zeros(replicas, dtype=np.int64),
        loads=np.zeros(replicas),
    )


@contextmanager
def lent(
    policy: RoutingPolicy, routing: kernel.RoutingState, replicas: Any, views: Sequence[Candidate]
) -> Iterator[None]:
    """The policy's state is the loop's until the context ends; `views` are the replicas as the policy knows them."""
    in_loop = routing.by[0] != kernel.BY_CALLER
    if in_loop:
        _lend(policy, routing, replicas, views)
    try:
        yield
    finally:
        if in_loop:
            _give_back(policy, routing, replicas, views)


def _lend(policy: RoutingPolicy, routing: kernel.RoutingState, replicas: Any, views: Sequence[Candidate]) -> None:
    if isinstance(policy, LeastLoadedPolicy | RandomPolicy):
        routing.words[:] = policy.rng.getstate()[1]
    if isinstance(policy, RoundRobinPolicy):
        routing.turn[0] = policy.turn
    if isinstance(policy, WeightedPolicy):
        replicas.credit = [policy.credit.get(view, 0.0) for view in views]


def _give_back(policy: RoutingPolicy, routing: kernel.RoutingState, replicas: Any, views: Sequence[Candidate]) -> None:
    if isinstance(policy, LeastLoadedPolicy | RandomPolicy):
        version, _, rest = policy.rng.getstate()
        policy.rng.setstate((version, tuple(routing.words.tolist()), rest))
    if isinstance(policy, RoundRobinPolicy):
        policy.turn = int(routing.turn[0])
    if isinstance(policy, WeightedPolicy):
        policy.credit.update(zip(views, replicas.credit.tolist(), strict=True))
