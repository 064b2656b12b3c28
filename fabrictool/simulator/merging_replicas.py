"""Replicas that merge and split, in virtual time. Source: Flying Serving, section 6."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabrictool.merging.requests import MergingRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.merging.core import MergingCounts, MergingReplicas
    from fabrictool.merging.requests import MergedStep


@dataclass(frozen=True, slots=True)
class MergedAnswer:
    """What one request met; seconds."""

    request: MergingRequest
    ttft: float
    e2e: float

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / max(1, self.request.emitted - 1)


@dataclass(slots=True)
class MergingRun:
    """What came of it."""

    answers: list[MergedAnswer] = field(default_factory=list)
    rejected: dict[int, int] = field(default_factory=dict)
    """Request → tokens that would have fit."""
    emitted: list[float] = field(default_factory=list)
    """When, of all tokens."""
    counts: MergingCounts | None = None

    def peak_rate(self, window_s: float = 10.0) -> float:
        """Tokens/s in the best of the windows of this length."""
        counted: dict[int, int] = {}
        for at in self.emitted:
            counted[int(at / window_s)] = counted.get(int(at / window_s), 0) + 1
        return max(counted.values(), default=0) / window_s


def play_merging(
    replicas: MergingReplicas,
    requests: Sequence[MergingRequest],
    answers: Mapping[int, int],
    seconds: Callable[[MergedStep], float],
) -> MergingRun:
    """Until all are answered. `answers`: request → tokens, which the replicas do not know; `seconds`: of a step."""
    order = itertools.count()
    events: list[tuple[float, int, MergingRequest | MergedStep]] = [(r.began, next(order), r) for r in requests]
    heapq.heapify(events)
    outcome = MergingRun()
    first: dict[int, float] = {}

    def is_answered(request: MergingRequest) -> bool:
        return request.emitted >= answers[request.id]

    while events:
        now = events[0][0]
        while events and events[0][0] <= now:
            _, _, what = heapq.heappop(events)
            if isinstance(what, MergingRequest):
                longest = replicas.arrive(what, now)
                if longest is not None:
                    outcome.rejected[what.id] = longest
                continue
            for request in replicas.ended(what, is_answered):
                outcome.emitted.append(now)
                first.setdefault(request.id, now - request.began)
                if is_answered(request):
                    outcome.answers.append(MergedAnswer(request, first[request.id], now - request.began))
        for step in replicas.next_steps(now):
            heapq.heappush(events, (step.begins + seconds(step), next(order), step))
    outcome.counts = replicas.counts
    if len(outcome.answers) + len(outcome.rejected) < len(requests):
        message = f"{len(requests) - len(outcome.answers) - len(outcome.rejected)} requests were never answered"
        raise AssertionError(message)
    return outcome
