"""The search behind `exact`: a first placement at once, then better ones, stage by stage, in steps of countable work.

The linear relaxation over all options gives bounds, and the options that matter (`core`). Its whole part, filled up, is
the first placement, or what runs is, filled up in the same way, where that is better. A stage is then improved in
steps: some models after others are placed anew, as an integer program with the devices that all others leave; and all
of them at once, over the core, or over all options where these are few. There its proof is one for the whole problem.

Each stage is kept while later ones are solved. Latency is kept within `LATENCY_TOLERANCE` of its *bound*: what the
search left of it is not given away a second time.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.fairness import FAIRNESS, joined
from fabrictool.planner.formulation import BY_CAPACITY, Formulation
from fabrictool.planner.infeasible import explain_infeasible
from fabrictool.planner.problem import PlacementProblem, Solution, StageResult
from fabrictool.planner.program import LEAST_LP_S
from fabrictool.planner.solvers import effort
from fabrictool.planner.solvers.capacity_cuts import add_rows
from fabrictool.planner.solvers.core import core_of, with_sites
from fabrictool.planner.solvers.first import first_placement
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.solvers.parties import parties
from fabrictool.planner.solvers.programs import SearchPrograms, has_few, is_tiny
from fabrictool.planner.solvers.shares import SLACK, KeptStage
from fabrictool.planner.solvers.splitting import DeviceSplits
from fabrictool.planner.solvers.steps import EngineSteps, nudge
from fabrictool.planner.stages import (
    TIDYING,
    TIE_BREAK,
    TOLERANCE,
    clean,
    kept,
    residual,
    rounding,
    spared,
    stage_names,
    user_stages,
)
from fabrictool.planner.tangents import LoadPrices
from fabrictool.planner.work import PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from fabrictool.planner.program import ProgramSolution
    from fabrictool.planner.work import StepwiseWork


# Long: what a search has placed so far is one state, and each kind of step changes all of it.
class PlacementSearch:
    """One run over all objectives in turn, and what it has placed so far."""

    # Wide: a problem, and how it is searched.
    def __init__(
        self,
        problem: PlacementProblem,
        solver: str,
        work: StepwiseWork,
        seed: int,
        warm: Mapping[int, int] | None = None,
        early: Mapping[int, int] | None = None,
    ) -> None:
        """`warm`: counts by option to begin with, such as those of the last plan; `early`: those of `solvers.early`."""
        problem = self._problem = with_sites(problem)
        self._solver, self._work, self._seed, self._warm, self._early = solver, work, seed, warm, early
        self._steps, self._rng = EngineSteps(work, seed), random.Random(f"large {seed}")
        work.done(1)
        relaxed = Formulation(problem, range(len(problem.options)), whole=False)
        alone = [name for name in user_stages(problem) if relaxed.terms(name)] == ["served", "latency"]
        self._splits = DeviceSplits.of(problem) if alone and not is_tiny(problem) else None
        # Tables of splits say more than a relaxation, tiny problems are proved, and where something runs time is short.
        closely = not (self._splits or is_tiny(problem) or problem.runs)
        self._core = core_of(problem, relaxed, work, seed, closely=closely, leans=closely and not has_few(problem))
        self._programs = SearchPrograms(problem, self._core)
        self._tiny, self._all = self._programs.tiny, self._programs.all
        self._is_by_tangents = self._all and self._programs.by_tangents
        self._counts: dict[int, int] = {}
        self._loads: dict[int, float] = {}
        self._values: dict[str, dict[str, float]] = {}
        """Stage → model → value."""
        self._limits: dict[str, KeptStage] = {}
        """Of the stages before."""
        self._bounds: dict[str, float] = {}
        self._reached: dict[str, float] = {}
        """Of stages that were let rise so that less moves: what they had come to."""
        self._optimal = self._repeatable = True
        self._part: effort.Part = "all" if problem.runs else "first"
        self._former: dict[str, float] = {}
        """What stages were kept within in the first pass."""
        self._spared_time: AbstractSet[str] = frozenset()
        """Stages that the second pass looks at only where they got worse."""
        self._begun_with, self._prices = 0, LoadPrices({}, {})
        self._told = False
        """Whether the last placement that was judged showed that programs thought too little of what loads cost."""
        self.stages = [n for n in stage_names(problem) if relaxed.terms(n) and (self._tiny or n != TIE_BREAK)]
        """Those that there is anything to; equals are settled for good only where that takes no time."""

    def stage(self, name: str) -> Iterator[Solution]:
        """Minimises one objective, and keeps it from then on."""
        left = len(self.stages) - self.stages.index(name)
        self._work.closing_s = self._core.relaxing_s * left / len(self.stages)
        if name == "moves":
            self._spare()
        known = [self._bounds[name]] if name in self._bounds and self._is_kept_as_before() else []
        self._bounds[name] = max([self._bound(name), *known])
        if not self._values and self._part != "second":
            self._begin(name)
        self._judge(name)
        yield self._solution()
        yield from self._improved(name)
        self._optimal = self._is_proved(name)
        self._keep(name, kept(self._problem, name, self._total(name), self._bounds[name]))
        if name == "moves":
            yield from self._tightened()

    def goes_on(self) -> bool:
        """Whether another pass over all stages is worth its time; then it begins, with what was found."""
        if not self._is_worth_another() or not self._work.more():
            return False
        self._programs.begin_again()
        self._former = {name: limit.most for name, limit in self._limits.items()}
        far = {name for name in self._values if name not in TIDYING and self._is_far(name)}
        self._spared_time = self._values.keys() - far if far and self._is_by_tangents else set()
        self._values, self._limits = {}, {}
        self._part, self._optimal, self._begun_with = "second", True, 0
        return True

    def _is_worth_another(self) -> bool:
        """Whether a second pass could bring users something."""
        felt = [name for name in self._values if name not in TIDYING]
        near = not any(map(self._is_far, felt))
        if near and self._is_by_tangents:  # that is quick
            near = all(self._gap(name) <= max(effort.CLOSE, self._enough(name)) for name in felt)
        return self._part == "first" and not (self._tiny or near or len(self._problem.options) > effort.PROVABLE)

    def _is_far(self, name: str) -> bool:
        return self._gap(name) > max(effort.AGAIN, self._enough(name))

    def _is_kept_as_before(self) -> bool:
        """Whether the stages before may come to no more than in the first pass, so that bounds of then hold."""
        return all(limit.most <= self._former[name] * (1 + SLACK) + SLACK for name, limit in self._limits.items())

    def _tightened(self) -> Iterator[Solution]:
        """What was spared for moves and did not save any is taken back."""
        for name in list(self._reached):
            self._judge(name)
            yield from self._improved(name)
            self._keep(name, self._total(name) + rounding(self._total(name)))

    def _spare(self) -> None:
        """Stages before may become a little worse again where that saves moves."""
        for name, share in spared(self._problem, self._values).items():
            total = self._reached[name] = self._total(name)
            self._keep(name, max(self._limits[name].most, total * (1.0 + share)))

    def _keep(self, name: str, most: float) -> None:
        """From now on the stage may come to so much."""
        limit = self._limits[name] = KeptStage.of(name, most, self._values[name])
        self._programs.keep(limit)

    # -- where a stage begins -------------------------------------------------------------------------------------

    def _bound(self, name: str) -> float:
        """What no solution can be better than, with the earlier stages where they are."""
        least = self._splits.unserved if self._splits is not None and name == "served" else 0.0
        return max(least, self._relaxed_bound(name))

    def _relaxed_bound(self, name: str) -> float:
        lowest = self._core.lowest
        if name in lowest and all(limit.most <= self._core.kept(limit.name, name) for limit in self._limits.values()):
            self._programs.learn(self._core.prices[name])
            return lowest[name]  # each stage before is at its own least
        if not self._core.whole or (self._work.ended and name in TIDYING):
            return 0.0  # it would take as long as what there was no time for; and nobody asks
        below = self._programs.relaxed.minimise(name, seconds=LEAST_LP_S, seed=self._seed)
        if below is None and not self._values:
            raise explain_infeasible(self._problem)
        if below is not None:
            self._programs.learn(self._programs.relaxed.prices(name, below))
        # There is a placement: that the relaxation denies it is a matter of digits, and leaves no bound but zero.
        return below.objective if below is not None else 0.0

    def _begin(self, name: str) -> None:
        """The best that is known; where all of that breaks a rule, whatever the integer solver finds first.

        Raises FabrictoolError FT2902 where the clock ends that before there is anything.
        """
        if self._splits is not None and not (self._warm or self._problem.runs):
            counts = self._splits.placement(self._steps)
            if counts is not None:
                self._counts = counts
                if self._judged(name):
                    return
        among = self._programs.options({}, by_capacity=False)
        counts = first_placement(self._problem, self._core, among, self._warm, self._early, self._seed)
        if counts is not None:
            self._counts = counts
            return
        program = self._program(name)
        self._work.closing_s = 0.0  # without a placement there is nothing to close
        for nodes in sorted({effort.QUICK, *[n for n in self._tries(name)[:1] if n > effort.QUICK]}):
            first = self._steps.by_highs(program, name, self._enough(name), nodes, {})
            if first is not None and first.values is not None:  # mostly, and far sooner than SCIP has one
                self._counts, self._begun_with = program.counts(first), nodes
                if self._judged(name):
                    if self._all and math.isfinite(first.bound):
                        self._raise_bound(name, min(first.bound, self._total(name)))
                    return
        whole = self._programs.program({}, by_capacity=False)
        answer = whole.minimise(
            name,
            seconds=LEAST_LP_S,
            seed=self._seed,
            gap=effort.CLOSE,
            nodes=effort.FIRST_NODES,
            left_s=self._work.left_s,
        )
        if answer is None:
            raise explain_infeasible(self._problem)
        self._counts, self._repeatable = whole.counts(answer), answer.in_time

    def _loaded(self, name: str) -> tuple[Formulation, ProgramSolution] | None:
        """The counts as they are, with the loads that are best for this stage."""
        among = self._programs.options(self._counts, by_capacity=False)
        loads = Formulation.of_counts(self._problem, self._counts, among)
        for limit in self._limits.values():
            limit.keep(loads)
        answer = loads.minimise(name, seconds=LEAST_LP_S, seed=self._seed)
        if answer is None:
            return None
        self._prices = loads.prices(name, answer)
        self._told = self._programs.learn(self._prices)
        return loads, answer

    def _judge(self, name: str) -> None:
        if not self._judged(name):
            raise explain_infeasible(self._problem)

    def _judged(self, name: str) -> bool:
        """Sets loads and values; False when the counts cannot keep what was kept before."""
        loaded = self._loaded(name)
        if loaded is None:
            return False
        loads, answer = loaded
        self._loads = loads.loads(answer)
        self._values = {stage: loads.shares(stage, answer) for stage in (*self._limits, name)}
        for stage, limit in self._limits.items():
            self._limits[stage] = KeptStage.of(stage, limit.most, self._values[stage])
        return True

    def _total(self, name: str) -> float:
        return joined(name, self._values[name].values())

    def _gap(self, name: str) -> float:
        """By how much of its value a stage is above its bound; dust is none."""
        total = self._total(name)
        above = total - self._bounds[name]
        return 0.0 if above <= residual(self._problem, name, total) else above / abs(total)

    def _is_proved(self, name: str) -> bool:
        """Whether neither this stage nor any before it, of those that users feel, can be better."""
        return self._optimal and (name in TIDYING or self._gap(name) <= 0.0)

    # -- better ones ----------------------------------------------------------------------------------------------

    def _improved(self, name: str) -> Iterator[Solution]:
        if self._tiny:
            yield from self._proved(name)
            return
        if name in TIDYING and self._is_worth_another():
            return  # in the second pass
        if name in self._spared_time and self._gap(name) <= effort.AGAIN:
            return  # others need it more
        yield from self._split(name)
        yield from self._before_all(name)
        for at, nodes in enumerate(self._tries(name)):
            if self._is_enough(name) or (at and self._gap(name) <= effort.AGAIN) or not self._work.more():
                return
            if len(self._values) == 1 and nodes <= self._begun_with:
                continue
            better = self._searched(name, nodes)
            if better is None:
                return
            if better:
                yield self._solution()
                if name != FAIRNESS and not self._is_by_tangents:
                    yield from self._sweeps(name)

    def _split(self, name: str) -> Iterator[Solution]:
        """All devices split among the models anew, where these are few."""
        if self._splits is None or name != "latency" or self._is_enough(name) or not self._work.more():
            return
        for bound, counts in self._splits.tries(self._steps, self._prices, self._limits["served"].most):
            self._raise_bound(name, min(bound, self._total(name)))
            if counts is not None and self._adopted(name, counts):
                yield self._solution()
            if self._is_enough(name) or not self._work.more():
                return

    def _before_all(self, name: str) -> Iterator[Solution]:
        """Some models at a time, before all are placed at once."""
        tries = self._tries(name)
        if name == FAIRNESS:
            return
        if self._all:
            if name not in TIDYING and not self._is_enough(name):
                yield from self._sweep(name, alone=True)
        elif not (tries and self._part == "second" and self._is_by_capacity(name)):  # sweeps took as long, for less
            yield from self._sweeps(name, effort.FIRST_GAIN if tries else effort.GAIN)

    def _tries(self, name: str) -> Sequence[int]:
        return effort.tries(
            name,
            options=len(self._options(name)),
            whole=self._all,
            by_capacity=self._is_by_capacity(name),
            by_tangents=self._is_by_tangents,
            part=self._part,
        )

    def _is_enough(self, name: str) -> bool:
        return self._gap(name) <= self._enough(name)

    def _enough(self, name: str) -> float:
        spare = 0.0 if name in self._reached else spared(self._problem, [name]).get(name, 0.0)
        return max(effort.enough(name, by_tangents=self._is_by_tangents), spare)

    def _raise_bound(self, name: str, bound: float) -> None:
        if name not in self._reached:  # else it is one for so few moves
            self._bounds[name] = max(self._bounds[name], bound)

    def _proved(self, name: str) -> Iterator[Solution]:
        if self._gap(name) <= 0.0 or not self._work.more():
            return
        program = self._programs.program(self._counts, by_capacity=False)
        answers = self._steps.in_time([program], name, nodes=effort.TINY_NODES)
        if answers is None or (answer := answers[0]) is None:
            return
        self._raise_bound(name, answer.bound)
        if self._adopted(name, program.counts(answer)):
            yield self._solution()

    def _searched(self, name: str, nodes: int) -> bool | None:
        """One try for all that take part; whether it is better, None where nothing more is to be hoped for."""
        better, ending = False, ""
        for _ in range(effort.ROUNDS):
            program = self._program(name)
            is_whole = len(program.chosen) == len(self._problem.options)
            leant = [] if is_whole else self._core.leaning.terms(program, name)
            result = self._steps.by_highs(program, name, self._enough(name), nodes, self._counts, leant)
            if result is None:
                return better or None
            ending = result.ending
            if is_whole and math.isfinite(result.bound):
                # Where HiGHS says that nothing keeps the rules, that is a matter of digits: there is a placement.
                self._raise_bound(name, min(result.bound, self._total(name)))
            self._told = False
            if result.values is None:
                break
            improved = self._adopted(name, program.counts(result))
            better |= improved
            thought = math.fsum(weight * float(result.values[column]) for column, weight in program.terms(name))
            as_thought = improved and self._total(name) - thought <= effort.CLOSE * self._total(name)
            if as_thought or not self._told or self._is_enough(name) or not self._work.more():
                break
        # What was told anew cuts off what the program found: there may be more to be had.
        ends = ending in ("OPTIMAL", "INFEASIBLE") and not better and not self._told
        return None if ends else better

    def _is_by_capacity(self, name: str) -> bool:
        """Whether loads say nothing to this stage, nor to those that are kept."""
        return {name, *self._limits} <= BY_CAPACITY

    def _program(self, name: str) -> Formulation:
        """In whole numbers; without loads where these say nothing."""
        return self._programs.program(self._counts, by_capacity=self._is_by_capacity(name))

    def _options(self, name: str) -> Sequence[int]:
        """That take part in a stage."""
        return self._programs.options(self._counts, by_capacity=self._is_by_capacity(name))

    def _adopted(self, name: str, counts: dict[int, int]) -> bool:
        """Whether these counts are better; then they are the counts."""
        before, total = (self._counts, dict(self._limits), self._values, self._loads), self._total(name)
        leant = self._core.leaning.cost
        self._counts = counts
        with suppress(FabrictoolError):  # no numbers that can be trusted
            if not self._judged(name):
                self._told = self._programs.learn_why_not(counts, self._seed)
            elif self._total(name) + leant(name, counts) < total + leant(name, before[0]) - rounding(total):
                return True
        self._counts, self._limits, self._values, self._loads = before
        return False

    # -- a few models at a time -----------------------------------------------------------------------------------

    def _sweeps(self, name: str, least: float = effort.GAIN) -> Iterator[Solution]:
        for _ in range(effort.TIDYING_SWEEPS if name in TIDYING else effort.MOST_SWEEPS):
            before = self._total(name)
            if self._is_enough(name):
                return
            yield from self._sweep(name)
            if before - self._total(name) <= least * abs(before) or self._work.ended:
                return

    def _sweep(self, name: str, *, alone: bool = False) -> Iterator[Solution]:
        """Every model once, `alone` or in groups that chance puts together; one of all would be a try with all."""
        mine: dict[str, list[int]] = defaultdict(list)
        for i in self._options(name):
            mine[self._problem.options[i].model].append(i)
        by_capacity, needs = self._is_by_capacity(name), self._problem.needs
        groups = [[model] for model in mine] if alone else parties(needs, mine, self._rng, by_capacity=by_capacity)
        if len(groups) == 1 and self._tries(name):
            return
        former = dict(self._counts), dict(self._limits)
        for models in groups:
            if not self._work.more():
                break
            self._place_anew(name, models)
        if not self._judged(name):
            # Parties share links by even parts, whatever others use of them: together they may ask for too much.
            self._counts, self._limits = former
            self._judge(name)
        yield self._solution()

    def _place_anew(self, name: str, models: Sequence[str]) -> None:
        part, indices = part_of(self._problem, self._counts, self._options(name), models)
        better = self._best(name, part, indices, models)
        if better is None:
            return
        counts, loads, answer = better
        for at, i in enumerate(indices):
            self._counts.pop(i, None)
            if counts.get(at):
                self._counts[i] = counts[at]
        self._values[name] |= loads.shares(name, answer)
        for stage, limit in self._limits.items():
            self._limits[stage] = limit.after(loads.shares(stage, answer))

    def _best(
        self, name: str, part: PlacementProblem, indices: Sequence[int], models: Sequence[str]
    ) -> tuple[dict[int, int], Formulation, ProgramSolution] | None:
        """Better counts for a part, and the loads that show it; None when there are none."""
        program = Formulation(part, range(len(indices)), whole=True, by_capacity=self._is_by_capacity(name))
        if self._is_by_capacity(name):
            add_rows(program, self._core.rows, indices)
        else:
            program.tighten()
        for limit in self._limits.values():
            limit.keep_of(program, models)
        now = {at: self._counts[i] for at, i in enumerate(indices) if self._counts.get(i)}
        nudges = [*nudge(program, name), *self._core.leaning.terms(program, name, indices)]
        rough = self._steps.by_highs(program, name, effort.PARTY_GAP, effort.PARTY_NODES, now, nudges)
        if rough is None or rough.values is None:
            return None
        # The integer solver's rows hold to a share of their size; loads are judged by the linear program.
        counts = program.counts(rough)
        loads = Formulation.of_counts(part, counts)
        for limit in self._limits.values():
            limit.keep_of(loads, models)
        try:
            answer = loads.minimise(name, seconds=LEAST_LP_S, seed=self._seed)
        except FabrictoolError:  # no numbers that can be trusted
            return None
        former = sum(self._values[name][model] for model in models)
        if answer is None or loads.value(name, answer) >= former - TOLERANCE * max(1.0, abs(former)):
            return None
        return counts, loads, answer

    def _result(self, name: str) -> StageResult:
        total, reached = self._total(name), self._reached.get(name)
        bound = clean(min(total, self._bounds[name]))
        return StageResult(name, clean(total), bound, None if reached is None else clean(reached))

    def _solution(self) -> Solution:
        return Solution(
            {i: count for i, count in sorted(self._counts.items()) if count},
            self._loads,
            tuple(map(self._result, self._values)),
            self._solver,
            optimal=self._is_proved(list(self._values)[-1]) and not self._work.ended,
            work=self._work.spent / PER_SECOND,
            ended=self._work.ended,
            repeatable=self._repeatable,
        )
