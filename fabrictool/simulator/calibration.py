"""Measured factors: which efficiencies and overheads hold for a device and an engine, and how far they may be wrong.

A calibration is fitted once from measurements (`fitting`), kept as a file of the catalogue with its source and its
residuals, and chosen here. Where a device was never measured, what was learned across devices stands in, with the wider
band that leaving devices out has shown.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog.calibrations import texts
from fabrictool.simulator.stepmodel import Factors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Scope = Literal["online", "static"]
"""`online`: a server under concurrent requests; `static`: one batch that starts and ends together."""
METRICS = ("ttft", "tpot", "e2e")
ANY = "*"
EXTRAPOLATION = 1.5
"""By how much the logarithmic band widens outside the measured range."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of log(measured / predicted) on measurements that the fit had not seen."""

    low: float
    """5 %."""
    high: float
    """95 %."""

    def widened(self, factor: float) -> Spread:
        """The same around its middle, `factor` times as wide."""
        return Spread(
            self.low * factor if self.low < 0 else self.low, self.high * factor if self.high > 0 else self.high
        )


UNKNOWN = Spread(math.log(0.4), math.log(2.5))
"""For what was never measured at all."""


@dataclass(frozen=True, slots=True)
class Hull:
    """The range of the measurements behind a calibration."""

    concurrency: tuple[float, float] = (0.0, math.inf)
    input_len: tuple[float, float] = (0.0, math.inf)
    output_len: tuple[float, float] = (0.0, math.inf)
    devices: tuple[float, float] = (0.0, math.inf)
    models: tuple[str, ...] = ()

    def holds(self, *, concurrency: float, input_len: float, output_len: float, devices: float) -> bool:
        """Whether a case lies within it, with a tenth to spare on either side."""
        pairs = (
            (self.concurrency, concurrency),
            (self.input_len, input_len),
            (self.output_len, output_len),
            (self.devices, devices),
        )
        return all(low * 0.9 <= value <= high * 1.1 for (low, high), value in pairs)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors for a device and an engine; ``*`` stands for all others."""

    device: str
    engine: str
    scope: Scope
    factors: Factors
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """Metric → spread, for models that the calibration has seen."""
    unseen: Mapping[str, Spread] = field(default_factory=dict)
    """Metric → spread, for other models: each was left out in turn."""
    hull: Hull = field(default_factory=Hull)
    points: int = 0
    version: str = ""
    source: str = ""

    def spread(self, metric: str, model: str, *, inside: bool) -> Spread:
        """The band of a metric for one case."""
        known = self.spreads if model in self.hull.models else (self.unseen or self.spreads)
        spread = known.get(metric) or self.spreads.get(metric) or UNKNOWN
        return spread if inside else spread.widened(EXTRAPOLATION)


NONE = Calibration(ANY, ANY, "online", Factors(), source="datasheets and literature constants; nothing measured")


def of_vendor(vendor: str) -> str:
    """What stands for a vendor's devices where a device's id would be."""
    return f"{vendor}/*"


def choose(calibrations: Iterable[Calibration], device: str, vendor: str, engine: str, scope: Scope) -> Calibration:
    """The nearest: the device, then its vendor's devices, then any; the engine before any engine.

    The same way of measuring comes first of all: a server under load and a lone batch have different overheads.
    """
    # What accelerators have in common, processors do not share: without a maker there are no relatives.
    places = (device, of_vendor(vendor), ANY) if vendor else (device,)
    best, best_rank = NONE, math.inf
    for one in calibrations:
        if one.device not in places or one.engine not in (engine, ANY):
            continue
        # An engine that was never measured on this device resembles itself on its vendor's others more than other
        # engines here; across vendors it does not.
        rank = places.index(one.device) * 2 + 3 * (one.engine == ANY) + 10 * (one.scope != scope)
        if rank < best_rank:
            best, best_rank = one, rank
    return best


def dumps(one: Calibration) -> str:
    """As a file of the catalogue: TOML, figures to four digits."""

    def number(value: float) -> str:
        return "inf" if math.isinf(value) else f"{value:.4g}"

    def pair(values: tuple[float, float]) -> str:
        return f"[{number(values[0])}, {number(values[1])}]"

    lines = [
        f'device = "{one.device}"',
        f'engine = "{one.engine}"',
        f'scope = "{one.scope}"',
        f"points = {one.points}",
        f'version = "{one.version}"',
        f'source = "{one.source}"',
        "",
        "# Efficiencies are shares of a peak; the others are seconds.",
        "[factors]",
        *(f"{f.name} = {number(getattr(one.factors, f.name))}" for f in fields(Factors)),
        "",
        "# log(measured / predicted), 5 % and 95 %, of measurements that the fit had not seen.",
        "[spreads]",
        *(f"{metric} = {pair((spread.low, spread.high))}" for metric, spread in one.spreads.items()),
        "",
        "# The same for models that the fit had not seen.",
        "[unseen]",
        *(f"{metric} = {pair((spread.low, spread.high))}" for metric, spread in one.unseen.items()),
        "",
        "[hull]",
        *(
            f"{name} = {pair(getattr(one.hull, name))}"
            for name in ("concurrency", "input_len", "output_len", "devices")
        ),
        f"models = [{', '.join(f'{chr(34)}{m}{chr(34)}' for m in one.hull.models)}]",
    ]
    return "\n".join(lines) + "\n"


def loads(text: str) -> Calibration:
    """The inverse of `dumps`. Raises InvalidInputError FT2120 for a file that is not a calibration."""
    try:
        row = tomllib.loads(text)
        hull = row["hull"]
        return Calibration(
            device=str(row["device"]),
            engine=str(row["engine"]),
            scope="static" if row["scope"] == "static" else "online",
            factors=Factors(**{name: float(value) for name, value in row["factors"].items()}),
            spreads={metric: Spread(*map(float, pair)) for metric, pair in row["spreads"].items()},
            unseen={metric: Spread(*map(float, pair)) for metric, pair in row["unseen"].items()},
            hull=Hull(
                models=tuple(hull["models"]),
                **{name: (float(hull[name][0]), float(hull[name][1])) for name in _RANGES},
            ),
            points=int(row["points"]),
            version=str(row["version"]),
            source=str(row["source"]),
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInputError.of("FT2120", f"this is not a calibration: {error!r}") from error


_RANGES = ("concurrency", "input_len", "output_len", "devices")


@cache
def shipped() -> tuple[Calibration, ...]:
    """The calibrations of the catalogue."""
    return tuple(loads(text) for text in texts().values())
