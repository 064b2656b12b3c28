"""Lengths follow their shape and stay within their bounds."""

import math

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.workload.lengths import LONGEST, SHAPES, Lengths

MANY = 100_000


def draw(*arguments, **more):
    return Lengths(*arguments, **more).draw(MANY, np.random.default_rng(11))


@pytest.mark.parametrize("shape", ["normal", "lognormal"])
def test_mean_and_spread_of_a_shape(shape):
    drawn = draw(shape, 1000.0, 250.0)
    assert drawn.dtype == np.int64
    assert drawn.mean() == pytest.approx(1000, rel=0.01)
    assert drawn.std() == pytest.approx(250, rel=0.02)


def test_normal_is_symmetric_and_lognormal_is_not():
    normal, lognormal = draw("normal", 1000.0, 250.0), draw("lognormal", 1000.0, 900.0)
    assert np.median(normal) == pytest.approx(1000, rel=0.01)
    assert np.median(lognormal) == pytest.approx(1000 / math.sqrt(1 + 0.81), rel=0.02)


def test_uniform_runs_over_the_mean_plus_and_minus_the_spread():
    drawn = draw("uniform", 100.0, 20.0)
    assert (drawn.min(), drawn.max()) == (80, 120)
    assert drawn.std() == pytest.approx(40 / math.sqrt(12), rel=0.02)


def test_fixed_and_empirical():
    assert set(draw("fixed", 77.0).tolist()) == {77}
    drawn = draw("empirical", values=(3, 3, 3, 9))
    assert set(drawn.tolist()) == {3, 9}
    assert (drawn == 3).mean() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_hold(shape):
    drawn = draw(shape, 100.0, 500.0, 40, 130, (1, 100, 9999))
    assert drawn.min() >= 40
    assert drawn.max() <= 130
    assert draw(shape, 1.0, 500.0, -5, 9, (-7, 0)).min() >= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_seed_gives_the_same_bytes(shape):
    lengths = Lengths(shape, 50.0, 10.0, values=(1, 2, 3))
    first, again = (lengths.draw(100, np.random.default_rng(5)).tobytes() for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": math.nan},
        {"mean": 0.0},
        {"mean": -3.0},
        {"mean": math.inf},
        {"mean": 1e-300, "sd": 1.0},
        {"sd": math.nan},
        {"sd": -1.0},
        {"sd": math.inf},
        {"sd": 1e200},
        {"least": 9, "most": 8},
        {"least": -5, "most": 0},
        {"most": LONGEST + 1},
        {"shape": "empirical"},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(InvalidInputError, match="FT2203"):
        Lengths(**({"shape": "lognormal"} | wrong))


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths("normal", 74, 211, 5, 4000),
        Lengths("normal", 600, 100),
        Lengths("lognormal", 500, 900, 1, 800),
        Lengths("lognormal", 3, 5),
        Lengths("uniform", 100, 20),
        Lengths("fixed", 64),
        Lengths("empirical", 50, 10, 1, 30, values=(1, 20, 90)),
    ],
)
def test_the_clipped_mean_is_that_of_what_is_drawn(lengths):
    drawn = lengths.draw(400_000, np.random.default_rng(5))
    assert lengths.clipped_mean == pytest.approx(drawn.mean(), rel=0.02)
