"""Continuous batching: which tokens of which requests the next step computes. No clock, no arrays, no I/O.

Each step has a budget of tokens. Requests that decode come first, one token each; what is left goes to prompts, in
chunks, in order of arrival. A request is admitted when the free blocks cover its whole prefix. When a running request
needs a block and none is free, the youngest running request is preempted: its blocks are freed and its prefix (prompt
and all it has generated) is computed again later. The oldest of the most urgent requests is never preempted, and the
pool holds at least one request of full length, so every request ends.

Invariants, checked by the tests after every step: the free blocks and those of running requests are all blocks, each
once; no request has more computed tokens than its blocks hold; waiting requests hold no blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.engines.reference.kv import BlockAllocator


class ScheduledChunk(NamedTuple):
    """What one step computes for one request."""

    request: int
    tokens: tuple[int, ...]
    position: int
    blocks: tuple[int, ...]
    samples: bool
    """The prefix is complete with this chunk: a token follows from its logits."""


class StepPlan(NamedTuple):
    """One step. Whoever carries it out needs nothing else, and reports the sampled tokens to `commit`."""

    epoch: int
    work: tuple[ScheduledChunk, ...]
    preempted: tuple[int, ...]
    """Requests that lost their blocks in making this plan."""


@dataclass(slots=True)
class _Sequence:
    request: int
    priority: int
    arrival: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


def _age(sequence: _Sequence) -> tuple[int, int]:
    """The urgent and the old first."""
    return sequence.priority, sequence.arrival


class ContinuousBatcher:
    """The queue and the batch."""

    def __init__(self, allocator: BlockAllocator, *, block_size: int, max_seqs: int, token_budget: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._max_seqs = max_seqs
        # Every running request must be able to decode in every step.
        self._budget = max(token_budget, max_seqs)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._arrivals = 0
        self._epoch = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: int, prompt: list[int], priority: int = 1) -> None:
        """Queue a request, before those of a greater `priority`; the caller has checked that prompt and answer fit into
        the pool.
        """
        self._requeue(_Sequence(request, priority, self._arrivals, list(prompt)))
        self._arrivals += 1

    def remove(self, request: int) -> bool:
        """Forget a request and free its blocks: it finished or was cancelled. False when it is not here."""
        for sequence in (*self._running, *self._waiting):
            if sequence.request == request:
                self._release(sequence)
                (self._running if sequence in self._running else self._waiting).remove(sequence)
                return True
        return False

    def plan(self) -> StepPlan:
        """The next step; empty when there is nothing to do. `commit` it before the next."""
        preempted: list[int] = []
        work: list[ScheduledChunk] = []
        budget = self._budget
        decoding = [s for s in self._running if s.computed == len(s.tokens) - 1]
        for sequence in decoding:
            if sequence in self._running and self._extend(sequence, preempted):
                work.append(self._work(sequence, 1))
                budget -= 1
        for sequence in [s for s in self._running if s.computed < len(s.tokens) - 1]:
            if budget == 0:
                break
            count = min(budget, len(sequence.tokens) - sequence.computed)
            work.append(self._work(sequence, count))
            budget -= count
        while budget and not preempted and self._waiting and len(self._running) < self._max_seqs:
            sequence = self._waiting[0]
            blocks = self._allocator.take(self._blocks_for(len(sequence.tokens)))
            if blocks is None:
                break  # first come, first served: a small request does not overtake a large one for ever
            self._waiting.popleft()
            sequence.blocks = blocks
            self._running.append(sequence)
            count = min(budget, len(sequence.tokens))
            work.append(self._work(sequence, count))
            budget -= count
        # A request may have been preempted after its part was planned.
        lost = set(preempted)
        work = [chunk for chunk in work if chunk.request not in lost]
        self._epoch += 1
        return StepPlan(self._epoch, tuple(work), tuple(preempted))

    def commit(self, plan: StepPlan, sampled: Mapping[int, int]) -> None:
        """Account for a step that was carried out; `sampled` has a token for each work that samples.

        Requests that ended are removed by the caller, before or after.
        """
        if plan.epoch != self._epoch:
            raise AssertionError(f"plan {plan.epoch} is not the last one, {self._epoch}")
        running = {sequence.request: sequence for sequence in self._running}
        for chunk in plan.work:
            sequence = running.get(chunk.request)
            if sequence is not None:
                sequence.computed += len(chunk.tokens)
                if chunk.samples:
                    sequence.tokens.append(sampled[chunk.request])

    def _extend(self, sequence: _Sequence, preempted: list[int]) -> bool:
        """Make room for one more token, at the cost of the youngest; False when that was the sequence itself."""
        missing = self._blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while missing > 0:
            blocks = self._allocator.take(missing)
            if blocks is not None:
                sequence.blocks += blocks
                return True
            youngest = max(self._running, key=_age)
            self._release(youngest)
            self._running.remove(youngest)
            self._requeue(youngest)
            preempted.append(youngest.request)
            if youngest is sequence:
                return False
        return True

    def _requeue(self, sequence: _Sequence) -> None:
        """Into the queue, before everything younger."""
        at = sum(1 for queued in self._waiting if _age(queued) < _age(sequence))
        self._waiting.insert(at, sequence)

    def _release(self, sequence: _Sequence) -> None:
        self._allocator.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _work(self, sequence: _Sequence, count: int) -> ScheduledChunk:
        start, end = sequence.computed, sequence.computed + count
        return ScheduledChunk(
            sequence.request,
            tuple(sequence.tokens[start:end]),
            start,
            tuple(sequence.blocks),
            end == len(sequence.tokens),
        )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
