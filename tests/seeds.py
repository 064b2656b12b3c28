"""Seeds of tests that must hold for any input: the same ones in each run, and some that the run draws.

A failure is named after its seed. Such a seed joins the test's `known` ones, which are tried from then on.
"""

import random

import pytest


def seeds(fixed, *, drawn, long, known=()):
    """Gives a test its `seed`: the known ones, `fixed` more, `drawn` new ones, and `long` by `make test-long` alone."""
    new = random.SystemRandom().sample(range(10**6, 10**9), drawn + long)
    many = [pytest.param(seed, marks=pytest.mark.long) for seed in new[drawn:]]
    return pytest.mark.parametrize("seed", [*known, *range(fixed), *new[:drawn], *many])


def some(values, kept):
    """All of `values`, of which the first `kept` are tried in each run and the others by `make test-long`."""
    values = list(values)
    return [*values[:kept], *(pytest.param(value, marks=pytest.mark.long) for value in values[kept:])]
