"""Whose iteration is next on a node. Source: LLM-Mesh, section 5.1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.sharing.replicas import SharedReplica, SharedRequest

LATE_LAST = 1e12
"""Seconds: the turn of a replica whose requests are all late comes when nobody else is urgent. By deadlines
alone a request that is late already would be served first, and make the next one late."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Of one replica: a prompt, or a token for all that run."""

    replica: SharedReplica
    prompt: SharedRequest | None
    expected_s: float


def next_turn(replicas: Iterable[SharedReplica], now: float) -> SharedReplica | None:
    """The one with least headroom among those that are ready and have requests; None without any."""
    chosen, least = None, math.inf
    for replica in replicas:
        if not (replica.running or replica.waiting) or replica.ready_at > now or replica.leaving:
            continue
        if replica.node.ledger.is_changing(replica.id):
            continue
        due = min(replica.due(now), LATE_LAST)
        if due < least:
            chosen, least = replica, due
    return chosen


def iteration(replica: SharedReplica) -> Iteration:
    """The replica's next: prompts before tokens, one at a time."""
    if replica.waiting:
        prompt = replica.waiting[0]
        return Iteration(replica, prompt, replica.table.prefill_s(prompt.context))
    contexts = sum(request.context for request in replica.running)
    batch = len(replica.running)
    return Iteration(replica, None, replica.table.decode_s(batch, contexts / batch))
