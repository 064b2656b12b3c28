"""What a request asks of the replica that serves it, beside the model and who may: precision, device, context. Pure.

Each is a header of its own, so that a client in any language can ask; what cannot be met is told by its name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PREFIX: Final = "x-fabric-"
HEADERS: Final = (
    "x-fabric-min-bits", "x-fabric-devices", "x-fabric-min-context", "x-fabric-engines", "x-fabric-sites",
    "x-fabric-labels",
)  # fmt: skip
_NAMED: Final = frozenset(HEADERS)
KEPT: Final = 1024
LONGEST: Final = 1000
"""Letters of a header."""


class Describable(Protocol):
    """A replica, as requirements see it; empty and 0: unknown, which meets none."""

    @property
    def precision(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def context(self) -> int:
        """Tokens that a request may hold."""

    @property
    def engine(self) -> str: ...

    @property
    def site(self) -> str: ...

    @property
    def labels(self) -> frozenset[str]:
        """What the inventory says of its node."""


D = TypeVar("D", bound=Describable)


@dataclass(frozen=True, slots=True)
class Requirements:
    """0 and empty: anything will do."""

    min_bits: int = 0
    """Of a weight."""
    devices: frozenset[str] = frozenset()
    min_context: int = 0
    """Tokens."""
    engines: frozenset[str] = frozenset()
    sites: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    """All of them."""

    def narrow(self, replicas: Sequence[D]) -> tuple[D, ...] | str:
        """The replicas that meet all of it, or what the last that were left do not meet."""
        left = tuple(replicas)
        tests: tuple[tuple[str, Callable[[D], bool]], ...] = (
            (f"of {self.min_bits} bits or more", lambda r: bits_of(r.precision) >= self.min_bits),
            (f"on {_any(self.devices)}", lambda r: not self.devices or r.device in self.devices),
            (f"with a context of {self.min_context} tokens", lambda r: r.context >= self.min_context),
            (f"with the engine {_any(self.engines)}", lambda r: not self.engines or r.engine in self.engines),
            (f"at {_any(self.sites)}", lambda r: not self.sites or r.site in self.sites),
            (f"labelled {' and '.join(sorted(self.labels))}", lambda r: self.labels <= r.labels),
        )
        for words, meets in tests:
            left = tuple(filter(meets, left))
            if not left:
                return words
        return left


ANYTHING: Final = Requirements()


def bits_of(precision: str) -> int:
    """Of a weight, by the name of a variant: 4 of ``q4_k_m`` and ``mxfp4``; 0 where it is unknown."""
    number = re.search(r"\d+", precision)
    return int(number[0]) if number else 0


def requirements_of(headers: Mapping[str, str]) -> Requirements | str:
    """What a request's headers (lower-case names) ask for, or what is wrong with one of them."""
    if _NAMED.isdisjoint(headers):  # most requests
        return ANYTHING
    return _parsed(tuple(headers.get(name, "") for name in HEADERS))


@functools.lru_cache(maxsize=KEPT)
def _parsed(values: tuple[str, ...]) -> Requirements | str:
    if max(map(len, values)) > LONGEST:  # they are kept, and a client could fill the memory with them
        return f"{HEADERS[[len(value) > LONGEST for value in values].index(True)]} has over {LONGEST} letters"
    bits, devices, context, engines, sites, labels = values
    numbers = []
    for name, value in (("min-bits", bits), ("min-context", context)):
        if value and not (value.isascii() and value.isdigit() and len(value) < 10):
            return f"{PREFIX}{name} is a whole number, not {value!r}"
        numbers.append(int(value or 0))
    return Requirements(numbers[0], _names(devices), numbers[1], _names(engines), _names(sites), _names(labels))


def _names(value: str) -> frozenset[str]:
    return frozenset(name.strip() for name in value.split(",") if name.strip())


def _any(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))
