"""Programs without loads, rows that tighten a program, and searches with a start."""

import random
from dataclasses import replace

import pytest

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner import highs
from fabrictool.planner.formulation import BY_CAPACITY, Formulation
from fabrictool.planner.solvers import effort, programs
from fabrictool.planner.solvers.core import with_sites
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.stages import stage_names
from fabrictool.planner.work import never
from tests.planner import test_consumers, test_survival
from tests.planner.test_exact import random_instance, solve
from tests.planner.test_phases import random_pairs
from tests.seeds import some

LIMITS = highs.SearchLimits(gap=0.0, nodes=1000, seed=0, seconds=60.0)


def fair(instance):
    return replace(instance, objective=("fairness", *instance.objective))


MAKERS = {
    "whole": lambda seed: random_instance(random.Random(seed)),
    "fair": lambda seed: fair(random_instance(random.Random(seed))),
    "groups": lambda seed: test_consumers.random_instance(random.Random(seed)),
    "fair groups": lambda seed: fair(test_consumers.random_instance(random.Random(seed))),
    "losses": lambda seed: test_survival.random_instance(random.Random(seed), one_width=False),
    "pairs": random_pairs,
}


def least(formulation, names):
    """What the stages come to, one after the other; None where the rules contradict each other."""
    values = []
    for name in names:
        answer = formulation.minimise(name, seconds=60.0, seed=0)
        if answer is None:
            return None
        values.append(answer.objective)
        formulation.keep(name, answer.objective + 1e-6)
    return values


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("first", some(range(0, 300, 30), 1))
def test_what_does_not_depend_on_loads_is_the_same_without_them(first, kind):
    lacking = 0
    for seed in range(first, first + 30):
        instance = with_sites(MAKERS[kind](seed))
        names = [name for name in stage_names(instance) if name in BY_CAPACITY]
        every = range(len(instance.options))
        whole, tightened = (Formulation(instance, every, whole=True) for _ in range(2))
        tightened.tighten()
        wanted = least(whole, names)
        for other in (tightened, Formulation(instance, every, whole=True, by_capacity=True)):
            values = least(other, names)
            assert (values is None) == (wanted is None), seed
            assert values is None or values == pytest.approx(wanted, abs=2e-5), seed
        lacking += wanted is not None and max(wanted) > 1e-3
    assert lacking, "of some of them not everything can be served"


def test_rows_that_tighten_leave_the_later_stages_alone():
    for seed in range(30):
        instance = with_sites(random_instance(random.Random(seed)))
        every = range(len(instance.options))
        whole, tightened = (Formulation(instance, every, whole=True) for _ in range(2))
        tightened.tighten()
        assert least(tightened, ["served", "latency"]) == pytest.approx(least(whole, ["served", "latency"]), abs=1e-4)


def test_a_search_that_may_look_at_nothing_answers_with_its_start():
    """A start that keeps the rules is an answer; one that breaks them is none, and the search goes on."""
    instance = with_sites(random_pairs(3))
    every = range(len(instance.options))
    for by_capacity in (False, True):
        program = Formulation(instance, every, whole=True, by_capacity=by_capacity)
        best = program.minimise("served", seconds=60.0, seed=0)
        start = program.beginning(program.counts(best))
        result = program.program.searched(program.terms("served"), LIMITS, never, start)
        assert result.ending == "OPTIMAL"
        assert program.value("served", result) == pytest.approx(best.objective, abs=1e-6)
        for impossible in (1e6, 4.0):  # of the columns, and of the rows
            anyhow = program.program.searched(program.terms("served"), LIMITS, never, dict.fromkeys(start, impossible))
            assert program.value("served", anyhow) == pytest.approx(best.objective, abs=1e-6)


def test_moves_have_a_start_too():
    """Replicas that run, fewer of them and more: what starts and stops is part of the start."""
    instance = random_instance(random.Random(8))
    running = solve(instance)
    current = {instance.options[i].key: count for i, count in running.counts.items()}
    moved = with_sites(replace(instance, current=current))
    program = Formulation(moved, range(len(moved.options)), whole=True)
    for change in (0, 1, -1):
        counts = {i: max(0, count + change) for i, count in moved.running.items()}
        values = program.beginning(counts)
        starts_and_stops = [values[column] for column, _ in program.terms("moves") if column in values]
        assert sum(starts_and_stops) == sum(abs(counts[i] - count) for i, count in moved.running.items())


def test_a_second_pass_looks_deeper_and_changes_nothing_for_the_worse(monkeypatch):
    """With programs so small that the first pass ends early: the second goes on from it, and its bounds hold."""
    monkeypatch.setattr(programs, "TINY", 0)
    deeper = 0
    for seed in range(40):
        instance = random_instance(random.Random(seed))
        best = try_solve(instance)
        if best is None:
            continue
        with monkeypatch.context() as shallow:
            shallow.setattr(effort, "QUICK_UP_TO", 0)
            shallow.setattr(effort, "NODES", ((), (1_000,)))
            shallow.setattr(effort, "NODES_BY_CAPACITY", ((), (1_000,)))
            *answers, last = ExactSolver().solve(instance, deadline_s=30, seed=0)
        values = {stage.name: stage for stage in last.stages}
        felt = ("served", "latency")
        ended = [i for i, answer in enumerate(answers) if answer.stages[-1].name == "cost"]
        first = answers[ended[0]] if ended else last
        deeper += {s.name: s.objective for s in first.stages} != {s.name: s.objective for s in last.stages}
        for stage in best.stages:
            if stage.name in felt:
                assert values[stage.name].bound <= stage.objective * 1.005 + 1e-3, seed
        assert values["served"].objective == pytest.approx(best.stages[0].objective, abs=1e-3), seed
    assert deeper, "some were made better by it"


def try_solve(instance):
    try:
        return solve(instance)
    except InfeasibleError:
        return None
