"""Whose clock is wrong never decides who lives."""

import random

import pytest

from fabrictool.clusters.heartbeats import LOOK_AGAIN_S, SILENT_S, Heartbeats

NOW = 1_800_000_000.0
BEAT_S = 15.0


def looks(times, beats_until, *, node=0.0, server=0.0, login=0.0, own=0.0):
    """Verdicts of looks at `times`; a heart beats until `beats_until`; the others are how far clocks are ahead."""
    hearts = Heartbeats()
    verdicts = []
    for at in times:
        last = min(at, beats_until) // BEAT_S * BEAT_S + NOW
        pulse = hearts.pulse("o", (last + node, last + server), (NOW + at + login, NOW + at + own), at)
        verdicts.append(pulse.verdict)
    return verdicts


CLOCKS = ("node", "server", "login", "own")
DRAWN = [
    dict(zip(CLOCKS, random.Random(seed).choices((-1e5, -99, -11, 0, 9, 400), k=4), strict=True)) for seed in range(20)
]


@pytest.mark.parametrize(
    "skew",
    [
        {"login": -15},
        {"login": 300},
        {"login": -120},
        {"node": -86400, "server": 500},
        {"own": 1e6},
        {"server": 40},
        *DRAWN,
    ],
)
def test_a_beating_heart_is_never_silent(skew):
    verdicts = looks([1000 + 20 * n for n in range(30)], 1e9, **skew)
    assert "silent" not in verdicts
    assert set(verdicts[1:]) == {"alive"}


@pytest.mark.parametrize("skew", [{}, {"login": -3600}, {"login": 300, "own": 299}, {"node": 7000, "server": 7000}])
def test_a_heart_that_stands_still_is_found_within_two_looks_and_the_usual_wait(skew):
    assert looks([2000, 2000 + LOOK_AGAIN_S], 1000, **skew)[-1] == "silent"
    watched = looks([980 + 10 * n for n in range(20)], 1000, **skew)
    assert watched[0] != "silent"
    assert watched[-1] == "silent"


def test_one_look_alone_says_silent_of_nobody():
    assert looks([5000], 1000) == ["unsure"]
    assert looks([1000 + SILENT_S - BEAT_S], 1000) == ["alive"]
