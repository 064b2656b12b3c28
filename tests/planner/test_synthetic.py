"""Made-up fabrics: what they contain, and that large ones are solved near their bound by the restricted program."""

import itertools

import pytest
import yaml

from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint import load
from fabrictool.cli.main import main
from fabrictool.planner.build import build_problem
from fabrictool.planner.instances import synthetic
from fabrictool.planner.solvers import exact, programs


def problem_of(folder):
    loaded = load(folder / "blueprint.yaml", environment={})
    usable = list(loaded.inventory.clusters)
    return build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    assert main(["init", "--synthetic", "6x3x96", "--seed", "7", str(folder)]) == 0
    return folder


def test_a_fabric_has_what_was_asked_for(small):
    problem = problem_of(small)
    assert len(problem.needs) == 6
    assert len({pool.device for pool in problem.pools}) == 3
    devices = sum(pool.nodes * pool.devices_per_node for pool in problem.pools)
    assert devices == pytest.approx(96, abs=24)  # whole nodes
    rates = [need.rate for need in problem.needs]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] / rates[3] == pytest.approx(4**synthetic.ZIPF, rel=1e-3)


def test_the_load_is_the_share_that_was_asked_for(small):
    problem = problem_of(small)
    assert synthetic.most_load(problem) == pytest.approx(1 / 0.7, rel=2e-3)


def test_the_same_seed_gives_the_same_files(small, tmp_path):
    for seed, same in (("7", True), ("8", False)):
        folder = tmp_path / seed
        assert main(["init", "--synthetic", "6x3x96", "--seed", seed, str(folder)]) == 0
        text = (folder / "inventory.yaml").read_text().partition("\n")[2]
        assert (text == (small / "inventory.yaml").read_text().partition("\n")[2]) is same
        assert yaml.safe_load(text)["kind"] == "Inventory"


@pytest.mark.parametrize("size", ["", "5", "5x3", "0x3x100", "5x99x1000", "5x3x8", "5x3x99999999", "ax3x5"])
def test_sizes_that_make_no_sense(size):
    with pytest.raises(InvalidInputError, match="FT2010"):
        synthetic.parse(size)


def test_a_rounded_relaxation_serves_all_near_the_bound(tmp_path, monkeypatch):
    assert main(["init", "--synthetic", "20x4x2000", "--seed", "7", str(tmp_path)]) == 0
    problem = problem_of(tmp_path)
    monkeypatch.setattr(programs, "FEW", 0)
    stream = exact.ExactSolver().solve(problem, deadline_s=60, seed=0)  # up to the rounded one of the second stage
    first, *_, found = itertools.islice(stream, 3)
    assert len(first.stages) == 1
    served, latency = found.stages[:2]
    assert served.objective == pytest.approx(0.0, abs=1e-4)
    assert latency.bound <= latency.objective <= 1.2 * latency.bound
    assert not found.optimal
