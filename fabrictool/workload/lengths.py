"""How long prompts and answers are: distributions over whole tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    Ints = np.ndarray[Any, np.dtype[np.int64]]

Shape = Literal["fixed", "uniform", "normal", "lognormal", "empirical"]
SHAPES: tuple[Shape, ...] = ("fixed", "uniform", "normal", "lognormal", "empirical")
LONGEST = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, clipped to [`least`, `most`].

    `mean` and `sd` are of the distribution before clipping (paper 001's experiments clip a normal one); `uniform` runs
    over mean ± sd; `empirical` draws from `values`.
    """

    shape: Shape = "fixed"
    mean: float = 512.0
    sd: float = 0.0
    least: int = 1
    most: int = LONGEST
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.mean <= LONGEST and 0 <= self.sd <= LONGEST):  # NaN is not either
            raise InvalidInputError.of(
                "FT2203",
                f"lengths with mean {self.mean:g} and sd {self.sd:g} are impossible",
                hint=f"lengths are 1 to {LONGEST} tokens",
            )
        if not max(1, self.least) <= self.most <= LONGEST:
            raise InvalidInputError.of(
                "FT2203",
                f"lengths from {self.least} to {self.most} are impossible",
                hint=f"lengths are 1 to {LONGEST} tokens",
            )
        if self.shape == "empirical" and not self.values:
            raise InvalidInputError.of("FT2203", "an empirical distribution of lengths needs values")

    @property
    def clipped_mean(self) -> float:
        """Mean of what is drawn: of a wide normal distribution far above `mean`, which half of it falls short of."""
        low, high = float(max(1, self.least)), float(self.most)
        if self.shape == "empirical":
            return float(np.clip(self.values, low, high).mean())
        if self.sd == 0 or self.shape in ("fixed", "uniform"):
            return min(max(self.mean, low), high)
        if self.shape == "normal":
            start, end = (low - self.mean) / self.sd, (high - self.mean) / self.sd
            inside = self.mean * (_below(end) - _below(start)) + self.sd * (_density(start) - _density(end))
            return low * _below(start) + inside + high * (1.0 - _below(end))
        variance = math.log1p((self.sd / self.mean) ** 2)
        middle, spread = math.log(self.mean) - variance / 2, math.sqrt(variance)
        start, end = (math.log(low) - middle) / spread, (math.log(high) - middle) / spread
        inside = self.mean * (_below(end - spread) - _below(start - spread))
        return low * _below(start) + inside + high * (1.0 - _below(end))

    def quantile(self, share: float) -> float:
        """The length that this share of the requests does not exceed."""
        match self.shape:
            case "fixed":
                value = self.mean
            case "uniform":
                value = self.mean + (2.0 * share - 1.0) * self.sd
            case "normal":
                value = self.mean + self.sd * NormalDist().inv_cdf(share)
            case "lognormal":
                variance = math.log1p((self.sd / self.mean) ** 2)
                value = self.mean * math.exp(math.sqrt(variance) * NormalDist().inv_cdf(share) - variance / 2)
            case "empirical":
                value = float(np.quantile(self.values, share))
        return min(max(value, float(self.least), 1.0), float(self.most))

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """`count` token counts, at least 1."""
        match self.shape:
            case "fixed":
                drawn = np.full(count, self.mean)
            case "uniform":
                drawn = rng.uniform(self.mean - self.sd, self.mean + self.sd, count)
            case "normal":
                drawn = rng.normal(self.mean, self.sd, count)
            case "lognormal":
                variance = math.log1p((self.sd / self.mean) ** 2)
                drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
            case "empirical":
                drawn = rng.choice(np.array(self.values, dtype=float), count)
        return np.asarray(np.clip(np.rint(drawn), max(1, self.least), self.most), dtype=np.int64)


def _below(value: float) -> float:
    """Share of a standard normal distribution below a value."""
    return 0.5 * math.erfc(-value / math.sqrt(2.0))


def _density(value: float) -> float:
    return math.exp(-value * value / 2.0) / math.sqrt(2.0 * math.pi)
