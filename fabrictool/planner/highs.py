"""HiGHS, as MathOpt in the OR-Tools wheel has it, in a process of its own.

It finds far better whole numbers than SCIP on our programs, and keeps what it has at a limit. But it crashed inside
OR-Tools before, and prints a line on standard output now and then: neither may happen where a plan is made. Its process
is started when it is first wanted, serves one program after another, and ends with ours.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

STARTS_S = 0.5
"""Seconds that its process takes until it searches: with less than these left it is not begun."""
FEASIBLE, FEASIBLE_WHOLE = 1e-7, 2e-7
"""By how much a row may be off in a relaxation, and a row or a whole number in an answer. Where both are the same HiGHS
takes an answer of its own for wrong at times, by the last digit, and gives up.
"""


@dataclass(frozen=True, slots=True)
class MixedProgram:
    """Minimise `costs` over columns, some of them whole numbers, within rows that are given entry by entry."""

    costs: Floats
    low: Floats
    high: Floats
    whole: np.ndarray[Any, np.dtype[np.bool_]]
    row_low: Floats
    row_high: Floats
    at_row: Ints
    at_column: Ints
    weights: Floats
    start: Mapping[int, float] = field(default_factory=dict)
    """Values of some columns to begin with."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Where a search ends: all but `seconds` are the same on any machine."""

    gap: float
    nodes: int
    seed: int
    seconds: float
    restarts: bool = True
    """Whether it may begin anew at its root when much is fixed by then: better bounds, in twice the time."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search brought."""

    ending: str
    """MathOpt's word for why it ended, such as ``OPTIMAL``."""
    values: Floats | None
    """By column; None: it found nothing."""
    bound: float
    """Nothing is better."""
    steps: int
    """Of the simplex algorithm: how much it did, on any machine."""
    in_time: bool
    """False: it would have gone on."""


def searched(program: MixedProgram, limits: SearchLimits, left_s: Callable[[], float]) -> Searched | None:
    """What HiGHS found; None when it gave up, or its process died.

    Where no seconds are left, or Ctrl-C is heard, its process ends.
    """
    if _process.is_impossible():
        return _answer(program, limits)
    try:
        with _process.lock:  # threads take turns
            return _process.ask(program, limits, left_s)
    except (EOFError, OSError):
        _process.end()
        return _answer(program, limits) if _process.is_impossible() else None
    except BaseException:
        _process.end()
        raise


class _EngineProcess:
    """One that searches for us, started when it is first asked."""

    def __init__(self) -> None:
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._owner = 0
        self._answers = 0
        self.lock = threading.RLock()

    def is_impossible(self) -> bool:
        """Whether this process may have none of its own, such as a worker of Dask, or a program that cannot be imported
        again: then the search is done here.
        """
        return multiprocessing.current_process().daemon or (self._answers < 0)

    def start(self) -> Connection:
        if self._pipe is None or self._owner != os.getpid():  # after a fork it is somebody else's
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True, name="highs")
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._pipe, self._process, self._owner = ours, process, os.getpid()
        return self._pipe

    def _runs(self) -> bool:
        return self._pipe is not None and self._owner == os.getpid()

    def ask(self, program: MixedProgram, limits: SearchLimits, left_s: Callable[[], float]) -> Searched | None:
        if not self._runs() and left_s() < STARTS_S:
            return Searched("CLOCK", None, -math.inf, 0, in_time=False)
        pipe = self.start()
        pipe.send((program, limits))
        while not pipe.poll(0.2):  # Ctrl-C is heard in between
            if left_s() <= 0.0:
                self.end()
                return Searched("CLOCK", None, -math.inf, 0, in_time=False)
        try:
            answer: Searched | None = pipe.recv()
        except (EOFError, OSError):
            self._answers = self._answers or -1  # it never began
            raise
        self._answers += 1
        return answer

    def end(self) -> None:
        process, pipe, mine = self._process, self._pipe, self._owner == os.getpid()
        self._process = self._pipe = None
        if process is not None and mine:
            process.kill()
            process.join()
            process.close()
        if pipe is not None:
            pipe.close()


_process = _EngineProcess()
atexit.register(_process.end)


def prepare() -> None:
    """Start the process, so that it is there when it is wanted."""
    if not _process.is_impossible():
        with suppress(OSError), _process.lock:  # what is asked of it later is done without it, if need be
            _process.start()


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side hears it, and decides
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    _load_engine()  # nothing is asked yet, mostly
    with suppress(EOFError, OSError):
        while True:
            pipe.send(_answer(*pipe.recv()))


