"""The placement by constraint programming: the papers' own method (OpenTela, paper 001, section 3.5), on CP-SAT.

Columns and rows are those of `formulation`, so that no rule is written twice. CP-SAT knows whole numbers only: loads
are counted in small steps, coefficients are rounded, and every row gets just the slack that this can cost. What CP-SAT
searches is therefore a relaxation: when it finds no solution there is none, and its bound, less what rounding can cost,
holds for the true program. The replica counts that it chooses are then loaded and judged by the linear program, in
floating point, one objective after another as in `exact`. Its search is repeatable: one thread, and a limit on the work
done instead of the time, roughly `deadline_s` seconds in all.

Of the paper's constraints, C1 (devices) are rows; C2 (memory) holds for every option, per replica; C3, one pair of data
and tensor parallelism for each model and pool, is `CpUniformSolver`: it only narrows the choice.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.infeasible import explain_infeasible, require_options
from fabrictool.planner.problem import Solution, StageResult
from fabrictool.planner.solvers.rounding import rounded
from fabrictool.planner.stages import LATENCY_TOLERANCE, clean, slack, spared, stage_names, tolerance
from fabrictool.planner.work import SearchWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fabrictool.domain.specs import Phase
    from fabrictool.planner.problem import PlacementProblem, PoolKey
    from fabrictool.planner.program import Floats, ProgramSolution, Terms

LEVEL = 1e-4
"""The step in which replicas at a load level are counted; a finer one makes the search much slower."""
QUANTUM = 1e-7
"""The step of other columns that need not be whole: requests/s, moves."""
PRECISION = 2.0**30
"""Largest coefficient where coefficients have to be rounded."""
LIMIT = 2.0**58
"""No row's sum gets larger: CP-SAT counts in 64 bits."""
NOTHING = 1e-12
"""Smaller weights are what is left of equal ones."""
WORK = 0.5
"""Units of CP-SAT's deterministic time a second; 0.3 to 0.9 were seen on two shared cores."""
MEMORY_MB = 4096
"""That CP-SAT may take, as far as it counts its own."""
MOST_OPTIONS = 3000
"""Beyond it its model alone takes gigabytes, and its search ends far from the bound."""
NEAR = 2 * LATENCY_TOLERANCE
"""Gap up to which a placement counts as optimal: twice, as the stage and those after it may have used their slack."""
ROUNDS = 3
"""Passes over the rows in search of upper bounds."""


