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
from fabrictool.engines.reference.resident import ResidentModel
from fabrictool.engines.reference.weights import cache_key
from fabrictool.sharing.quantified import IterationTable

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
            return msgspec.json.decode(place.read_bytes(), type=Quantified)
    measured = measure(weights, limits, clock)
    if place is not None:
        with contextlib.suppress(OSError, FabrictoolError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(place, msgspec.json.encode(measured))
    return measured


def measure(weights: Weights, limits: EngineLimits, clock: Clock) -> Quantified:
    """Load the model, and time prompts and batches of all sizes."""
    began = clock.monotonic()
    # Samples are at powers of two: the last one may be nearly twice as long as what is asked for.
    blocks = limits.max_seqs * 2 * (-(-2 * limits.context // limits.block_size) + 1)
    model = ResidentModel(weights, blocks, limits.block_size)
    load_s = clock.monotonic() - began

    def prefill(tokens: float) -> float:
        def compute() -> None:
            model.step([(0, [0] * int(tokens), 0)])
            model.forget(0)

        return _least(compute, clock)

    def decode(batch: float, length: float) -> float:
        rows = [(request, [0], int(length) - 1) for request in range(int(batch))]
        seconds = _least(lambda: model.step(rows), clock)
        for request in range(int(batch)):
            model.forget(request)
        return seconds

    return Quantified(IterationTable.sampled(prefill, decode, limits.context, limits.max_seqs), load_s)


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
