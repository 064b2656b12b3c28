"""What the gateway counts: Prometheus series for scrapers, and the percentiles of its status page."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fabrictool.gateway.density import TokenDensity
from fabrictool.gateway.patience import Patience
from fabrictool.gateway.recounting import Recounts
from fabrictool.routing.retry_budget import RetryBudget
from fabrictool.status.documents import Totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from fabrictool.gateway.directory import Directory
    from fabrictool.gateway.records import RequestRecord
    from fabrictool.gateway.spool import RecordSpool

WAITING_MAX: Final = 1024
"""Requests that are counted in the series together."""
SERVER_ERROR: Final = 500
KEPT: Final = 512
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


class _Tally:
    """Of records with the same model, provider and status: a series of Prometheus takes a microsecond to find."""

    __slots__ = ("answers", "cached", "completions", "counted", "failures", "prompts")

    def __init__(self) -> None:
        self.answers = self.failures = self.cached = self.prompts = self.completions = 0
        self.counted = False
        """Whether an engine said how many tokens there were."""


def percentile(values: deque[float], share: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class _Replicas(Collector):
    """Those that are there when somebody looks: what has gone leaves no series behind."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("fabric_candidates", "Replicas that are ready", labels=["model"])
        for model in self._directory.models():
            ready.add_metric([model], sum(target.ready for target in self._directory.of_model(model)))
        yield ready
        labels = ["model", "provider", "replica"]
        in_flight = GaugeMetricFamily("fabric_replica_inflight", "Our requests in it", labels=labels)
        out = GaugeMetricFamily("fabric_replica_out", "1 while it is left alone for its failures", labels=labels)
        requests = CounterMetricFamily("fabric_replica_requests", "Attempts", labels=labels)
        failures = CounterMetricFamily("fabric_replica_failures", "Attempts that failed", labels=labels)
        for target in self._directory:
            values = [target.model, target.provider, target.replica]
            in_flight.add_metric(values, target.in_flight)
            out.add_metric(values, bool(target.ejection.out_until))
            requests.add_metric(values, target.requests)
            failures.add_metric(values, target.failures)
        yield from (in_flight, out, requests, failures)


class _Spool(Collector):
    """Records on their way to the store."""

    def __init__(self, spool: RecordSpool) -> None:
        self._spool = spool

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "fabric_spool_octets", "Of records that the store does not have", self._spool.waiting_octets
        )
        yield CounterMetricFamily("fabric_records_lost", "Request records that had no room", self._spool.lost)


