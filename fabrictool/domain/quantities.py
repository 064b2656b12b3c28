"""Field types for quantities and names: parsed to base units, described to editors as strings with a unit."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetPydanticSchema, WithJsonSchema
from pydantic_core import core_schema

from fabrictool.base.ids import NAME_PATTERN, is_name
from fabrictool.base.units import (
    BANDWIDTH,
    DURATION,
    LENGTH,
    POWER,
    PRICE,
    REQUEST_RATE,
    SHARE,
    SIZE,
    Kind,
    UnitError,
    currency_of,
)


class Part(BaseModel):
    """Base of everything that is read from YAML: frozen, unknown keys refused, docstrings shown by editors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _schema(kind: Kind) -> WithJsonSchema:
    units = ", ".join(unit for unit, _ in kind.units)
    return WithJsonSchema(
        {
            "type": "string",
            "pattern": kind.pattern,
            "examples": [kind.example],
            "description": f"A {kind.name} with its unit ({units}).",
        }
    )


Duration = Annotated[float, BeforeValidator(DURATION.parse), _schema(DURATION), DURATION]
"""Seconds."""
Size = Annotated[float, BeforeValidator(SIZE.parse), _schema(SIZE), SIZE]
"""Octets."""
Rate = Annotated[float, BeforeValidator(REQUEST_RATE.parse), _schema(REQUEST_RATE), REQUEST_RATE]
"""Requests per second."""
Length = Annotated[float, BeforeValidator(LENGTH.parse), _schema(LENGTH), LENGTH]
"""Tokens."""
Bandwidth = Annotated[float, BeforeValidator(BANDWIDTH.parse), _schema(BANDWIDTH), BANDWIDTH]
"""Bits per second."""
Power = Annotated[float, BeforeValidator(POWER.parse), _schema(POWER), POWER]
"""Watts."""
Share = Annotated[float, BeforeValidator(SHARE.parse), _schema(SHARE), SHARE]
"""0 to 1, written in percent."""

Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
"""A whole number of things, at least one."""
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
"""A whole number of things."""


class Price(Part):
    """Money per hour."""

    amount: float
    """Per hour, in `currency`."""
    currency: str
    """ISO 4217."""

    def __str__(self) -> str:
        """As it is written: ``0.5 CHF/h``."""
        return f"{self.amount:.6g} {self.currency}/h"


def _price(value: object) -> Price:
    if isinstance(value, Price):
        return value
    return Price(amount=PRICE.parse(value), currency=currency_of(str(value)))


PriceText = Annotated[Price, BeforeValidator(_price), _schema(PRICE), PRICE]
"""Money per hour, written ``0.5 CHF/h``."""


def _check_name(value: str) -> str:
    if not is_name(value):
        message = f"{value!r} is no name: lower-case letters, digits, '.', '_' and '-', at most 63, no '-' at the ends"
        raise UnitError("FT1104", message, f"write {_harmless(value)}" if _harmless(value) else None)
    return value


def _harmless(value: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in value.lower()).strip("-._")
    return kept[:63]


Name = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]
"""The name of a thing: safe in paths, job names and labels."""


class SecretRef:
    """Where a secret is, never the secret: ``secret://env/NAME``, ``secret://file/PATH``, ``secret://keyring/SERVICE/NAME``
    or ``secret://sops/FILE#KEY``.
    """

    __slots__ = ("scheme", "target")

    SCHEMES = ("env", "file", "keyring", "sops")

    def __init__(self, scheme: str, target: str) -> None:
        self.scheme = scheme
        self.target = target

    @classmethod
    def parse(cls, value: object) -> SecretRef:
        """The reference in `value`; a literal secret is refused and never repeated in the message."""
        if isinstance(value, SecretRef):
            return value
        prefix, _, rest = str(value).partition("://")
        scheme, _, target = rest.partition("/")
        if prefix != "secret":
            message = "a secret is never written here, only a reference to it"
            raise UnitError("FT1401", message, "write secret://env/NAME or secret://file/PATH")
        if scheme not in cls.SCHEMES or not target:
            hint = "secret://env/NAME, secret://file/PATH, secret://keyring/SERVICE/NAME or secret://sops/FILE#KEY"
            raise UnitError("FT1402", "this secret reference has no known form", hint)
        return cls(scheme, target)

    def __eq__(self, other: object) -> bool:
        """By scheme and target."""
        return isinstance(other, SecretRef) and (self.scheme, self.target) == (other.scheme, other.target)

    def __hash__(self) -> int:
        """By scheme and target."""
        return hash((self.scheme, self.target))

    def __repr__(self) -> str:
        """The reference; there is no value that could leak."""
        return f"secret://{self.scheme}/{self.target}"

    __str__ = __repr__


def _secret_schema(_source: Any, _handler: Any) -> core_schema.CoreSchema:
    return core_schema.no_info_plain_validator_function(
        SecretRef.parse, serialization=core_schema.to_string_ser_schema()
    )


Secret = Annotated[
    SecretRef,
    GetPydanticSchema(_secret_schema),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": "^secret://(env|file|keyring|sops)/.+$",
            "examples": ["secret://env/HF_TOKEN"],
            "description": "A reference to a secret, never the secret itself.",
        }
    ),
]
"""A reference to a secret."""
