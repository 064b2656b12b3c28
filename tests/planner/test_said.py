"""What a plan says is so: each sentence is computed from what it claims."""

import re
from dataclasses import replace

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.cli.plan_output import PlanOutput, _ending
from fabrictool.domain.plan import StagePlacement
from fabrictool.planner.chosen import _last
from fabrictool.planner.explaining import alternatives
from fabrictool.planner.explaining.alternatives import Unused
from fabrictool.planner.explaining.explain import reasons
from fabrictool.planner.explaining.whynot import answers
from fabrictool.planner.explaining.wording import first_difference, more, valued
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import cp
from fabrictool.planner.solvers.cp import CpSolver
from fabrictool.planner.solvers.reschedule import RescheduleSolver
from tests.gitops.plans import action, plan
from tests.gitops.plans import replica as placed
from tests.planner.fabrics import resolver, situation, solved, told
from tests.planner.test_exact import option, pool, problem

OUTPUT = PlanOutput(
    None, None, chart=False, plot=None, explain=False, verbosity=0, as_json=False, detailed=False, assume=False
)


def test_the_next_step_is_none_that_apply_refuses(capsys):
    whole = plan(action("create"), replicas=[placed("m/0")])
    stages = (StagePlacement(cluster="a", partition="p", device="d", tp=1),) * 2
    half = plan(action("create"), replicas=[msgspec.structs.replace(placed("m/0"), stages=stages)])
    for made, said, unsaid in ((whole, "next: fabrictool apply", "FT4008"), (half, "FT4008", "next:")):
        assert _ending(made, [], OUTPUT, offline=False) == 0
        err = capsys.readouterr().err
        assert said in err
        assert unsaid not in err


def test_reschedule_says_what_it_cannot_do():
    where = pool("a", nodes=2)
    instance = problem([ModelNeed("m", 0.5, 2, 3)], [option("m", where)], [where])
    instance = replace(instance, current={instance.options[0].key: 1})
    with pytest.raises(InfeasibleError) as found:
        list(RescheduleSolver().solve(instance, deadline_s=1, seed=0))
    (complaint,) = found.value.problems
    assert complaint.code == "FT2014"
    assert "1 run, replicas.min is 2" in complaint.message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/DeepSeek-V3", "GiB: "),
        (
            "engine: vllm",
            "engine: vllm\n    trust: [beta]\n    tier: owned",
            "it is scavenger capacity",
        ),
    ],
)
def test_a_model_that_fits_nowhere_says_why_and_by_how_much(tmp_path, old, new, words):
    made = situation(tmp_path, old=old, new=new)
    instance, _ = made.build()
    generator = instance.columns["m"]
    refused = " ".join(generator.refusals())
    assert words in refused


def test_the_missing_memory_is_told_in_gib(tmp_path):
    made = situation(tmp_path, old="meta-llama/Llama-3.1-8B-Instruct", new="deepseek-ai/DeepSeek-V3")
    instance, _ = made.build()
    alone = replace(instance, options=tuple(o for o in instance.options if o.model != "m"))
    (complaint,) = explain_infeasible(alone).problems
    assert complaint.code == "FT2002"
    assert "dear/gpu lacks " in complaint.message
    assert " GiB: " in complaint.message


def test_the_minimum_decides_only_where_fewer_would_do():
    where = pool("a", nodes=9)

    def sentence(rate, least, most):
        instance = problem([ModelNeed("m", rate, least, most)], [option("m", where)], [where])
        return reasons(instance, solved(instance), "CHF")[0]

    assert "replicas.min decides" in sentence(0.1, 3, 5)
    assert "replicas.min decides" not in sentence(6.5, 2, 2)
    assert "and 6.5 are demanded: 4.9 more than they can serve" in sentence(6.5, 2, 2)
    assert "replicas.min decides" not in sentence(1.5, 2, 5), "the demand needs two"


def test_as_good_is_said_only_of_what_whole_replicas_make_as_good(monkeypatch):
    cheap, dear = pool("cheap", nodes=3, price=1), pool("dear", nodes=3, price=4)
    options = [option("m", where) for where in (cheap, dear)]
    instance = problem([ModelNeed("m", 0.5, 1, 3)], options, [cheap, dear], objective=("cost",))
    solution = solved(instance)
    other = next(i for i, o in enumerate(instance.options) if o.pool is dear)
    monkeypatch.setattr(alternatives, "nearest_unused", lambda *_: {"m": Unused(other, "", 0.0)})
    first = told(instance, solution)[0]
    assert "would mean 3 CHF/h more cost" in first


