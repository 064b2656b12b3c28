"""A linear program in arrays, and the engines inside the OR-Tools wheel that solve it.

GLOP for relaxations (with prices), SCIP for small programs in whole numbers, and HiGHS for all others: it proves in
seconds what SCIP does not in a minute (`fabrictool.planner.highs`).
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.highs import MixedProgram, searched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.planner.highs import Searched, SearchLimits

    Floats = np.ndarray[Any, np.dtype[np.float64]]

LEAST_LP_S = 600.0
"""Relaxations take a second where integer programs take minutes: they are never the ones to be cut short."""
PATIENCE = 10.0
"""A search that is limited by nodes may take so many times its seconds: on a slow or busy machine."""

# More rounds of cuts took ten times as long on these programs, and gained nothing.
FOR_MANY_COLUMNS = "separating/maxroundsroot = 2\n"
FEW_COLUMNS = 400
FOR_FEW_COLUMNS = "".join(
    (
        "presolving/maxrounds = 2\npresolving/maxrestarts = 0\n",
        "separating/maxrounds = 0\nseparating/maxroundsroot = 0\n",
        "branching/pscost/priority = 100000\n",
        *(
            f"heuristics/{name}/freq = -1\n"
            for name in ("adaptivediving", "alns", "crossover", "feaspump", "rens", "rins", "rootsoldiving")
        ),
    )
)
"""To look at nodes at once: with so few columns what comes before them by default, and programs that heuristics search,
take more than half of the time. Measured on 94 programs of one model and its devices, to a gap of 0.1 %: 3.2 s with
all of it, 1.3 s. Proofs to the last digit take longer with it: 32 s for 25 s.
"""

Terms = list[tuple[int, float]]
"""(column, weight) pairs."""


@dataclass(frozen=True, slots=True)
class ProgramSolution:
    """What an engine found."""

    values: Floats
    """By column."""
    objective: float
    """Recomputed here in floating point."""
    bound: float
    """No solution can be better; the engine's own claim."""
    optimal: bool
    in_time: bool
    """False when the search ended because time was up, and not by a limit that is the same on any machine."""
    prices: Floats
    """By row: what one unit more of its limit would change (relaxations only)."""
    reduced: Floats
    """By column: what one unit of it would cost (relaxations only)."""


