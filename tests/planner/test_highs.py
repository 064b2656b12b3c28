"""HiGHS in its own process: what it finds, where it ends, and what becomes of it when it dies."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fabrictool.planner import highs
from fabrictool.planner.program import Program
from fabrictool.planner.work import never

LIMITS = highs.SearchLimits(gap=0.0, nodes=1000, seed=0, seconds=60.0)


def knapsack(items=3):
    """The most of items that weigh 2, 3, 4, …, in a sack of 7, without the last one's half."""
    program = Program(whole=True)
    columns = [program.column(0, 1, whole=True) for _ in range(items)]
    program.row(-math.inf, 7.0, [(column, float(at + 2)) for at, column in enumerate(columns)])
    return program, [(column, -float(at + 2)) for at, column in enumerate(columns)]


def test_it_finds_what_scip_finds():
    program, terms = knapsack()
    by_highs = program.searched(terms, LIMITS, never)
    by_scip = program.minimise(terms, seconds=60, seed=0)
    assert by_highs.ending == "OPTIMAL"
    assert by_highs.in_time
    assert by_highs.values.tolist() == pytest.approx(by_scip.values.tolist())
    assert by_highs.bound == pytest.approx(-7.0)


def test_what_contradicts_itself_is_infeasible():
    program, terms = knapsack()
    program.row(9.5, 10.0, [(0, 1.0)])
    assert program.searched(terms, LIMITS, never).ending == "INFEASIBLE"


def test_no_time_is_left_at_once_or_later():
    program, terms = knapsack()
    clock = itertools.chain([1.0], itertools.repeat(0.0))
    highs._process.end()  # so that an answer takes longer than the first look
    answer = program.searched(terms, LIMITS, lambda: next(clock))
    assert answer.values is None or answer.in_time
    assert program.searched(terms, LIMITS, never).ending == "OPTIMAL", "and it starts again"


def test_a_process_that_died_is_started_anew():
    program, terms = knapsack()
    assert program.searched(terms, LIMITS, never).ending == "OPTIMAL"
    highs._process._process.kill()
    highs._process._process.join()
    assert program.searched(terms, LIMITS, never) is None
    assert program.searched(terms, LIMITS, never).ending == "OPTIMAL"


def test_threads_take_turns():
    def answer(_):
        program, terms = knapsack()
        return program.searched(terms, LIMITS, never).ending

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(answer, range(40))) == {"OPTIMAL"}


def test_where_there_can_be_no_process_it_is_done_here(monkeypatch):
    program, terms = knapsack()
    monkeypatch.setattr(highs._EngineProcess, "is_impossible", lambda self: True)
    monkeypatch.setattr(highs._EngineProcess, "ask", None)
    found = program.searched(terms, LIMITS, never)
    assert np.flatnonzero(found.values).tolist() in ([0, 1], [1, 2], [0, 1, 2])[:2]


def test_what_it_prints_is_not_printed_by_us(capfd):
    program, terms = knapsack(40)
    program.searched(terms, LIMITS, never)
    assert capfd.readouterr() == ("", "")


def test_an_engine_that_does_not_start_leaves_nothing(monkeypatch):
    """What is asked of it later starts it anew, and does not wait at a pipe that nobody reads."""
    engine, starts = highs._EngineProcess(), []

    def failing(_):
        starts.append("start")
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(highs, "_process", engine)
    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", failing)
    highs.prepare()
    assert not engine._runs()
    program, terms = knapsack()
    assert program.searched(terms, LIMITS, never) is None
    assert starts == ["start", "start"]
