"""Solved, played, solved again: within one limit, for problems of any size, and with bounds of what was asked."""

from dataclasses import replace

import pytest

from fabrictool.cli.plan_text import gap_text
from fabrictool.cli.solve_watch import SolverWatch
from fabrictool.planner.certificate import certificate, certificate_of
from fabrictool.planner.chosen import SearchOptions, best, forecast_of
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.situation import situation_of
from fabrictool.planner.solvers import cp, programs
from fabrictool.planner.solvers.cp import CpSolver
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.tabu import TabuSolver
from fabrictool.planner.work import SearchWork
from tests.planner.test_verdict import nothing_runs, solved, wide

pytestmark = pytest.mark.usefixtures("kept_calibrations")


class Recorder:
    """The exact solver, and what it was asked; `work` is what it says to have used up."""

    name = "recorder"

    def __init__(self, work=0.0, stop_at=None, late_at=None):
        self.deadlines, self.solutions = [], []
        self._work, self._stop_at, self._late_at = work, stop_at, late_at

    def solve(self, problem, *, deadline_s, seed, warm=None):
        self.deadlines.append(deadline_s)
        if len(self.deadlines) == self._stop_at:
            raise KeyboardInterrupt
        *_, solution = ExactSolver().solve(problem, deadline_s=10, seed=seed)
        self.solutions.append(solution)
        yield replace(solution, work=self._work, repeatable=len(self.deadlines) != self._late_at)


def situation(folder, ttft="650ms"):
    loaded = wide(folder, ttft)
    return situation_of(loaded.blueprint, loaded.inventory, nothing_runs(loaded), 0.0)


def verdict(chosen):
    (line,) = forecast_of(chosen, "CHF").models
    return line.slo, line.why


def test_all_rounds_keep_within_one_limit(tmp_path):
    now = situation(tmp_path, "600ms")  # takes two lessons
    for work, deadlines, last in ((0.0, [9.0, 9.0, 9.0], "meets"), (4.0, [9.0, 5.0, 1.0], "meets")):
        solver = Recorder(work)
        assert verdict(best(now, SearchOptions(0, 9.0, solver))) == (last, "")
        assert solver.deadlines == deadlines
    solver = Recorder(work=9.0)
    slo, why = verdict(best(now, SearchOptions(0, 9.0, solver)))
    assert (slo, solver.deadlines) == ("misses", [9.0])
    assert why.endswith("the search ended before a placement that uses it was found")


def test_what_ends_by_its_proof_uses_little_up(tmp_path):
    _, solution = solved(wide(tmp_path, "650ms"))
    assert solution.optimal
    assert solution.work < 1.0


def test_a_stage_that_tidies_up_gets_little():
    work = SearchWork(80.0)
    assert (work.share("cost"), work.share("replicas")) == (40.0, 10.0)
    work.spent = 90.0
    assert work.share("cost") == work.left == 0.0


def test_large_problems_learn_as_well_and_count_their_sweeps(tmp_path, monkeypatch):
    now = situation(tmp_path)
    monkeypatch.setattr(programs, "TINY", 0)
    monkeypatch.setattr(programs, "FEW", 0)
    chosen = best(now, SearchOptions(0, 60.0))
    assert verdict(chosen)[0] == "meets"
    assert chosen.situation.learned
    assert chosen.solution.repeatable
    assert chosen.solution.work > 0.0


@pytest.mark.parametrize(("late_at", "repeatable"), [(None, True), (1, False), (2, False), (3, False)])
def test_a_search_that_the_clock_cut_short_is_told_of_whatever_came_after_it(tmp_path, late_at, repeatable):
    """What the first one found decided what was learned; what the last one missed might have been better."""
    chosen = best(situation(tmp_path, "600ms"), SearchOptions(0, 9.0, Recorder(late_at=late_at)))
    assert chosen.solution.repeatable is repeatable


def test_ctrl_c_while_it_searches_again_keeps_what_was_found(tmp_path):
    now = situation(tmp_path)
    chosen = best(now, SearchOptions(0, 9.0, Recorder(stop_at=2), lambda _: None))
    assert (verdict(chosen)[0], chosen.stopped) == ("misses", True)
    with pytest.raises(KeyboardInterrupt):
        best(now, SearchOptions(0, 9.0, Recorder(stop_at=2)))


