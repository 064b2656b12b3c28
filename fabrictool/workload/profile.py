"""What users sent to a model, hour by hour, as sketches that add up: rate, bursts, lengths, and what prompts shared.

A sketch says as much after its requests are forgotten as before; none of them can be told from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HOUR_S = 3600.0
ACCURACY = 0.01
"""Relative, of a quantile. Less: more buckets, 115 for each factor of ten now."""
_LOG_BASE = math.log((1 + ACCURACY) / (1 - ACCURACY))


class Sums(msgspec.Struct):
    """Of values ≥ 0: what mean and spread need."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    def merge(self, other: Sums) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def sd(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2)) if self.count else 0.0


class LengthSketch(msgspec.Struct):
    """Tokens, whole and > 0, in buckets that grow with them (DDSketch: Masson, Rim and Lee, VLDB 2019)."""

    sums: Sums = msgspec.field(default_factory=Sums)
    most: int = 0
    buckets: dict[int, int] = {}

    def add(self, tokens: int) -> None:
        self.sums.add(tokens)
        self.most = max(self.most, tokens)
        bucket = math.ceil(math.log(tokens) / _LOG_BASE)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: LengthSketch) -> None:
        self.sums.merge(other.sums)
        self.most = max(self.most, other.most)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """Tokens, within `ACCURACY`; `share` in 0 to 1."""
        rank, passed = share * (self.sums.count - 1), 0
        for bucket in sorted(self.buckets):
            passed += self.buckets[bucket]
            if passed > rank:
                return min(2 * math.exp(bucket * _LOG_BASE) / (math.exp(_LOG_BASE) + 1), float(self.most))
        return 0.0


class DemandSketch(msgspec.Struct):
    """Requests for one model that were answered, at least in part."""

    input: LengthSketch = msgspec.field(default_factory=LengthSketch)
    output: LengthSketch = msgspec.field(default_factory=LengthSketch)
    first: float = math.inf
    """Wall time of an arrival, seconds."""
    last: float = -math.inf
    gaps: Sums = msgspec.field(default_factory=Sums)
    """Seconds between arrivals of the same hour."""
    shared_tokens: int = 0
    """Of prompts that had been in an earlier one."""
    cached_tokens: int = 0
    """Of prompts that an engine had in its cache."""

    def merge(self, other: DemandSketch) -> None:
        self.input.merge(other.input)
        self.output.merge(other.output)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.gaps.merge(other.gaps)
        self.shared_tokens += other.shared_tokens
        self.cached_tokens += other.cached_tokens

    @property
    def requests(self) -> int:
        return self.input.sums.count

    @property
    def rate(self) -> float:
        """Requests/s from the first to the last; 0 for fewer than two moments."""
        return (self.requests - 1) / (self.last - self.first) if self.last > self.first else 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps; 1, as by chance, where nothing is known."""
        return self.gaps.sd / self.gaps.mean if self.gaps.count > 1 and self.gaps.mean else 1.0

    def share(self, tokens: int) -> float:
        """Of all prompts' tokens."""
        return tokens / self.input.sums.total if self.requests else 0.0


class Demanded(msgspec.Struct, frozen=True):
    """One request's part in it."""

    model: str
    at: float
    """Wall time, seconds."""
    prompt_tokens: int
    completion_tokens: int
    shared_tokens: int = 0
    cached_tokens: int = 0


Hours = dict[tuple[str, int], DemandSketch]
"""By model and hour since 1970 (UTC)."""


def sketched(requests: Iterable[Demanded]) -> Hours:
    """Sketches of requests in the order of arrival; those without prompt or answer are left out."""
    hours: Hours = {}
    for request in requests:
        if request.prompt_tokens < 1 or request.completion_tokens < 1:
            continue
        sketch = hours.setdefault((request.model, int(request.at // HOUR_S)), DemandSketch())
        if sketch.requests:
            sketch.gaps.add(request.at - sketch.last)
        sketch.first, sketch.last = min(sketch.first, request.at), request.at
        sketch.input.add(request.prompt_tokens)
        sketch.output.add(request.completion_tokens)
        sketch.shared_tokens += request.shared_tokens
        sketch.cached_tokens += request.cached_tokens
    return hours


def merge(into: Hours, other: Mapping[tuple[str, int], DemandSketch]) -> None:
    """Add the sketches of `other`."""
    for key, sketch in other.items():
        into.setdefault(key, DemandSketch()).merge(sketch)


class ModelProfile(msgspec.Struct, frozen=True):
    """A model's demand over some time."""

    model: str
    hours: int
    """In which there was any."""
    peak_hour: int
    """The busiest, since 1970."""
    peak_rate: float
    """Requests/s in it, or in all of a time that is shorter."""
    demand: DemandSketch


def profiles(hours: Mapping[tuple[str, int], DemandSketch]) -> list[ModelProfile]:
    """Of each model, those with the most requests first."""
    of_model: dict[str, list[int]] = {}
    for model, hour in hours:
        of_model.setdefault(model, []).append(hour)
    answer = []
    for model, times in of_model.items():
        whole = DemandSketch()
        for hour in times:
            whole.merge(hours[model, hour])
        peak = max(times, key=lambda hour: (hours[model, hour].requests, -hour))
        peak_rate = max(hours[model, peak].requests / HOUR_S, whole.rate)
        answer.append(ModelProfile(model, len(times), peak, peak_rate, whole))
    return sorted(answer, key=lambda profile: (-profile.demand.requests, profile.model))
