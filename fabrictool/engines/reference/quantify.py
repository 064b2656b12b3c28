"""How long iterations of a model take here, measured once and kept. Source: LLM-Mesh, section 5.2."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.kept import facts_key, keep, kept, processor
from fabrictool.domain.steps import SHORTEST
from fabrictool.engines.reference.kv import KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.resident import in_memory
from fabrictool.engines.reference.weights import cache_key
from fabrictool.sharing.quantified import LONG_S, SAMPLES, IterationTable, still_true

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.engines.reference.answers import EngineLimits
    from fabrictool.engines.reference.weights import Weights

_FORMAT = 1
"""Part of the file's name: figures of another engine are measured anew."""
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
    before = kept(place, Quantified)
    if before is not None and _still_true(before, weights, limits, clock):
        return before
    measured = measure(weights, limits, clock)
    keep(place, measured)
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


def _still_true(before: Quantified, weights: Weights, limits: EngineLimits, clock: Clock) -> bool:
    samples, table = _Samples(weights, limits, clock), before.iterations
    pairs = (
        (samples.prefill(SHORTEST), table.prefill_s(SHORTEST)),
        (samples.decode(1, SHORTEST), table.decode_s(1, SHORTEST)),
    )
    return still_true(pairs)


def _least(compute: Callable[[], object], clock: Clock) -> float:
    least = float("inf")
    for _ in range(SAMPLES):
        began = clock.monotonic()
        compute()
        seconds = clock.monotonic() - began
        least = min(least, seconds)
        if seconds >= LONG_S:
            break
    return least


def _key(path: Path, limits: EngineLimits) -> str:
    threads = [os.environ.get(name, "") for name in _THREADS]
    return facts_key((_FORMAT, cache_key(path), limits, processor(), os.cpu_count(), threads))
