"""What engines have in common: messages to one compute thread, which fails and stops.

`submit` and `cancel` may be called from any thread. Events of a request are given to its callback in the compute
thread, the last one with a finish reason.
"""

from __future__ import annotations

import abc
import itertools
import logging
import queue
import threading
from typing import TYPE_CHECKING

from fabrictool.engines.reference.answers import OpenAnswer, OpenAnswers
from fabrictool.engines.reference.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import (
        AnsweredModel,
        EngineLimits,
        FinishReason,
        GenerationEvent,
        GenerationRequest,
    )
    from fabrictool.engines.reference.tokenizer import Tokenizer
    from fabrictool.status.elastic import ElasticState

_log = logging.getLogger("fabrictool.engine")


class ComputeThread(abc.ABC):
    """Open answers, and the thread that computes them; how is said by those that inherit it."""

    def __init__(self, clock: Clock, on_failure: Callable[[str], None]) -> None:
        self.failure: str | None = None
        """Why the compute thread ended, when it should not have."""
        self._on_failure = on_failure
        self._clock = clock
        self._answers = OpenAnswers(clock)
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[tuple[int, OpenAnswer | None]] = queue.SimpleQueue()
        """(number, answer) submits, (number, None) cancels, (0, None) stops."""
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def state(self) -> ElasticState | None:
        """What it is now; None of an engine that does not change."""
        return None

    def merge(self, merged: bool | None) -> bool:
        """One group of all replicas, none, or as the load wants it; False: this engine has no such."""
        return False

    @abc.abstractmethod
    def start(self) -> None:
        """Requests that were queued before are answered as well."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End after the current step; requests in progress end as cancelled."""

    def _submit(self, model: AnsweredModel, request: GenerationRequest, emit: Callable[[GenerationEvent], None]) -> int:
        if len(request.prompt) + request.max_tokens > model.limits.context or not request.prompt:
            raise AssertionError("the caller checks lengths")
        number = next(self._numbers)
        self._tell(number, OpenAnswer(request, model, emit, self._clock.monotonic()))
        return number

    def _tell(self, number: int, answer: OpenAnswer | None) -> None:
        self._inbox.put((number, answer))

    # -- the compute thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._compute()
        except Exception as error:  # noqa: BLE001 - fail-stop: whatever broke, say so and serve nobody
            _log.exception("the compute thread failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._end_all("error")
            self._on_failure(self.failure)
        else:
            self._end_all("cancelled")

    @abc.abstractmethod
    def _receive(self) -> bool:
        """Take all messages; False to stop."""

    @abc.abstractmethod
    def _compute(self) -> None:
        """What can be computed now."""

    def _end_all(self, reason: FinishReason) -> None:
        for number in self._answers.numbers():
            event = self._answers.given_up(number, reason)
            self._answers.close(number, reason).emit(event)


class AnsweringEngine(ComputeThread):
    """Answers requests for one model."""

    def __init__(
        self, tokenizer: Tokenizer, limits: EngineLimits, clock: Clock, on_failure: Callable[[str], None]
    ) -> None:
        super().__init__(clock, on_failure)
        self.limits = limits
        self.tokenizer = tokenizer
        self.stats = Stats()

    @property
    def context(self) -> int:
        """Tokens that one request may hold."""
        return self.limits.context

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationEvent], None]) -> int:
        """Queue a request; returns its number for `cancel`."""
        return self._submit(self, request, emit)

    def cancel(self, number: int) -> None:
        """Stop a request and free its blocks; nothing when it has ended."""
        self._tell(number, None)
