"""A stream of requests as arrays: what importers and generators make, and what the simulator plays."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Each array has one entry for each request, `chain_start` one more."""

    arrival: Floats
    """Seconds since the first."""
    prompt: Ints
    """Tokens."""
    output: Ints
    """Tokens."""
    models: tuple[str, ...] = ("",)
    model: Ints | None = None
    """Index into `models`; None: all ask for the first."""
    chain_start: Ints | None = None
    chain: Ints | None = None
    """Dense ids of prefix blocks, `block_tokens` tokens each; equal ids mean equal text up to there."""
    block_tokens: int = 0
    latency: Floats | None = None
    """Seconds that the request really took, where the source says so; NaN where it does not."""
    ttft: Floats | None = None
    """Seconds to its first token, likewise."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Why rows of the source were left out → how many."""

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Requests/s over the span, on average; 0 where it has no length."""
        return (len(self) - 1) / self.span if self.span > 0 else 0.0

    def only(self, chosen: Any) -> Trace:
        """The requests that a boolean mask or a slice chooses; time starts anew."""
        index = np.arange(len(self))[chosen]
        start = chain = None
        if self.chain_start is not None and self.chain is not None:
            lengths = np.diff(self.chain_start)[index]
            start = np.concatenate([[0], np.cumsum(lengths)])
            parts = [self.chain[self.chain_start[i] : self.chain_start[i + 1]] for i in index]
            chain = np.unique(np.concatenate(parts), return_inverse=True)[1] if parts else np.zeros(0, np.int64)
        arrival = self.arrival[index]
        return replace(
            self,
            arrival=arrival - arrival[0] if len(arrival) else arrival,
            prompt=self.prompt[index],
            output=self.output[index],
            model=None if self.model is None else self.model[index],
            chain_start=start,
            chain=chain,
            latency=None if self.latency is None else self.latency[index],
            ttft=None if self.ttft is None else self.ttft[index],
        )

    def renamed(self, names: Mapping[str, str]) -> Trace:
        """The same, with each of the models that `names` has called what it says there."""
        meant = [names.get(name, name) for name in self.models]
        models = tuple(dict.fromkeys(meant))
        places = np.array([models.index(name) for name in meant])
        return replace(self, models=models, model=None if self.model is None else places[self.model])

    def of_model(self, name: str) -> Trace:
        if self.model is None:
            return self if self.models == (name,) else self.only(np.zeros(len(self), dtype=bool))
        chosen = self.only(self.model == self.models.index(name)) if name in self.models else self.only(slice(0))
        return replace(chosen, models=(name,), model=None)

    def times_of(self, name: str) -> Floats:
        """When a model's requests came, in seconds since the first of all; every request's where none names a model."""
        times: Floats = self.arrival - self.arrival[0]
        return times if self.model is None or self.models == ("",) else times[self.model == self.models.index(name)]

    def anonymous(self) -> Trace:
        """The same without the models' names, which are numbered by how often they are asked for."""
        if self.model is None:
            return replace(self, models=("",))
        counts = np.bincount(self.model, minlength=len(self.models))
        rank = np.argsort(np.argsort(-counts, kind="stable"), kind="stable")
        names = tuple(f"model-{i + 1}" for i in range(len(self.models)))
        return replace(self, models=names, model=rank[self.model])

    def at_rate(self, rate: float) -> Trace:
        """The same requests, faster or slower: `rate` requests/s on average. Raises InvalidInputError FT2202."""
        if not np.isfinite(rate) or rate <= 0 or not self.rate:
            raise InvalidInputError.of("FT2202", f"a trace of {len(self)} requests cannot be played at {rate} req/s")
        return replace(self, arrival=self.arrival * (self.rate / rate))


def merge(traces: Mapping[str, Trace]) -> Trace:
    """Several models' traces as one, by time; each trace is one model's and has no prefix chains."""
    names = tuple(traces)
    arrival = np.concatenate([t.arrival for t in traces.values()]) if names else np.zeros(0)
    order = np.argsort(arrival, kind="stable")
    which = np.repeat(np.arange(len(names)), [len(t) for t in traces.values()])
    return Trace(
        arrival=arrival[order],
        prompt=np.concatenate([t.prompt for t in traces.values()])[order] if names else np.zeros(0, np.int64),
        output=np.concatenate([t.output for t in traces.values()])[order] if names else np.zeros(0, np.int64),
        models=names or ("",),
        model=which[order],
    )


def dumps(trace: Trace) -> Iterator[str]:
    """Our own format, one JSON object on each line: t (seconds), in and out (tokens).

    Where known also model, prefix (block ids), block (tokens of one), ttft and latency (seconds until its first and
    its last token).
    """
    for i in range(len(trace)):
        row: dict[str, Any] = {
            "t": round(float(trace.arrival[i]), 6),
            "in": int(trace.prompt[i]),
            "out": int(trace.output[i]),
        }
        if trace.models != ("",):
            row["model"] = trace.models[0 if trace.model is None else int(trace.model[i])]
        if trace.chain is not None and trace.chain_start is not None:
            row["prefix"] = trace.chain[trace.chain_start[i] : trace.chain_start[i + 1]].tolist()
            row["block"] = trace.block_tokens
        if trace.ttft is not None and math.isfinite(trace.ttft[i]):
            row["ttft"] = round(float(trace.ttft[i]), 6)
        if trace.latency is not None and math.isfinite(trace.latency[i]):
            row["latency"] = round(float(trace.latency[i]), 6)
        yield json.dumps(row, separators=(",", ":"))
