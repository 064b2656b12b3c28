"""Arrivals have the rate and the spread that were asked for, and nonsense is refused."""

import math

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.arrivals import PROCESSES, arrivals, cv_of_part, weibull_shape

MANY = 200_000


@pytest.mark.parametrize(
    ("process", "cv", "expected"),
    [
        ("poisson", 1.0, 1.0),
        ("poisson", 3.0, 1.0),  # a Poisson process has no other
        ("constant", 1.0, 0.0),
        ("gamma", 0.5, 0.5),
        ("gamma", 1.0, 1.0),
        ("gamma", 3.0, 3.0),
        ("weibull", 0.5, 0.5),
        ("weibull", 1.0, 1.0),
        ("weibull", 2.5, 2.5),
    ],
)
def test_rate_and_cv_are_those_asked_for(process, cv, expected):
    times = arrivals(process, 4.0, MANY, np.random.default_rng(7), cv=cv)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(expected, abs=1e-9 if not expected else 0.05 * expected)


def test_bursts_keep_the_rate_and_leave_the_pauses_empty():
    times = arrivals("bursts", 2.0, MANY, np.random.default_rng(7), on=10.0, off=30.0)
    assert MANY / times[-1] == pytest.approx(2.0, rel=0.02)
    assert ((times % 40.0) <= 10.0 + 1e-6).all()
    inside = np.diff(times)[np.diff(times) < 30.0]
    assert inside.mean() == pytest.approx(1 / 8.0, rel=0.03)


@pytest.mark.parametrize("process", PROCESSES)
def test_the_same_seed_gives_the_same_bytes(process):
    first, again, other = (arrivals(process, 1.5, 500, np.random.default_rng(seed), cv=2.0) for seed in (3, 3, 4))
    assert first.tobytes() == again.tobytes()
    assert process == "constant" or first.tobytes() != other.tobytes()


@pytest.mark.parametrize("cv", [0.05, 0.3, 1.0, 4.0, 50.0])
def test_the_weibull_shape_has_the_cv(cv):
    shape = weibull_shape(cv)
    second = math.exp(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape))
    assert math.sqrt(second - 1) == pytest.approx(cv, rel=1e-3)


@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_part_of_a_stream_is_as_uneven_as_is_left(cv, share):
    rng = np.random.default_rng(0)
    every = arrivals("gamma", 1.0, 200_000, rng, cv=cv)
    gaps = np.diff(every[rng.random(len(every)) < share])
    assert float(gaps.std() / gaps.mean()) == pytest.approx(cv_of_part(cv, share), rel=0.05)


NONSENSE = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-320, 1e300]


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("value", NONSENSE)
def test_an_impossible_rate_is_refused(process, value):
    with pytest.raises(InvalidInputError, match="FT2202"):
        arrivals(process, value, 10, np.random.default_rng(0))


@pytest.mark.parametrize("process", ["gamma", "weibull"])
@pytest.mark.parametrize("value", [*NONSENSE, 1e-200, 1e200])
def test_an_impossible_cv_is_refused(process, value):
    with pytest.raises(InvalidInputError, match="FT2202"):
        arrivals(process, 1.0, 10, np.random.default_rng(0), cv=value)


@pytest.mark.parametrize("window", [{"on": 0.0}, {"on": math.nan}, {"off": -1.0}, {"off": math.nan}, {"on": math.inf}])
def test_impossible_bursts_are_refused(window):
    with pytest.raises(InvalidInputError, match="FT2202"):
        arrivals("bursts", 1.0, 10, np.random.default_rng(0), **window)


def test_fewer_than_no_requests_are_refused():
    with pytest.raises(InvalidInputError, match="FT2202"):
        arrivals("poisson", 1.0, -1, np.random.default_rng(0))
    assert len(arrivals("poisson", 1.0, 0, np.random.default_rng(0))) == 0
