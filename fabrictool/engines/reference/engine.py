"""The engine: one thread that plans a step, computes it, and hands out text; everything else talks to it by messages.

`submit` and `cancel` may be called from any thread. Events of a request are given to its callback in the compute
thread, the last one with a finish reason.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

from fabrictool.engines.reference.answers import OpenAnswer, OpenAnswers
from fabrictool.engines.reference.kv import BlockAllocator, KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.scheduler import ContinuousBatcher, StepPlan
from fabrictool.engines.reference.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import FinishReason, GenerationEvent, GenerationRequest
    from fabrictool.engines.reference.tokenizer import Tokenizer
    from fabrictool.engines.reference.weights import Weights

_log = logging.getLogger("fabrictool.engine")


class EngineLimits(NamedTuple):
    """Sizes that are fixed while the engine runs."""

    context: int
    """Tokens that one request may hold, prompt and answer."""
    max_seqs: int
    blocks: int
    block_size: int
    """Tokens."""
    token_budget: int
    """Tokens of one step: larger fills the caches of prompts better and makes other requests wait longer for it."""


class ReferenceEngine:
    """Answers requests for one model, several at a time."""

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        clock: Clock,
        on_failure: Callable[[str], None] = _log.error,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.failure: str | None = None
        """Why the compute thread ended, when it should not have."""
        self._on_failure = on_failure
        self._clock = clock
        self._model = Transformer(weights)
        self._pool = KvPool(weights.config, limits.blocks, limits.block_size)
        self._allocator = BlockAllocator(limits.blocks)
        self._scheduler = ContinuousBatcher(
            self._allocator,
            block_size=limits.block_size,
            max_seqs=limits.max_seqs,
            token_budget=limits.token_budget,
        )
        self._answers = OpenAnswers(tokenizer, self.stats, clock)
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[tuple[int, OpenAnswer | None]] = queue.SimpleQueue()
        """(number, answer) submits, (number, None) cancels, (0, None) stops."""
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    @property
    def context(self) -> int:
        """Tokens that one request may hold."""
        return self.limits.context

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the current step; requests in progress end as cancelled."""
        self._inbox.put((0, None))
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationEvent], None]) -> int:
        """Queue a request; returns its number for `cancel`."""
        if len(request.prompt) + request.max_tokens > self.limits.context or not request.prompt:
            raise AssertionError("the caller checks lengths")
        number = next(self._numbers)
        self._inbox.put((number, OpenAnswer(request, self.tokenizer, emit, self._clock.monotonic())))
        return number

    def cancel(self, number: int) -> None:
        """Stop a request and free its blocks; nothing when it has ended."""
        self._inbox.put((number, None))

    # -- the compute thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                plan = self._scheduler.plan()
                if plan.work:
                    self._carry_out(plan)
                self._measure()
        except Exception as error:  # noqa: BLE001 - fail-stop: whatever broke, say so and serve nobody
            _log.exception("the compute thread failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._end_all("error")
            self._on_failure(self.failure)
        else:
            self._end_all("cancelled")

    def _receive(self) -> bool:
        """Take all messages, waiting for one when there is nothing to compute; False to stop."""
        idle = not self._answers
        while True:
            try:
                number, answer = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if answer is not None:
                self._answers.add(number, answer)
                self._scheduler.add(number, answer.request.prompt, answer.request.priority)
            elif number == 0:
                return False
            elif number in self._answers:
                self._end(number, self._answers.given_up(number, "cancelled"), "cancelled")
            self._measure()

    def _carry_out(self, plan: StepPlan) -> None:
        batch = [SequenceRows(work.tokens, work.position, work.blocks, work.samples) for work in plan.work]
        logits = self._model.step(batch, self._pool)
        sampling = [work.request for work in plan.work if work.samples]
        sampled = {
            number: self._answers[number].sampler.draw(row) for number, row in zip(sampling, logits, strict=True)
        }
        self._scheduler.commit(plan, sampled)
        self.stats.steps += 1
        self.stats.preemptions += len(plan.preempted)
        for number, token in sampled.items():
            event = self._answers.advance(number, token)
            if event.finish is None:
                self._answers[number].emit(event)
            else:
                self._end(number, event, event.finish)

    def _end(self, number: int, event: GenerationEvent, finish: FinishReason) -> None:
        answer = self._answers.close(number, finish)
        self._scheduler.remove(number)
        self._measure()
        answer.emit(event)

    def _end_all(self, reason: FinishReason) -> None:
        for number in self._answers.numbers():
            self._end(number, self._answers.given_up(number, reason), reason)

    def _measure(self) -> None:
        self.stats.running = self._scheduler.running
        self.stats.waiting = self._scheduler.waiting
        self.stats.kv_use = 1.0 - self._allocator.free / self._allocator.total
