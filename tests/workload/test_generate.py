"""Made-up workloads: reproducible, with the popularity that was asked for."""

import math

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError, UsageError
from fabrictool.cli import tracing
from fabrictool.workload.generate import Recipe, generate, popular
from fabrictool.workload.lengths import Lengths
from fabrictool.workload.statistics import statistics
from fabrictool.workload.trace import dumps

NAMES = tuple(f"m{i}" for i in range(8))


def test_one_model():
    trace = generate(Recipe(5.0, Lengths("fixed", 64.0), Lengths("uniform", 20.0, 4.0)), 2000, 1, "m")
    assert len(trace) == 2000
    assert trace.models == ("m",)
    assert trace.arrival[0] == 0.0
    assert trace.rate == pytest.approx(5.0, rel=0.1)
    assert set(trace.prompt.tolist()) == {64}
    assert trace.output.min() >= 16


@pytest.mark.parametrize(
    "make", [lambda s: generate(Recipe(2.0), 300, s), lambda s: popular(NAMES, 9, 300, s, Recipe(1))]
)
def test_the_same_seed_gives_the_same_bytes(make):
    first, again, other = ("\n".join(dumps(make(seed))) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("recipe", [Recipe(1.0), Recipe(1.0, process="gamma", cv=2.0), Recipe(1.0, process="bursts")])
def test_popularity_follows_the_law_and_the_rate_is_kept(recipe):
    trace = popular(NAMES, 10.0, 20_000, 3, recipe, skew=1.0)
    assert len(trace) == 20_000
    assert (np.diff(trace.arrival) >= 0).all()
    assert trace.rate == pytest.approx(10.0, rel=0.05)
    shares = statistics(trace).popularity
    total = sum(1 / rank for rank in range(1, 9))
    for rank, name in enumerate(NAMES, start=1):
        assert shares[name] == pytest.approx(1 / rank / total, rel=0.15), name


def test_models_do_not_all_start_at_once():
    trace = popular(tuple(f"m{i}" for i in range(100)), 1.0, 1000, 3, Recipe(1.0))
    assert (trace.arrival == 0.0).sum() == 1


def test_without_skew_all_are_equal():
    shares = statistics(popular(NAMES, 10.0, 20_000, 3, Recipe(1.0), skew=0.0)).popularity
    assert all(share == pytest.approx(1 / 8, rel=0.1) for share in shares.values())


@pytest.mark.parametrize(
    ("models", "rate", "count", "skew"),
    [
        ((), 1.0, 10, 1.0),
        (NAMES, 0.0, 10, 1.0),
        (NAMES, math.nan, 10, 1.0),
        (NAMES, 1.0, 0, 1.0),
        (NAMES, 1.0, 10, -0.1),
        (NAMES, 1.0, 10, math.nan),
        (NAMES, 1.0, 10, math.inf),
    ],
)
def test_nonsense_is_refused(models, rate, count, skew):
    with pytest.raises(InvalidInputError, match="FT2202"):
        popular(models, rate, count, 0, Recipe(1.0), skew)


def test_popularity_without_a_skew_is_that_of_serverless_functions():
    names = tuple(f"m{i}" for i in range(100))
    found = popular(names, 50.0, 20_000, 3, Recipe(1.0))
    again = popular(names, 50.0, 20_000, 3, Recipe(1.0))
    shares = np.bincount(found.model, minlength=100) / len(found)
    assert found.arrival.tobytes() == again.arrival.tobytes()
    # The trace's most popular tenth gets 93 % of all invocations; a draw of a hundred functions is near that.
    assert 0.75 < np.sort(shares)[::-1][:10].sum() < 1.0


def test_more_requests_than_memory_holds_are_refused():
    assert len(tracing.generated("poisson", 10, 0)) == 10
    with pytest.raises(UsageError, match="10000000000"):
        tracing.generated("poisson", 10_000_000_000, 0)
