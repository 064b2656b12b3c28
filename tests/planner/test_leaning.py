"""Of what serves as much, the search leans to what later stages want; and no bound is taken from what was leant."""

import math
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import Level, ModelNeed, Option
from fabrictool.planner.solvers import leaning as leanings
from fabrictool.planner.solvers import placing, programs
from fabrictool.planner.solvers.core import with_sites
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.leaning import UPRIGHT, leaning
from fabrictool.planner.solvers.steps import EngineSteps
from fabrictool.planner.stages import user_stages
from tests.planner.test_exact import figures, pool, problem
from tests.planner.test_splitting import fabric, optimum
from tests.seeds import seeds

QUICK, SLOW = 6.0, 9.0
"""Requests in a replica of a model on the pool that suits it, and on the other one."""


def crossed(rate=60.0, objective=("latency",)):
    """Two models and two pools, where each serves as much on one as on the other, and is slow on one of them."""
    pools = [pool(name, nodes=40) for name in "ab"]
    options = [
        Option(model, at, 1, figures(1.0), (Level(1.0, QUICK if model == suited else SLOW, True),))
        for model in "mn"
        for suited, at in zip("mn", pools, strict=True)
    ]
    return with_sites(problem([ModelNeed(m, rate, 0, 99) for m in "mn"], options, pools, objective=objective))


def leant(instance, solved=None):
    relaxed = Formulation(instance, range(len(instance.options)), whole=False)
    felt = [name for name in user_stages(instance) if relaxed.terms(name)]
    lowest = {"served": relaxed.minimise("served", seconds=60.0, seed=0).objective}
    before = relaxed.program.rows()
    lean = leaning(relaxed, felt, lowest, solved or (lambda name: relaxed.minimise(name, seconds=60.0, seed=0)))
    kept = relaxed.program.rows()[len(before) :]
    assert all(most == math.inf for _, most, _ in kept), "the relaxation is as it was"
    return lean


def test_what_serves_as_much_and_is_slower_costs_something():
    instance = crossed()
    lean = leant(instance)
    slow = {i for i, option in enumerate(instance.options) if option.levels[0].in_system == SLOW}
    assert lean.costs.keys() == slow
    assert lean.stage == "served"
    # It takes the place of a quick one, and a request/s more unserved saves a quick one.
    assert list(lean.costs.values()) == pytest.approx([(SLOW - QUICK) / QUICK] * len(slow))
    program = Formulation(instance, range(len(instance.options)), whole=True, by_capacity=True)
    answer = program.minimise("served", seconds=60.0, seed=0)
    assert answer.objective == pytest.approx(40.0)
    assert not lean.terms(program, "latency")
    nudged = program.program.minimise([*program.terms("served"), *lean.terms(program, "served")], seconds=60.0, seed=0)
    assert program.value("served", nudged) == pytest.approx(40.0)
    assert not slow & program.counts(nudged).keys()


def test_terms_are_of_the_options_of_a_part():
    lean = leant(crossed())
    part = crossed()
    turned = list(reversed(range(len(part.options))))
    program = Formulation(part, range(len(part.options)), whole=True, by_capacity=True)
    costs = dict(lean.terms(program, "served", turned))
    for i, column in ((i, program.count(i)[0][0]) for i in program.chosen):
        assert costs.get(column, 0.0) == lean.costs.get(turned[i], 0.0)


@pytest.mark.parametrize(
    "instance",
    [
        pytest.param(crossed(rate=30.0), id="all is served"),
        pytest.param(crossed(objective=()), id="nothing that users feel comes after it"),
    ],
)
def test_there_is_nothing_to_lean_to(instance):
    assert leant(instance) is UPRIGHT


def test_without_time_there_is_no_leaning():
    assert leant(crossed(), lambda name: None) is UPRIGHT


def test_numbers_that_cannot_be_trusted_are_no_reason_to_end():
    def failing(_):
        raise FabrictoolError.of("FT2902", "nothing in time")

    assert leant(crossed(), failing) is UPRIGHT


def test_a_stage_that_gains_nothing_is_passed():
    """What costs the same everywhere and is used up gains by less that is served; what nobody wishes does not."""
    instance = crossed(objective=("slo", "latency"))
    asked = []
    relaxed = Formulation(instance, range(len(instance.options)), whole=False)

    def solved(name):
        asked.append(name)
        return relaxed.minimise(name, seconds=60.0, seed=0)

    felt = ["served", "slo", "latency"]
    lean = leaning(relaxed, felt, {"served": 40.0}, solved)
    assert asked == ["slo", "latency"]
    assert lean.costs.keys() == leant(crossed()).costs.keys()


def test_no_replica_costs_more_than_it_could_serve():
    """A model that nothing is left for has any price: it would be kept out for good."""
    here = pool("a", nodes=10)
    options = [Option(m, here, 1, figures(1.0), (Level(1.0, its, True),)) for m, its in (("m", 1.0), ("n", 500.0))]
    instance = with_sites(problem([ModelNeed("m", 10.0, 0, 99), ModelNeed("n", 1.0, 0, 99)], options, [here]))
    lean = leant(replace(instance, objective=("latency",)))
    assert all(0.0 <= cost <= 1.0 for cost in lean.costs.values())
    assert lean is not UPRIGHT


def searched(instance, monkeypatch, few=0):
    monkeypatch.setattr(programs, "TINY", 0)
    monkeypatch.setattr(programs, "FEW", few)
    monkeypatch.setattr(placing.DeviceSplits, "of", lambda problem: None)  # or there is no relaxation to lean to
    *_, solution = ExactSolver().solve(instance, deadline_s=5.0, seed=0)
    return {stage.name: stage for stage in solution.stages}


def test_a_search_leans_but_where_all_take_part(monkeypatch):
    nudges, by_highs = [], EngineSteps.by_highs

    def listened(self, program, name, gap, nodes, start, nudge=()):
        nudges.append((name, len(program.chosen) == len(program.problem.options), bool(nudge)))
        return by_highs(self, program, name, gap, nodes, start, nudge)

    monkeypatch.setattr(EngineSteps, "by_highs", listened)
    stages = searched(crossed(), monkeypatch)
    assert stages["served"].objective == stages["served"].bound == pytest.approx(40.0)
    assert stages["latency"].objective == pytest.approx(80 * QUICK)
    assert all(name == "served" for name, _, leans in nudges if leans)
    nudges.clear()
    searched(crossed(), monkeypatch, few=999)
    assert not any(leans for _, _, leans in nudges), "programs of all models find what is best"


def valid(seed, monkeypatch):
    """Whether a fabric that nobody chose leaned; its bounds are none that something is below."""
    lean = []
    monkeypatch.setattr(
        "fabrictool.planner.solvers.core.leaning", lambda *a: lean.append(leanings.leaning(*a)) or lean[-1]
    )
    instance = fabric(seed, 2.0)
    if not instance.needs:
        return False
    stages = searched(instance, monkeypatch)
    unserved, latency = optimum(instance)
    assert stages["served"].bound <= unserved + 1e-4 <= stages["served"].objective + 2e-4, seed
    if stages["served"].objective <= unserved + 1e-4:
        assert stages["latency"].bound <= latency + 1e-3 * max(1.0, latency), seed
    return any(its is not UPRIGHT for its in lean)


def test_bounds_are_not_of_what_was_leant(monkeypatch):
    assert sum(valid(seed, monkeypatch) for seed in range(25)) > 5


@seeds(0, drawn=5, long=300)
def test_nor_on_fabrics_that_nobody_chose(seed, monkeypatch):
    valid(seed, monkeypatch)
