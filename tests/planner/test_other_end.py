"""A copy of the process that makes tables from the other end: what it brings, and what is left of it."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabrictool.blueprint import load
from fabrictool.planner import build, process_copy
from fabrictool.planner.other_end import OtherEnd
from tests.planner.fabrics import write_fabric

pytestmark = pytest.mark.skipif(process_copy._cores() < 2, reason="there is one core, and no copy")
ITEMS = [f"item {number}" for number in range(20)]


def children():
    """Processes of this one, the dead that nobody waited for, too; HiGHS may have one that stays."""
    text = (Path("/proc/self/task") / str(os.getpid()) / "children").read_text()
    return {int(pid) for pid in text.split()}


def last_one(there):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        result = there.done(len(ITEMS) - 1)
        if result is not None:
            return result
        time.sleep(0.001)
    pytest.fail("the copy brought nothing")


def test_it_begins_at_the_end_and_is_gone_afterwards():
    before = children()
    with OtherEnd(ITEMS, str.upper, wanted=True) as there:
        assert last_one(there) == "ITEM 19"
        assert len(children() - before) == 1
    assert children() == before
    assert there._copy.descriptor is None


def test_more_than_the_pipe_holds_is_no_trouble():
    with OtherEnd(ITEMS, lambda item: item * 100_000, wanted=True) as there:
        assert last_one(there) == ITEMS[-1] * 100_000


def test_where_the_copy_fails_it_is_silent_and_others_do_it(capfd):
    def work(item):
        if item == "item 15":
            raise ValueError("no")
        return item.upper()

    with OtherEnd(ITEMS, work, wanted=True) as there:
        last_one(there)
        os.waitid(os.P_PIDFD, there._copy.descriptor, os.WEXITED | os.WNOWAIT)
        assert [there.done(at) for at in range(20)] == [None] * 16 + ["ITEM 16", "ITEM 17", "ITEM 18", None]
    assert capfd.readouterr() == ("", "")


def test_the_copy_does_not_hear_ctrl_c(capfd):
    with OtherEnd(ITEMS, lambda item: time.sleep(0.02) or item, wanted=True) as there:
        signal.pidfd_send_signal(there._copy.descriptor, signal.SIGINT)
        last_one(there)
        os.waitid(os.P_PIDFD, there._copy.descriptor, os.WEXITED | os.WNOWAIT)
        assert there.done(0) == "item 0", "it went on to its end"
    assert capfd.readouterr() == ("", "")


def test_where_nobody_waits_for_children_it_is_no_matter_that_it_is_gone():
    before, former = children(), signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with OtherEnd(ITEMS, str.upper, wanted=True) as there:
            last_one(there)
            deadline = time.monotonic() + 30
            while children() != before and time.monotonic() < deadline:
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGCHLD, former)


def test_ctrl_c_while_it_begins_leaves_no_copy(monkeypatch):
    def pressed(which, mask):
        if which == signal.SIG_SETMASK:
            real(which, mask)
            raise KeyboardInterrupt
        return real(which, mask)

    real, before = signal.pthread_sigmask, children()
    monkeypatch.setattr(signal, "pthread_sigmask", pressed)
    with pytest.raises(KeyboardInterrupt):
        OtherEnd(ITEMS, lambda item: time.sleep(60), wanted=True)
    assert children() == before


@contextmanager
def another_thread():
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


def test_there_is_none_beside_threads_nor_where_none_is_wanted():
    with another_thread(), OtherEnd(ITEMS, str.upper, wanted=True) as there:
        assert there._copy is None
        assert there.done(19) is None
    with OtherEnd(ITEMS, str.upper, wanted=False) as there:
        assert there._copy is None


def problem_of(folder):
    loaded = load(folder / "blueprint.yaml", environment={})
    usable = ("dear", "cheap", "spot")
    return build.build_problem(loaded.blueprint, loaded.inventory, usable=usable, unseen=(), current={})[0]


def test_tables_of_two_are_the_same_and_are_not_made_again(tmp_path, monkeypatch):
    write_fabric(tmp_path, "phases: any")
    alone = problem_of(tmp_path)
    learned = []

    class Slow(OtherEnd):
        def done(self, at):
            """Waits for the copy, whatever it is at."""
            deadline = time.monotonic() + 30
            while (result := super().done(at)) is None and time.monotonic() < deadline:
                time.sleep(0.001)
            learned.append(result)
            return result

    monkeypatch.setattr(build, "MANY", 1)
    monkeypatch.setattr(build, "OtherEnd", Slow)
    together = problem_of(tmp_path)
    assert together.options == alone.options
    assert together.tables_sha256 == alone.tables_sha256
    assert all(tables for result in learned for tables in result.values())
