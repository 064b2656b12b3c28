"""What a plan may do: rules that people other than the blueprint's authors own. One YAML document."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, WithJsonSchema, field_validator, model_validator

from fabrictool.base.ids import NAME_PATTERN
from fabrictool.domain.quantities import Document, Name, Price, problem

__all__ = ["Hours", "Limits", "ReviewPolicy", "ReviewRule"]

Count = Annotated[int, Field(ge=0, le=1_000_000)]
ModelOrAll = Annotated[str, StringConstraints(pattern=rf"^\*$|{NAME_PATTERN}", strict=True)]
"""A model's name, or ``*`` for every model."""
_PLACE = re.compile(r"[a-z0-9][a-z0-9._-]*(?:/[a-z0-9][a-z0-9._-]*)?")
_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
_DAY = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]


def _place(value: Any) -> str:
    if not isinstance(value, str) or not _PLACE.fullmatch(value):
        raise problem("FT3004", "expected CLUSTER or CLUSTER/PARTITION", "such as `alpha` or `alpha/normal`")
    return value


def _time(value: Any) -> str:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise problem("FT3004", "expected a time of day: HH:MM", 'in quotes, such as `"08:00"`')
    return value


PlaceName = Annotated[
    str,
    PlainValidator(_place),
    WithJsonSchema({"type": "string", "pattern": f"^{_PLACE.pattern}$", "examples": ["alpha/normal"]}),
]
TimeOfDay = Annotated[
    str,
    PlainValidator(_time),
    WithJsonSchema({"type": "string", "pattern": f"^{_TIME.pattern}$", "examples": ["08:00"]}),
]


class Hours(Document):
    """When changes may be made, in UTC."""

    days: Annotated[tuple[_DAY, ...], Field(min_length=1)] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    """On these days."""
    begin: TimeOfDay
    """From this time of day."""
    end: TimeOfDay
    """Until before this one; earlier than `begin`: of the next day."""


class Limits(Document):
    """What a plan must keep; each limit is looked at by itself."""

    max_changes: Count | None = None
    """Most actions that change something."""
    max_deletes: Count | None = None
    """Most units that are stopped for good."""
    max_replaces: Count | None = None
    """Most units that are replaced."""
    min_replicas_after: dict[ModelOrAll, Count] = Field(default_factory=dict)
    """Fewest replicas that a model has after the plan; ``*``: every model of the plan."""
    keep: tuple[ModelOrAll, ...] = ()
    """Models of which no replica may be deleted."""
    keep_protected: bool = False
    """``true``: no replica may be deleted of a model that the blueprint marks with ``protect: true``."""
    providers_allowed: dict[ModelOrAll, tuple[Name, ...]] = Field(default_factory=dict)
    """Model → the only providers that may serve it."""
    providers_forbidden: dict[ModelOrAll, tuple[Name, ...]] = Field(default_factory=dict)
    """Model → providers that may not serve it."""
    max_cost_per_hour: Price | None = None
    """Most that the whole placement costs."""
    slo_met: tuple[ModelOrAll, ...] = ()
    """Models whose forecast must meet every target of their SLO; what the replay leaves undecided is not met."""
    places_forbidden: tuple[PlaceName, ...] = ()
    """Clusters, and partitions of them, on which nothing may be started."""
    hours: Hours | None = None
    """The only hours in which anything may be changed."""

    @model_validator(mode="after")
    def _some(self) -> Limits:
        if not self.model_fields_set:
            raise problem("FT3004", "no limit is given", f"one of: {', '.join(type(self).model_fields)}")
        return self


class ReviewRule(Document):
    """Limits, and what it means when one is not kept."""

    name: Name
    """What messages call it."""
    deny: Limits | None = None
    """A plan that does not keep one of them is refused."""
    warn: Limits | None = None
    """A plan that does not keep one of them is warned of."""

    @model_validator(mode="after")
    def _one(self) -> ReviewRule:
        if (self.deny is None) == (self.warn is None):
            raise problem("FT3004", "a rule has either `deny` or `warn`", "make two rules of it")
        return self


class ReviewPolicy(Document):
    """Rules for plans of a fabric."""

    apiVersion: Literal["fabrictool/v1"]  # noqa: N815 - the name that YAML users know
    """Version of this format."""
    kind: Literal["Policy"]
    """What this file is."""
    rules: Annotated[tuple[ReviewRule, ...], Field(min_length=1)]
    """All of them are looked at."""

    @field_validator("rules")
    @classmethod
    def _named_once(cls, value: tuple[ReviewRule, ...]) -> tuple[ReviewRule, ...]:
        names = [rule.name for rule in value]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise problem("FT3004", f"two rules are called `{name}`", "give each a name of its own")
        return value
