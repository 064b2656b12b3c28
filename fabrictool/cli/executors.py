"""Who does the work of a sweep: this process, processes beside it, or a Dask cluster; all as `concurrent.futures`."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, TypeVar

from fabrictool.base.errors import FabrictoolError, UnreachableError, UsageError
from fabrictool.cli.gateway_commands import split_address
from fabrictool.cli.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.process import BaseProcess

Result = TypeVar("Result")
DASK = "dask://"
PATIENCE_S = 5
"""A Dask scheduler that does not answer for so long is not there."""
FORMS = "here, processes, dask://HOST:PORT"


class Here(Executor):
    """One task after another, in this process, at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it goes to whoever asks the future
            future.set_exception(error)
        return future


def chosen_executor(name: str, workers: int | None, *, large: bool) -> str:
    """By its name, or for want of one: processes where the work is `large` or somebody says how many, else here."""
    return name or ("processes" if large or workers is not None else "here")


def as_done(
    doer: Executor, work: Callable[..., Result], pieces: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[int, Result]]:
    """(number, result) of each of the `pieces`, which are the arguments of `work`, in the order in which they end.

    Where this process does the work, the next piece begins when the one before was taken.
    """
    waiting: dict[Future[Result], int] = {}
    for number, piece in enumerate(pieces):
        future = doer.submit(work, *piece)
        if future.done():
            yield number, future.result()
        else:
            waiting[future] = number
    for future in as_completed(waiting):
        yield waiting[future], future.result()


@contextmanager
def lost_workers_named(what: str) -> Iterator[None]:
    """Around work on an executor. Raises FabrictoolError FT2013 where the executor lost `what`, such as ``cases``."""
    try:
        yield
    except Exception as error:
        if not _lost(error):
            raise
        message = f"a worker of {what} stopped or cannot do the work: {str(error) or type(error).__name__}"
        hint = "--executor here; every Dask worker needs this release of fabrictool, and memory for the work"
        raise FabrictoolError.of("FT2013", message, hint=hint) from error


def _lost(error: Exception) -> bool:
    """Whether it is the executor's error, and not one of the work."""
    own = isinstance(error, BrokenExecutor | CancelledError | ImportError)
    return own or type(error).__module__.partition(".")[0] == "distributed"


def cores() -> int:
    """That this process may use: a job on a shared node has a part of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return multiprocessing.cpu_count() if affinity is None else len(affinity(0))


@contextmanager
def executor_named(name: str, tasks: int, workers: int | None) -> Iterator[Executor]:
    """By its name on the command line; "": this process for one of the `tasks`, processes for more.

    However the block ends, by Ctrl-C as well, no task is running any more and no process is left.

    Raises
    ------
    UsageError
        FT2013 no such executor, `workers` that nobody asks for; FT9002 no HOST:PORT.
    FabrictoolError
        FT2013 the extra `dask` is missing; exit code 69 when the scheduler does not answer.
    """
    chosen = name or ("here" if tasks == 1 and workers is None else "processes")
    if chosen.startswith(DASK):
        if workers is not None:
            raise UsageError.of("FT2013", "--workers has no effect on a Dask cluster", hint="leave it out")
        with _dask(chosen.removeprefix(DASK)) as cluster:
            yield cluster
    elif chosen == "processes":
        with _processes(workers if workers is not None else cores(), tasks) as pool:
            yield pool
    elif chosen == "here":
        if workers is not None:
            raise UsageError.of("FT2013", "--workers needs processes", hint="--executor processes")
        yield Here()
    else:
        raise UsageError.of("FT2013", f"unknown executor {name!r}", hint=f"one of: {FORMS}")


@contextmanager
def _processes(workers: int, tasks: int) -> Iterator[Executor]:
    # Not forked: the solver's threads would be copied in the middle of what they do.
    number = max(1, min(workers, tasks))
    # Such as the planner's own process, which is not ours to end.
    others = {child.pid for child in multiprocessing.active_children()}
    resource_tracker.ensure_running()  # lets signals through again when it has started
    pool = ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn"))
    try:
        # Ctrl-C reaches a terminal's whole group. What starts while it is held back never hears it, and we end that
        # ourselves; what was pressed meanwhile is heard as soon as all have started, not lost. Noted as well as held
        # back, for another thread of ours (a solver's) may take the signal, and this one would raise midway: a child
        # that was told half of what it is for prints a traceback.
        with Interrupts(at_once=False) as interrupts:
            former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                for _ in range(number):
                    pool.submit(int)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
            interrupts.check()
        yield pool
    except BaseException:
        for child in _children_but(others):
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for child in _children_but(others):
            child.join()


def _children_but(others: set[int | None]) -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.pid not in others]


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    if find_spec("distributed") is None:
        raise FabrictoolError.of(
            "FT2013", "a Dask cluster needs the package distributed", hint="pip install 'fabrictool[dask]'"
        )
    split_address(address)
    distributed: Any = import_module("distributed")
    try:
        client = distributed.Client(f"tcp://{address}", timeout=PATIENCE_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        hint = "start one with `dask scheduler --host HOST --port PORT`, and workers with `dask worker`"
        message = f"no Dask scheduler answers at {address}: {error}"
        raise UnreachableError.of("FT2013", message, hint=hint) from error
    try:
        try:
            client.wait_for_workers(1, timeout=PATIENCE_S)
        except TimeoutError as error:
            message, hint = f"the Dask scheduler at {address} has no worker", f"`dask worker tcp://{address}`"
            raise UnreachableError.of("FT2013", message, hint=hint) from error
        executor = client.get_executor(pure=False)
        try:
            yield executor
        finally:
            executor.shutdown(wait=False)
    finally:
        client.close()
