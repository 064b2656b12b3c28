"""When requests are served that may wait: in the steps, and in the room, that the rest leaves.

One integer program for one model over all steps of a horizon:

* counts of its options in each step, by the rules of that step, beside what all others hold there
* requests served by the end of each step: no more than have come, and all but the lost ones that may wait no longer
* least are, in this order, the lost ones, those that miss their SLO, and what running, starting and stopping come to

All that comes within the horizon is served in it, or lost: what is left for afterwards would look cheaper than it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import INFINITY, Formulation
from fabrictool.planner.program import Program
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.stages import rounding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.planner.problem import OptionKey
    from fabrictool.planner.program import ProgramSolution, Terms
    from fabrictool.planner.steps import Placed, Step

SECONDS = 60.0
"""Of one such program's stage, at most."""
STAGES = 3
NODES = 300
GAP = 1e-3
NOTHING_IN_TIME = "FT2902"
NEAREST = 4
"""So many options take part that cost least for a request, and as many that cost least by themselves."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Of one model, by step."""

    placed: tuple[Placed, ...]
    rates: tuple[float, ...]
    """Requests/s that are served, or given up, in it."""


def postponed(
    steps: Sequence[Step],
    rest: Sequence[Placed],
    model: str,
    wait: int,
    running: Mapping[OptionKey, int],
    seconds: float = math.inf,
) -> Postponed | None:
    """When a model's requests are served that may wait for so many steps; `rest`: what all others hold in each.

    None where nothing was found in so many seconds, or a rule leaves no room for the model.
    """
    wanted = _Wanted(steps, rest, model, wait, running)
    try:
        answer = wanted.solved(min(SECONDS, seconds / STAGES))
    except FabrictoolError as error:
        if any(problem.code != NOTHING_IN_TIME for problem in error.problems):
            raise
        return None
    return None if answer is None else wanted.read(answer)


