"""Sketches of demand: what they say, and that they add up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fabrictool.workload.profile import ACCURACY, Demanded, LengthSketch, merge, profiles, sketched


def requests(count: int, seed: int, begin: float = 0.0) -> list[Demanded]:
    dice, at, rows = random.Random(seed), begin, []
    for _ in range(count):
        at += dice.expovariate(0.5)
        rows.append(Demanded("m", at, 1 + int(dice.lognormvariate(6, 1)), 1 + int(dice.expovariate(0.01)), 16, 8))
    return rows


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 0.99, 1.0])
def test_a_quantile_is_as_near_as_it_says(share: float) -> None:
    values = [row.prompt_tokens for row in requests(5000, 1)]
    sketch = LengthSketch()
    for value in values:
        sketch.add(value)
    exact = float(np.quantile(values, share, method="lower"))
    assert sketch.quantile(share) == pytest.approx(exact, rel=ACCURACY + 1e-9)
    assert sketch.sums.mean == pytest.approx(np.mean(values))
    assert sketch.sums.sd == pytest.approx(np.std(values))
    assert sketch.most == max(values)


def test_sketches_of_parts_add_up_to_that_of_all() -> None:
    rows = requests(9000, 2)
    whole = sketched(rows)
    hour = rows[len(rows) // 2].at // 3600
    parts = sketched(row for row in rows if row.at // 3600 < hour)
    merge(parts, sketched(row for row in rows if row.at // 3600 >= hour))
    assert parts.keys() == whole.keys()
    assert len(whole) > 3
    (mine,), (its,) = profiles(parts), profiles(whole)
    assert mine.demand.input.buckets == its.demand.input.buckets
    assert mine.demand.gaps.total == pytest.approx(its.demand.gaps.total)
    assert (mine.hours, mine.peak_hour, mine.demand.requests) == (its.hours, its.peak_hour, 9000)


def test_rate_and_bursts() -> None:
    (profile,) = profiles(sketched(requests(9000, 3)))
    assert profile.demand.rate == pytest.approx(0.5, rel=0.05)
    assert profile.demand.cv == pytest.approx(1.0, abs=0.05)
    assert 0.5 <= profile.peak_rate < 0.65
    assert profile.demand.share(profile.demand.shared_tokens) == pytest.approx(2 * profile.demand.share(9000 * 8))


def test_models_are_apart_and_what_has_no_answer_is_no_demand() -> None:
    rows = [Demanded("a", 10.0, 5, 5), Demanded("b", 11.0, 5, 5), Demanded("b", 12.0, 5, 5), Demanded("c", 13.0, 5, 0)]
    assert [(profile.model, profile.demand.requests) for profile in profiles(sketched(rows))] == [("b", 2), ("a", 1)]


def test_a_short_time_has_its_own_rate_not_the_hour_s() -> None:
    (profile,) = profiles(sketched(Demanded("m", 100.0 + i, 5, 5) for i in range(61)))
    assert profile.demand.rate == pytest.approx(1.0)
    assert profile.peak_rate == pytest.approx(1.0)
    assert profile.demand.cv == pytest.approx(0.0, abs=1e-6)