class Program:
    """Columns and rows, to be minimised for one objective after another."""

    def __init__(self, *, whole: bool) -> None:
        """`whole`: whether columns that are asked to be whole numbers have to be, or this is the relaxation."""
        from ortools.linear_solver.python import model_builder_helper  # noqa: PLC0415 - --help must not pay for it

        self._engines = model_builder_helper
        self._model = model_builder_helper.ModelBuilderHelper()
        self._whole = whole
        self._costs: Terms = []

    @property
    def columns(self) -> int:
        return int(self._model.num_variables())

    def whole_columns(self) -> list[bool]:
        """By column: whether it has to be a whole number."""
        return [bool(self._model.var_is_integral(column)) for column in range(self.columns)]

    def bounds(self) -> list[tuple[float, float]]:
        """By column: the least and the most that it may be."""
        return [self._bounds(column) for column in range(self.columns)]

    def rows(self) -> list[tuple[float, float, Terms]]:
        """(least, most, terms) of each constraint, those of kept stages last."""
        model = self._model
        return [
            (
                model.constraint_lower_bound(row),
                model.constraint_upper_bound(row),
                list(zip(model.constraint_var_indices(row), model.constraint_coefficients(row), strict=True)),
            )
            for row in range(model.num_constraints())
        ]

    def column(self, low: float, high: float, *, whole: bool = False) -> int:
        """A new variable between `low` and `high`."""
        index = int(self._model.add_var())
        self._set_bounds(index, low, high)
        self._model.set_var_integrality(index, whole and self._whole)
        return index

    def row(self, low: float, high: float, terms: Iterable[tuple[int, float]]) -> int:
        """A new constraint: `low` <= sum of `terms` <= `high`; a column that occurs again is added to itself."""
        index = int(self._model.add_linear_constraint())
        self._model.set_constraint_lower_bound(index, low)
        self._model.set_constraint_upper_bound(index, high)
        once: dict[int, float] = {}
        for column, weight in terms:
            once[column] = once.get(column, 0.0) + weight
        for column, weight in once.items():
            self._model.add_term_to_constraint(index, column, weight)
        return index

    def set_most(self, row: int, high: float) -> None:
        """Another upper limit of a constraint."""
        self._model.set_constraint_upper_bound(row, high)

    def set_least(self, row: int, low: float) -> None:
        """Another lower limit of a constraint."""
        self._model.set_constraint_lower_bound(row, low)

    def most(self, row: int) -> float:
        """The upper limit of a constraint."""
        return float(self._model.constraint_upper_bound(row))

    def searched(
        self,
        terms: Sequence[tuple[int, float]],
        limits: SearchLimits,
        left_s: Callable[[], float],
        start: Mapping[int, float] | None = None,
    ) -> Searched | None:
        """What HiGHS finds for an objective within limits; None when its process died.

        `start`: values of some columns, of which it makes an answer first, if it can. One that its column cannot have
        would end it: then there is no start.
        """
        costs = np.zeros(self.columns)
        for column, weight in terms:
            costs[column] += weight
        rows, bounds = self.rows(), np.asarray(self.bounds(), dtype=float).reshape(-1, 2)
        entries = [(at, column, weight) for at, (_, _, row) in enumerate(rows) for column, weight in row]
        possible = all(bounds[column, 0] <= value <= bounds[column, 1] for column, value in (start or {}).items())
        return searched(
            MixedProgram(
                costs,
                bounds[:, 0],
                bounds[:, 1],
                np.asarray(self.whole_columns(), dtype=bool),
                np.asarray([low for low, _, _ in rows], dtype=float),
                np.asarray([high for _, high, _ in rows], dtype=float),
                np.asarray([at for at, _, _ in entries], dtype=np.int64),
                np.asarray([column for _, column, _ in entries], dtype=np.int64),
                np.asarray([weight for _, _, weight in entries], dtype=float),
                (start if possible else None) or {},
            ),
            limits,
            left_s,
        )

    # Wide: what limits a search, and what it starts from, varies from caller to caller.
    def minimise(
        self,
        terms: Sequence[tuple[int, float]],
        *,
        seconds: float,
        seed: int,
        gap: float = 0.0,
        nodes: int | None = None,
        start: Floats | None = None,
        fixed: Mapping[int, float] | None = None,
        left_s: Callable[[], float] | None = None,
    ) -> ProgramSolution | None:
        """The best values for an objective; None when the rows contradict each other.

        `gap` is the relative one at which the search may end, `nodes` the most that it looks at: a limit that is the
        same on any machine, unlike `seconds`. `start` are values, of the first columns, to start from; `fixed` columns
        have to take these values, this time. Where `left_s` says that none are left, the best until then is
        taken.

        Raises
        ------
        FabrictoolError
            FT2902 when nothing was found in time, FT2901 when the engine is missing.
        KeyboardInterrupt
            At once; the engine's thread ends with the process.
        """
        costs = np.zeros(self.columns)
        for column, weight in terms:
            costs[column] += weight
        self._model.clear_objective()
        for column in np.flatnonzero(costs).tolist():
            self._model.set_var_objective_coefficient(column, float(costs[column]))
        self._model.clear_hints()
        for column, value in enumerate(start if start is not None else ()):
            self._model.add_hint(column, float(value))
        bounds = {column: self._bounds(column) for column in fixed or {}}
        for column, value in (fixed or {}).items():
            self._set_bounds(column, value, value)
        try:
            engine, cut = self._engine(seconds if self._whole else max(seconds, LEAST_LP_S), seed, gap, nodes, left_s)
        finally:
            for column, (low, high) in bounds.items():
                self._set_bounds(column, low, high)
        return self._solution(engine, costs, 0.0 if cut else _patience(seconds, nodes))

    def _solution(self, engine: Any, costs: Floats, patience: float) -> ProgramSolution | None:
        """`patience`: seconds that it might take; 0: it was interrupted."""
        used = np.flatnonzero(costs).tolist()
        status = engine.status()
        codes = self._engines.SolveStatus
        if status == codes.INFEASIBLE:
            return None
        # A relaxation that was cut short bounds nothing.
        good = (codes.OPTIMAL, codes.FEASIBLE) if self._whole else (codes.OPTIMAL,)
        if status not in good or not engine.has_solution():
            raise FabrictoolError.of(
                "FT2902",
                "the solver found nothing in time",
                hint="more time: `fabrictool plan --budget 2m -o FILE`",
            )
        values = np.asarray(engine.variable_values(), dtype=float)
        objective = math.fsum(costs[column] * values[column] for column in used)
        bound = float(engine.best_objective_bound()) if self._whole else objective
        none = np.zeros(0)
        return ProgramSolution(
            values=values,
            objective=objective,
            bound=min(bound, objective) if used else objective,
            optimal=status == codes.OPTIMAL,
            in_time=status == codes.OPTIMAL or engine.wall_time() < 0.98 * patience,
            prices=none if self._whole else np.asarray(engine.dual_values(), dtype=float),
            reduced=none if self._whole else np.asarray(engine.reduced_costs(), dtype=float),
        )

    def _bounds(self, column: int) -> tuple[float, float]:
        return self._model.var_lower_bound(column), self._model.var_upper_bound(column)

    def _set_bounds(self, column: int, low: float, high: float) -> None:
        self._model.set_var_lower_bound(column, low)
        self._model.set_var_upper_bound(column, high)

    def _engine(
        self, seconds: float, seed: int, gap: float, nodes: int | None, left_s: Callable[[], float] | None
    ) -> tuple[Any, bool]:
        """The engine with its answer, and whether it was interrupted."""
        engine = self._engines.ModelSolverHelper("scip" if self._whole else "glop")
        if not engine.solver_is_supported():
            raise FabrictoolError.of("FT2901", "the MIP engine is missing from the installed ortools", hint="reinstall")
        engine.set_time_limit_in_seconds(_patience(seconds, nodes))
        if self._whole:
            engine.set_solver_specific_parameters(
                f"randomization/randomseedshift = {seed % 2**31}\nparallel/maxnthreads = 1\nlimits/gap = {gap}\n"
                # Rows that are kept within 1e-6: with a tolerance as large as that SCIP finds them infeasible at times.
                "numerics/feastol = 1e-8\nmisc/catchctrlc = FALSE\n"
                + (FOR_FEW_COLUMNS if self.columns <= FEW_COLUMNS and gap else FOR_MANY_COLUMNS)
                + (f"limits/totalnodes = {nodes}\n" if nodes is not None else "")
            )
        # The engine answers no signal; a thread of its own lets Ctrl-C end the wait at once.
        thread = threading.Thread(target=engine.solve, args=(self._model,), daemon=True)
        thread.start()
        interrupted = False
        while thread.is_alive():
            thread.join(0.2)
            if left_s is not None and left_s() <= 0.0 and thread.is_alive():
                engine.interrupt_solve()
                interrupted = True
        return engine, interrupted


def _patience(seconds: float, nodes: int | None) -> float:
    return seconds if nodes is None else PATIENCE * seconds
