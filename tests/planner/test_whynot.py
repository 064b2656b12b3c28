"""Why a model does not stand somewhere: a question and its answer."""

import pytest

from fabrictool.base.errors import UsageError
from fabrictool.planner.explaining import resolving, whynot
from fabrictool.planner.explaining.whynot import answers
from fabrictool.planner.problem import Level, ModelNeed
from fabrictool.planner.stages import values_of
from tests.planner.fabrics import resolver, situation, solved
from tests.planner.test_exact import MOST, option, pool, problem, solve


def answer(instance, question):
    return list(answers(resolver(instance, solve(instance)), question, "CHF"))


@pytest.fixture
def three():
    cheap, dear, slow = pool("cheap", price=1.0, nodes=9), pool("dear", price=3.0, device="y"), pool("slow", price=1.0)
    late = (Level(0.4, 0.4, attains=False, excess=0.5),)
    options = [option("m", cheap), option("m", dear), option("m", slow, levels=late), option("n", cheap)]
    needs = [ModelNeed("m", MOST, 1, 9), ModelNeed("n", 0.1, 1, 9)]
    return problem(needs, options, [cheap, dear, slow], objective=("slo", "cost"))


def test_where_it_stands_it_says_so(three):
    assert answer(three, "m on cheap/p") == ["m on cheap/p: the plan has it there: 1 on cheap/p (tp 1)"]


def test_what_a_replica_there_would_cost(three):
    (said,) = answer(three, "m on dear")
    assert said.startswith("m on dear/p: a replica on dear/p (tp 1) takes 1 req/s; 0.833 CHF for 1,000 requests")
    assert said.endswith("a replica there would mean 2 CHF/h more cost")
    assert values_of(solve(three))["cost"] == 2.0


def test_a_question_is_one_word_for_a_shell_or_three_for_people():
    pools = [pool("alps", device="gh200")]
    place = "/".join(pools[0].key)
    for question in (f"chat@{place}", f"chat on {place}", f"  chat   on {place} "):
        assert whynot.checked(question, ["chat"], pools) == ("chat", pools)
    assert whynot.checked(f"a@b on {place}", ["a@b"], pools) == ("a@b", pools)
    assert whynot.checked(f"a@{place}", ["a"], pools) == ("a", pools)


def test_that_it_would_miss_its_slo_is_said(three):
    (said,) = answer(three, "m on slow/p")
    assert "it misses the SLO under any load" in said


def test_a_device_means_every_partition_that_has_it(three):
    assert [said.split(":")[0] for said in answer(three, "m on x")] == ["m on cheap/p", "m on slow/p"]


def test_what_is_told_of_large_problems_is_marginal(three, monkeypatch):
    monkeypatch.setattr(resolving, "FEW", 0)
    (said,) = answer(three, "m on dear/p")
    assert said.endswith("each request/s there would mean 2.5 CHF/h more cost (marginal, by the relaxation)")


@pytest.mark.parametrize("question", ["m", "m on", "z on cheap", "m on nowhere", "m on cheap, please"])
def test_what_is_no_question_is_refused_with_what_there_is(three, question):
    with pytest.raises(UsageError) as caught:
        answer(three, question)
    (complaint,) = caught.value.problems
    assert complaint.code == "FT2015"
    assert complaint.hint


def test_a_place_that_trust_forbids_is_named_with_its_reason(tmp_path):
    built, _ = situation(tmp_path, "trust: [alpha]").build()
    forbidden = [pool for pool in built.pools if pool.provider != "alpha"]
    (said,) = answers(resolver(built, solved(built)), f"m on {'/'.join(forbidden[0].key)}", "CHF")
    assert "it cannot be: the partition is not allowed: `trust` does not name" in said
