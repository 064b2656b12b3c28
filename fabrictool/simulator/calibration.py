"""Measured factors: which efficiencies and overheads hold for a device and an engine, and how far they may be wrong.

A calibration is fitted once from measurements (`fitting`), kept as a file of the catalogue with its source and its
residuals, and chosen here. Where a device was never measured, what was learned across devices stands in, with the wider
band that leaving devices out has shown.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog.calibrations import texts
from fabrictool.simulator.stepmodel import Factors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Scope = Literal["online", "static"]
"""`online`: a server under concurrent requests; `static`: one batch that starts and ends together."""
METRICS = ("ttft", "tpot", "e2e")
ANY = "*"
MOST = {"compute": 0.95, "attention_compute": 0.9, "expert_compute": 1.0, "tile": 2048.0}
"""What a file's factors may be at most, where it is not 1: the whole of a peak, or a second (a tile: tokens), which is
beyond all that was ever measured. No fit goes further (`fitting.LIMIT`); experts' is a share of `compute`, and fits
once let it be 1.2.
"""
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
    accelerators: tuple[str, ...] = ()
    """Ids of the devices that were measured."""

    def outside(
        self, *, concurrency: float, input_len: float, output_len: float, devices: float
    ) -> dict[str, tuple[float, float]]:
        """In what a case lies outside of it, and what was measured there; a tenth to spare on either side."""
        case = {"concurrency": concurrency, "input_len": input_len, "output_len": output_len, "devices": devices}
        ranges: dict[str, tuple[float, float]] = {name: getattr(self, name) for name in case}
        return {name: (low, high) for name, (low, high) in ranges.items() if not low * 0.9 <= case[name] <= high * 1.1}


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
    elsewhere: Mapping[str, Spread] = field(default_factory=dict)
    """Metric → spread, for other devices: each was left out in turn."""

    def on(self, device: str) -> Calibration:
        """The same with the bands that hold on a device: those of measured ones, or those of devices left out."""
        if not self.elsewhere or device in self.hull.accelerators:
            return self
        return replace(self, spreads=self.elsewhere, unseen=self.elsewhere)

    def beyond(self, other: Calibration) -> Calibration:
        """The same for a model or number of devices that it has not seen: with the wider of its band and `other`'s,
        which would have held without it.
        """
        bands = {}
        for metric in METRICS:
            own, others = self.spread(metric, "", inside=False), other.spread(metric, "", inside=True)
            bands[metric] = Spread(min(own.low, others.low), max(own.high, others.high))
        return replace(self, spreads=bands, unseen=bands)

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
    for calibration in calibrations:
        if calibration.device not in places or calibration.engine not in (engine, ANY):
            continue
        # An engine that was never measured on this device resembles itself on its vendor's others more than other
        # engines here; across vendors it does not.
        rank = (
            places.index(calibration.device) * 2 + 3 * (calibration.engine == ANY) + 10 * (calibration.scope != scope)
        )
        if rank < best_rank:
            best, best_rank = calibration, rank
    return best.on(device)


def dumps(calibration: Calibration) -> str:
    """As a file of the catalogue: TOML, figures to four digits."""

    def number(value: float) -> str:
        return "inf" if math.isinf(value) else f"{value:.4g}"

    def pair(values: tuple[float, float]) -> str:
        return f"[{number(values[0])}, {number(values[1])}]"

    def names(values: tuple[str, ...]) -> str:
        return f"[{', '.join(f'{chr(34)}{value}{chr(34)}' for value in values)}]"

    lines = [
        f'device = "{calibration.device}"',
        f'engine = "{calibration.engine}"',
        f'scope = "{calibration.scope}"',
        f"points = {calibration.points}",
        f'version = "{calibration.version}"',
        f'source = "{calibration.source}"',
        "",
        "# Efficiencies are shares of a peak, a tile is in tokens; the others are seconds.",
        "[factors]",
        *(f"{f.name} = {number(getattr(calibration.factors, f.name))}" for f in fields(Factors)),
        "",
        "# log(measured / predicted), 5 % and 95 %, of measurements that the fit had not seen.",
        "[spreads]",
        *(f"{metric} = {pair((spread.low, spread.high))}" for metric, spread in calibration.spreads.items()),
        "",
        "# The same for models that the fit had not seen.",
        "[unseen]",
        *(f"{metric} = {pair((spread.low, spread.high))}" for metric, spread in calibration.unseen.items()),
        "",
        "# The same for devices that the fit had not seen.",
        "[elsewhere]",
        *(f"{metric} = {pair((spread.low, spread.high))}" for metric, spread in calibration.elsewhere.items()),
        "",
        "[hull]",
        *(
            f"{name} = {pair(getattr(calibration.hull, name))}"
            for name in ("concurrency", "input_len", "output_len", "devices")
        ),
        f"models = {names(calibration.hull.models)}",
        f"accelerators = {names(calibration.hull.accelerators)}",
    ]
    return "\n".join(lines) + "\n"


def loads(text: str, name: str = "the file") -> Calibration:
    """The inverse of `dumps`; complaints call the text `name`.

    Raises InvalidInputError FT2120 for a file that is not a calibration, or in which a field is missing or impossible.
    """
    try:
        return _calibration(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError, _WrongError) as error:
        raise InvalidInputError.of("FT2120", f"{name}: {error}"[:300]) from error


class _WrongError(Exception):
    """Which field of a calibration cannot be used, and why."""


_RANGES = ("concurrency", "input_len", "output_len", "devices")
_WIDEST = math.log(1000.0)
"""A band that reaches further says nothing; shipped ones reach as far as a factor of fifty."""
_ROUNDED = 1.001
"""Figures are written with four digits."""


def _calibration(row: Mapping[str, Any]) -> Calibration:
    scope, points, hull = row.get("scope"), row.get("points"), _table(row, "hull")
    if scope not in ("online", "static"):
        raise _WrongError(f"scope is {scope!r}, not online or static")
    if not isinstance(points, int) or isinstance(points, bool) or points < 0:
        raise _WrongError(f"points is {points!r}, not a whole number")
    return Calibration(
        device=_word(row, "device"),
        engine=_word(row, "engine"),
        scope=scope,
        factors=_factors(_table(row, "factors")),
        spreads=_spreads(row, "spreads"),
        unseen=_spreads(row, "unseen"),
        elsewhere=_spreads(row, "elsewhere"),
        hull=Hull(
            models=_names(hull, "models"),
            accelerators=_names(hull, "accelerators"),
            **{name: _range(hull, name) for name in _RANGES},
        ),
        points=points,
        version=_word(row, "version"),
        source=_word(row, "source"),
    )


def _factors(given: Mapping[str, Any]) -> Factors:
    names = [f.name for f in fields(Factors)]
    odd = sorted(set(given) ^ set(names))
    if odd:
        older = "missing: what an earlier release fitted does not hold any more, calibrate again"
        raise _WrongError(f"factors.{odd[0]} is {'unknown' if odd[0] in given else older}")
    factors = {name: _number(given[name], f"factors.{name}") for name in names}
    for name, value in factors.items():
        most = MOST.get(name, 1.0)
        if not 0 < value <= most * _ROUNDED:
            raise _WrongError(f"factors.{name} is {value:g}, but it must be above 0 and at most {most:g}")
    return Factors(**factors)


def _spreads(row: Mapping[str, Any], table: str) -> dict[str, Spread]:
    spreads = {}
    for metric, pair in _table(row, table).items():
        place = f"{table}.{metric}"
        if metric not in METRICS:
            raise _WrongError(f"{place} is not one of {', '.join(METRICS)}")
        low, high = _pair(pair, place)
        if not -_WIDEST <= low <= high <= _WIDEST:
            raise _WrongError(f"{place} is {pair!r}, not two logarithms in order, of factors from 0.001 to 1000")
        spreads[metric] = Spread(low, high)
    return spreads


def _names(hull: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = hull.get(name)
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise _WrongError(f"hull.{name} is {names!r}, not a list of names")
    return tuple(names)


def _range(hull: Mapping[str, Any], name: str) -> tuple[float, float]:
    low, high = _pair(hull.get(name), f"hull.{name}")
    if not 0 <= low <= high:
        raise _WrongError(f"hull.{name} is {hull[name]!r}, not two numbers of at least 0 in order")
    return low, high


def _pair(value: Any, place: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise _WrongError(f"{place} is {value!r}, not two numbers")
    return _number(value[0], place), _number(value[1], place)


def _number(value: Any, place: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or (abs(value) > 1e300 and value != math.inf):
        raise _WrongError(f"{place} is {value!r}, not a number")
    return float(value)


def _word(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _WrongError(f"{name} is {value!r}, not text")
    return value


def _table(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if not isinstance(value, dict):
        raise _WrongError(f"{name} is {value!r}, not a table")
    return value


def choose_own(
    own: Sequence[Calibration], device: str, vendor: str, engine: str, model: str, devices: int
) -> Calibration:
    """For a server: the nearest of one's `own` and of those that come with fabrictool, with the bands that hold for a
    replica of `model` on so many devices.
    """
    common = choose(shipped(), device, vendor, engine, "online")
    of_servers = [calibration for calibration in own if calibration.scope == "online"]
    chosen = choose([*of_servers, common], device, vendor, engine, "online") if of_servers else common
    low, high = chosen.hull.devices
    seen = model in chosen.hull.models and low <= devices <= high
    return chosen if seen or chosen.factors is common.factors else chosen.beyond(common)


@cache
def calibrations_in(texts: tuple[str, ...]) -> tuple[Calibration, ...]:
    """Of an inventory (`Inventory.calibrated`). Raises InvalidInputError FT2120."""
    return tuple(loads(text) for text in texts)


@cache
def shipped() -> tuple[Calibration, ...]:
    return tuple(loads(text, name) for name, text in texts().items())
