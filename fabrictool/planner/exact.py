r"""The exact solver: replica counts as integers, load as a continuous flow, solved by MIP, one objective at a time.

For model m and option o (pool n, tensor parallelism t): :math:`k_o \in \mathbb{N}` replicas, :math:`y_o \ge 0`
requests/s, :math:`u_m \ge 0` requests/s unserved:

* demand      :math:`\sum_{o \in m} y_o + u_m = \lambda_m`
* capacity    :math:`y_o \le \rho\, c_o\, k_o` with :math:`\rho` = 0.8
* devices     :math:`\sum_{o \in n} t_o k_o \le D_n`, and for each size s that occurs, whole nodes:
  :math:`\sum_{t_o \ge s} k_o \lfloor t_o / s \rfloor \le N_n \lfloor d_n / s \rfloor` (planner.md §3.6)
* counts      :math:`k^{min}_m \le \sum k_o \le k^{max}_m`; stable pools alone reach the minimum
* pins, and with *spread* at most :math:`\lceil \sum k_o / S \rceil` replicas a site
* counts of clusters that do not answer are fixed

Objectives in order, each kept while the next is minimised: unserved demand by priority, then those of the
blueprint with the wishes of `place` after its SLO, then moves against what runs, then the number of replicas, then a
fixed tie-break. Latency is kept within 1 %: its figures are not that exact, and nothing is moved for less.
Objectives are recomputed here in floating point; the bound is the solver's own, and never above the value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, InfeasibleError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.planner.problem import ModelNeed, Option, Problem, Solution, StageResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ortools.linear_solver import pywraplp

PLANNING_UTILISATION = 0.8
"""Load that a replica is planned for; the rest absorbs bursts."""
TOLERANCE = 1e-6
"""Slack with which a solved stage is kept, relative to its value (and absolute near zero)."""

LATENCY_TOLERANCE = 0.01
"""Slack of the latency stage; the forecast's own band is far wider (`fabrictool.simulator.calibration`)."""


class ExactSolver:
    """See the module's docstring."""

    name = "exact"

    def solve(
        self, problem: Problem, *, deadline_s: float, seed: int, warm: Solution | None = None
    ) -> Iterator[Solution]:
        """Yields one solution: each stage is solved to the end or to the deadline."""
        yield _Model(problem, seed, deadline_s).run()


