"""A problem solved once more with something more asked of it, in steps that are counted like those of a search.

So what is explained ends where its work ends, on any machine, and sooner where a clock says so. Partitions that are
alike are one in it: nobody is told that a plan could as well be its mirror image.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.explaining.wording import compared, first_difference
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.highs import SearchLimits
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers.steps import STEPS_PER_UNIT
from fabrictool.planner.solvers.symmetry import MergedProblem, merged
from fabrictool.planner.stages import in_order, residual, rounding, user_stages, values_of
from fabrictool.planner.work import StepwiseWork

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.highs import Searched
    from fabrictool.planner.problem import PlacementProblem, Solution
    from fabrictool.planner.program import ProgramSolution, Terms

FEW = 450
"""Options up to which a problem is solved again in whole numbers; of alike partitions they count once."""
NODES, GAP = 50, 1e-4
"""Of one program: most are proved at the root, and the first answer says enough of the others. With more of them one
program could take all the work that there is for all."""
COLUMNS_PER_UNIT = 1_000
"""Of a relaxation, in a unit of work."""
LATE = "was not found out in time"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of solving again."""

    ending: Literal["compared", "impossible", "late"]
    change: tuple[str, float] | None = None
    """The first stage that differs from the plan's, and by how much it is larger; None: it is as good."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Of the smaller problem."""
    proved: bool = True
    """Whether nothing that was asked for is better."""

    def words(self, currency: str) -> str:
        """Against the plan; of what may be better yet, "up to"."""
        text = compared(self.change, currency)
        return text if self.proved or self.change is None or self.change[1] < 0 else f"up to {text}"


