"""A large empty fabric has a whole placement before its relaxations are solved."""

import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.planner import chosen
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.problem import Level, ModelNeed, Option, ResourceLimit
from fabrictool.planner.rehearsal import Rehearsal
from fabrictool.planner.solvers import early, exact, placing, programs
from fabrictool.planner.solvers.early import early_placement
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.placing import PlacementSearch
from fabrictool.planner.work import StepwiseWork
from tests.planner.test_exact import figures, pool, problem
from tests.planner.test_splitting import fabric, with_twins
from tests.seeds import seeds


def two_pools(rate=30.0, **more):
    pools = [pool(name, nodes=20) for name in "ab"]
    options = [Option(m, at, 1, figures(2.0), (Level(2.0, 3.0, True),)) for m in "mn" for at in pools]
    return problem([ModelNeed(m, rate, 0, 60) for m in "mn"], options, pools, objective=("latency",), **more)


@pytest.fixture
def any_number(monkeypatch):
    for module in (early, exact):
        monkeypatch.setattr(module, "MANY", 1)


@pytest.mark.usefixtures("any_number")
@pytest.mark.parametrize(
    ("rate", "unserved"), [pytest.param(30.0, 0.0, id="enough"), pytest.param(50.0, 20.0, id="not")]
)
def test_serves_what_there_are_devices_for(rate, unserved):
    solution = early_placement(two_pools(rate), "x", 0)
    (served,) = solution.stages
    assert served.objective == served.bound == pytest.approx(unserved)
    assert sum(solution.loads.values()) == pytest.approx(2 * rate - unserved)
    assert solution.ended, "there is more to be tried"


def test_few_options_have_none():
    assert early_placement(two_pools(), "x", 0) is None


@pytest.mark.usefixtures("any_number")
@pytest.mark.parametrize(
    "instance",
    [
        pytest.param(replace(two_pools(), current={two_pools().options[0].key: 1}), id="something runs"),
        pytest.param(replace(two_pools(), objective=("fairness", "latency")), id="others come before what is unserved"),
    ],
)
def test_there_is_none_where(instance):
    assert early_placement(instance, "x", 0) is None


def plain(seed):
    return fabric(seed, 1.5)


def ruled(seed):
    """A fabric with rules that nobody chose."""
    rng = random.Random(seed)
    alone = fabric(seed, rng.choice((0.5, 1.5, 2.5)))
    if not alone.needs:
        return alone
    instance = with_twins(alone) if rng.random() < 0.4 else alone
    clusters, keys = [pool.cluster for pool in instance.pools], [pool.key for pool in instance.pools]

    rules = {
        "minimum": (0.4, lambda: rng.randint(1, 3)),
        "maximum": (0.3, lambda: rng.randint(3, 8)),
        "pins": (0.3, lambda: {(rng.choice(clusters), ""): rng.randint(0, 2)}),
        "spread_sites": (0.3, lambda: True),
        "spread_nodes": (0.2, lambda: True),
        "survive": (0.2, lambda: rng.choice(("node", "cluster", "site"))),
        "rate": (0.15, lambda: 0.0),
    }

    def drawn():
        return {name: draw() for name, (chance, draw) in rules.items() if rng.random() < chance}

    unseen = rng.choice(clusters) if rng.random() < 0.3 else ""
    limit = ResourceLimit("l", "devices", "devices", float(rng.randint(0, 6)), frozenset(keys))
    return replace(
        instance,
        needs=tuple(replace(need, **drawn()) for need in instance.needs),
        fixed={o.key: int(rng.random() < 0.2) for o in instance.options if o.pool.cluster == unseen},
        limits=(limit,) if rng.random() < 0.3 else (),
        outages=(frozenset({rng.choice(keys)}),) if rng.random() < 0.3 else (),
    )