def test_after_a_lesson_the_bounds_are_those_of_what_was_asked(tmp_path):
    """The tables as they were allow a placement for 8 CHF/h; what the replay taught makes it 12."""
    solver = Recorder()
    chosen = best(situation(tmp_path), SearchOptions(0, 9.0, solver))
    first, *_ = solver.solutions
    own, asked = certificate(chosen.problem, chosen.solution, 0), certificate_of(chosen, 0)
    cost = {name: next(s for s in one.stages if s.name == "cost") for name, one in (("own", own), ("asked", asked))}
    assert (cost["own"].objective, cost["own"].bound) == (12.0, 12.0)
    assert (cost["asked"].objective, cost["asked"].bound) == (12.0, 8.0)
    assert {s.name: s.bound for s in first.stages}["cost"] == 8.0
    assert (own.optimal, asked.optimal) == (True, False)
    assert (asked.stage, asked.lessons, asked.gap_with_lessons) == ("cost", 1, 0.0)
    assert asked.gap == pytest.approx(1 / 3, rel=1e-4)
    gap = "gap 33.33% in cost (12 CHF/h, and no less than 8 CHF/h can be)"
    assert gap_text(asked, "CHF") == f"{gap} before the replay's lessons, none with them"
    assert all(stage.bound <= stage.objective for stage in asked.stages)


def test_bounds_after_a_stage_that_became_worse_are_the_relaxations(tmp_path):
    """More is paid than the first search paid: what it proved of the latency then says nothing of this placement."""
    chosen = best(situation(tmp_path), SearchOptions(0, 9.0, Recorder()))
    latency = {s.name: s for s in certificate_of(chosen, 0).stages}["latency"]
    problem, first = chosen.asked
    before = {s.name: s for s in first.stages}["latency"]
    assert latency.objective < before.bound, "it is better there, as it costs more"
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    for name, limit in (("served", 1e-6), ("slo", 1e-6), ("excess", 1e-6), ("cost", 12.0 + 1e-4)):
        relaxed.keep(name, limit)
    assert latency.bound == pytest.approx(relaxed.minimise("latency", seconds=9, seed=0).objective, rel=1e-3)


def test_without_a_lesson_the_certificate_is_the_solvers(tmp_path):
    chosen = best(situation(tmp_path, "2s"), SearchOptions(0, 9.0))
    assert certificate_of(chosen, 0) == certificate(chosen.problem, chosen.solution, 0)
    assert gap_text(certificate_of(chosen, 0), "") == "no gap"


def test_the_seconds_of_a_plan_are_those_of_all_its_searches(tmp_path):
    watch = SolverWatch(ExactSolver())
    problem, _ = solved(wide(tmp_path, "650ms"))
    passed = []
    for _ in range(2):
        *_, _ = watch.solve(problem, deadline_s=9.0, seed=0)
        passed.append(watch.seconds)
    assert passed[1] > 1.2 * passed[0]
    times = [moment.seconds for moment in watch.moments]
    assert times == sorted(times)


def test_tabu_counts_what_it_weighed_also_where_it_finds_nothing_better(tmp_path):
    problem, _ = solved(wide(tmp_path, "650ms"))
    *_, start, last = TabuSolver().solve(problem, deadline_s=3.0, seed=0)
    assert start.counts == last.counts
    assert 0.0 < last.work < 3.5


def test_cp_counts_stages_that_went_to_their_limit(tmp_path, monkeypatch):
    problem, _ = solved(wide(tmp_path, "650ms"))
    *_, proved = CpSolver().solve(problem, deadline_s=20.0, seed=0)
    minimise = cp._Integers.minimise
    limits = []

    def cut_short(self, terms, work, *rest):
        limits.append(work / cp.WORK)
        return replace(minimise(self, terms, work, *rest), optimal=False)

    monkeypatch.setattr(cp._Integers, "minimise", cut_short)
    *_, hurried = CpSolver().solve(problem, deadline_s=20.0, seed=0)
    assert proved.work == 0.0
    assert hurried.work == pytest.approx(sum(limits))
    assert hurried.work < 20.0
    assert limits[0] == 10.0
