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

SECONDS = 20.0
"""Of one such program's stage."""
NODES = 300
GAP = 1e-3


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
) -> Postponed | None:
    """When a model's requests are served that may wait for so many steps; `rest`: what all others hold in each.

    None where nothing was found in time, or a rule leaves no room for the model.
    """
    if not any(need.model == model for need in steps[0].problem.needs):
        return None
    wanted = _Wanted(steps, rest, model, wait, running)
    try:
        answer = wanted.solved()
    except FabrictoolError:  # FT2902: they are served as they come, then
        return None
    return None if answer is None else wanted.read(answer)


class _Wanted:
    """The program, and which column stands for what."""

    def __init__(
        self, steps: Sequence[Step], rest: Sequence[Placed], model: str, wait: int, running: Mapping[OptionKey, int]
    ) -> None:
        self._steps, self._model, self._wait = steps, model, wait
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
        self._paid = self._running_terms() + self._change_terms(running)

    def _due(self, at: int) -> float:
        """Requests/s of one step that may wait no longer at the end of this one."""
        last = at == len(self._steps) - 1
        return math.fsum(self._came if last else self._came[: max(0, at + 1 - self._wait)])

    def _add_step(self, step: Step, rest: Placed, could: float) -> None:
        problem = step.problem
        index = {option.key: i for i, option in enumerate(problem.options)}
        others = {index[key]: count for key, count in rest if key[0] != self._model and key in index}
        part, _ = part_of(problem, others, range(len(problem.options)), [self._model])
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

    def _change_terms(self, running: Mapping[OptionKey, int]) -> Terms:
        """Columns of what starts and what stops at the beginning of each step."""
        terms: Terms = []
        before: dict[OptionKey, Terms] = {}
        already: Mapping[OptionKey, int] = {key: k for key, k in running.items() if key[0] == self._model}
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

    def solved(self) -> ProgramSolution | None:
        misses = [term for formulation in self._formulations for term in formulation.terms("slo")]
        answer: ProgramSolution | None = None
        for terms in ([(self._lost[-1], 1.0)], misses, self._paid):
            if terms:
                start = None if answer is None else answer.values
                answer = self._program.minimise(terms, seconds=SECONDS, seed=0, gap=GAP, nodes=NODES, start=start)
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
            served = math.fsum(weight * float(answer.values[column]) for column, weight in self._served[at])
            all_served += served
            # Not as the columns say: they may give up early what is lost later.
            now = max(lost, self._due(at) - all_served)
            rates.append(max(0.0, served + now - lost))
            lost = now
        scale = math.fsum(self._came) / total if (total := math.fsum(rates)) else 1.0
        return Postponed(tuple(placed), tuple(rate * scale for rate in rates))


def by_size(steps: Sequence[Step], waits: Mapping[str, int]) -> list[str]:
    """The models that may wait, the one with the most requests first."""
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for need in step.problem.needs:
            if waits.get(need.model):
                total[need.model] += need.rate
    return sorted(total, key=lambda model: (-total[model], model))
