"""What explains a plan ends in time, is the same again, and offers what is worth a thought."""

import itertools
import math
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.planner.explaining.exchanges import exchanges
from fabrictool.planner.explaining.explain import explanation
from fabrictool.planner.explaining.moves import refuse_too_few
from fabrictool.planner.explaining.resolving import Resolver, in_parts
from fabrictool.planner.explaining.rules import rule_sentences
from fabrictool.planner.explaining.whynot import answers
from fabrictool.planner.highs import Searched
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.program import Program
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
    late = [sentence for sentence in explanation(now, asked, "CHF") if " limits it: " not in sentence]
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


def test_an_exchange_is_one_that_has_room_and_serves_as_much():
    a, b = pool("a", nodes=4, price=1.0), pool("b", nodes=2, price=1.3, device="y")
    options = [option("m", a), option("m", b, capacity=0.5)]
    instance = problem([ModelNeed("m", 1.6, 0, 8)], options, [a, b], objective=("slo", "cost"))
    asked = resolver(instance, solve(instance))
    on_b = next(i for i, its in enumerate(instance.options) if its.pool is b)
    on_a = 1 - on_b
    exchanged = list(exchanges(asked, [on_b], math.inf))
    assert exchanged == [{on_a: 2, on_b: 1}, {on_a: 1, on_b: 2}], "for two of a it has no room for four"
    assert list(exchanges(asked, [on_b], 0.01)) == []


def test_what_stands_where_nobody_answers_is_not_exchanged():
    """Its partition is none of the problem's, and its replicas stay."""
    here, away = pool("a", nodes=4, price=1.0), pool("b", nodes=4, price=1.0)
    options = [option("m", here), option("m", away)]
    instance = problem([ModelNeed("m", 2.0, 0, 8)], options, [here], objective=("slo", "cost"))
    unseen = next(o for o in instance.options if o.pool is away)
    instance = replace(instance, fixed={unseen.key: 1})
    asked = resolver(instance, solve(instance))
    at = {o.pool.key: i for i, o in enumerate(instance.options)}
    exchanged = list(exchanges(asked, [at[here.key]], math.inf))
    assert exchanged
    assert all(counts[at[away.key]] == 1 for counts in exchanged)


def test_what_is_not_proved_is_told_as_the_most_that_it_would_be(monkeypatch):
    """Where no work is left for a search, an exchange that keeps the rules is an answer all the same."""
    instance = three_places()
    monkeypatch.setattr(Resolver, "searched", lambda *_: (_ for _ in ()).throw(FabrictoolError.of("FT2902", "late")))
    (answer,) = answers(resolver(instance, solve(instance)), "m@b", "CHF")
    assert answer.endswith("a replica there would mean up to 0.3 CHF/h more cost")
    assert (
        told(instance, solve(instance))[-1]
        == "whether other placements are as good within 1% was not found out in time"
    )


def test_that_rules_need_more_moves_is_said_only_where_it_is_proved(monkeypatch):
    where = pool("a", nodes=4)
    running = {("m", "a", "p", 1, 1, "unified"): 1}
    instance = problem([ModelNeed("m", 0.5, 3, 4)], [option("m", where)], [where], current=running)
    limited = replace(instance, max_moves=1)
    part = Searched("FEASIBLE", None, 1.5, 1, in_time=True)
    monkeypatch.setattr(Program, "searched", lambda *_: part)
    with pytest.raises(InfeasibleError, match="the rules need at least 2 moves, and `--max-moves` allows 1"):
        refuse_too_few(limited, 0)
    monkeypatch.setattr(Program, "searched", lambda *_: replace(part, bound=1.0))
    refuse_too_few(limited, 0)