def _load_engine() -> None:
    from ortools.math_opt import (  # noqa: F401, PLC0415 - see above
        callback_pb2,
        model_parameters_pb2,
        model_pb2,
        parameters_pb2,
        result_pb2,
    )
    from ortools.math_opt.core.python import solver  # noqa: F401, PLC0415 - see above


def _answer(program: MixedProgram, limits: SearchLimits) -> Searched | None:
    """None where the engine gives up: with a start it may, and is asked again without one."""
    from ortools.math_opt import result_pb2  # noqa: PLC0415 - --help must not pay for it

    result = _solved(program, limits)
    if result is None:
        return _answer(replace(program, start={}), limits) if program.start else None
    values = None
    if result.solutions:
        sparse = result.solutions[0].primal_solution.variable_values
        values = np.zeros(len(program.costs))
        values[np.asarray(sparse.ids, dtype=np.int64)] = sparse.values
    ending = result_pb2.TerminationReasonProto.Name(result.termination.reason).removeprefix("TERMINATION_REASON_")
    return Searched(
        ending,
        values,
        float(result.termination.objective_bounds.dual_bound),
        int(result.solve_stats.simplex_iterations),
        result.termination.limit != result_pb2.LIMIT_TIME,
    )


def _solved(program: MixedProgram, limits: SearchLimits) -> Any:
    from ortools.math_opt import callback_pb2, parameters_pb2  # noqa: PLC0415 - as above
    from ortools.math_opt.core.python import solver  # noqa: PLC0415 - as above
    from pybind11_abseil.status import StatusNotOk  # noqa: PLC0415 - as above

    try:
        return solver.solve(
            _model(program),
            parameters_pb2.SOLVER_TYPE_HIGHS,
            parameters_pb2.SolverInitializerProto(),
            _parameters(limits),
            _beginning(program),
            None,
            callback_pb2.CallbackRegistrationProto(),
            None,
            None,
        )
    except StatusNotOk:
        return None


def _beginning(program: MixedProgram) -> Any:
    from ortools.math_opt import model_parameters_pb2  # noqa: PLC0415 - as above

    beginning = model_parameters_pb2.ModelSolveParametersProto()
    if program.start:
        hint = beginning.solution_hints.add().variable_values
        hint.ids.extend(sorted(program.start))
        hint.values.extend(program.start[column] for column in sorted(program.start))
    return beginning


def _model(program: MixedProgram) -> Any:
    from ortools.math_opt import model_pb2  # noqa: PLC0415 - as above

    model = model_pb2.ModelProto()
    columns, rows = len(program.costs), len(program.row_low)
    model.variables.ids.extend(range(columns))
    model.variables.lower_bounds.extend(program.low)
    model.variables.upper_bounds.extend(program.high)
    model.variables.integers.extend(program.whole.tolist())
    used = np.flatnonzero(program.costs)
    model.objective.linear_coefficients.ids.extend(used)
    model.objective.linear_coefficients.values.extend(program.costs[used])
    model.linear_constraints.ids.extend(range(rows))
    model.linear_constraints.lower_bounds.extend(program.row_low)
    model.linear_constraints.upper_bounds.extend(program.row_high)
    order = np.lexsort((program.at_column, program.at_row))
    model.linear_constraint_matrix.row_ids.extend(program.at_row[order])
    model.linear_constraint_matrix.column_ids.extend(program.at_column[order])
    model.linear_constraint_matrix.coefficients.extend(program.weights[order])
    return model


def _parameters(limits: SearchLimits) -> Any:
    from ortools.math_opt import parameters_pb2  # noqa: PLC0415 - as above

    parameters = parameters_pb2.SolveParametersProto(
        node_limit=limits.nodes, relative_gap_tolerance=limits.gap, absolute_gap_tolerance=0.0
    )
    parameters.time_limit.FromMilliseconds(max(1, int(1000 * limits.seconds)))
    options = parameters.highs
    options.int_options["threads"] = 1
    options.bool_options["mip_allow_restart"] = limits.restarts
    options.int_options["random_seed"] = limits.seed % 2**31
    options.double_options["mip_feasibility_tolerance"] = FEASIBLE_WHOLE
    options.double_options["primal_feasibility_tolerance"] = FEASIBLE
    return parameters