class Resolver:
    """One solution, and what else its problem could have had; in work that ends."""

    def __init__(self, problem: PlacementProblem, solution: Solution, seed: int, work: StepwiseWork) -> None:
        """`work` is what may be done; it is counted there."""
        self.whole, self.solution, self.seed, self.work = problem, solution, seed, work
        every = {i: (i,) for i in range(len(problem.options))}
        # Where something runs, another place is a move, however alike it is.
        smaller = MergedProblem(problem, problem, every) if problem.runs else merged(_without_unread(problem))
        self.problem = smaller.problem
        self.members: Mapping[int, Sequence[int]] = smaller.members
        self.place_of = {member: i for i, members in smaller.members.items() for member in members}
        """Option of the whole problem → that of the smaller one."""
        self.counts = smaller.counts_of(solution.counts)
        self.values = values_of(solution)

    def within(self, work: StepwiseWork) -> Resolver:
        """The same with other work to do it in."""
        other = copy(self)
        other.work = work
        return other

    @property
    def is_small(self) -> bool:
        """Whether it is solved again in whole numbers."""
        return len(self.problem.options) <= FEW

    def program(self) -> Formulation:
        """Of everything in whole numbers, for more rows."""
        program = Formulation(self.problem, range(len(self.problem.options)), whole=True)
        program.tighten()
        return program

    def relaxation(self) -> Formulation:
        return Formulation(self.problem, range(len(self.problem.options)), whole=False)

    def relaxed(self, relaxation: Formulation, name: str) -> ProgramSolution | None:
        """The least of a stage; None where there is none. Raises FabrictoolError FT2902 when work or time is up."""
        self._begin_step()
        answer = relaxation.program.minimise(
            relaxation.terms(name), seconds=LEAST_LP_S, seed=self.seed, left_s=self.work.for_steps_s
        )
        self.work.done(relaxation.program.columns // COLUMNS_PER_UNIT)
        return answer

    def best(self, program: Formulation, guess: Mapping[int, int] | None = None) -> Comparison:
        """The objectives in turn, up to the first that differs from the plan's; `guess`: counts that will do, which is
        where it begins, and what it ends with if nothing else is found in time.
        """
        names = [name for name in user_stages(self.problem) if program.terms(name)]
        # What is nothing cannot be less: stages that are, and come first, are kept and not searched.
        none = next((at for at, name in enumerate(names) if self._was(name) > residual(self.problem, name, 0.0)), None)
        begin = len(names) - 1 if none is None else none
        try:
            for name in names[:begin]:
                program.keep(name, self._was(name) + rounding(self._was(name)))
            outcome = self._in_turn(program, names[begin:], guess)
            if outcome.ending == "impossible" and begin:
                for name in names[:begin]:
                    program.keep(name, math.inf)
                outcome = self._in_turn(program, names, guess)
            if outcome.ending == "compared" or not guess:
                return outcome
        except FabrictoolError:
            pass
        return self.compared(guess, proved=False) if guess else Comparison("late")

    def _in_turn(
        self, program: Formulation, names: Sequence[str], guess: Mapping[int, int] | None = None
    ) -> Comparison:
        """Raises FabrictoolError FT2902 when work or time is up."""
        counts: dict[int, int] = {}
        proved = True
        for name in names:
            try:
                result = self.searched(program, program.terms(name), counts or guess or {})
            except FabrictoolError:
                if not counts:
                    raise
                return self.compared(counts, proved=False)
            if result.values is None:
                if result.ending == "INFEASIBLE" and not counts:
                    return Comparison("impossible")
                return self.compared(counts, proved=False) if counts else Comparison("late")
            counts, value = program.counts(result), _value(program.terms(name), result)
            proved = proved and result.ending == "OPTIMAL"
            if first_difference(self.problem, self.values, {name: value}, [name]) is not None:
                break
            program.keep(name, value + rounding(value))
        return self.compared(counts, proved=proved)

    def compared(self, counts: Mapping[int, int], *, proved: bool) -> Comparison:
        """What counts are worth, loaded as well as can be. Raises FabrictoolError FT2902 when that cannot be had."""
        values = self.worth(counts)
        if values is None:
            raise FabrictoolError.of("FT2902", "these counts cannot be loaded within the solver's digits")
        change = first_difference(self.problem, self.values, values, user_stages(self.problem))
        return Comparison("compared", change, counts, proved)

    def worth(self, counts: Mapping[int, int]) -> dict[str, float] | None:
        """The values of what users feel; None where the counts break a rule."""
        loads = Formulation.of_counts(self.problem, counts)
        judged = in_order(loads, user_stages(self.problem), seconds=LEAST_LP_S, seed=self.seed)
        self.work.done(1)
        return None if judged is None else judged[0]

    def searched(self, program: Formulation, terms: Terms, start: Mapping[int, int], gap: float = GAP) -> Searched:
        """One step. Raises FabrictoolError FT2902 when work or time is up."""
        self._begin_step()
        limits = SearchLimits(gap, NODES, self.seed, min(LEAST_LP_S, self.work.for_steps_s()), restarts=False)
        begin = program.beginning(start) if start else None
        result = program.program.searched(terms, limits, self.work.for_steps_s, begin)
        if result is None or not result.in_time:
            if result is not None:
                self.work.cut()
            raise FabrictoolError.of("FT2902", "the solver found nothing in time")
        self.work.done(result.steps * len(program.chosen) // STEPS_PER_UNIT)
        return result

    def _begin_step(self) -> None:
        if not self.work.more():
            raise FabrictoolError.of("FT2902", "no work is left to explain more with")

    def _was(self, name: str) -> float:
        return self.values.get(name, 0.0)


def in_parts(work: StepwiseWork, parts: int) -> Iterator[StepwiseWork]:
    """As many parts, each with an even share of what those before it left; what each does is counted in the whole."""
    for left in range(parts, 0, -1):
        part = _part(work, left)
        yield part
        work.spent += part.spent


def _part(work: StepwiseWork, parts: int) -> StepwiseWork:
    left_s = work.for_steps_s()
    others_s = left_s - left_s / parts if left_s < math.inf else 0.0
    return StepwiseWork(math.ceil(max(0, work.limit - work.spent) / parts), lambda: work.for_steps_s() - others_s)


def _value(terms: Terms, result: Searched) -> float:
    values = result.values
    return 0.0 if values is None else math.fsum(weight * float(values[column]) for column, weight in terms)


def _without_unread(problem: PlacementProblem) -> PlacementProblem:
    """Without figures of partitions that neither an objective nor a limit reads: by these nothing differs."""
    read = {*problem.objective, *({"power": "energy"}.get(limit.resource, limit.resource) for limit in problem.limits)}
    unread: dict[str, object] = {} if "carbon" in read else {"carbon_per_kwh": None}
    if not {"energy", "carbon"} & read:
        unread["power_per_node_w"] = 0.0
    # Options may stand in partitions of clusters that do not answer, which are none of the problem's.
    every = {*problem.pools, *(pool for option in problem.options for pool in option.pools)}
    plain = {pool: replace(pool, **unread) for pool in every}  # type: ignore[arg-type]
    options = tuple(
        replace(option, pool=plain[option.pool], others=tuple((plain[pool], tp) for pool, tp in option.others))
        for option in problem.options
    )
    return replace(problem, pools=tuple(plain[pool] for pool in problem.pools), options=options)
