"""Amounts by hour: how they are written, what they mean, and when they are local time."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from fabrictool.domain.blueprint import Blueprint, Demand
from fabrictool.domain.hours import DAY, WEEK, factor_during, hour_of_week

DECLARED = {"rate": "2 req/s", "input": "10 tok", "output": "5 tok"}
MORNING = tuple(2.0 if 6 <= hour < 12 else 1.0 for hour in range(DAY))


def demand(**more):
    return Demand.model_validate(DECLARED | more)


def test_only_ratios_count_and_their_mean_is_the_rate():
    factors = demand(hours=MORNING).factors
    assert factors == pytest.approx(demand(hours=[10 * value for value in MORNING]).factors)
    assert sum(factors) / WEEK == pytest.approx(1.0)
    assert factors[7] == pytest.approx(2 * factors[5])
    assert factors[:DAY] * 7 == factors
    assert demand().factors == ()


def test_weekdays_and_weekends():
    factors = demand(hours={"weekday": MORNING, "weekend": (1.0,) * DAY}).factors
    assert factors[4 * DAY + 7] == pytest.approx(2 * factors[5 * DAY + 7])
    assert factors == pytest.approx(demand(hours=MORNING * 5 + (1.0,) * 2 * DAY).factors)


@pytest.mark.parametrize(
    "hours",
    [
        (1.0,) * 5,
        (1.0,) * 30,
        (0.0,) * DAY,
        {"weekday": MORNING},
        {},
        {"weekday": MORNING, "weekend": (1.0,) * 5},
        {"week": MORNING * 7, "weekday": MORNING},
    ],
)
def test_what_is_no_week_is_refused(hours):
    with pytest.raises(ValidationError) as error:
        demand(hours=hours)
    assert {problem["type"] for problem in error.value.errors()} == {"FT1298"}


@pytest.mark.parametrize(
    "written",
    [
        DECLARED | {"hours": MORNING, "quantile": "95%"},
        DECLARED | {"begins": "2026-11-02T08:00Z"},
        {"trace": "t.csv", "hours": MORNING},
    ],
)
def test_what_contradicts_itself_is_refused(written):
    with pytest.raises(ValidationError, match=r"hours|begins"):
        Demand.model_validate(written)


def test_a_step_has_the_mean_of_its_hours_in_local_time():
    zone, factors = ZoneInfo("Europe/Zurich"), demand(hours=MORNING).factors
    six = datetime(2026, 12, 1, 6, 0, tzinfo=zone).timestamp()
    assert hour_of_week(six, zone) == DAY + 6
    assert factor_during(factors, six, 3600.0, zone) == factors[6]
    assert factor_during(factors, six - 3600.0, 7200.0, zone) == pytest.approx((factors[5] + factors[6]) / 2)
    assert factor_during(factors, six - 900.0, 3600.0, zone) == pytest.approx((factors[5] + 3 * factors[6]) / 4)
    # In summer the same hour of the day is another one of UTC.
    assert hour_of_week(datetime(2026, 7, 1, 6, 0, tzinfo=zone).timestamp(), zone) == 2 * DAY + 6


def test_an_unknown_timezone_is_refused():
    wanted = {
        "apiVersion": "fabrictool/v1",
        "kind": "Blueprint",
        "fabric": "f",
        "models": {"m": {"source": "hf://a/b"}},
    }
    assert Blueprint.model_validate(wanted | {"timezone": "Asia/Tokyo"}).zone == ZoneInfo("Asia/Tokyo")
    for name in ("Mars/Olympus", "../etc/passwd", ""):
        with pytest.raises(ValidationError):
            Blueprint.model_validate(wanted | {"timezone": name})
