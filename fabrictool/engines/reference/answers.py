"""Requests in progress: their samplers, their text, and what is counted of them. Whoever computes tells it tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from fabrictool.engines.reference.sampling import Sampler, Sampling
from fabrictool.engines.reference.tokenizer import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.stats import Stats
    from fabrictool.engines.reference.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "dropped", "error"]
"""Dropped: nobody could begin it in time."""
ORDINARY = 1
"""A request's priority when nothing is said; 0 goes first."""


class LatencyTargets(NamedTuple):
    """What a client wants for a request; seconds."""

    ttft_s: float
    tpot_s: float


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


class GenerationRequest(NamedTuple):
    """One answer to make; `prompt` and `max_tokens` together fit into the context."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    priority: int = ORDINARY
    targets: LatencyTargets | None = None
    """None: as the engine has them for every request."""


class GenerationEvent(NamedTuple):
    """Progress of a request."""

    text: str
    """New text; may be empty."""
    tokens: int
    """Tokens generated so far."""
    finish: FinishReason | None = None


class AnsweredModel(Protocol):
    """A model that requests are answered for, as its server sees it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def context(self) -> int:
        """Tokens that one request may hold."""

    def submit(self, request: GenerationRequest, emit: Callable[[GenerationEvent], None]) -> int:
        """Queue a request; returns its number for `cancel`."""

    def cancel(self, number: int) -> None:
        """Stop a request and free its blocks; nothing when it has ended."""


class OpenAnswer:
    """What the compute thread keeps of a request in progress."""

    def __init__(
        self, request: GenerationRequest, model: AnsweredModel, emit: Callable[[GenerationEvent], None], now: float
    ) -> None:
        self.request = request
        self.model = model
        self.emit = emit
        self.sampler = Sampler(request.sampling)
        self.text = TextStream(model.tokenizer, request.stop)
        self.tokens = 0
        self.arrived = now
        self.last_token: float | None = None


class OpenAnswers:
    """All of them, by number. Used by one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[int, OpenAnswer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def __getitem__(self, number: int) -> OpenAnswer:
        return self._open[number]

    def numbers(self) -> list[int]:
        return list(self._open)

    def add(self, number: int, answer: OpenAnswer) -> None:
        self._open[number] = answer

    def advance(self, number: int, token: int) -> GenerationEvent:
        """A request has one more token: what its client shall hear, with the reason if that was the last one."""
        answer, now = self._open[number], self._clock.monotonic()
        stats = answer.model.stats
        if answer.last_token is None:
            stats.time_to_first_token.observe(now - answer.arrived)
            stats.prompt_tokens += len(answer.request.prompt)
        else:
            stats.inter_token_latency.observe(now - answer.last_token)
        answer.last_token = now
        answer.tokens += 1
        stats.generated_tokens += 1
        if token in answer.model.tokenizer.ends:
            return GenerationEvent(answer.text.finish(), answer.tokens, "stop")
        full = answer.tokens == answer.request.max_tokens
        text = answer.text.push(token, last=full)
        if answer.text.stopped or full:
            return GenerationEvent(text, answer.tokens, "stop" if answer.text.stopped else "length")
        return GenerationEvent(text, answer.tokens)

    def given_up(self, number: int, reason: FinishReason) -> GenerationEvent:
        """What the client of one hears that is not answered to its end."""
        return GenerationEvent("", self._open[number].tokens, reason)

    def close(self, number: int, finish: FinishReason) -> OpenAnswer:
        """It is over; its client has still to be told."""
        answer = self._open.pop(number)
        answer.model.stats.finished[finish] += 1
        return answer
