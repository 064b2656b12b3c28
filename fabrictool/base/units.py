"""Quantities with units: one family, parsed from what people write and printed with the unit, exactly.

``Duration.parse("800ms") == 0.8`` and ``str(Duration(0.8)) == "800ms"``: a quantity *is* a number in its base unit (a
float or an int), so arithmetic needs no wrapper, and ``X.parse(str(x)) == x`` holds for every one of them.

============= =============== ====================================================
class         base unit       written as
============= =============== ====================================================
`Duration`    seconds         ``800ms`` ``5s`` ``24h`` (ns us ms s m h d)
`Memory`      octets          ``80GiB`` (2³⁰) and ``80GB`` (10⁹) are distinct
`Tokens`      tokens          ``2048 tok``
`Rate`        requests/s      ``22 req/s``
`Bandwidth`   octets/s        ``1 Gbit/s`` ``3.35 TB/s``
`Power`       watts           ``700 W`` ``1.2 kW``
`Carbon`      g CO2e/kWh      ``45 g/kWh``
`Share`       0 to 1          ``95%``
`Compute`     operations/s    ``989.4 TFLOP/s``
`Price`       currency/hour   ``1.20 CHF/h``
`Spending`    currency/time   ``400 CHF/h`` ``250000 CHF/month`` (h day month)
`Instant`     s since 1970    ``2026-12-01T06:00Z``
============= =============== ====================================================

Longer than other modules because one family in one file is what keeps its members alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal, InvalidOperation
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Self, SupportsFloat, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

_WRITTEN = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?) ?([^\s0-9.+-].*)?")
_EXPONENT = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]+) ?(.*)")
_EXACT = Context(prec=80)
"""Enough digits that no product of a written number and a unit's factor is ever rounded."""
_LONGEST = 64
"""Characters; longer texts are no quantity that anybody means."""
_LARGEST = Decimal(10) ** 30
_READABLE = 20
"""Digits; a longer number is not repeated in a hint."""


