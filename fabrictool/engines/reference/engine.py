"""The engine: one thread that plans a step, computes it and hands out text; the rest talks to it by messages."""

from __future__ import annotations

import logging
import queue
from typing import TYPE_CHECKING

from fabrictool.engines.reference.answering import AnsweringEngine
from fabrictool.engines.reference.kv import BlockAllocator, KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.scheduler import ContinuousBatcher, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import EngineLimits, FinishReason, GenerationEvent
    from fabrictool.engines.reference.tokenizer import Tokenizer
    from fabrictool.engines.reference.weights import Weights

_log = logging.getLogger("fabrictool.engine")


class ReferenceEngine(AnsweringEngine):
    """Computes in its own thread."""

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        clock: Clock,
        on_failure: Callable[[str], None] = _log.error,
    ) -> None:
        super().__init__(tokenizer, limits, clock, on_failure)
        self._model = Transformer(weights)
        self._pool = KvPool(weights.config, limits.blocks, limits.block_size)
        self._allocator = BlockAllocator(limits.blocks)
        self._scheduler = ContinuousBatcher(
            self._allocator,
            block_size=limits.block_size,
            max_seqs=limits.max_seqs,
            token_budget=limits.token_budget,
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the current step; requests in progress end as cancelled."""
        self._tell(0, None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # -- the compute thread -----------------------------------------------------------------------------------

    def _compute(self) -> None:
        plan = self._scheduler.plan()
        if plan.work:
            self._carry_out(plan)
        self._measure()

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

    def _measure(self) -> None:
        self.stats.running = self._scheduler.running
        self.stats.waiting = self._scheduler.waiting
        self.stats.kv_use = 1.0 - self._allocator.free / self._allocator.total
