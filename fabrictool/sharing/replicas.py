"""Requests, and the replicas of models that work on them side by side on one node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.sharing.ledger import MemoryLedger
    from fabrictool.sharing.quantified import IterationTimes

PRIOR_ANSWERS = 10
"""Answers that a model's assumed mean length counts for."""


@dataclass(slots=True, eq=False)
class SharedRequest:
    """Of one model, with latency targets of its own. What it will answer nobody knows."""

    id: int
    model: str
    prompt: int
    """Tokens that were asked."""
    began: float
    ttft_s: float
    tpot_s: float
    emitted: int = 0
    """Tokens so far; they stay with it when it moves."""

    @property
    def deadline(self) -> float:
        """Of its next token (equation 1, plus the present time)."""
        return self.began + self.ttft_s + self.tpot_s * self.emitted

    @property
    def context(self) -> int:
        """Tokens that its cache must hold."""
        return self.prompt + self.emitted


@dataclass(slots=True, eq=False)
class SharedModel:
    """What is known of a model; octets, tokens, seconds."""

    name: str
    weights: int
    token: int
    """Octets of one cached token."""
    longest: int
    """Tokens of a request at most: a replica has room for one such."""
    tables: Mapping[str, IterationTimes]
    """By kind of node."""
    mean_answer: float
    """Tokens; assumed at first, learned by and by."""
    answers: int = PRIOR_ANSWERS
    block: int = 1
    """Tokens of cache that are handed out together."""

    def learn(self, answer: int) -> None:
        """From a request that was answered."""
        self.answers += 1
        self.mean_answer += (answer - self.mean_answer) / self.answers

    def need(self, requests: Iterable[SharedRequest]) -> int:
        """Octets of cache that these will need (equation 2)."""
        tokens = sum(self.held(r.prompt + max(float(r.emitted), self.mean_answer)) for r in requests)
        return math.ceil(self.token * max(tokens, self.held(float(self.longest))))

    def held(self, tokens: float) -> float:
        """Tokens of cache that a request of so many keeps from others."""
        return tokens if self.block == 1 else -(-tokens // self.block) * self.block


@dataclass(slots=True, eq=False)
class SharedReplica:
    """A model that is loaded on a node."""

    id: int
    model: SharedModel
    node: SharedNode
    ready_at: float = 0.0
    """When its memory is as it should be; infinite while it waits for memory."""
    idle_since: float | None = None
    leaving: bool = False
    waiting: list[SharedRequest] = field(default_factory=list)
    """For their prompts to be read, in the order they came."""
    running: list[SharedRequest] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def cache(self) -> int:
        """Octets that were decided on."""
        return max(0, self.node.ledger.granted(self.id) - self.model.weights)

    @property
    def table(self) -> IterationTimes:
        return self.model.tables[self.node.kind]

    def due(self, now: float) -> float:
        """When its most urgent token is due that is not late already; infinite without such."""
        due = math.inf
        for requests in (self.running, self.waiting):
            for request in requests:
                deadline = request.began + request.ttft_s + request.tpot_s * request.emitted  # the inner loop of a node
                if now <= deadline < due:
                    due = deadline
        return due


@dataclass(slots=True, eq=False)
class SharedNode:
    """A node, or the part of it that replicas share: one iteration at a time."""

    id: int
    kind: str
    """Which of a model's tables holds here."""
    ledger: MemoryLedger
    replicas: dict[int, SharedReplica] = field(default_factory=dict)
    busy_until: float = 0.0
    """Expected end of the iteration under way."""
    computing: SharedReplica | None = None
    """The replica that computes it."""
