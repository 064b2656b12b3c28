"""The placement that a plan has: solved, played, and solved again where the replay misses what the tables thought met.

All rounds together keep within one time limit, counted in work: the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.apart_search import searched_apart
from fabrictool.planner.assign import assign
from fabrictool.planner.fairness import FAIRNESS
from fabrictool.planner.forecast import forecast
from fabrictool.planner.group_flows import divided_demands
from fabrictool.planner.hysteresis import steadied
from fabrictool.planner.judged import ROUNDS, lessons, shortfall, taught, with_reasons
from fabrictool.planner.node_spread import crowded
from fabrictool.planner.problem import replica_key
from fabrictool.planner.rehearsal import Asked, play
from fabrictool.planner.solvers.appraisal import settled
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.stages import clean, values_of
from fabrictool.planner.verify import violations
from fabrictool.planner.weights import planned_flows, planned_rates, weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.domain.plan import Forecast, Placement
    from fabrictool.planner.build import Tables
    from fabrictool.planner.judged import Again
    from fabrictool.planner.played import Played, PlayedLoss
    from fabrictool.planner.problem import OptionKey, PlacementProblem, Solution, Solver
    from fabrictool.planner.rehearsal import Rehearsal
    from fabrictool.planner.situation import Situation

BROKEN_RULE = "FT2903"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a placement is searched for."""

    seed: int = 0
    work_s: float = 60.0
    """Of the whole search: seconds of about one core's work, in hundredths."""
    solver: Solver = field(default_factory=ExactSolver)
    progress: Callable[[Solution], None] | None = None
    """Is told each better placement; with it, Ctrl-C ends the search and keeps the last one."""
    steady: bool = False
    """Whether replicas stay that some more demand would need again (`planner.hysteresis`)."""
    rehearsal: Rehearsal | None = field(default=None, compare=False)
    """Where what the replay needs is loaded during the search, which is a process's first; None: when it is played."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A placement, and what the replay says of it."""

    situation: Situation
    """With what the replay taught before."""
    problem: PlacementProblem
    """As it was solved: with these lessons."""
    tables: Tables
    solution: Solution
    placement: Placement
    played: Mapping[str, Played]
    after: Mapping[str, PlayedLoss]
    """Of models that are to survive a loss: what the rest then does."""
    stopped: bool
    """By Ctrl-C."""
    again: Again = ""
    """What came of another search after a replay that missed."""
    standing_by: Mapping[str, int] = field(default_factory=dict)
    """Model → replicas that stay only for what some more demand would need."""
    needed: Solution | None = None
    """Without these, where there are any: what the search came to, and other placements are compared with."""
    asked: tuple[PlacementProblem, Solution] | None = None
    """Of a placement that lessons led to: the problem without them, and its solution."""

    @property
    def lacks(self) -> tuple[float, ...]:
        """The less, the better, the first ones first."""
        values = values_of(self.solution)
        lost = {name: loss.played for name, loss in self.after.items()}
        first = (clean(values.get(name, 0.0)) for name in (FAIRNESS, "served", "survived"))
        return *first, *shortfall(self.problem, self.played), *shortfall(self.problem, lost)


def best(situation: Situation, options: SearchOptions, built: tuple[PlacementProblem, Tables] | None = None) -> Chosen:
    """The placement with the least that is unserved and that misses its SLO in the replay. `built`: what the situation
    leads to, where that is known.

    Raises
    ------
    InfeasibleError
        FT200x why there is none.
    FabrictoolError
        FT2902 nothing was found in time, FT2903 a rule is broken after all, FT2904 out of memory.
    """
    problem, tables = built or situation.build()
    if options.rehearsal is not None:
        options.rehearsal.prepare(situation.blueprint, situation.inventory, problem)
    first = last = chosen = _found(situation, problem, tables, options)
    left = round(options.work_s - first.solution.work, 2)
    repeatable, stopped, again = first.solution.repeatable, first.stopped, chosen.again
    ended, work = first.solution.ended, first.solution.work
    for _ in range(ROUNDS):
        learned = lessons(last.problem, last.solution, last.played, last.after)
        if not learned or stopped:
            break
        if ended or left <= 0.0:
            again, ended = "no time", True
            break
        taught_by = replace(situation, learned=(*last.situation.learned, *learned))
        within = replace(options, work_s=left)
        try:
            last = _found(taught_by, taught(problem, taught_by.learned), tables, within, last)
        except KeyboardInterrupt:
            if options.progress is None:
                raise
            stopped = True
            break
        except FabrictoolError as error:  # such as FT2902, no time: what was found before is a plan
            if any(problem.code == BROKEN_RULE for problem in error.problems):
                raise
            again, repeatable, ended = "no time", False, True  # it may have been the clock's
            break
        left = round(left - last.solution.work, 2)
        ended, work = last.solution.ended, round(work + last.solution.work, 2)
        # A search that the clock cut short decided what was learned, whichever placement is the better one.
        repeatable, stopped, again = repeatable and last.solution.repeatable, last.stopped, "searched"
        if last.lacks < chosen.lacks:
            chosen = replace(last, asked=(first.problem, first.solution))
    solution = replace(chosen.solution, repeatable=repeatable, ended=ended, work=work)
    return replace(chosen, solution=solution, stopped=stopped, again=again)


