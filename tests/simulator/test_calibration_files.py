"""Calibration files: what is impossible is refused with the file's name and the field's."""

import re

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog.calibrations import texts
from fabrictool.simulator import fitting
from fabrictool.simulator.calibration import MOST, Calibration, Hull, Spread, dumps, loads
from fabrictool.simulator.stepmodel import Factors

HULL = Hull((1, 64), (1, 2000), (1, 2000), (1, 8), ("a/b",), ("d",))
GOOD = dumps(
    Calibration("d", "e", "static", Factors(), {"tpot": Spread(-0.1, 0.2)}, {"tpot": Spread(-0.3, 0.3)}, HULL, 50)
)


def test_the_good_one_is_read():
    assert loads(GOOD, "mine.toml").hull == HULL


def test_what_a_fit_may_write_can_be_read():
    limits = {name: fitting.LIMIT.get(name, 1.0) for name in fitting.NAMES}
    assert all(most <= MOST.get(name, 1.0) for name, most in limits.items())
    again = loads(dumps(Calibration("d", "e", "online", Factors(**limits), hull=HULL)))
    assert again.factors.vector() == pytest.approx(Factors(**limits).vector())


@pytest.mark.parametrize("name", sorted(texts()))
def test_all_shipped_ones_are_read(name):
    assert loads(texts()[name], name).points


@pytest.mark.parametrize(
    ("line", "changed", "field"),
    [
        ("compute = 0.6", "compute = -0.6", "factors.compute"),
        ("compute = 0.6", "compute = 0", "factors.compute"),
        ("compute = 0.6", "compute = nan", "factors.compute"),
        ("compute = 0.6", "compute = 0.96", "factors.compute"),
        ("compute = 0.6", 'compute = "0.6"', "factors.compute"),
        ("compute = 0.6", "compute = true", "factors.compute"),
        ("bandwidth = 0.8", "bandwidth = 1.5", "factors.bandwidth"),
        ("expert_compute = 0.6", "expert_compute = 1.3", "factors.expert_compute"),
        ("step = 0.002", "", "factors.step"),
        ("step = 0.002", "step = inf", "factors.step"),
        ("step = 0.002", "step = 100.0", "factors.step"),
        ("step = 0.002", "step = 0.002\nluck = 7.0", "factors.luck"),
        ('scope = "static"', 'scope = "sometimes"', "scope"),
        ('device = "d"', "device = 3", "device"),
        ("points = 50", "points = -1", "points"),
        ("points = 50", "points = 5.5", "points"),
        ("tpot = [-0.1, 0.2]", "tpot = [0.2, -0.1]", "spreads.tpot"),
        ("tpot = [-0.1, 0.2]", "tpot = [-0.1, inf]", "spreads.tpot"),
        ("tpot = [-0.1, 0.2]", "tpot = [nan, 0.2]", "spreads.tpot"),
        ("tpot = [-0.1, 0.2]", "tpot = [-0.1, 999.0]", "spreads.tpot"),
        ("tpot = [-0.1, 0.2]", "tpot = [-0.1]", "spreads.tpot"),
        ("tpot = [-0.1, 0.2]", "speed = [-0.1, 0.2]", "spreads.speed"),
        ("tpot = [-0.3, 0.3]", "tpot = 3", "unseen.tpot"),
        ("concurrency = [1, 64]", "concurrency = [64, 1]", "hull.concurrency"),
        ("concurrency = [1, 64]", "concurrency = [nan, 64]", "hull.concurrency"),
        ("concurrency = [1, 64]", "concurrency = [-1, 64]", "hull.concurrency"),
        ("concurrency = [1, 64]", "", "hull.concurrency"),
        ('models = ["a/b"]', 'models = "a/b"', "hull.models"),
        ('accelerators = ["d"]', "", "hull.accelerators"),
        ('accelerators = ["d"]', "accelerators = [3]", "hull.accelerators"),
        ("[hull]", "[hall]", "hull"),
        ("[factors]", "factors = 3\n[other]", "factors"),
    ],
)
def test_a_wrong_field_is_named_and_so_is_the_file(line, changed, field):
    assert len(re.findall(rf"^{re.escape(line)}$", GOOD, re.MULTILINE)) == 1
    text = re.sub(rf"^{re.escape(line)}$", lambda _: changed, GOOD, flags=re.MULTILINE)
    with pytest.raises(InvalidInputError) as caught:
        loads(text, "mine.toml")
    (problem,) = caught.value.problems
    assert problem.code == "FT2120"
    assert problem.message.startswith("mine.toml: ")
    assert re.search(rf"\b{re.escape(field)}\b", problem.message)


def test_what_is_not_toml_is_refused():
    with pytest.raises(InvalidInputError, match="FT2120"):
        loads("{", "mine.toml")
