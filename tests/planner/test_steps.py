"""Programs that are solved side by side."""

import os
import signal
import threading

import pytest

from fabrictool.planner.solvers.steps import EngineSteps
from fabrictool.planner.work import StepwiseWork


class FakeProgram:
    """Takes until it is told to end."""

    columns = 100

    def __init__(self, begun, ended):
        self.program, self._begun, self._ended = self, begun, ended

    def minimise(self, *_, **__):
        self._begun.release()
        while not self._ended.wait(0.05):  # a signal that comes just before a long wait would be seen after it
            pass


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one core, and one program at a time")
def test_ctrl_c_does_not_wait_for_programs():
    begun, ended = threading.Semaphore(0), threading.Event()

    def interrupt():
        begun.acquire()
        begun.acquire()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    pressing = threading.Thread(target=interrupt)
    pressing.start()
    steps = EngineSteps(StepwiseWork(100), 0)
    with pytest.raises(KeyboardInterrupt):
        steps.in_time([FakeProgram(begun, ended) for _ in range(2)], "latency", nodes=1)
    assert threading.active_count() > 1, "one of them is not done"
    ended.set()
    pressing.join()
    assert not steps.work.spent


def test_answers_come_in_the_order_of_the_programs_and_count_together():
    ended = threading.Event()
    ended.set()
    steps = EngineSteps(StepwiseWork(100), 0)
    programs = [FakeProgram(threading.Semaphore(0), ended) for _ in range(7)]
    assert steps.in_time(programs, "latency", nodes=1) == [None] * 7
    assert steps.work.spent == 7 * FakeProgram.columns // 30