class GatewayMetrics:
    """All counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter("fabric_requests", "Answered requests", ["model", "provider", "code"], registry=own)
        self._retries = Counter("fabric_retries", "Attempts after the first", ["reason"], registry=own)
        self._retries_left = Gauge("fabric_retries_left", "Second attempts after slow failures", registry=own)
        self._cancelled = Counter("fabric_cancelled", "Requests that the client gave up on", ["phase"], registry=own)
        self._tokens = Counter("fabric_tokens", "Tokens, from the engines' usage", ["model", "direction"], registry=own)
        self._handed = Counter("fabric_handed_prompts", "Of split models", ["model", "outcome"], registry=own)
        self._cache_octets = Counter(
            "fabric_cache_octets", "Of caches that were handed over", ["model", "sender", "receiver"], registry=own
        )
        self.crossed: dict[tuple[str, str, str], tuple[int, int, float]] = {}
        """(model, sending site, receiving site) → prompts, tokens and octets of their caches."""
        self._spans = Counter("fabric_spans", "Of traces, brought to the collector or not", ["outcome"], registry=own)
        self._ttft = Histogram(
            "fabric_ttft_seconds", "To the first body byte", ["model"], buckets=_TTFT_BUCKETS, registry=own
        )
        self._tpot = Histogram(
            "fabric_tpot_seconds", "Per output token after the first", ["model"], buckets=_TPOT_BUCKETS, registry=own
        )
        self._in_flight = Gauge("fabric_inflight", "Open requests", registry=own)
        self._clients = Gauge("fabric_clients", "Clients' connections", registry=own)
        self._slow_clients = Gauge("fabric_slow_clients", "Clients that take less than they are sent", registry=own)
        self._lag = Gauge("fabric_loop_lag_seconds", "The latest tick since the last look", registry=own)
        self.lag_s = 0.0
        self._waiting_for_slots = Gauge("fabric_waiting", "Requests that wait for a slot", ["priority"], registry=own)
        self.models: dict[str, ModelFigures] = {}
        self.patience = Patience()
        self.density = TokenDensity()
        self.recounts = Recounts()
        self.retry_budget = RetryBudget()
        self.in_flight = 0
        self.requests = 0
        self.failures = 0
        self.retries = 0
        self.tokens = 0
        self._waiting: list[RequestRecord] = []
        """Not counted yet: each for itself would cost a request more than its routing does."""

    def begun(self) -> None:
        self.in_flight += 1
        self.retry_budget.begun += 1

    def count(self, record: RequestRecord) -> None:
        """Whatever became of a request, and one that was refused at once."""
        self._waiting.append(record)
        if len(self._waiting) >= WAITING_MAX:
            self.fold()

    def refused(self, status: int) -> None:
        """A request that was not read to its end, or has no key: of no model."""
        self._requests.labels("", "", str(status)).inc()
        self.requests += 1
        self.failures += status >= SERVER_ERROR

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()
        self.retries += 1

    def cancelled(self, phase: str) -> None:
        self._cancelled.labels(phase).inc()

    def cross(self, way: tuple[str, str, str], tokens: int, octets: float) -> None:
        """One prompt's cache went that way: model, sending site, receiving site."""
        prompts, before, octets_before = self.crossed.get(way, (0, 0, 0.0))
        self.crossed[way] = (prompts + 1, before + tokens, octets_before + octets)
        self._cache_octets.labels(*way).inc(octets)

    def handed(self, model: str, outcome: str) -> None:
        """`outcome`: handed to the replica that answers, or alone: that computes it by itself."""
        self._handed.labels(model, outcome).inc()

    def count_spans(self, outcome: str, spans: int) -> None:
        """`outcome`: exported or dropped."""
        self._spans.labels(outcome).inc(spans)

    def totals(self, *, in_flight: int) -> Totals:
        """Of all that was counted."""
        return Totals(
            requests=self.requests,
            failures=self.failures,
            retries=self.retries,
            in_flight=in_flight,
            tokens=self.tokens,
        )

    def watch(self, directory: Directory) -> None:
        """Tell of its replicas, too, as they are when somebody looks."""
        self._registry.register(_Replicas(directory))

    def watch_spool(self, spool: RecordSpool) -> None:
        """Tell of its records, too."""
        self._registry.register(_Spool(spool))

    def exposition(
        self, *, clients: int = 0, slow_clients: int = 0, waiting: Mapping[str, int] = MappingProxyType({})
    ) -> bytes:
        """`waiting` for a slot, by class."""
        self.fold()
        self._in_flight.set(self.in_flight)
        self._retries_left.set(self.retry_budget.left)
        self._clients.set(clients)
        self._slow_clients.set(slow_clients)
        for priority, number in waiting.items():
            self._waiting_for_slots.labels(priority).set(number)
        self._lag.set(self.lag_s)
        self.lag_s = 0.0
        return generate_latest(self._registry)

    def fold(self) -> None:
        """Count what waits; called each second, and by whoever reads the figures."""
        waiting, self._waiting = self._waiting, []
        tallies: dict[tuple[str, str, int], _Tally] = {}
        for record in waiting:
            # Looked at once for each: this is half of what a record costs here.
            model, ttft_s, tpot_s = record.model, record.ttft_s, record.tpot_s
            provider, status, end = record.provider, record.status, record.end
            tally = tallies.get((model, provider, status))
            if tally is None:
                tally = tallies[model, provider, status] = _Tally()
            cancelled = end == "cancelled"
            tally.answers += not cancelled
            tally.failures += end == "broken" or (status >= SERVER_ERROR and not cancelled)
            if record.counted:
                tally.counted = True
                tally.cached += record.cached_tokens
                tally.prompts += record.prompt_tokens
                tally.completions += record.completion_tokens
            if end != "answered" or status != 200:
                continue
            if ttft_s is not None:
                self._ttft.labels(model).observe(ttft_s)
                if tpot_s is not None:
                    self._tpot.labels(model).observe(tpot_s)
                if model:
                    figures = self._figures(model)
                    figures.ttft.append(ttft_s)
                    if tpot_s is not None:
                        figures.tpot.append(tpot_s)
        for (model, provider, status), tally in tallies.items():
            self._add(model, provider, status, tally)

    def _add(self, model: str, provider: str, status: int, tally: _Tally) -> None:
        if tally.answers:
            self._requests.labels(model, provider, str(status)).inc(tally.answers)
        if tally.counted:
            self._tokens.labels(model, "cached").inc(tally.cached)
            self._tokens.labels(model, "prompt").inc(tally.prompts)
            self._tokens.labels(model, "completion").inc(tally.completions)
        self.requests += tally.answers
        self.failures += tally.failures
        if model:
            figures = self._figures(model)
            figures.requests += tally.answers
            figures.failures += tally.failures
            figures.tokens += tally.completions
            self.tokens += tally.completions

    def _figures(self, model: str) -> ModelFigures:
        figures = self.models.get(model)
        if figures is None:
            figures = self.models[model] = ModelFigures()
        return figures