class UnitError(ValueError):
    """A text that is not a quantity of the wanted kind: a code of the FT111x range, one line, and the mend."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class Quantity:
    """What the quantities share: the units, parsing and printing."""

    __slots__ = ()

    NOUN: ClassVar[str]
    """With its article, for messages: ``a duration``."""
    UNITS: ClassVar[Mapping[str, Decimal]]
    """Unit as written → how many base units it is."""
    PRINTED: ClassVar[tuple[str, ...]]
    """Units for printing, largest first; the last one is exact for every value."""
    SPACE: ClassVar[str] = " "
    """Between number and unit when printed; both forms are read."""
    EXAMPLES: ClassVar[tuple[str, ...]]
    MISTAKES: ClassVar[Mapping[str, str]] = {}
    """Wrong unit in small letters → the right one, which is as large."""
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {}
    """Wrong unit in small letters → how many of the right one it is, and that one."""
    MOST: ClassVar[Decimal] = _LARGEST
    """Base units; nothing that anybody has or waits for is larger."""
    WHOLE: ClassVar[bool] = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``NUMBER UNIT``; the number is plain decimal, a space between is optional.

        Raises
        ------
        UnitError
            FT1110 no unit, FT1111 unknown unit, FT1112 not a number, FT1113 negative, too large or not whole.
        """
        number, unit = split(text, cls.NOUN, cls.EXAMPLES)
        if not unit:
            raise UnitError("FT1110", f"{cls.NOUN} needs a unit", cls._mend(number))
        factor = cls.UNITS.get(unit)
        if factor is None:
            raise UnitError("FT1111", f"`{unit}` is not a unit of {cls.NOUN}", cls._unit_hint(number, unit))
        value = _EXACT.multiply(number, factor)
        if value > cls.MOST:
            most = str(cls.of(cls.MOST))
            raise UnitError("FT1113", f"`{text}` is too large for {cls.NOUN}", f"at most `{most}`")
        if cls.WHOLE and value != value.to_integral_value():
            raise UnitError("FT1113", f"`{text}` is not a whole number", f"such as `{cls.EXAMPLES[0]}`")
        return cls.of(value)

    @classmethod
    def of(cls, value: Decimal) -> Self:
        """The quantity of that many base units."""
        make = cast("type[float]", cls)
        return cast("Self", make(int(value) if cls.WHOLE else value))

    def __str__(self) -> str:
        """With the largest unit that shows it exactly in few digits."""
        number = cast("float", self)
        exact = Decimal(int(number)) if self.WHOLE else Decimal(repr(float(number)))
        for unit in self.PRINTED[:-1]:
            factor = self.UNITS[unit]
            if abs(exact) >= factor:
                scaled = _EXACT.divide(exact, factor).quantize(Decimal("0.001"), context=_EXACT)
                if _EXACT.multiply(scaled, factor) == exact:
                    return f"{_plain(scaled)}{self.SPACE}{unit}"
        unit = self.PRINTED[-1]
        return f"{_plain(_EXACT.divide(exact, self.UNITS[unit]))}{self.SPACE}{unit}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @classmethod
    def pattern(cls) -> str:
        """Regular expression (ECMA 262) of what `parse` accepts, for the JSON Schema."""
        units = "|".join(re.escape(unit).replace("/", r"\/") for unit in sorted(cls.UNITS, key=len, reverse=True))
        return rf"^\+?[0-9]+(\.[0-9]+)? ?({units})$"

    @classmethod
    def _mend(cls, number: Decimal) -> str:
        written = [f"`{_plain(number)}{cls.SPACE}{unit}`" for unit in cls._suggested()]
        return "write " + " or ".join(written) + "?"

    @classmethod
    def _suggested(cls) -> tuple[str, ...]:
        units = [split(example, cls.NOUN, ())[1] for example in cls.EXAMPLES]
        return tuple(dict.fromkeys(units))[:2]

    @classmethod
    def _unit_hint(cls, number: Decimal, unit: str) -> str:
        """Never another amount than the one that was written."""
        known = f"units: {', '.join(cls.UNITS)}"
        low = " ".join(unit.lower().split())
        factor, near = cls.SCALED.get(unit, cls.SCALED.get(low, (Decimal(1), None)))
        if near is None:
            folded = {known.lower(): known for known in cls.UNITS}
            near = cls.MISTAKES.get(low) or folded.get(low)
            close = get_close_matches(low, [name for name in folded if name[:1] == low[:1]], 1, 0.6)
            near = near or (folded[close[0]] if close else None)
        amount = _plain(_rounded(_EXACT.multiply(number, factor)))
        return f"did you mean `{amount}{cls.SPACE}{near}`? {known}" if near else known


def split(text: str, noun: str, examples: tuple[str, ...]) -> tuple[Decimal, str]:
    """Number and unit of a written quantity; the unit may be missing.

    Raises
    ------
    UnitError
        FT1112 no number in front, FT1113 negative or too large.
    """
    such = f"such as `{examples[0]}`" if examples else "write NUMBER UNIT"
    short = text.strip() if len(text) <= _LONGEST else ""
    match = _WRITTEN.fullmatch(short)
    if exponent := _EXPONENT.fullmatch(short):
        raise UnitError("FT1112", f"`{text}` has an exponent", _without_exponent(exponent[1], exponent[2]) or such)
    if match is None:
        raise UnitError("FT1112", f"`{text[:_LONGEST]}` is not {noun}: expected a number and a unit", such)
    try:
        number = Decimal(match[1])
    except InvalidOperation as error:  # pragma: no cover - the pattern admits decimal numbers only
        raise UnitError("FT1112", f"`{text}` is not {noun}", such) from error
    if number < 0:
        raise UnitError("FT1113", f"{noun} cannot be negative", such)
    if number >= _LARGEST:
        raise UnitError("FT1113", f"`{text}` is too large for {noun}", such)
    return number, (match[2] or "").strip()