def forecast_of(chosen: Chosen, currency: str, seed: int = 0) -> Forecast:
    """What it is expected to do, and what stands in the way of what it is not shown to do."""
    problem, solution = chosen.problem, chosen.solution
    blueprint, tables = chosen.situation.blueprint, chosen.tables
    expected = forecast(blueprint, problem, solution, tables, currency, chosen.played, chosen.after, seed)
    return with_reasons(expected, problem, solution, chosen.again)


def _found(
    situation: Situation,
    problem: PlacementProblem,
    tables: Tables,
    options: SearchOptions,
    former: Chosen | None = None,
) -> Chosen:
    warm = None if former is None or former.solution.added else former.solution
    problem, solution, stopped = _searched(problem, options, warm)
    growth = float(situation.blueprint.hysteresis) if options.steady else 0.0
    larger, standing_by = steadied(problem, solution, growth, options.seed) if growth else (solution, {})
    if crowded(problem, larger.counts):
        larger, standing_by = solution, {}
    needed = settled(problem, solution, options.seed) if standing_by else None
    solution = settled(problem, larger, options.seed)
    placed = _placed(situation, problem, solution)
    divided = divided_demands(problem, solution)
    placement = weighted(problem, solution, placed, situation.weights, situation.group_weights, divided)
    rates, flows = planned_rates(problem, solution), planned_flows(problem, solution, divided)
    names = sorted(situation.blueprint.models)
    same = {} if former is None else {n: former.played[n] for n in names if _stays(n, placement, rates, former)}
    others = [name for name in names if name not in same]
    known = {} if former is None else {name: former.after[name] for name in same if name in former.after}
    surviving = [name for name in names if name not in known]
    what = situation.blueprint, situation.inventory, options.seed
    asked = Asked(*what, problem, placement, rates, others, surviving, flows)
    result = play(asked) if options.rehearsal is None else options.rehearsal.play(asked)
    played, after = same | result.played, known | result.after
    return Chosen(
        situation, problem, tables, solution, placement, played, after, stopped, standing_by=standing_by, needed=needed
    )


def _searched(
    problem: PlacementProblem, options: SearchOptions, warm: Solution | None
) -> tuple[PlacementProblem, Solution, bool]:
    """The problem with the columns of its solution, the solution, and whether Ctrl-C stopped the search."""

    def search(asked: PlacementProblem, work: float) -> tuple[Solution, bool]:
        within = max(0.01, round(options.work_s - work, 2))
        solutions = options.solver.solve(asked, deadline_s=within, seed=options.seed, warm=warm)
        return _last(_first_at_once(solutions, options.rehearsal), options.progress)

    return searched_apart(problem, search)


def _first_at_once(solutions: Iterator[Solution], rehearsal: Rehearsal | None) -> Iterator[Solution]:
    """The same; from the first one on the process has time for what comes after the search."""
    for at, solution in enumerate(solutions):
        yield solution
        if not at and rehearsal is not None:
            rehearsal.load()


def _stays(model: str, placement: Placement, rates: Mapping[OptionKey, float], former: Chosen) -> bool:
    """Whether a model was played in just this way before."""

    def shape(of: Placement, loads: Mapping[OptionKey, float]) -> list[object]:
        return [(replica, loads.get(replica_key(replica), 0.0)) for replica in of.replicas if replica.model == model]

    before = planned_rates(former.problem, former.solution)
    return model in former.played and shape(placement, rates) == shape(former.placement, before)


def _placed(situation: Situation, problem: PlacementProblem, solution: Solution) -> Placement:
    """The solution with names; raises FT2903 when it breaks a rule after all."""
    placement = assign(problem, solution, situation.names, situation.unseen)
    blind = situation.blind | {replica.cluster for replica in situation.unseen}
    refuse_broken(violations(situation.blueprint, situation.inventory, placement, blind, situation.now))
    return placement


def refuse_broken(broken: Sequence[str]) -> None:
    """Raises FT2903 with the rules that are broken, if there are any."""
    if broken:
        hint = "this is a bug of the planner: report it with blueprint and inventory"
        raise FabrictoolError.of(BROKEN_RULE, f"the placement breaks a rule: {'; '.join(broken)}", hint=hint)


def _last(search: Iterator[Solution], progress: Callable[[Solution], None] | None) -> tuple[Solution, bool]:
    solution = None
    try:
        for solution in search:
            if progress is not None:
                progress(solution)
    except KeyboardInterrupt:
        if solution is None or progress is None:
            raise
        return solution, True
    except MemoryError as error:
        hint = "`--solver exact` takes the least; else raise the memory limit"
        raise FabrictoolError.of("FT2904", "the solver ran out of memory", hint=hint) from error
    if solution is None:
        raise FabrictoolError.of("FT2902", "the solver found nothing")
    return solution, False