class _Wanted:
    """The program, and which column stands for what."""

    def __init__(
        self, steps: Sequence[Step], rest: Sequence[Placed], model: str, wait: int, running: Mapping[OptionKey, int]
    ) -> None:
        self._steps, self._model, self._wait, self._running = steps, model, wait, running
        self._program = Program(whole=True)
        self._came = [next(need.rate for need in step.problem.needs if need.model == model) for step in steps]
        self._formulations: list[Formulation] = []
        self._served: list[Terms] = []
        for at, step in enumerate(steps):
            could = math.fsum(self._came[max(0, at - wait) : at + 1])
            self._add_step(step, rest[at], could)
        self._lost = [self._program.column(0, INFINITY) for _ in steps]
        """Requests/s of one step, of all until then."""
        for at in range(len(steps)):
            until = [term for terms in self._served[: at + 1] for term in terms]
            self._program.row(-INFINITY, math.fsum(self._came[: at + 1]), until)
            self._program.row(self._due(at), INFINITY, [*until, (self._lost[at], 1.0)])
            if at:
                self._program.row(0, INFINITY, [(self._lost[at], 1.0), (self._lost[at - 1], -1.0)])
        self._paid = self._running_terms() + self._change_terms()

    def _due(self, at: int) -> float:
        """Requests/s of one step that may wait no longer at the end of this one."""
        last = at == len(self._steps) - 1
        return math.fsum(self._came if last else self._came[: max(0, at + 1 - self._wait)])

    def _add_step(self, step: Step, rest: Placed, could: float) -> None:
        problem = step.problem
        index = {option.key: i for i, option in enumerate(problem.options)}
        others = {index[key]: count for key, count in rest if key[0] != self._model and key in index}
        part, _ = part_of(problem, others, _promising(step, self._model, self._running), [self._model])
        part = replace(part, needs=tuple(replace(need, rate=could) for need in part.needs))
        formulation = Formulation(part, range(len(part.options)), whole=True, program=self._program)
        self._formulations.append(formulation)
        self._served.append(formulation.served(self._model))

    def _running_terms(self) -> Terms:
        return [
            (column, weight * step.hours * step.price(option))
            for step, formulation in zip(self._steps, self._formulations, strict=True)
            for i, option in enumerate(formulation.problem.options)
            for column, weight in formulation.count(i)
        ]

    def _change_terms(self) -> Terms:
        """Columns of what starts and what stops at the beginning of each step."""
        terms: Terms = []
        before: dict[OptionKey, Terms] = {}
        already: Mapping[OptionKey, int] = {key: k for key, k in self._running.items() if key[0] == self._model}
        for step, formulation in zip(self._steps, self._formulations, strict=True):
            now = {option.key: formulation.count(i) for i, option in enumerate(formulation.problem.options)}
            there = {option.key: option for option in (*formulation.problem.options, *step.gone.values())}
            for key in sorted(now.keys() | before.keys() | already.keys()):
                change = [*now.get(key, []), *((column, -weight) for column, weight in before.get(key, []))]
                more, fewer = self._program.column(0, INFINITY), self._program.column(0, INFINITY)
                had = float(already.get(key, 0))
                self._program.row(had, had, [*change, (more, -1.0), (fewer, 1.0)])
                if key in there:
                    terms += [(more, step.change_price(there[key], 1)), (fewer, step.change_price(there[key], -1))]
            before, already = now, {}
        return terms

    def solved(self, seconds: float) -> ProgramSolution | None:
        misses = [term for formulation in self._formulations for term in formulation.terms("slo")]
        answer: ProgramSolution | None = None
        for terms in ([(self._lost[-1], 1.0)], misses, self._paid):
            if terms:
                start = None if answer is None else answer.values
                answer = self._program.minimise(terms, seconds=seconds, seed=0, gap=GAP, nodes=NODES, start=start)
                if answer is None:
                    return None
                self._program.row(-INFINITY, answer.objective + rounding(answer.objective), terms)
        return answer

    def read(self, answer: ProgramSolution) -> Postponed:
        placed, rates = [], []
        all_served = lost = 0.0
        for at, formulation in enumerate(self._formulations):
            options = formulation.problem.options
            counts = formulation.counts(answer)
            placed.append(tuple(sorted((options[i].key, count) for i, count in counts.items())))
            served = formulation.rate(self._model, answer)
            all_served += served
            # Not as the columns say: they may give up early what is lost later.
            now = max(lost, self._due(at) - all_served)
            rates.append(max(0.0, served + now - lost))
            lost = now
        scale = math.fsum(self._came) / total if (total := math.fsum(rates)) else 1.0
        return Postponed(tuple(placed), tuple(rate * scale for rate in rates))


def _promising(step: Step, model: str, running: Mapping[OptionKey, int]) -> list[int]:
    """Options with which a model is served cheaply, those that run, and those that a rule wants."""
    problem = step.problem
    mine = problem.of(model)
    rates = {i: max((level.rate for level in problem.options[i].levels if level.attains), default=0.0) for i in mine}
    able = [i for i in mine if rates[i] > 0.0] or mine
    by_request = sorted(able, key=lambda i: (step.price(problem.options[i]) / (rates[i] or 1.0), i))[:NEAREST]
    alone = sorted(able, key=lambda i: (step.price(problem.options[i]), i))[:NEAREST]
    pins = [place for need in problem.needs if need.model == model for place in need.pins]
    wanted = [
        i for i in mine
        if problem.options[i].key in running or problem.options[i].key in problem.fixed
        or any(problem.options[i].pool.within(*place) for place in pins)
    ]  # fmt: skip
    return sorted({*by_request, *alone, *wanted})


def able_to_wait(steps: Sequence[Step], waits: Mapping[str, int]) -> list[str]:
    """The models whose requests may wait, the one with the most first.

    Not those with several variants, which would wait for hours of the worse one, nor those that are to survive a loss,
    whose reserve is of the demand that they have at once.
    """
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        lesser = {option.model for option in step.problem.options if option.steps_down}
        for need in step.problem.needs:
            if waits.get(need.model) and need.survive is None and need.model not in lesser:
                total[need.model] += need.rate
    return sorted((model for model in total if total[model]), key=lambda model: (-total[model], model))