class CpSolver:
    """See the module's docstring."""

    name = "cp"
    uniform = False

    def solve(
        self, problem: PlacementProblem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields a solution after each stage; the last one is the answer."""
        require_options(problem)
        if len(problem.options) > MOST_OPTIONS:
            message = f"{len(problem.options):,} options are too many for CP-SAT: {MOST_OPTIONS:,} at most"
            raise FabrictoolError.of("FT2904", message, hint="`--solver exact`")
        search = _Search(problem, deadline_s, seed, uniform=self.uniform)
        for name in stage_names(problem):
            if search.whole.terms(name):
                counts, loads, stages = search.stage(name)
                # What it proves is proved of rounded numbers: only the bound in floating point says how good it is.
                optimal = search.optimal and all(map(search.is_close, stages))
                title = f"{self.name} (CP-SAT and GLOP in OR-Tools)"
                yield Solution(counts, loads, stages, title, optimal, work=search.work.spent)


class CpUniformSolver(CpSolver):
    """With C3: replicas of a model on a pool are all alike, per phase. Bounds hold under this rule only."""

    name = "cp-uniform"
    uniform = True


class _Search:
    """One run: the integer program, its relaxation, and the best placement so far."""

    def __init__(self, problem: PlacementProblem, deadline_s: float, seed: int, *, uniform: bool) -> None:
        every = range(len(problem.options))
        self._problem, self._seconds, self._seed = problem, deadline_s, seed
        self.work = SearchWork(deadline_s)
        self.whole = Formulation(problem, every, whole=True)
        self.optimal = True
        self._relaxed = Formulation(problem, every, whole=False)
        self._groups = _alternatives(problem) if uniform else []
        groups = [[self._column(i) for i in group] for group in self._groups]
        self._integers = _Integers(self.whole, groups)
        self._answer: ProgramSolution | None = None
        self._bounds: dict[str, float] = {}

    def stage(self, name: str) -> tuple[dict[int, int], dict[int, float], tuple[StageResult, ...]]:
        """Minimises one objective and keeps it from then on; counts, loads and all stages so far."""
        if name == "moves" and self._answer is not None:
            self._spare(self._answer)
        below = self._relaxed.minimise(name, seconds=self._seconds, seed=self._seed)
        if below is None:
            raise explain_infeasible(self._problem)
        self._bounds[name] = below.objective
        least = below.objective
        now = self._answer = self._better(name, self._answer, self._near(name, below))
        if now is None or self.whole.value(name, now) > least + tolerance(name, least):
            now = self._improve(name)
            least = self.whole.value(name, now)
        self._answer = now
        limit = least + slack(self._problem, name, least) + self._integers.lost(self.whole.terms(name))
        for formulation in (self.whole, self._relaxed):
            formulation.keep(name, limit)
        values = {stage: self.whole.value(stage, now) for stage in self._bounds}
        stages = tuple(StageResult(n, clean(v), clean(min(v, self._bounds[n]))) for n, v in values.items())
        return self.whole.counts(now), self.whole.loads(now), stages

    def _spare(self, now: ProgramSolution) -> None:
        """Stages before may become a little worse again where that saves moves."""
        for name, share in spared(self._problem, self._bounds).items():
            limit = self.whole.value(name, now) * (1.0 + share) + self._integers.lost(self.whole.terms(name))
            for formulation in (self.whole, self._relaxed):
                formulation.keep(name, limit)

    def is_close(self, stage: StageResult) -> bool:
        """Whether it is as near its bound as tolerances and rounding allow."""
        value = abs(stage.objective)
        room = NEAR * max(0.1, value) + value * spared(self._problem, [stage.name]).get(stage.name, 0.0)
        return stage.objective - stage.bound <= room + self._integers.lost(self.whole.terms(stage.name))

    def _improve(self, name: str) -> ProgramSolution:
        seconds = self.work.share(name)
        result = self._integers.minimise(self.whole.terms(name), WORK * seconds, self._seed, self._answer)
        if result is None:
            raise explain_infeasible(self._problem)
        self.work.spent += 0.0 if result.optimal else seconds
        self._bounds[name] = max(self._bounds[name], result.bound)
        # The counts may keep an earlier stage within rounding only: then what was there before remains.
        better = None if result.values is None else self._loaded(name, self._counts(result.values))
        self.optimal = self.optimal and result.optimal and better is not None
        best = self._better(name, self._answer, better)
        if best is None:
            raise FabrictoolError.of("FT2902", "CP-SAT found nothing in time", hint="more time, or `--solver exact`")
        return best

    def _better(self, name: str, *answers: ProgramSolution | None) -> ProgramSolution | None:
        there = [answer for answer in answers if answer is not None]
        return min(there, key=lambda answer: self.whole.value(name, answer), default=None)

    def _near(self, name: str, below: ProgramSolution) -> ProgramSolution | None:
        """The relaxation rounded to whole replicas, where that keeps the rules and the stages before."""
        distance = {i: self._relaxed.distance(below, i) for i in self._relaxed.chosen}
        counts = rounded(self._problem, self._relaxed.usage(below), distance)
        if any(sum(counts.get(i, 0) > 0 for i in group) > 1 for group in self._groups):
            return None
        return self._loaded(name, counts)

    def _loaded(self, name: str, counts: dict[int, int]) -> ProgramSolution | None:
        return self.whole.minimise(name, seconds=self._seconds, seed=self._seed, counts=counts)

    def _counts(self, values: Floats) -> dict[int, int]:
        return {i: round(float(values[self._column(i)])) for i in self.whole.chosen}

    def _column(self, i: int) -> int:
        ((column, _),) = self.whole.count(i)
        return column


def _alternatives(problem: PlacementProblem) -> list[list[int]]:
    """Options of which one at most may be used; what runs on clusters that do not answer is as it is."""
    groups: dict[tuple[str, PoolKey, Phase], list[int]] = defaultdict(list)
    for i, option in enumerate(problem.options):
        if option.key not in problem.fixed:
            groups[option.model, option.pool.key, option.phase].append(i)
    return [group for group in groups.values() if len(group) > 1]


_Row: TypeAlias = "tuple[float, float, Any, Floats]"
"""(least, most, columns, weights)."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What CP-SAT found, in the program's own units."""

    values: Floats | None
    """None when the time was too short for any."""
    bound: float
    """Of the true program: what rounding can cost is taken off."""
    optimal: bool


class _Integers:
    """A program in whole numbers, of which every solution of the true one, rounded up, is a solution.

    Replicas at a level or above take the place of replicas at that level, and all of an option that of its idle ones:
    then demand and devices are kept without any slack. Objectives that are kept get none either: their limits leave
    room for what rounding costs.
    """

    def __init__(self, formulation: Formulation, alternatives: Iterable[Sequence[int]]) -> None:
        """`alternatives`: groups of columns of which one at most may be positive."""
        from ortools.sat.python import cp_model  # noqa: PLC0415 - --help must not pay for it

        self._engine = cp_model
        self._alternatives = alternatives
        self._program = formulation.program
        self._rules = len(self._program.rows())
        self._whole = np.array(self._program.whole_columns(), dtype=bool)
        self._unit = np.where(self._whole, 1.0, QUANTUM)
        self._exact = self._whole.copy()
        self._chains = [formulation.ladder(i) for i in formulation.chosen]
        self._above: dict[int, int] = {}
        for chain in self._chains:
            self._unit[chain] = LEVEL
            self._exact[chain[0]] = True  # all replicas of an option are a whole number
            self._above.update(itertools.pairwise(chain))
        self._low, self._high = np.zeros(0), np.zeros(0)
        self._model: Any = None
        self._columns: list[Any] = []

    def minimise(self, terms: Terms, work: float, seed: int, start: ProgramSolution | None) -> _Found | None:
        """The best values found; None when there is no solution."""
        self._build()
        used, costs = self._chained(terms)
        scale = self._scale(used, costs)
        self._model.minimize(self._sum(used, _down(costs * self._unit[used] * scale)))
        if start is not None:
            for column, value in zip(self._columns, self._counted(start.values), strict=True):
                self._model.add_hint(column, value)
        engine, status = self._run(work, seed)
        if status == self._engine.INFEASIBLE:
            return None
        some = status in (self._engine.OPTIMAL, self._engine.FEASIBLE)
        return _Found(
            values=np.array([engine.value(column) for column in self._columns]) * self._unit if some else None,
            bound=engine.best_objective_bound / scale - self.lost(terms),
            optimal=status == self._engine.OPTIMAL,
        )

    def lost(self, terms: Terms) -> float:
        """By how much rounding can raise an objective."""
        used, costs = self._chained(terms)
        loose = ~self._exact[used]
        return math.fsum(np.maximum(0.0, costs[loose]) * self._unit[used[loose]])

    def _build(self) -> None:
        """The model of the rows as they stand now: each stage adds one."""
        rows = [(least, most, *self._chained(terms)) for least, most, terms in self._program.rows()]
        self._low, self._high = np.array(self._program.bounds(), dtype=float).T.copy()
        self._bound(rows)
        self._model = self._engine.CpModel()
        bottom, top = (np.ceil(v / self._unit - QUANTUM).astype(int).tolist() for v in (self._low, self._high))
        self._columns = [self._model.new_int_var(a, b, "") for a, b in zip(bottom, top, strict=True)]
        for r, row in enumerate(rows):
            self._add(*row, kept=r >= self._rules)
        for lower, upper in self._above.items():
            self._model.add(self._columns[upper] <= self._columns[lower])
        for group in self._alternatives:
            used = [self._model.new_bool_var("") for _ in group]
            self._model.add_at_most_one(used)
            for column, flag in zip(group, used, strict=True):
                self._model.add(self._columns[column] == 0).only_enforce_if(flag.negated())

    def _chained(self, terms: Iterable[tuple[int, float]]) -> tuple[Any, Floats]:
        """Columns and weights: replicas at a level are those at it or above, less those above it."""
        weights: dict[int, float] = defaultdict(float)
        for column, weight in terms:
            weights[column] += weight
            if column in self._above:
                weights[self._above[column]] -= weight
        used = {column: weight for column, weight in weights.items() if abs(weight) > NOTHING}
        return np.array(list(used), dtype=int), np.array(list(used.values()), dtype=float)

    def _counted(self, values: Floats) -> list[int]:
        """Columns in CP-SAT's units."""
        values = values.copy()
        for chain in self._chains:
            values[chain] = np.cumsum(values[chain][::-1])[::-1]
        units = np.where(self._exact, np.round(values / self._unit), np.ceil(values / self._unit - QUANTUM))
        return [int(value) for value in np.clip(units, 0, np.ceil(self._high / self._unit - QUANTUM))]

    def _bound(self, rows: Sequence[_Row]) -> None:
        """Upper bounds that follow from the rows.

        What they leave unbounded is bounded by the value at which it satisfies each row by itself: no objective has a
        negative weight, so more than that is of no use.
        """
        for _ in range(ROUNDS):
            for least, most, used, weights in rows:
                if most < math.inf:
                    self._tighten(most, used, weights)
                if least > -math.inf:
                    self._tighten(-least, used, -weights)
        for column in np.flatnonzero(np.isinf(self._high)):
            alone = [1.0]
            for least, most, used, weights in rows:
                here = used == column
                if here.any():
                    rest = float(np.abs(weights[~here]) @ self._high[used[~here]])
                    weight = abs(float(weights[here][0]))
                    alone += [(abs(limit) + rest) / weight for limit in (least, most) if math.isfinite(limit)]
            self._high[column] = max(alone)

    def _tighten(self, limit: float, used: Any, weights: Floats) -> None:
        """By a row `weights` × columns <= `limit`."""
        up = weights > 0
        if np.isinf(self._high[used[~up]]).any():
            return
        least = float(weights[up] @ self._low[used[up]] + weights[~up] @ self._high[used[~up]])
        room = self._low[used[up]] + (limit - least) / weights[up]
        room = np.where(self._whole[used[up]], np.floor(room + QUANTUM), room)
        self._high[used[up]] = np.maximum(self._low[used[up]], np.minimum(self._high[used[up]], room))

    def _add(self, least: float, most: float, used: Any, weights: Floats, *, kept: bool) -> None:
        """A row, as one for each side: each with the slack that rounding columns up can cost."""
        loose = np.where(self._exact[used] | kept, 0.0, weights * self._unit[used])
        scale = self._scale(used, weights)
        exact = weights * self._unit[used] * scale
        if most < math.inf:
            limit = math.floor((most + float(loose[loose > 0].sum())) * scale + QUANTUM)
            self._model.add_linear_constraint(self._sum(used, _down(exact)), -(2**62), limit)
        if least > -math.inf:
            limit = math.ceil((least + float(loose[loose < 0].sum())) * scale - QUANTUM)
            self._model.add_linear_constraint(self._sum(used, -_down(-exact)), limit, 2**62)

    def _scale(self, used: Any, weights: Floats) -> float:
        """What a row is multiplied by: as little as makes all whole, else for so many digits as there is room for."""
        if used.size == 0:
            return 1.0
        for scale in (1.0, 1.0 / LEVEL, 1.0 / QUANTUM):
            exact = weights * self._unit[used] * scale
            if np.allclose(exact, np.round(exact), rtol=0, atol=1e-12 * scale):
                return scale
        room = LIMIT / max(1.0, float(np.abs(weights) @ self._high[used]))
        return min(room, PRECISION / float(np.abs(weights * self._unit[used]).max()))

    def _sum(self, used: Any, weights: Floats) -> Any:
        columns = [self._columns[column] for column in used]
        return self._engine.LinearExpr.weighted_sum(columns, [int(weight) for weight in weights])

    def _run(self, work: float, seed: int) -> tuple[Any, Any]:
        engine = self._engine.CpSolver()
        engine.parameters.num_workers = 1
        engine.parameters.random_seed = seed % 2**31
        engine.parameters.max_deterministic_time = work
        engine.parameters.linearization_level = 1
        engine.parameters.max_memory_in_mb = MEMORY_MB
        engine.parameters.catch_sigint_signal = False
        # As in `program`: a thread of its own lets Ctrl-C end the wait at once.
        status: list[Any] = []
        errors: list[MemoryError] = []

        def solve() -> None:
            try:
                status.append(engine.solve(self._model))
            except MemoryError as error:
                errors.append(error)

        thread = threading.Thread(target=solve, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.2)
        finally:
            engine.stop_search()
        if errors:
            raise errors[0]
        return engine, status[0]


def _down(values: Floats) -> Floats:
    """Rounded down, but for what is whole but for the last digit."""
    near = np.round(values)
    return np.where(np.abs(values - near) <= 1e-9 * np.maximum(1.0, np.abs(values)), near, np.floor(values))
