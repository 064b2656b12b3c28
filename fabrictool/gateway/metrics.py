"""What the gateway counts: Prometheus series for scrapers, and the percentiles of its status page."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self.in_flight = Gauge("fabric_inflight", "Open requests", registry=own)
        self.candidates = Gauge("fabric_candidates", "Replicas that are ready", ["model"], registry=own)
        self.models: dict[str, ModelFigures] = {}
        self.requests = 0
        self.failures = 0
        self.retries = 0
        self.tokens = 0

    def answered(self, model: str, provider: str, status: int, *, broken: bool = False) -> None:
        """A request ended with this status; `broken`: its stream was cut after the head; model "" when unknown."""
        self._requests.labels(model, provider, str(status)).inc()
        self.requests += 1
        failed = broken or status >= 500
        self.failures += failed
        if model:
            figures = self.models.setdefault(model, ModelFigures())
            figures.requests += 1
            figures.failures += failed

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()
        self.retries += 1

    def cancelled(self, phase: str) -> None:
        self._cancelled.labels(phase).inc()

    def timed(self, model: str, ttft_s: float, tpot_s: float | None) -> None:
        """Latencies of a request that ended well."""
        figures = self.models.setdefault(model, ModelFigures())
        self._ttft.labels(model).observe(ttft_s)
        figures.ttft.append(ttft_s)
        if tpot_s is not None:
            self._tpot.labels(model).observe(tpot_s)
            figures.tpot.append(tpot_s)

    def used(self, model: str, prompt: int, completion: int) -> None:
        self._tokens.labels(model, "prompt").inc(prompt)
        self._tokens.labels(model, "completion").inc(completion)
        self.tokens += completion
        self.models.setdefault(model, ModelFigures()).tokens += completion

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
