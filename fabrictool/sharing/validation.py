"""Whether a node can take a request without a token coming late: its next iterations are played beforehand.

Source: LLM-Mesh, section 5.3 (shadow validation). Requests that are late already refuse nobody: a node with one of them
would be lost for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from fabrictool.sharing.turns import LATE_LAST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabrictool.sharing.quantified import IterationTimes
    from fabrictool.sharing.replicas import SharedNode, SharedReplica, SharedRequest

OVER = 1.1
"""Iterations are thought to take so much longer than quantified: a right estimate is too short half of the time."""
HORIZON = 80
"""Iterations that are played at most."""
ENOUGH = 2
"""Tokens of the target's batch after the last prompt was read."""


class Refusal(Enum):
    """Why a node cannot take a request."""

    LATE = "its own first token, or one of its replica, would be late"
    OTHERS = "a token of another replica would be late"
    SLOW = "all replicas together would take longer for a token than is allowed"
    HELD = "its replica waits for memory"


@dataclass(slots=True)
class Tentative:
    """Decisions of a search that were not carried out yet."""

    requests: dict[int, list[SharedRequest]] = field(default_factory=dict)
    """Replica → more of them."""
    octets: dict[int, int] = field(default_factory=dict)
    """Node → more of its budget."""
    replicas: dict[int, list[SharedReplica]] = field(default_factory=dict)
    """Node → replicas that would be loaded."""

    def add(self, replica: SharedReplica, request: SharedRequest, octets: int) -> None:
        """A request to a replica, for which its node gives `octets`."""
        self.requests.setdefault(replica.id, []).append(request)
        self.octets[replica.node.id] = self.octets.get(replica.node.id, 0) + octets


@dataclass(slots=True)
class _Shadow:
    """What is left of a replica when only times count."""

    table: IterationTimes
    ready_at: float
    tpot_s: float
    due: float
    """Of its most urgent running request that is not late."""
    batch: int
    tokens: int
    """Contexts of the running requests together."""
    waiting: list[tuple[float, int, float]]
    """(deadline, tokens, seconds for each further token), in order."""
    decoded: int = 0

    def urgent(self) -> float:
        return min(self.due, min((w[0] for w in self.waiting), default=math.inf))


def refusal(
    target: SharedReplica,
    request: SharedRequest,
    now: float,
    *,
    tentative: Tentative,
    resize_s: float = 0.0,
    without: SharedReplica | None = None,
) -> Refusal | None:
    """None: all tokens come in time. `resize_s`: its memory is changed first; `without`: who leaves."""
    node = target.node
    if math.isinf(target.ready_at) or node.ledger.is_waiting(target.id):
        return Refusal.HELD
    shadows, mine = [], None
    for replica in (*node.replicas.values(), *tentative.replicas.get(node.id, ())):
        if replica is without or replica.leaving:
            continue
        more = tentative.requests.get(replica.id, ())
        if replica is target:
            mine = _shadow(replica, (*more, request), now)
            mine.ready_at = max(mine.ready_at, now) + resize_s
            shadows.append(mine)
        elif replica.running or replica.waiting or more:
            shadows.append(_shadow(replica, more, now))
    if mine is None:
        message = "the target is not on its node"
        raise ValueError(message)
    return _too_slow(shadows) or _play(node, shadows, mine, now)


def _shadow(replica: SharedReplica, more: Iterable[SharedRequest], now: float) -> _Shadow:
    due, tokens, tpot = math.inf, 0, math.inf
    for r in replica.running:
        tokens += r.prompt + r.emitted
        tpot = min(tpot, r.tpot_s)
        deadline = r.began + r.ttft_s + r.tpot_s * r.emitted
        if now <= deadline < due:
            due = deadline
    waiting = []
    for r in (*replica.waiting, *more):
        tpot = min(tpot, r.tpot_s)
        deadline = r.deadline
        waiting.append((deadline if deadline >= now else math.inf, r.context, r.tpot_s))
    ready_at = math.inf if replica.node.ledger.is_waiting(replica.id) else replica.ready_at
    return _Shadow(replica.table, ready_at, tpot, due, len(replica.running), tokens, waiting)


def _too_slow(shadows: list[_Shadow]) -> Refusal | None:
    """Whether everybody's next token, one after the other, takes longer than somebody allows (case 3)."""
    total = 0.0
    for shadow in shadows:
        batch = shadow.batch + len(shadow.waiting)
        tokens = shadow.tokens + sum(w[1] for w in shadow.waiting)
        total += OVER * shadow.table.decode_s(batch, tokens / batch)
    return Refusal.SLOW if total > min(shadow.tpot_s for shadow in shadows) else None


def _play(node: SharedNode, shadows: list[_Shadow], mine: _Shadow, now: float) -> Refusal | None:
    at = max(now, node.busy_until)  # the iteration under way cannot be stopped
    for _ in range(HORIZON):
        turn, least = None, math.inf
        for shadow in shadows:
            if shadow.ready_at <= at and (shadow.batch or shadow.waiting):
                urgent = min(shadow.urgent(), LATE_LAST)
                if urgent < least:
                    turn, least = shadow, urgent
        if turn is None:
            at = min(shadow.ready_at for shadow in shadows)  # the target's is finite
            continue
        if turn.waiting:
            deadline, tokens, tpot = turn.waiting.pop(0)
            at += OVER * turn.table.prefill_s(tokens)
            if at > deadline:
                return Refusal.LATE if turn is mine else Refusal.OTHERS
            turn.due = min(turn.due, deadline + tpot)
            turn.batch += 1
            turn.tokens += tokens + 1
            continue
        at += OVER * turn.table.decode_s(turn.batch, turn.tokens / turn.batch)
        if at > turn.due:
            return Refusal.LATE if turn is mine else Refusal.OTHERS
        turn.due += turn.tpot_s
        turn.tokens += turn.batch
        turn.decoded += 1
        if mine.decoded >= ENOUGH and not any(shadow.waiting for shadow in shadows):
            return None
    return None
