"""Placements that a copy of the process plays: the same as here, and here where it cannot."""

import errno
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fabrictool.planner import process_copy, rehearsal
from fabrictool.planner.chosen import SearchOptions, best
from fabrictool.planner.process_copy import ProcessCopy
from fabrictool.planner.rehearsal import Asked, Rehearsal
from fabrictool.planner.weights import planned_rates
from tests.planner.fabrics import situation as situation_with
from tests.planner.test_other_end import children

pytestmark = pytest.mark.skipif(process_copy._cores() < 2, reason="there is one core, and no copy")


@pytest.fixture
def situation(tmp_path):
    return situation_with(tmp_path, "slo: {ttft_p95: 2s}\nsurvive: node")


@pytest.fixture
def asked(situation):
    chosen = best(situation, SearchOptions())
    rates = planned_rates(chosen.problem, chosen.solution)
    what = situation.blueprint, situation.inventory, 3
    return Asked(*what, chosen.problem, chosen.placement, rates, ["m", "other"], ["m"])


@pytest.fixture
def elsewhere(monkeypatch):
    """Process numbers of those that played here."""
    here = []
    real = rehearsal.play
    monkeypatch.setattr(rehearsal, "play", lambda asked: here.append(os.getpid()) or real(asked))
    return here


def begun(asked):
    """A rehearsal whose copy is ready for what is asked."""
    prepared = Rehearsal()
    prepared.begin()
    prepared.prepare(asked.blueprint, asked.inventory, asked.problem)
    return prepared


def test_the_copy_plays_the_same_and_is_gone_afterwards(asked, elsewhere):
    before = children()
    with Rehearsal() as alone:
        result = alone.play(asked)
    assert set(result.played) == {"m", "other"}
    assert set(result.after) == {"m"}
    elsewhere.clear()
    with begun(asked) as copied:
        assert len(children() - before) == 1
        assert copied.play(asked) == result
        assert copied.play(asked) == result, "it plays as often as it is asked"
    assert not elsewhere
    assert children() == before


def test_a_copy_that_is_gone_or_fails_is_done_without(asked, elsewhere, monkeypatch, capfd):
    with begun(asked) as copied:
        signal.pidfd_send_signal(copied._copy.descriptor, signal.SIGKILL)
        result = copied.play(asked)
    assert elsewhere == [os.getpid()]
    with Rehearsal() as gone:
        gone.begin()
        signal.pidfd_send_signal(gone._copy.descriptor, signal.SIGKILL)
        os.waitid(os.P_PIDFD, gone._copy.descriptor, os.WEXITED | os.WNOWAIT)
        gone.prepare(asked.blueprint, asked.inventory, asked.problem)
        assert gone.play(asked) == result
    monkeypatch.setattr("fabrictool.planner.loss_replay.played_losses", lambda *_: 1 / 0)
    with begun(asked) as failing:
        with pytest.raises(ZeroDivisionError):
            failing.play(asked)
        monkeypatch.undo()
        assert failing.play(asked) == result
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_is_stopped_is_left_alone(asked, elsewhere, monkeypatch):
    before = children()
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.2)
    with begun(asked) as stopped:
        signal.pidfd_send_signal(stopped._copy.descriptor, signal.SIGSTOP)
        stopped.play(asked)
        assert children() == before
        stopped.play(asked)
    assert elsewhere == [os.getpid()] * 2


def test_a_copy_that_reads_nothing_stops_nobody(asked, elsewhere, monkeypatch):
    """More is handed over than a pipe takes before somebody reads it."""
    before = children()
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.2)
    monkeypatch.setattr(rehearsal, "_least_asked", lambda *_: b"x" * 10_000_000)
    with Rehearsal() as stopped:
        stopped.begin()
        signal.pidfd_send_signal(stopped._copy.descriptor, signal.SIGSTOP)
        stopped.prepare(asked.blueprint, asked.inventory, asked.problem)
        stopped.play(asked)
        assert children() == before
    assert elsewhere == [os.getpid()]
    with Rehearsal() as closed:
        closed.begin()
        signal.pidfd_send_signal(closed._copy.descriptor, signal.SIGSTOP)
        closed.prepare(asked.blueprint, asked.inventory, asked.problem)
    assert children() == before
    assert threading.active_count() == 1


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(asked, monkeypatch):
    with begun(asked) as copied:
        with monkeypatch.context() as patch:
            patch.setattr(type(copied._ours), "poll", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                copied.play(asked)
        other = replace(asked, models=["m"], surviving=[])
        assert set(copied.play(other).played) == {"m"}


def test_where_no_descriptor_is_left_it_is_played_here(asked, elsewhere, monkeypatch):
    before, real = children(), os.pidfd_open

    def full(process):
        if process != os.getpid():
            raise OSError(errno.EMFILE, "too many open files")
        return real(process)

    monkeypatch.setattr(os, "pidfd_open", full)
    with begun(asked) as alone:
        assert children() == before
        alone.play(asked)
    assert elsewhere == [os.getpid()]


def test_copies_of_a_copy_end_with_it(tmp_path):
    """However it ended: the kernel sees to it."""
    told = tmp_path / "number"

    def work():
        inner = ProcessCopy(lambda: time.sleep(60))
        number = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        told.write_text(number)
        time.sleep(60)
        inner.close()

    outer = ProcessCopy(work)
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.01)
    inner = Path("/proc") / told.read_text().strip() / "stat"
    assert inner.exists()
    outer.close()
    while inner.exists() and inner.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() < deadline


def test_what_is_large_is_played_here_and_loaded_by_a_thread(asked, monkeypatch):
    before, names = children(), []
    monkeypatch.setattr(rehearsal, "MOST_OPTIONS", len(asked.problem.options) - 1)
    monkeypatch.setattr(rehearsal, "import_module", lambda name: names.append((name, threading.current_thread().name)))
    with begun(asked) as played:
        assert children() == before
        assert not names, "before there is a placement the process has better things to do"
        played.load()
    ((name, thread),) = names
    assert name == rehearsal.PLAYERS
    assert thread != threading.main_thread().name


def test_a_search_that_prepares_comes_to_the_same(situation):
    alone, before = best(situation, SearchOptions()), children()
    with Rehearsal() as copied:
        copied.begin()
        prepared = best(situation, SearchOptions(rehearsal=copied))
    assert (prepared.placement, prepared.played, prepared.after) == (alone.placement, alone.played, alone.after)
    assert children() == before
