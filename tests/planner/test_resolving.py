"""What explains a plan ends in time, is the same again, and offers what is worth a thought."""

import itertools
import math
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.explaining.explain import explanation
from fabrictool.planner.explaining.resolving import in_parts
from fabrictool.planner.explaining.rules import rule_sentences
from fabrictool.planner.explaining.whynot import answers
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.work import StepwiseWork
from tests.planner.fabrics import resolver, situation, solved, told
from tests.planner.test_exact import option, pool, problem, solve


def three_places(dear=1.3):
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=dear, device="y")
    return problem([ModelNeed("m", 1.6, 0, 4)], [option("m", a), option("m", b)], [a, b], objective=("slo", "cost"))


# -- in time ----------------------------------------------------------------------------------------------------------


def test_what_had_no_time_is_named(tmp_path):
    now = situation(tmp_path, "trust: [alpha]")
    built, _ = now.build()
    asked = resolver(built, solved(built), left_s=lambda: 0.0)
    assert list(rule_sentences(now, asked, "CHF")) == [
        "what these rules cost was not found out in time: m its trust allowlist"
    ]
    for sentence in (*told(built, solved(built)), *explanation(now, resolver(built, solved(built)), "CHF")):
        assert "in time" not in sentence
    late = list(explanation(now, asked, "CHF"))
    assert len(late) == 3
    assert all("was not found out in time" in sentence for sentence in late)
    instance = three_places()
    (answer,) = answers(resolver(instance, solve(instance), work=0), "m@b", "CHF")
    assert answer.startswith("m on b/p: a replica on b/p (tp 1) takes 1 req/s"), "what is known is told"
    assert answer.endswith("what a replica there would cost was not found out in time")


def test_each_part_has_an_even_share_of_what_is_left_of_work_and_time():
    clock = [12.0]
    work = StepwiseWork(900, lambda: clock[0])
    shares = []
    for part, (used, seconds) in zip(in_parts(work, 3), [(100, 2.0), (400, 5.0), (10, 0.0)], strict=False):
        shares.append((part.limit, part.for_steps_s()))
        part.done(used)
        clock[0] -= seconds
    assert shares == [(300, 4.0), (400, 5.0), (400, 5.0)]
    assert work.spent == 510
    endless = StepwiseWork(10)
    assert [part.for_steps_s() for part in in_parts(endless, 2)] == [math.inf, math.inf]


def test_explaining_ends_where_its_work_ends():
    """After any number of steps, and without a second more: no step begins that there is no work for."""
    instance = three_places()
    solution = solve(instance)
    for work in range(12):
        asked = resolver(instance, solution, work=work)
        sentences = [[*answers(asked.within(StepwiseWork(work)), "m@b", "CHF")] for _ in range(2)]
        assert sentences[0] == sentences[1]
    with pytest.raises(FabrictoolError, match="FT2902"):
        asked = resolver(instance, solution, work=0)
        asked.searched(asked.program(), [], {})


# -- what is worth a thought ------------------------------------------------------------------------------------------


def test_a_mirror_image_is_no_alternative():
    """North and south swapped: the same devices at the same price, whoever owns them and whatever they emit."""
    north, south = pool("north", nodes=2, per_node=4), replace(pool("south", nodes=3, per_node=4), carbon_per_kwh=400.0)
    instance = problem(
        [ModelNeed("m", 1.6, 0, 8), ModelNeed("n", 0.8, 0, 8)],
        [option(model, where) for model, where in itertools.product("mn", (north, south))],
        [north, south],
        objective=("slo", "cost"),
    )
    sentences = told(instance, solve(instance))
    assert not any("as good" in sentence for sentence in sentences), sentences
    carbon = replace(instance, objective=("slo", "cost", "carbon"))
    assert any("on south/p (tp 1)" in sentence for sentence in told(carbon, solve(carbon)))


def test_what_is_within_one_percent_is_a_choice():
    instance = three_places(dear=1.008)
    sentences = told(instance, solve(instance))
    choices = [sentence for sentence in sentences if sentence.startswith("as good within 1%: ")]
    assert choices == [
        "as good within 1%: m -1 on a/p (tp 1), m +1 on b/p (tp 1): cost +0.4%",
        "as good within 1%: m -2 on a/p (tp 1), m +2 on b/p (tp 1): cost +0.8%",
    ]
    assert not any("second best" in sentence for sentence in sentences)
    far = told(three_places(), solve(three_places()))
    assert far[-1] == "second best: m -1 on a/p (tp 1), m +1 on b/p (tp 1): 0.3 CHF/h more cost"
