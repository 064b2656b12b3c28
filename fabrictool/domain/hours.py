"""What differs from hour to hour of a day or a week, beside a mean that is said elsewhere."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from fabrictool.domain.quantities import Document, problem

if TYPE_CHECKING:
    from datetime import tzinfo

DAY, WEEK = 24, 168
PIECE_S = 900.0
"""Offsets of timezones are multiples of a quarter of an hour."""
Weights = tuple[Annotated[float, Field(ge=0, le=1e12)], ...]


class HourlyAmounts(Document):
    """Relative amounts of the hours, from midnight on in the blueprint's `timezone`; their mean over a week is what the
    field beside it says. A list of 24 is short for every day alike, one of 168 for a week from Monday on.
    """

    weekday: Weights | None = None
    """24 numbers, for Monday to Friday."""
    weekend: Weights | None = None
    """24 numbers, for Saturday and Sunday."""
    week: Weights | None = None
    """168 numbers, from Monday on, instead of the two."""

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return {"week": tuple(value) * (WEEK // DAY) if len(value) == DAY else tuple(value)}

    @model_validator(mode="after")
    def _whole(self) -> HourlyAmounts:
        hint = "24 numbers, 168 numbers, or {weekday: [24 numbers], weekend: [24 numbers]}"
        halves = (self.weekday, self.weekend)
        if (self.week is None) is (None in halves) or (self.week is not None and halves != (None, None)):
            raise problem("FT1298", "`hours` say the week in no one form", hint)
        wrong = [(part, most) for part, most in ((self.week, WEEK), *((half, DAY) for half in halves))
                 if part is not None and len(part) != most]  # fmt: skip
        if wrong:
            part, most = wrong[0]
            raise problem(
                "FT1298", f"`hours` have {len(part)} numbers, not {DAY if most == DAY else f'{DAY} or {WEEK}'}", hint
            )
        if not any(self._every):
            raise problem("FT1298", "`hours` are all zero", "remove them, or give one hour at least some share")
        return self

    @property
    def _every(self) -> tuple[float, ...]:
        return self.week or (self.weekday or ()) * 5 + (self.weekend or ()) * 2

    @property
    def factors(self) -> tuple[float, ...]:
        """168 factors of the mean, from Monday's midnight on."""
        mean = math.fsum(self._every) / WEEK
        return tuple(value / mean for value in self._every)


def factor_during(factors: tuple[float, ...], begin: float, seconds: float, zone: tzinfo = UTC) -> float:
    """The mean factor from `begin` (seconds since 1970) on."""
    pieces = max(1, round(seconds / PIECE_S))
    return math.fsum(factors[hour_of_week(begin + i * seconds / pieces, zone)] for i in range(pieces)) / pieces


def hour_of_week(at: float, zone: tzinfo = UTC) -> int:
    there = datetime.fromtimestamp(at, zone)
    return there.weekday() * DAY + there.hour