def two_places(rate=0.5):
    cheap, dear = pool("cheap", nodes=3, price=1), pool("dear", nodes=3, price=4)
    return problem([ModelNeed("m", rate, 1, 3)], [option("m", p) for p in (cheap, dear)], [cheap, dear],
                   objective=("slo", "cost"))  # fmt: skip


def with_value(solution, stage, value):
    stages = (replace(s, objective=value) if s.name == stage else s for s in solution.stages)
    return replace(solution, stages=tuple(stages))


def test_what_the_search_missed_is_told_as_better_and_not_as_less_than_nothing():
    instance = two_places()
    missed = with_value(solved(instance), "cost", 9.0)  # as of a search that ended too soon
    sentences = [*told(instance, missed), *answers(resolver(instance, missed), "m@dear", "CHF")]
    for sentence in sentences:
        assert not re.search(r"-[0-9.e-]+ (?!on )", sentence), sentence
    better = "better than what the search ended with: 5 CHF/h less cost; a larger `--budget` or `--work` may find it"
    assert any(better in sentence for sentence in sentences)


def test_the_dust_of_a_large_demand_is_no_difference():
    instance = two_places()
    many = replace(instance, needs=(replace(instance.needs[0], rate=500.0),))
    before = {"served": 0.0, "slo": 40.0, "cost": 3.0}
    assert first_difference(many, before, before | {"slo": 40.0 - 6e-4}, ["served", "slo", "cost"]) is None
    assert first_difference(many, before, before | {"slo": 39.9}, ["served", "slo"]) == ("slo", pytest.approx(-0.1))


def test_every_stage_that_a_search_reports_has_its_unit():
    texts = {name: valued(name, value, "CHF") for name, value in
             (("cost", 470.5), ("energy", 103000.0), ("latency", 6640.96), ("excess", 0.25), ("slo", 0.0),
              ("fairness", 0.125), ("moves", 1.0), ("replicas", 12.0), ("carbon", 12.0))}  # fmt: skip
    assert texts == {
        "cost": "cost 470.5 CHF/h",
        "energy": "power 103,000 W",
        "latency": "6,641 requests in the system",
        "excess": "load times its distance from the SLO 0.25 req/s",
        "slo": "load that misses the SLO 0 req/s",
        "fairness": "the largest share that a model or group lacks 12.5%",
        "moves": "1 replica started or stopped",
        "replicas": "12 replicas in all",
        "carbon": "carbon 12 g CO2e/h",
    }
    assert more("latency", -2.5, "") == "2.5 fewer requests in the system"
    assert more("excess", 0.5, "") == "0.5 req/s more load times its distance from the SLO"


def test_cp_calls_optimal_only_what_its_bound_reaches(monkeypatch):
    where = pool("a", nodes=4)
    instance = problem([ModelNeed("m", 1.3, 1, 4)], [option("m", where)], [where])
    *_, good = CpSolver().solve(instance, deadline_s=5, seed=0)
    assert good.optimal
    lost = cp._Integers.lost
    monkeypatch.setattr(cp._Integers, "lost", lambda self, terms: lost(self, terms) + 0.1)
    stage = cp._Search.stage

    def loose(self, name):
        counts, loads, stages = stage(self, name)
        return counts, loads, tuple(replace(s, bound=s.objective - 0.06 * abs(s.objective) - 0.01) for s in stages)

    monkeypatch.setattr(cp._Search, "stage", loose)
    *_, bad = CpSolver().solve(instance, deadline_s=5, seed=0)
    assert not bad.optimal


def test_cp_refuses_what_would_take_all_memory(monkeypatch):
    where = pool("a", nodes=4)
    instance = problem([ModelNeed("m", 1.3, 1, 4)], [option("m", where)], [where])
    monkeypatch.setattr(cp, "MOST_OPTIONS", 0)
    with pytest.raises(FabrictoolError, match="FT2904"):
        list(CpSolver().solve(instance, deadline_s=5, seed=0))


def test_too_little_memory_is_told_in_words():
    def search():
        raise MemoryError
        yield

    with pytest.raises(FabrictoolError, match="FT2904"):
        _last(search(), None)
