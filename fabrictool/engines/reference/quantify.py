"""How long iterations of a model take here, measured once and kept. Source: LLM-Mesh, section 5.2."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import write_atomic
from fabrictool.engines.reference.kv import KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.resident import in_memory
from fabrictool.engines.reference.weights import cache_key
from fabrictool.sharing.quantified import SHORTEST, IterationTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import EngineLimits
    from fabrictool.engines.reference.weights import Weights

_FORMAT = 1
"""Part of the file's name: figures of another engine are measured anew."""
_TIMES = 3
"""A sample is the least of so many: whatever else a machine does makes an iteration longer, never shorter."""
_LONG_S = 1.0
"""A sample that takes so long is taken once."""
_ABOUT = 2.0
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


class Quantified(msgspec.Struct, frozen=True):
    """Of one model on this machine."""

    iterations: IterationTable
    load_s: float
    """To copy its weights into memory."""


def quantified(path: Path, weights: Weights, limits: EngineLimits, clock: Clock, folder: Path | None) -> Quantified:
    """As measured before, or measured now: seconds to minutes, at lengths up to the context and batches up to the
    places. A `folder` that cannot be read or written costs a measurement at the next start, nothing else.
    """
    place = None if folder is None else folder / "quantified" / f"{_key(path, limits)}.json"
    if place is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            kept = msgspec.json.decode(place.read_bytes(), type=Quantified)
            if _still_true(kept, weights, limits, clock):
                return kept
    measured = measure(weights, limits, clock)
    if place is not None:
        with contextlib.suppress(OSError, FabrictoolError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(place, msgspec.json.encode(measured))
    return measured


def measure(weights: Weights, limits: EngineLimits, clock: Clock) -> Quantified:
    """Load the model, and time prompts and batches of all sizes."""
    began = clock.monotonic()
    samples = _Samples(in_memory(weights), limits, clock)
    load_s = clock.monotonic() - began
    table = IterationTable.sampled(samples.prefill, samples.decode, limits.context, limits.max_seqs)
    return Quantified(table, load_s)


class _Samples:
    """Iterations over the one block table that there is room for: their results are of no use, their times are."""

    def __init__(self, weights: Weights, limits: EngineLimits, clock: Clock) -> None:
        self._clock = clock
        self._model = Transformer(weights)
        # Samples are at powers of two: the last one may be nearly twice as long as what is asked for.
        self._table = range(2 * max(limits.context, SHORTEST) // limits.block_size + 1)
        self._pool = KvPool(weights.config, len(self._table), limits.block_size)

    def prefill(self, tokens: float) -> float:
        rows = SequenceRows([0] * int(tokens), 0, self._table, True)
        return _least(lambda: self._model.step([rows], self._pool), self._clock)

    def decode(self, batch: float, length: float) -> float:
        rows = [SequenceRows([0], int(length) - 1, self._table, True)] * int(batch)
        return _least(lambda: self._model.step(rows, self._pool), self._clock)


def _still_true(kept: Quantified, weights: Weights, limits: EngineLimits, clock: Clock) -> bool:
    """Whether a few samples say about the same: the kept ones may be of a time when the machine was busy."""
    samples = _Samples(weights, limits, clock)
    pairs = (
        (samples.prefill(SHORTEST), kept.iterations.prefill_s(SHORTEST)),
        (samples.decode(1, SHORTEST), kept.iterations.decode_s(1, SHORTEST)),
    )
    return all(before / _ABOUT <= now <= _ABOUT * before for now, before in pairs)


def _least(compute: Callable[[], object], clock: Clock) -> float:
    least = float("inf")
    for _ in range(_TIMES):
        began = clock.monotonic()
        compute()
        seconds = clock.monotonic() - began
        least = min(least, seconds)
        if seconds >= _LONG_S:
            break
    return least


def _key(path: Path, limits: EngineLimits) -> str:
    threads = [os.environ.get(name, "") for name in _THREADS]
    facts = (_FORMAT, cache_key(path), limits, _processor(), os.cpu_count(), threads)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return ""
