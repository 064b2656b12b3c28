"""From logits to a token: greedy, or drawn after temperature, top-k and top-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    seed: int | None = None
    """Same seed, same draws; None: a fresh one."""


class Sampler:
    """Draws the tokens of one request; its random state is the request's own, whatever else is in the batch."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        # Seeds of the API are signed 64-bit numbers, those of NumPy are not negative.
        seed = None if sampling.seed is None else sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._random = np.random.Generator(np.random.PCG64(seed))

    def draw(self, logits: NDArray[np.float32]) -> int:
        """The next token for logits [vocab]."""
        wanted = self._sampling
        if wanted.temperature == 0.0:
            return int(logits.argmax())
        probabilities = np.exp((logits - logits.max()).astype(np.float64) / wanted.temperature)
        candidates = self._candidates(probabilities)
        cumulative = np.cumsum(probabilities[candidates])
        if wanted.top_p < 1.0:
            # The smallest set that reaches top_p, never empty.
            keep = int(np.searchsorted(cumulative, wanted.top_p * cumulative[-1])) + 1
            cumulative = cumulative[:keep]
        at = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(candidates[min(at, len(cumulative) - 1)])

    def _candidates(self, probabilities: NDArray[np.float64]) -> NDArray[np.intp]:
        """Tokens that can be drawn, likeliest first where a cut follows; ties by number, the same on every machine."""
        wanted, vocab = self._sampling, len(probabilities)
        if wanted.top_k <= 0 and wanted.top_p >= 1.0:
            return np.arange(vocab)
        least = 0.0
        if 0 < wanted.top_k < vocab:
            least = float(np.partition(probabilities, vocab - wanted.top_k)[vocab - wanted.top_k])
        elif wanted.top_p < 1.0:
            # All tokens below this together weigh less than 1 - top_p: none is needed to reach it, none need sorting.
            least = (1.0 - wanted.top_p) * float(probabilities.sum()) / vocab
        kept = np.flatnonzero(probabilities >= least)
        ordered = kept[np.argsort(-probabilities[kept], kind="stable")]
        return ordered[: wanted.top_k] if wanted.top_k > 0 else ordered
