"""Seeds of tests that must hold for any input: the same ones in each run, and some that the run draws.

A failure is named after its seed. Such a seed joins the test's `known` ones, which are tried from then on.
"""

import random

import pytest

_asked = {"long": True}


def leave_out_long(expression):
    """Hears from `tests.conftest`, before any test is read, which marks this run asks for.

    Each lane of `make test` would spend ten seconds on twenty thousand tests that it then leaves out.
    """
    _asked["long"] = "not long" not in expression


def seeds(fixed, *, drawn, long, known=()):
    """Gives a test its `seed`: the known ones, `fixed` more, `drawn` new ones, and `long` by `make test-long` alone."""
    new = random.SystemRandom().sample(range(10**6, 10**9), drawn + long)
    return pytest.mark.parametrize("seed", [*known, *range(fixed), *new[:drawn], *only_long(new[drawn:])])


def some(values, kept):
    """All of `values`, of which the first `kept` are tried in each run and the others by `make test-long`."""
    values = list(values)
    return [*values[:kept], *only_long(values[kept:])]


def only_long(values):
    """For `make test-long` alone; elsewhere the first stands for all, and is left out."""
    return [pytest.param(value, marks=pytest.mark.long) for value in (values if _asked["long"] else values[:1])]