class _Model:
    """The MIP of one problem."""

    def __init__(self, problem: Problem, seed: int, deadline_s: float) -> None:
        from ortools.linear_solver import pywraplp  # noqa: PLC0415 - 0.2 s and 30 MB that --help must not pay

        solver = pywraplp.Solver.CreateSolver("SCIP")
        if solver is None:
            raise FabrictoolError.of("FT2901", "the MIP engine is missing from the installed ortools", hint="reinstall")
        self._problem = problem
        self._solver = solver
        self._deadline_ms = max(100, int(deadline_s * 1000))
        self._optimal = True
        self._counts: list[float] = []
        self._loads: list[float] = []
        solver.SetSolverSpecificParametersAsString(
            f"randomization/randomseedshift = {seed % 2**31}\nparallel/maxnthreads = 1\n"
        )
        limit = {need.model: need.maximum for need in problem.needs}
        fixed = problem.fixed
        self._count = [
            solver.IntVar(fixed.get(o.key, 0), fixed.get(o.key, limit[o.model]), f"k{i}")
            for i, o in enumerate(problem.options)
        ]
        self._load = [solver.NumVar(0, solver.infinity(), f"y{i}") for i in range(len(problem.options))]
        self._unserved = {need.model: solver.NumVar(0, need.rate, f"u_{need.model}") for need in problem.needs}
        for need in problem.needs:
            self._demand_rows(need)
        self._device_rows()

    def run(self) -> Solution:
        """Solve the stages."""
        stages = []
        objective = list(self._problem.objective)
        objective.insert(1 if objective[:1] == ["slo"] else 0, "preference")
        names = ["served", *objective, "moves", "replicas", "tie-break"]
        for name in names:
            terms = self._stage_terms(name)
            if not terms:
                continue
            stages.append(self._minimise(name, terms))
        return Solution(
            {i: round(k) for i, k in enumerate(self._counts) if round(k)},
            {i: y for i, y in enumerate(self._loads) if y > TOLERANCE},
            tuple(stages),
            f"exact (SCIP in OR-Tools, {PLANNING_UTILISATION:.0%} planned utilisation)",
            self._optimal,
        )

    # -- rows -------------------------------------------------------------------------------------------------

    def _demand_rows(self, need: ModelNeed) -> None:
        add, problem = self._solver.Add, self._problem
        mine = problem.of(need.model)
        if not mine:
            if need.minimum or any(need.pins.values()):
                raise explain_infeasible(problem)
            add(self._unserved[need.model] == need.rate)
            return
        add(sum(self._load[i] for i in mine) + self._unserved[need.model] == need.rate)
        for i in mine:
            add(self._load[i] <= PLANNING_UTILISATION * problem.options[i].capacity * self._count[i])
        total = sum(self._count[i] for i in mine)
        stable = sum(self._count[i] for i in mine if problem.options[i].pool.stable)
        fixed = {i: problem.fixed[problem.options[i].key] for i in mine if problem.options[i].key in problem.fixed}
        add(total <= max(need.maximum, sum(fixed.values())))
        add(stable >= need.minimum)
        for (cluster, partition), wanted in sorted(need.pins.items()):
            there = [i for i in mine if _in(problem.options[i], cluster, partition)]
            add(sum(self._count[i] for i in there) == wanted)
        sites = sorted({problem.options[i].pool.site for i in mine})
        if need.spread_sites and len(sites) > 1:
            for site in sites:
                here = [i for i in mine if problem.options[i].pool.site == site]
                # count <= ceil(total / S), in whole numbers; what cannot be seen cannot be moved, so it may exceed that
                stuck = sum(fixed.get(i, 0) for i in here)
                excess = max(0, stuck - math.ceil(need.minimum / len(sites)))
                add(len(sites) * (sum(self._count[i] for i in here) - excess) <= total + len(sites) - 1)

    def _device_rows(self) -> None:
        problem = self._problem
        for pool in problem.pools:
            here = [i for i, o in enumerate(problem.options) if o.pool.key == pool.key]
            whole = pool.nodes * pool.devices_per_node
            self._solver.Add(sum(problem.options[i].tp * self._count[i] for i in here) <= whole)
            for size in sorted({problem.options[i].tp for i in here} - {1}):
                room = pool.nodes * (pool.devices_per_node // size)
                large = [i for i in here if problem.options[i].tp >= size]
                self._solver.Add(sum(self._count[i] * (problem.options[i].tp // size) for i in large) <= room)

    # -- stages -----------------------------------------------------------------------------------------------

    def _stage_terms(self, name: str) -> list[tuple[float, pywraplp.Variable]]:
        options, count, load = self._problem.options, self._count, self._load
        match name:
            case "served":
                return [(need.priority, self._unserved[need.model]) for need in self._problem.needs]
            case "slo":
                return [(1.0, load[i]) for i, option in enumerate(options) if not option.attains]
            case "latency":
                return [(option.latency_s, load[i]) for i, option in enumerate(options)]
            case "cost":
                return [(option.cost, count[i]) for i, option in enumerate(options)]
            case "energy":
                return [(option.power, count[i]) for i, option in enumerate(options)]
            case "preference":
                return [(option.preference, count[i]) for i, option in enumerate(options) if option.preference]
            case "moves":
                return self._moves()
            case "replicas":
                return [(1.0, count[i]) for i in range(len(options))]
        # Any fixed order will do, as long as it is the same everywhere: the first of the sorted options.
        return [(float(i), count[i]) for i in range(len(options))]

    def _moves(self) -> list[tuple[float, pywraplp.Variable]]:
        """Replicas to be started or stopped against what runs: |k - k_now|."""
        terms = []
        for i, option in enumerate(self._problem.options):
            now = self._problem.current.get(option.key, 0)
            move = self._solver.NumVar(0, self._solver.infinity(), f"move{i}")
            self._solver.Add(move >= self._count[i] - now)
            self._solver.Add(move >= now - self._count[i])
            terms.append((1.0, move))
        return terms

    def _minimise(self, name: str, terms: list[tuple[float, pywraplp.Variable]]) -> StageResult:
        solver = self._solver
        objective = solver.Objective()
        objective.Clear()
        for weight, variable in terms:
            objective.SetCoefficient(variable, weight)
        objective.SetMinimization()
        solver.SetTimeLimit(self._deadline_ms)
        status = solver.Solve()
        if status == solver.INFEASIBLE:
            raise explain_infeasible(self._problem)
        if status not in (solver.OPTIMAL, solver.FEASIBLE):
            raise FabrictoolError.of(
                "FT2902",
                f"the solver gave up in stage {name}",
                hint="more time: `fabrictool plan --time-limit SECONDS -o FILE`",
            )
        self._optimal = self._optimal and status == solver.OPTIMAL
        value = math.fsum(weight * variable.solution_value() for weight, variable in terms)
        bound = min(value, objective.BestBound())
        slack = TOLERANCE * max(1.0, abs(value))
        if name == "latency":
            slack = max(slack, LATENCY_TOLERANCE * value)
        # The solver forgets its solution with the next row or variable.
        self._counts = [variable.solution_value() for variable in self._count]
        self._loads = [variable.solution_value() for variable in self._load]
        solver.Add(sum(weight * variable for weight, variable in terms) <= value + slack)
        return StageResult(name, _clean(value), _clean(bound))


def explain_infeasible(problem: Problem) -> InfeasibleError:
    """The models whose rules cannot hold, each with the smallest relaxation that would let it."""
    complaints = []
    for need in problem.needs:
        options = [problem.options[i] for i in problem.of(need.model)]
        place = Place(thing=f"models.{need.model}")
        if not options:
            complaints.append(
                Complaint(
                    "FT2002",
                    f"{need.model}: no partition can hold a replica",
                    place,
                    "every partition is too small, not allowed by trust or placement, or its cluster is unknown",
                )
            )
            continue
        most = sum(_room(option) for option in _largest_per_pool(options) if option.pool.stable)
        if most < need.minimum:
            hint = f"lower replicas.min to {most}, or add devices, or widen trust and place"
            message = f"{need.model}: at least {need.minimum} replicas are wanted, {most} fit"
            complaints.append(Complaint("FT2003", message, place, hint))
        for (cluster, partition), wanted in sorted(need.pins.items()):
            there = [o for o in _largest_per_pool(options) if _in(o, cluster, partition)]
            room = sum(_room(option) for option in there)
            if room < wanted:
                message = f"{need.model}: {wanted} replicas are pinned to {cluster}, {room} fit"
                complaints.append(Complaint("FT2004", message, place, f"pin {room}, or another cluster"))
        pinned = sum(need.pins.values())
        if pinned > need.maximum:
            message = f"{need.model}: {pinned} replicas are pinned, replicas.max is {need.maximum}"
            complaints.append(Complaint("FT2004", message, place, f"raise replicas.max to {pinned}"))
    if not complaints:
        models = ", ".join(need.model for need in problem.needs)
        message = f"the minimum replicas of {models} do not fit together"
        complaints.append(
            Complaint("FT2001", message, Place(), "lower replicas.min of one of them, or add devices to a partition")
        )
    return InfeasibleError(complaints)


def _largest_per_pool(options: list[Option]) -> list[Option]:
    """Per pool the option with the smallest degree: the one of which most fit."""
    best: dict[tuple[str, str], Option] = {}
    for option in options:
        if option.pool.key not in best or option.tp < best[option.pool.key].tp:
            best[option.pool.key] = option
    return list(best.values())


def _room(option: Option) -> int:
    pool = option.pool
    free = pool.nodes * pool.devices_per_node
    return min(free // option.tp, pool.nodes * (pool.devices_per_node // option.tp))


def _in(option: Option, cluster: str, partition: str) -> bool:
    return option.pool.cluster == cluster and partition in ("", option.pool.partition)


def _clean(value: float) -> float:
    """Without the solver's last digits, which differ between machines."""
    return round(value, 6) + 0.0
