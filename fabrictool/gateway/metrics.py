"""What the gateway counts: Prometheus series for scrapers, and the percentiles of its status page."""

from __future__ import annotations

from collections import Counter as Counting
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fabrictool.gateway.patience import Patience

if TYPE_CHECKING:
    from fabrictool.gateway.records import RequestRecord

WAITING_MAX = 1024
"""Requests that are counted in the series together."""
KEPT = 512
"""Latencies kept per model for the status page's percentiles."""
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@dataclass(slots=True)
class ModelFigures:
    """Of one model, since the start."""

    requests: int = 0
    failures: int = 0
    tokens: int = 0
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


def percentile(values: deque[float], share: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class GatewayMetrics:
    """All counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter("fabric_requests", "Answered requests", ["model", "provider", "code"], registry=own)
        self._retries = Counter("fabric_retries", "Attempts after the first", ["reason"], registry=own)
        self._cancelled = Counter("fabric_cancelled", "Requests that the client gave up on", ["phase"], registry=own)
        self._tokens = Counter("fabric_tokens", "Tokens, from the engines' usage", ["model", "direction"], registry=own)
        self._ttft = Histogram(
            "fabric_ttft_seconds", "To the first body byte", ["model"], buckets=_TTFT_BUCKETS, registry=own
        )
        self._tpot = Histogram(
            "fabric_tpot_seconds", "Per output token after the first", ["model"], buckets=_TPOT_BUCKETS, registry=own
        )
        self._in_flight = Gauge("fabric_inflight", "Open requests", registry=own)
        self.candidates = Gauge("fabric_candidates", "Replicas that are ready", ["model"], registry=own)
        self.waiting = Gauge("fabric_waiting", "Requests that wait for a slot", ["priority"], registry=own)
        self.models: dict[str, ModelFigures] = {}
        self.patience = Patience()
        self.in_flight = 0
        self.requests = 0
        self.failures = 0
        self.retries = 0
        self.tokens = 0
        self._waiting: list[RequestRecord] = []
        """Not in the series yet: a series costs more than all else that a request is counted by."""

    def begun(self) -> None:
        self.in_flight += 1

    def ended(self, record: RequestRecord) -> None:
        """A request that was `begun` is over."""
        self.in_flight -= 1
        self.count(record)

    def count(self, record: RequestRecord) -> None:
        """Whatever became of a request, and one that was refused at once."""
        self._waiting.append(record)
        if len(self._waiting) >= WAITING_MAX:
            self._fold()
        failed = record.end == "broken" or (record.status >= 500 and record.end != "cancelled")
        self.requests += record.end != "cancelled"
        self.failures += failed
        if not record.model:
            return
        figures = self.models.get(record.model)
        if figures is None:
            figures = self.models[record.model] = ModelFigures()
        figures.requests += record.end != "cancelled"
        figures.failures += failed
        if record.counted:
            self.tokens += record.completion_tokens
            figures.tokens += record.completion_tokens
        if record.end == "answered" and record.status == 200:
            began_s = record.e2e_s if record.ttft_s is None else record.ttft_s
            self.patience.learn(record.model, stream=record.stream, seconds=began_s)
            if record.ttft_s is not None:
                figures.ttft.append(record.ttft_s)
                if record.tpot_s is not None:
                    figures.tpot.append(record.tpot_s)

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()
        self.retries += 1

    def cancelled(self, phase: str) -> None:
        self._cancelled.labels(phase).inc()

    def exposition(self) -> bytes:
        self._fold()
        self._in_flight.set(self.in_flight)
        return generate_latest(self._registry)

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        answered: Counting[tuple[str, str, int]] = Counting()
        tokens: Counting[tuple[str, str]] = Counting()
        for record in waiting:
            if record.end != "cancelled":
                answered[record.model, record.provider, record.status] += 1
            if record.counted:
                tokens[record.model, "prompt"] += record.prompt_tokens
                tokens[record.model, "completion"] += record.completion_tokens
            if record.end == "answered" and record.status == 200 and record.ttft_s is not None:
                self._ttft.labels(record.model).observe(record.ttft_s)
                if record.tpot_s is not None:
                    self._tpot.labels(record.model).observe(record.tpot_s)
        for (model, provider, status), number in answered.items():
            self._requests.labels(model, provider, str(status)).inc(number)
        for labels, number in tokens.items():
            self._tokens.labels(*labels).inc(number)
