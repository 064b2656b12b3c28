"""What the engine counts, and how `/metrics` prints it: vLLM's names, so that one reader serves both engines."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REASONS = ("stop", "length", "cancelled", "dropped", "error")
_TTFT = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 1.0, 2.5, 5.0)


class Histogram:
    """Counts of observations per bucket, in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> list[str]:
        """Lines of Prometheus' text format; its buckets are cumulative."""
        out: list[str] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*out, f"{name}_sum{{{labels}}} {self._sum}", f"{name}_count{{{labels}}} {total}"]


class Stats:
    """Written by the compute thread alone; read by others at any time, each figure by itself."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_use = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.finished: Counter[str] = Counter()
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token_latency = Histogram(_ITL)


def exposition(models: Mapping[str, Stats], further: Iterable[tuple[str, str, Mapping[str, float]]] = ()) -> str:
    """Prometheus text, format 0.0.4, of models by name. `further`: (kind, name, value by model; "": of all of them)."""
    labelled = {f'model_name="{_quoted(name)}"': stats for name, stats in models.items()}
    lines: list[str] = []
    for kind, name, field in (
        ("gauge", "vllm:num_requests_running", "running"),
        ("gauge", "vllm:num_requests_waiting", "waiting"),
        ("gauge", "vllm:kv_cache_usage_perc", "kv_use"),
        ("counter", "vllm:prompt_tokens_total", "prompt_tokens"),
        ("counter", "vllm:generation_tokens_total", "generated_tokens"),
        ("counter", "vllm:num_preemptions_total", "preemptions"),
    ):
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"{name}{{{labels}}} {getattr(stats, field)}" for labels, stats in labelled.items()]
    lines.append("# TYPE vllm:request_success_total counter")
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {stats.finished[reason]}'
        for labels, stats in labelled.items()
        for reason in REASONS
    ]
    for name, field in (
        ("vllm:time_to_first_token_seconds", "time_to_first_token"),
        ("vllm:inter_token_latency_seconds", "inter_token_latency"),
    ):
        lines.append(f"# TYPE {name} histogram")
        for labels, stats in labelled.items():
            lines += getattr(stats, field).lines(name, labels)
    for kind, name, values in further:
        lines.append(f"# TYPE {name} {kind}")
        for model, value in values.items():
            labels = f'{{model_name="{_quoted(model)}"}}' if model else ""
            lines.append(f"{name}{labels} {value}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