def _without_exponent(number: str, unit: str) -> str:
    """The mend, for a number that can be written out."""
    plain = _plain(Decimal(number)) if abs(Decimal(number).adjusted()) < _READABLE else ""
    return f"write `{plain}{' ' if unit else ''}{unit}`" if plain else ""


def _rounded(number: Decimal) -> Decimal:
    """Of a conversion that has no end, such as a third, four digits."""
    short = number.normalize(Context(prec=12))
    return short if len(short.as_tuple().digits) < 12 else number.normalize(Context(prec=4))


def _plain(number: Decimal) -> str:
    """Without exponent and trailing zeros."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Real(Quantity, float):
    """A quantity that is a float."""

    __slots__ = ()
    __str__ = Quantity.__str__
    __repr__ = Quantity.__repr__


class _Whole(Quantity, int):
    """A quantity that is an int."""

    __slots__ = ()
    __str__ = Quantity.__str__
    __repr__ = Quantity.__repr__
    WHOLE = True


class Duration(_Real):
    """Seconds, from nanoseconds to days."""

    __slots__ = ()
    NOUN = "a duration"
    UNITS: ClassVar[Mapping[str, Decimal]] = {
        "ns": Decimal("1e-9"),
        "us": Decimal("1e-6"),
        "ms": Decimal("1e-3"),
        "s": Decimal(1),
        "m": Decimal(60),
        "h": Decimal(3600),
        "d": Decimal(86400),
    }
    PRINTED = ("h", "m", "s", "ms", "us", "ns")
    SPACE = ""
    EXAMPLES = ("800ms", "5s", "24h")
    MISTAKES: ClassVar[Mapping[str, str]] = {
        "sec": "s",
        "secs": "s",
        "second": "s",
        "seconds": "s",
        "min": "m",
        "mins": "m",
        "minute": "m",
        "minutes": "m",
        "hour": "h",
        "hours": "h",
        "hr": "h",
        "day": "d",
        "days": "d",
        "msec": "ms",
        "µs": "us",
        "μs": "us",
    }
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        **dict.fromkeys(("w", "wk", "week", "weeks"), (Decimal(7), "d")),
        **dict.fromkeys(("mo", "month", "months"), (Decimal(30), "d")),
        **dict.fromkeys(("y", "yr", "year", "years"), (Decimal(365), "d")),
    }
    MOST = Decimal(86400 * 3660)


def _powers(base: int, units: tuple[str, ...]) -> dict[str, Decimal]:
    return {unit: Decimal(base) ** (power + 1) for power, unit in enumerate(units)}


class Memory(_Whole):
    """Octets; binary and decimal multiples are different units."""

    __slots__ = ()
    NOUN = "an amount of memory"
    UNITS: ClassVar[Mapping[str, Decimal]] = {
        "B": Decimal(1),
        **_powers(1000, ("kB", "MB", "GB", "TB")),
        **_powers(1024, ("KiB", "MiB", "GiB", "TiB")),
    }
    PRINTED = ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB", "B")
    SPACE = ""
    EXAMPLES = ("80GiB", "80GB")
    MISTAKES: ClassVar[Mapping[str, str]] = {
        "g": "GiB", "m": "MiB", "t": "TiB", "k": "KiB", "gi": "GiB", "mi": "MiB", "ti": "TiB", "ki": "KiB",
    }  # fmt: skip
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        "pb": (Decimal(1000), "TB"),
        "pib": (Decimal(1024), "TiB"),
        **{f"{prefix}{bit}": (Decimal("0.125"), f"{prefix}B") for prefix in "kMGT" for bit in ("bit", "bits")},
    }
    MOST = Decimal(10) ** 18


class Tokens(_Whole):
    """A number of tokens."""

    __slots__ = ()
    NOUN = "a number of tokens"
    UNITS: ClassVar[Mapping[str, Decimal]] = {"tok": Decimal(1)}
    PRINTED = ("tok",)
    EXAMPLES = ("2048 tok",)
    MISTAKES: ClassVar[Mapping[str, str]] = {"token": "tok", "tokens": "tok", "t": "tok", "toks": "tok"}
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        **{f"k{gap}{word}".rstrip(): (Decimal(1000), "tok") for gap in ("", " ") for word in ("", "tok", "tokens")},
        **{f"m{gap}{word}".rstrip(): (Decimal(10**6), "tok") for gap in ("", " ") for word in ("", "tok", "tokens")},
    }
    MOST = Decimal(10) ** 12


class Rate(_Real):
    """A rate in requests per second."""

    __slots__ = ()
    NOUN = "a request rate"
    UNITS: ClassVar[Mapping[str, Decimal]] = {"req/s": Decimal(1)}
    PRINTED = ("req/s",)
    EXAMPLES = ("22 req/s", "0.5 req/s")
    MISTAKES: ClassVar[Mapping[str, str]] = {"rps": "req/s", "qps": "req/s", "/s": "req/s", "requests/s": "req/s"}
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        f"{what}{time}": (1 / Decimal(seconds), "req/s")
        for what in ("req/", "requests/", "/", "rp", "qp")
        for time, seconds in (
            ("m", 60), ("min", 60), ("minute", 60), ("h", 3600), ("hour", 3600), ("d", 86400), ("day", 86400),
        )
    }  # fmt: skip
    MOST = Decimal(10) ** 9


class Bandwidth(_Real):
    """Octets per second; network links are written in bits, memory and NVLink in octets."""

    __slots__ = ()
    NOUN = "a bandwidth"
    UNITS: ClassVar[Mapping[str, Decimal]] = {
        "bit/s": Decimal("0.125"),
        "kbit/s": Decimal(125),
        "Mbit/s": Decimal(125_000),
        "Gbit/s": Decimal(125_000_000),
        "Tbit/s": Decimal(125_000_000_000),
        "B/s": Decimal(1),
        **_powers(1000, ("kB/s", "MB/s", "GB/s", "TB/s")),
    }
    PRINTED = ("TB/s", "GB/s", "MB/s", "kB/s", "B/s")
    EXAMPLES = ("1 Gbit/s", "900 GB/s")
    MISTAKES: ClassVar[Mapping[str, str]] = {
        "gbps": "Gbit/s", "mbps": "Mbit/s", "gbit": "Gbit/s", "mbit": "Mbit/s",
        "tb": "TB/s", "gb": "GB/s", "mb": "MB/s", "kb": "kB/s",
    }  # fmt: skip
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        **{f"{prefix}ib/s": (Decimal(1024) ** power / 1000**power, f"{right}B/s")
           for power, (prefix, right) in enumerate(zip("kmgt", "kMGT", strict=True), 1)},
        **{f"{prefix}bps": (Decimal(1), f"{prefix}bit/s") for prefix in "kMGT"},
        **{f"{prefix}Bps": (Decimal(1), f"{prefix}B/s") for prefix in "kMGT"},
        **{f"{prefix}b": (Decimal(1), f"{prefix}bit/s") for prefix in "kMGT"},
        **{f"{prefix}b/s": (Decimal(1), f"{prefix}bit/s") for prefix in "kMGT"},
    }  # fmt: skip
    MOST = Decimal(10) ** 18


class Power(_Real):
    """Electrical power in watts."""

    __slots__ = ()
    NOUN = "a power"
    UNITS: ClassVar[Mapping[str, Decimal]] = {"W": Decimal(1), "kW": Decimal(1000), "MW": Decimal(1_000_000)}
    PRINTED = ("MW", "kW", "W")
    EXAMPLES = ("700 W",)
    MISTAKES: ClassVar[Mapping[str, str]] = {"watt": "W", "watts": "W", "kilowatt": "kW", "kilowatts": "kW"}
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        "mW": (Decimal("0.001"), "W"),
        "GW": (Decimal(1000), "MW"),
        "gw": (Decimal(1000), "MW"),
    }
    MOST = Decimal(10) ** 10


class Carbon(_Real):
    """What electricity emits, in grams of CO2 equivalent for each kilowatt hour."""

    __slots__ = ()
    NOUN = "a carbon intensity"
    UNITS: ClassVar[Mapping[str, Decimal]] = {"g/kWh": Decimal(1)}
    PRINTED = ("g/kWh",)
    EXAMPLES = ("45 g/kWh",)
    MISTAKES: ClassVar[Mapping[str, str]] = {
        "gco2/kwh": "g/kWh", "gco2e/kwh": "g/kWh", "gco2eq/kwh": "g/kWh", "kg/mwh": "g/kWh",
    }  # fmt: skip
    SCALED: ClassVar[Mapping[str, tuple[Decimal, str]]] = {
        "kg/kwh": (Decimal(1000), "g/kWh"),
        "t/mwh": (Decimal(1000), "g/kWh"),
    }
    MOST = Decimal(10) ** 5


class Share(_Real):
    """A part of a whole, 0 to 1, written in percent."""

    __slots__ = ()
    NOUN = "a share"
    UNITS: ClassVar[Mapping[str, Decimal]] = {"%": Decimal("0.01")}
    PRINTED = ("%",)
    SPACE = ""
    EXAMPLES = ("95%",)
    MISTAKES: ClassVar[Mapping[str, str]] = {"percent": "%", "pct": "%"}

    @classmethod
    def _mend(cls, number: Decimal) -> str:
        """Somebody who writes 0.99 means 99 %."""
        return super()._mend(number * 100 if number <= 1 else number)

    @classmethod
    def of(cls, value: Decimal) -> Self:
        """At most the whole."""
        if value > 1:
            raise UnitError("FT1113", "a share cannot exceed 100%", "such as `95%`")
        return super().of(value)


class Compute(_Real):
    """Operations per second: FLOP/s, or OP/s for integers."""

    __slots__ = ()
    NOUN = "a computing speed"
    UNITS: ClassVar[Mapping[str, Decimal]] = {
        "GFLOP/s": Decimal("1e9"),
        "TFLOP/s": Decimal("1e12"),
        "PFLOP/s": Decimal("1e15"),
        "TOP/s": Decimal("1e12"),
        "POP/s": Decimal("1e15"),
    }
    PRINTED = ("PFLOP/s", "TFLOP/s", "GFLOP/s")
    EXAMPLES = ("989.4 TFLOP/s",)
    MOST = Decimal(10) ** 21


@dataclass(frozen=True, slots=True)
class Price:
    """Money per hour. Currencies are never converted: an inventory uses one."""

    amount: float
    currency: str

    NOUN: ClassVar[str] = "a price"
    EXAMPLES: ClassVar[tuple[str, ...]] = ("1.20 CHF/h",)
    MOST: ClassVar[int] = 10**9
    PATTERN: ClassVar[str] = r"^\+?[0-9]+(\.[0-9]+)? ?[A-Z]{3}\/h$"

    @classmethod
    def parse(cls, text: str) -> Price:
        """Read ``NUMBER CUR/h`` with a three-letter currency code (ISO 4217).

        Raises
        ------
        UnitError
            FT1110 no unit, FT1111 another unit, FT1112 not a number, FT1113 negative or too large.
        """
        number, unit = split(text, cls.NOUN, cls.EXAMPLES)
        if not unit:
            raise UnitError("FT1110", "a price needs a unit", f"write `{_plain(number)} CHF/h`?")
        if not re.fullmatch(r"[A-Z]{3}/h", unit):
            raise UnitError("FT1111", f"`{unit}` is not a unit of a price", "a currency code and an hour: `1.20 CHF/h`")
        if number > cls.MOST:
            raise UnitError("FT1113", f"`{text}` is too large for a price", f"at most `{cls.MOST} {unit}`")
        return cls(float(number), unit[:3])

    def __str__(self) -> str:
        return f"{_plain(Decimal(repr(self.amount)))} {self.currency}/h"

    def __float__(self) -> float:
        return self.amount


@dataclass(frozen=True, slots=True)
class Spending:
    """Money in a time; a month has 730 hours."""

    amount: float
    currency: str
    per: str
    """``h``, ``day`` or ``month``."""

    NOUN: ClassVar[str] = "an amount of money in a time"
    EXAMPLES: ClassVar[tuple[str, ...]] = ("400 CHF/h", "250000 CHF/month")
    HOURS: ClassVar[Mapping[str, float]] = {"h": 1.0, "day": 24.0, "month": 730.0}
    MOST: ClassVar[int] = 10**12
    PATTERN: ClassVar[str] = r"^\+?[0-9]+(\.[0-9]+)? ?[A-Z]{3}\/(h|day|month)$"

    @classmethod
    def parse(cls, text: str) -> Spending:
        """Read ``NUMBER CUR/h``, ``NUMBER CUR/day`` or ``NUMBER CUR/month``.

        Raises
        ------
        UnitError
            FT1110 no unit, FT1111 another unit, FT1112 not a number, FT1113 negative or too large.
        """
        number, unit = split(text, cls.NOUN, cls.EXAMPLES)
        if not unit:
            raise UnitError("FT1110", f"{cls.NOUN} needs a unit", f"write `{_plain(number)} CHF/month`?")
        match = re.fullmatch(rf"([A-Z]{{3}})/({'|'.join(cls.HOURS)})", unit)
        if match is None:
            hint = f"a currency code and a time, {', '.join(cls.HOURS)}: `{cls.EXAMPLES[1]}`"
            raise UnitError("FT1111", f"`{unit}` is not a unit of {cls.NOUN}", hint)
        if number > cls.MOST:
            raise UnitError("FT1113", f"`{text}` is too large for {cls.NOUN}", f"at most `{cls.MOST} {unit}`")
        return cls(float(number), match[1], match[2])

    @property
    def hours(self) -> float:
        return self.HOURS[self.per]

    @property
    def per_hour(self) -> float:
        return self.amount / self.hours

    def __str__(self) -> str:
        return f"{_plain(Decimal(repr(self.amount)))} {self.currency}/{self.per}"

    def __float__(self) -> float:
        return self.amount


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in time, in UTC."""

    seconds: float
    """Since 1970."""

    NOUN: ClassVar[str] = "a point in time"
    EXAMPLES: ClassVar[tuple[str, ...]] = ("2026-12-01T06:00Z",)
    PATTERN: ClassVar[str] = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+\-][0-9]{2}:[0-9]{2})$"

    @classmethod
    def parse(cls, text: str) -> Instant:
        """Read ``YYYY-MM-DDTHH:MM`` with ``Z`` or an offset. Raises UnitError FT1112 for anything else."""
        such = f"such as `{cls.EXAMPLES[0]}`, or with an offset: `2026-12-01T07:00+01:00`"
        if not re.fullmatch(cls.PATTERN, text):
            raise UnitError("FT1112", f"`{text[:_LONGEST]}` is not {cls.NOUN}", such)
        try:
            return cls(datetime.fromisoformat(text).timestamp())
        except (ValueError, OverflowError) as error:
            raise UnitError("FT1112", f"`{text}` is not {cls.NOUN}: {error}", such) from error

    def __str__(self) -> str:
        return datetime.fromtimestamp(self.seconds, UTC).isoformat().replace("+00:00", "Z")

    def __float__(self) -> float:
        return self.seconds


def as_float(value: SupportsFloat | None, default: float = 0.0) -> float:
    """A plain float, for documents that are written to JSON; `default` for None."""
    return default if value is None else float(value)
