"""Quantities with their units, always written: ``80GiB``, ``800ms``, ``22 req/s``, ``0.5 CHF/h``.

One table says which units a kind of quantity has and how each relates to the kind's base unit; parsing, the hint for
a bare number, the JSON Schema and printing all come from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_SPLIT = re.compile(rf"\s*({_NUMBER})\s*(.*?)\s*")

_KI = 1024.0


class UnitError(ValueError):
    """A text is no quantity of the kind; `code` is FT1101 (no unit), FT1102 (wrong unit) or FT1103 (no number)."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of quantity."""

    name: str
    base: str
    """Unit of the parsed number."""
    units: tuple[tuple[str, float], ...]
    """Unit → factor to the base unit, in the order in which hints name them."""
    usual: str
    """What a bare number most likely meant, for the hint."""
    spaced: bool = True
    """Whether a space stands between number and unit when printing."""

    def parse(self, value: object) -> float:
        """The number in base units.

        Raises
        ------
        UnitError
            With a hint that can be pasted.
        """
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            message = f"a {self.name} is written as a number with a unit, such as {self.example}"
            raise UnitError("FT1103", message, f"write {self.example}")
        text = str(value)
        match = _SPLIT.fullmatch(text)
        if match is None:
            message = f"{text!r} is no {self.name}: it needs a number and a unit"
            raise UnitError("FT1103", message, f"write, for example, {self.example}")
        number, unit = match.groups()
        if not unit:
            hint = f"write {number}{' ' if self.spaced else ''}{self.usual}"
            raise UnitError("FT1101", f"a {self.name} needs a unit", hint)
        for known, factor in self.units:
            if unit == known:
                return float(number) * factor
        raise UnitError("FT1102", f"{unit!r} is no unit of a {self.name}", f"one of: {self._unit_list(unit)}")

    def format(self, value: float) -> str:
        """With the largest unit that keeps the number at 1 or more; parses back to the same value."""
        for unit, factor in sorted(self.units, key=lambda pair: -pair[1]):
            if abs(value) >= factor and float(f"{value / factor:.6g}") * factor == value:
                return f"{value / factor:.6g}{' ' if self.spaced else ''}{unit}"
        return f"{value!r}{' ' if self.spaced else ''}{self.base}"

    @property
    def example(self) -> str:
        """Such as ``800 ms``."""
        return f"{_EXAMPLES.get(self.name, '1')}{' ' if self.spaced else ''}{self.usual}"

    @property
    def pattern(self) -> str:
        """A regular expression for the JSON Schema."""
        alternatives = "|".join(re.escape(unit).replace("/", r"\/") for unit, _ in self.units)
        return rf"^\s*{_NUMBER}\s*({alternatives})\s*$".replace(r"\/", "/")

    def _unit_list(self, given: str) -> str:
        same = [unit for unit, _ in self.units if unit.lower() == given.lower()]
        return ", ".join(same or [unit for unit, _ in self.units])


_EXAMPLES = {"duration": "800", "size": "80", "rate": "22", "length": "1100", "price": "0.5", "share": "99"}

DURATION = Kind(
    "duration",
    "s",
    (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0)),
    "ms",
    spaced=False,
)
SIZE = Kind(
    "size",
    "B",
    (
        ("B", 1.0),
        ("KiB", _KI),
        ("MiB", _KI**2),
        ("GiB", _KI**3),
        ("TiB", _KI**4),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
    ),
    "GiB",
    spaced=False,
)
REQUEST_RATE = Kind("rate", "req/s", (("req/s", 1.0), ("req/m", 1 / 60), ("req/h", 1 / 3600)), "req/s")
LENGTH = Kind("length", "tok", (("tok", 1.0), ("ktok", 1e3)), "tok")
BANDWIDTH = Kind(
    "bandwidth",
    "bit/s",
    (("bit/s", 1.0), ("Mbit/s", 1e6), ("Gbit/s", 1e9), ("Tbit/s", 1e12), ("GB/s", 8e9), ("GiB/s", 8 * _KI**3)),
    "Gbit/s",
)
POWER = Kind("power", "W", (("W", 1.0), ("kW", 1e3), ("MW", 1e6)), "W")
SHARE = Kind("share", "", (("%", 0.01),), "%", spaced=False)
PRICE = Kind("price", "/h", tuple((f"{currency}/h", 1.0) for currency in ("CHF", "EUR", "USD", "GBP", "JPY")), "CHF/h")
"""The currency is kept beside the number by `currency_of`; a fabric uses one."""
ENERGY = Kind("energy", "J/tok", (("J/tok", 1.0), ("mJ/tok", 1e-3)), "J/tok")

KINDS = (DURATION, SIZE, REQUEST_RATE, LENGTH, BANDWIDTH, POWER, SHARE, PRICE, ENERGY)


def currency_of(text: str) -> str:
    """``CHF`` of ``0.5 CHF/h``; the text must have been parsed as a price."""
    match = _SPLIT.fullmatch(text)
    return match[2].split("/")[0] if match else ""
