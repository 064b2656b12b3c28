"""What-if: what an expression changes, what is refused, and that the executor does not matter."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fabrictool.base.errors import UsageError
from fabrictool.cli.executors import Here
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.state import State
from fabrictool.planner.chosen import SearchOptions, best, forecast_of
from fabrictool.planner.explaining.whatif import changed_by, started, stopped, sweep
from fabrictool.planner.situation import situation_of
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.weights import gateway_weights
from tests.planner.fabrics import situation
from tests.planner.test_verdict import fabric, nothing_runs, planned, wide

pytestmark = pytest.mark.usefixtures("kept_calibrations")

EVERYTHING = [
    "gpus.cheap/gpu-=16",
    "gpus.h100-sxm+=8",
    "rate.m*=3",
    "rate.*=2",
    "replicas.m.min=20",
    "replicas.m.max=1",
    "trust.m=alpha",
    "price.dear/gpu*=0.01",
]

LOPSIDED = {"m@slow/gpu:1": 0.08}
"""About what is planned, and not the same."""

NOTHING_APPLIED = Evidence(fabric="f", lineage="l", at=0.0, clusters={}, specs={}, state=State(fabric="f", lineage="l"))


def swept(now, *expressions, executor=None):
    return sweep(executor or Here(), now, NOTHING_APPLIED, expressions, ExactSolver(), deadline_s=30, seed=0)


@pytest.mark.parametrize(
    ("expression", "read", "value"),
    [
        ("gpus.cheap/gpu+=8", lambda s: s.inventory.clusters["cheap"].partitions["gpu"].nodes, 3),
        ("gpus.cheap/gpu-=16", lambda s: s.inventory.clusters["cheap"].partitions["gpu"].nodes, 0),
        ("gpus.h100-sxm+=8", lambda s: s.inventory.clusters["cheap"].partitions["gpu"].nodes, 3),
        ("rate.m*=1.5", lambda s: float(s.blueprint.models["m"].demand.rate), 300.0),
        ("rate.*=2", lambda s: float(s.blueprint.models["other"].demand.rate), 2.0),
        ("rate.**=2", lambda s: float(s.blueprint.models["m"].demand.rate), 400.0),
        ("replicas.m.min=3", lambda s: s.blueprint.models["m"].replicas.min, 3),
        ("replicas.m.max=3", lambda s: s.blueprint.models["m"].replicas.max, 3),
        ("trust.m=*", lambda s: s.blueprint.models["m"].trust, None),
        ("trust.m=alpha, beta", lambda s: s.blueprint.models["m"].trust, ("alpha", "beta")),
        ("price.dear/gpu*=0.5", lambda s: s.inventory.clusters["dear"].partitions["gpu"].price.amount, 40.0),
        (" rate.m *= 1.5 ", lambda s: float(s.blueprint.models["m"].demand.rate), 300.0),
    ],
)
def test_an_expression_changes_one_thing(tmp_path, expression, read, value):
    now = situation(tmp_path, "trust: [beta]")
    before = read(now)
    assert read(changed_by(now, expression)) == value
    assert read(now) == before, "the situation itself stays"


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("", "FT2011"),
        ("nonsense", "FT2011"),
        ("rate.m=2", "FT2011"),
        ("gpus.cheap/gpu*=2", "FT2011"),
        ("gpus.cheap/gpu+=eight", "FT2011"),
        ("gpus.cheap/gpu+=-8", "FT2011"),
        ("rate.m*=-1", "FT2011"),
        ("rate.m*=nan", "FT2011"),
        ("rate.m*=inf", "FT2011"),
        ("replicas.m=3", "FT2011"),
        ("replicas.m.mean=3", "FT2011"),
        ("gpus.cheap/gpu+=3", "FT2012"),
        ("gpus.cheap/gpu-=24", "FT2012"),
        ("gpus.t4+=8", "FT2012"),
        ("gpus.cheap/cpu+=8", "FT2012"),
        ("rate.nobody*=2", "FT2012"),
        ("replicas.nobody.min=2", "FT2012"),
        ("replicas.m.min=41", "FT2012"),
        ("replicas.m.max=0", "FT2012"),
        ("trust.m=gamma", "FT2012"),
        ("trust.nobody=*", "FT2012"),
        ("price.cheap*=2", "FT2012"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_solved(tmp_path, expression, code):
    with pytest.raises(UsageError) as refused:
        swept(situation(tmp_path), "rate.m*=2", expression)
    (problem,) = refused.value.problems
    assert problem.code == code
    assert problem.hint


def test_a_partition_without_a_price_has_none_to_change(tmp_path):
    now = situation(tmp_path)
    cluster = now.inventory.clusters["cheap"]
    bare = cluster.partitions["gpu"].model_copy(update={"price": None})
    clusters = now.inventory.clusters | {"cheap": cluster.model_copy(update={"partitions": {"gpu": bare}})}
    free = type(now)(now.blueprint, now.inventory.model_copy(update={"clusters": clusters}), now.usable, (), {}, 0.0)
    with pytest.raises(UsageError, match="FT2012"):
        changed_by(free, "price.cheap/gpu*=2")


def test_outcomes_are_compared_with_the_plan_as_it_is(tmp_path):
    found = swept(situation(tmp_path, "trust: [alpha]"), "trust.m=*", "price.dear/gpu*=0.5", "replicas.m.min=17")
    wider, cheaper, too_many = found.outcomes
    assert found.stages == ("served", "preference", "cost", "latency")
    assert wider.values["cost"] < found.base.values["cost"]
    assert started(found.base, wider) > 0
    assert stopped(found.base, wider) > 0
    assert cheaper.values["cost"] < found.base.values["cost"]
    assert started(found.base, cheaper) == stopped(found.base, cheaper) == 0
    assert not too_many.feasible
    assert "17" in too_many.problem


def test_a_plan_and_its_row_say_the_same(tmp_path):
    """A lesson of the replay leads to both, and another row has lessons and a verdict of its own."""
    loaded = wide(tmp_path, "650ms")
    made = planned(loaded)
    (line,) = made.forecast.models
    assert (line.slo, made.certificate.lessons, line.replicas) == ("meets", 1, 2)
    found = swept(situation_of(loaded.blueprint, loaded.inventory, nothing_runs(loaded), 0.0), "replicas.m.max=1")
    assert found.base.models == made.forecast.models
    assert sum(found.base.counts.values()) == len(made.placement.replicas)
    assert found.base.optimal is made.certificate.optimal is False, "of what was asked"
    assert found.base.values["cost"] == {s.name: s.objective for s in made.certificate.stages}["cost"]
    (narrow,) = found.outcomes
    assert [model.slo for model in narrow.models] == ["misses"]
    assert narrow.values["cost"] < found.base.values["cost"]


def test_the_row_of_what_runs_has_the_names_and_weights_of_the_plan(tmp_path):
    """A gateway that runs keeps weights that are about right, and the replay of both goes by them."""
    loaded = fabric(tmp_path)
    now = replace(situation_of(loaded.blueprint, loaded.inventory, nothing_runs(loaded), 0.0), weights=LOPSIDED)
    chosen = best(now, SearchOptions(0, 30.0))
    assert {gateway_weights(chosen.placement.replicas, {})[key] for key in LOPSIDED} == set(LOPSIDED.values())
    assert swept(now).base.models == forecast_of(chosen, "CHF").models
    fresh = swept(replace(now, weights={})).base.models
    assert fresh[0].replay != forecast_of(chosen, "CHF").models[0].replay


def test_what_moves_cost_is_left_out_of_the_base_and_changes_nothing_else(tmp_path):
    priced = {"old": "objective: [cost]", "new": "objective: [cost]\nmove_price: 3 CHF/h"}
    now = situation(tmp_path, **priced)
    running = replace(now, current={("other", "dear", "gpu", 8, 1, "unified"): 2})
    chosen = best(running, SearchOptions(0, 30.0))
    counts = {chosen.problem.options[i].key: count for i, count in chosen.solution.counts.items()}
    base = swept(running).base
    assert base.counts == counts
    moved = sum(abs(counts.get(key, 0) - running.current.get(key, 0)) for key in {*counts, *running.current})
    assert moved > 2
    cost = {stage.name: stage.objective for stage in chosen.solution.stages}["cost"]
    assert base.values["cost"] == pytest.approx(cost - 3.0 * moved)


def test_a_plan_that_cannot_be_made_may_become_possible(tmp_path):
    now = situation(tmp_path, "trust: [alpha]", old="min: 1, max: 40", new="min: 17, max: 40")
    found = swept(now, "trust.m=*")
    assert not found.base.feasible
    assert found.outcomes[0].feasible


def test_the_executor_does_not_matter(tmp_path):
    now = situation(tmp_path)
    assert pickle.loads(pickle.dumps(now)) == now  # noqa: S301 - ours
    done = []
    with ThreadPoolExecutor(3) as threads:
        several = sweep(
            threads, now, NOTHING_APPLIED, EVERYTHING, ExactSolver(), deadline_s=30, seed=0, done=done.append
        )
    assert several == swept(now, *EVERYTHING)
    assert [one.expression for one in several.outcomes] == EVERYTHING
    assert done == list(range(1, len(EVERYTHING) + 1))