def keeps_the_rules(instance):
    """Whether there was an early placement; then it is what it says, on all partitions, and the search says no less."""
    if not instance.needs:
        return False
    try:
        first, *others = ExactSolver().solve(instance, deadline_s=1.0, seed=0)
    except InfeasibleError:
        return False
    if first.repeatable:
        return False
    (served,) = first.stages
    answer = Formulation.of_counts(instance, first.counts).minimise("served", seconds=60.0, seed=0)
    assert answer.objective == pytest.approx(served.objective, abs=1e-4)
    assert served.bound <= answer.objective + 1e-6
    assert others
    assert served.bound <= others[-1].stages[0].objective + 1e-4
    return True


@pytest.mark.usefixtures("any_number")
@pytest.mark.parametrize(("drawn", "least"), [(plain, 20), (ruled, 5)])
def test_keeps_the_rules(drawn, least):
    assert sum(keeps_the_rules(drawn(seed)) for seed in range(30)) > least


@pytest.mark.usefixtures("any_number")
@seeds(0, drawn=5, long=500)
@pytest.mark.parametrize("drawn", [plain, ruled])
def test_keeps_those_that_nobody_chose(seed, drawn):
    keeps_the_rules(drawn(seed))


@pytest.mark.usefixtures("any_number")
def test_the_search_begins_after_it(monkeypatch):
    relaxed, core_of = [], placing.core_of
    monkeypatch.setattr(placing, "core_of", lambda *a, **k: relaxed.append(a) or core_of(*a, **k))
    solutions = ExactSolver().solve(two_pools(), deadline_s=5.0, seed=0)
    first = next(solutions)
    assert [stage.name for stage in first.stages] == ["served"]
    assert not first.repeatable, "no work brings it again"
    assert not relaxed
    *_, last = solutions
    assert relaxed
    assert [stage.name for stage in last.stages][:3] == ["served", "latency", "replicas"]
    assert last.repeatable


@pytest.mark.usefixtures("any_number")
def test_the_search_begins_with_what_is_better(monkeypatch):
    """Of the early placement and the relaxation rounded; so nothing that is shown later serves less."""
    monkeypatch.setattr(programs, "TINY", 0)
    monkeypatch.setattr(placing.DeviceSplits, "of", lambda problem: None)
    monkeypatch.setattr("fabrictool.planner.solvers.core.rounded", lambda *_: {})
    work = StepwiseWork(1)
    early = early_placement(two_pools(), "x", 0)
    for counts, unserved in ((early.counts, 0.0), ({}, 60.0), (None, 60.0)):
        search = PlacementSearch(two_pools(), "x", work, 0, None, counts)
        assert next(search.stage("served")).stages[0].objective == pytest.approx(unserved)


@pytest.mark.usefixtures("any_number")
def test_numbers_that_cannot_be_trusted_are_no_reason_to_end(monkeypatch):
    def failing(*_, **__):
        raise FabrictoolError.of("FT2902", "nothing in time")

    monkeypatch.setattr(early, "in_order", failing)
    assert early_placement(two_pools(), "x", 0) is None


@pytest.mark.usefixtures("any_number")
@pytest.mark.parametrize("runs", [False, True])
def test_the_engine_is_started_when_there_is_time_for_it(monkeypatch, runs):
    asked = []
    monkeypatch.setattr(exact, "prepare", lambda: asked.append("prepare"))
    instance = two_pools()
    if runs:
        instance = replace(instance, current={instance.options[0].key: 1})
    asked += ("solution" for _ in ExactSolver().solve(instance, deadline_s=5.0, seed=0))
    assert asked[: 2 - runs] == ["solution", "prepare"][runs:]
    assert asked.count("prepare") == 1


def test_what_plays_is_loaded_when_there_is_a_first_placement(monkeypatch):
    """Of a large fabric; until then the process has better things to do."""
    course = []
    monkeypatch.setattr(Rehearsal, "load", lambda self: course.append("load"))

    def solutions():
        for name in ("first", "second"):
            course.append(name)
            yield name

    course += (f"got {name}" for name in chosen._first_at_once(solutions(), Rehearsal()))
    assert course == ["first", "got first", "load", "second", "got second"]
