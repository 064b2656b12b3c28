"""When requests are served that may wait: in the steps, and in the room, that the rest leaves.

One integer program for one model over all steps of a horizon:

* counts of its options in each step, by the rules of that step, beside what all others hold there
* requests served by the end of each step: no more than have come, and all but the lost ones that may wait no longer
* least are, in this order, the lost ones, those that miss their SLO, and what running, starting and stopping come to

All that comes within the horizon is served in it, or lost: what is left for afterwards would look cheaper than it is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.formulation import INFINITY, Formulation
from fabrictool.planner.loading import Lead, loads_before
from fabrictool.planner.moving import DRAIN_S
from fabrictool.planner.program import Program
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.stages import rounding
from fabrictool.planner.steps import HOUR_S
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.planner.problem import Option, OptionKey, Pool
    from fabrictool.planner.program import ProgramSolution, Terms
    from fabrictool.planner.quotas import Quota
    from fabrictool.planner.schedules import Schedule
    from fabrictool.planner.steps import Placed, Step

SECONDS = 60.0
"""Of one such program's stage, at most."""
STAGES = 3
NODES = 300
GAP = 1e-3
NOTHING_IN_TIME = "FT2902"
NEAREST = 4
"""So many options take part that cost least for a request, and as many that cost least by themselves."""


class _Change(NamedTuple):
    """Columns: how many start for a step, how many stop, and how many of those that start serve from its beginning."""

    more: int
    fewer: int
    early: int


@dataclass(frozen=True, slots=True)
class Postponed:
    """Of one model, by step."""

    placed: tuple[Placed, ...]
    rates: tuple[float, ...]
    """Requests/s that are served, or given up, in it."""


@dataclass(frozen=True, slots=True)
class Others:
    """What all other models hold, and how early a start may be."""

    placed: Sequence[Placed]
    """By step, with what loads in it for later ones."""
    lead: Lead = field(default_factory=Lead)
    quotas: tuple[Quota, ...] = ()
    """With what the others leave of them."""

    @classmethod
    def of(cls, schedule: Schedule, lead: Lead | None) -> Others:
        parts = schedule.parts
        loading = loads_before([its.begun for its in parts], [its.renewals for its in parts], schedule.seconds)
        both = (Counter(dict(part.placed)) + Counter(dict(its)) for part, its in zip(parts, loading, strict=True))
        left = (
            replace(quota, most=max(0.0, quota.most - used))
            for quota, used in zip(schedule.quotas, schedule.used, strict=True)
        )
        placed = [tuple(sorted(its.items())) for its in both]
        return cls(placed, Lead() if lead is None else lead, tuple(left))


# Wide: what there is, what may wait, and how long that may take.
def postponed(
    steps: Sequence[Step],
    others: Others,
    model: str,
    wait: int,
    running: Mapping[OptionKey, int],
    left_s: Callable[[], float] = never,
) -> Postponed | None:
    """When a model's requests are served that may wait for so many steps, beside all others.

    None where nothing was found before no seconds were left, or a rule leaves no room for the model.
    """
    wanted = _Wanted(steps, others, model, wait, running)
    try:
        answer = wanted.solved(left_s)
    except FabrictoolError as error:
        if any(problem.code != NOTHING_IN_TIME for problem in error.problems):
            raise
        return None
    return None if answer is None else wanted.read(answer)


class _Wanted:
    """The program, and which column stands for what."""

    def __init__(
        self, steps: Sequence[Step], others: Others, model: str, wait: int, running: Mapping[OptionKey, int]
    ) -> None:
        self._steps, self._model, self._wait, self._running = steps, model, wait, running
        self._others = others
        self._now = others.lead.since(steps[0].begin)
        self._program = Program(whole=True)
        self._came = [next(need.rate for need in step.problem.needs if need.model == model) for step in steps]
        self._formulations: list[Formulation] = []
        self._served: list[Terms] = []
        for at, step in enumerate(steps):
            could = math.fsum(self._came[max(0, at - wait) : at + 1])
            self._add_step(step, others.placed[at], could)
        self._lost = [self._program.column(0, INFINITY) for _ in steps]
        """Requests/s of one step, of all until then."""
        for at in range(len(steps)):
            until = [term for terms in self._served[: at + 1] for term in terms]
            self._program.row(-INFINITY, math.fsum(self._came[: at + 1]), until)
            self._program.row(self._due(at), INFINITY, [*until, (self._lost[at], 1.0)])
            if at:
                self._program.row(0, INFINITY, [(self._lost[at], 1.0), (self._lost[at - 1], -1.0)])
        self._changes = self._changing()
        self._paid = self._running_terms() + self._change_terms()
        self._loading_rows()
        self._quota_rows()

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

    def _changing(self) -> list[dict[OptionKey, _Change]]:
        """Columns of what starts and what stops at the beginning of each step."""
        changes: list[dict[OptionKey, _Change]] = []
        before: dict[OptionKey, Terms] = {}
        already: Mapping[OptionKey, int] = {key: k for key, k in self._running.items() if key[0] == self._model}
        for formulation in self._formulations:
            now = {option.key: formulation.count(i) for i, option in enumerate(formulation.problem.options)}
            its = {}
            for key in sorted(now.keys() | before.keys() | already.keys()):
                change = [*now.get(key, []), *((column, -weight) for column, weight in before.get(key, []))]
                columns = _Change(*(self._program.column(0, INFINITY) for _ in range(3)))
                had = float(already.get(key, 0))
                self._program.row(had, had, [*change, (columns.more, -1.0), (columns.fewer, 1.0)])
                self._program.row(0, INFINITY, [(columns.more, 1.0), (columns.early, -1.0)])
                its[key] = columns
            changes.append(its)
            before, already = now, {}
        return changes

    def _change_terms(self) -> Terms:
        """A late start is priced as an early one: late is only what has to be (`planner.loading`)."""
        terms: Terms = []
        for at, (step, formulation) in enumerate(zip(self._steps, self._formulations, strict=True)):
            there = {option.key: option for option in (*formulation.problem.options, *step.gone.values())}
            for key, columns in self._changes[at].items():
                if key in there:
                    price = step.price(there[key])
                    terms.append((columns.more, step.moving(price, self._early_s(at, there[key]))))
                    terms.append((columns.fewer, step.moving(price, DRAIN_S)))
        return terms

    # -- what loads -------------------------------------------------------------------------------------------

    def _soonest(self, at: int, option: Option) -> float:
        """Seconds from the beginning of a step on when a job may begin that is submitted now."""
        return self._now + self._others.lead.wait_s(option) - self._steps[at].begin

    def _early_s(self, at: int, option: Option) -> float:
        """For how long an early start holds devices before its step."""
        return max(0.0, min(option.start_s, -self._soonest(at, option)))

    def _loading_rows(self) -> None:
        """Early is only what fits into the steps before; what is not early takes nothing until it has loaded."""
        loading: list[list[tuple[Option, int]]] = [[] for _ in self._steps]
        before: list[tuple[Option, int]] = []
        for at, formulation in enumerate(self._formulations):
            for option in formulation.problem.options:
                column = self._changes[at][option.key].early
                for back in range(1, max(1, math.ceil((option.start_s + DRAIN_S) / self._steps[0].seconds)) + 1):
                    if back > at:
                        before.append((option, column))
                        break
                    loading[at - back].append((option, column))
        self._room_rows(self._steps[0], before, {}, None)
        for at, columns in enumerate(loading):
            self._room_rows(self._steps[at], columns, dict(self._others.placed[at]), self._formulations[at])
        for at in range(len(self._steps)):
            self._ready_rows(at)

    # Wide: a step, what loads in it, and what else is there.
    def _room_rows(
        self,
        step: Step,
        columns: Sequence[tuple[Option, int]],
        others: Mapping[OptionKey, int],
        formulation: Formulation | None,
    ) -> None:
        """What loads in a step fits beside what is there; without a formulation, beside what runs before all steps."""
        if not columns:
            return
        known = {option.key: option for option in (*step.problem.options, *step.gone.values())}
        held = self._running if formulation is None else others
        mine = () if formulation is None else (self._model,)
        fixed = [(known[key], float(n)) for key, n in held.items() if key in known and key[0] not in mine]
        moving = [(option, [(column, 1.0)]) for option, column in columns]
        if formulation is not None:
            moving += [(option, formulation.count(i)) for i, option in enumerate(formulation.problem.options)]
        pools = {pool.key: pool for pool in step.problem.pools}
        for option, column in columns:
            if any(pool.key not in pools for pool in option.pools):
                self._program.row(-INFINITY, 0.0, [(column, 1.0)])
        for key in {pool.key for option, _ in columns for pool in option.pools} & pools.keys():
            for part in {size for option, _ in moving for (place, size) in option.blocks if place == key} | {1}:
                taken = math.fsum(n * _parts(pools[key], option, part) for option, n in fixed)
                terms = [(c, w * _parts(pools[key], option, part)) for option, its in moving for c, w in its]
                room = pools[key].nodes * (pools[key].devices_per_node // part)
                self._program.row(-INFINITY, max(0.0, room - taken), [term for term in terms if term[1]])
        for limit in step.problem.limits:
            used = limit.taken + math.fsum(n * limit.used_by(option) for option, n in fixed)
            terms = [(c, w * limit.used_by(option)) for option, its in moving for c, w in its]
            self._program.row(-INFINITY, max(0.0, limit.most - used), [term for term in terms if term[1]])

    def _ready_rows(self, at: int) -> None:
        """What an option takes in a step is what those can that have loaded."""
        seconds, formulation = self._steps[at].seconds, self._formulations[at]
        for i, option in enumerate(formulation.problem.options):
            most = option.levels[-1].rate
            terms = [(column, -most * weight) for column, weight in formulation.count(i)]
            loaded = zip(formulation.ladder(i)[1:], option.levels, strict=True)
            terms += [(column, level.rate) for column, level in loaded]
            for began in range(at, -1, -1):
                columns = self._changes[began].get(option.key)
                if columns is None:
                    continue
                soonest = self._soonest(began, option) + option.start_s
                from_here = (at - began) * seconds
                first = max(0.0, self._now - self._steps[at].begin)
                early, late = (
                    min(seconds, max(0.0, serves - from_here - first)) / seconds
                    for serves in (max(0.0, soonest), max(option.start_s + DRAIN_S, soonest))
                )
                if not late:
                    break
                terms += [(columns.more, most * late), (columns.early, most * (early - late))]
            self._program.row(-INFINITY, 0.0, terms)

    def _quota_rows(self) -> None:
        for quota in self._others.quotas:
            terms: Terms = []
            for at, (step, formulation) in enumerate(zip(self._steps, self._formulations, strict=True)):
                for i, option in enumerate(formulation.problem.options):
                    uses = quota.limit.used_by(option)
                    terms += [(column, uses * weight * step.hours) for column, weight in formulation.count(i)]
                    early_s = min(self._early_s(at, option), at * step.seconds)
                    terms.append((self._changes[at][option.key].more, uses * early_s / HOUR_S))
            self._program.row(-INFINITY, quota.most, [term for term in terms if term[1]])

    def solved(self, left_s: Callable[[], float]) -> ProgramSolution | None:
        misses = [term for formulation in self._formulations for term in formulation.terms("slo")]
        answer: ProgramSolution | None = None
        seconds = min(SECONDS, left_s() / STAGES)
        for terms in ([(self._lost[-1], 1.0)], misses, self._paid):
            if terms:
                start = None if answer is None else answer.values
                answer = self._program.minimise(
                    terms, seconds=seconds, seed=0, gap=GAP, nodes=NODES, start=start, left_s=left_s
                )
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


def _parts(pool: Pool, option: Option, part: int) -> int:
    """Parts of so many devices that a pool has less room for with a replica in it."""
    blocks = ((size, number) for (key, size), number in option.blocks.items() if key == pool.key and size >= part)
    return sum(number * pool.parts_lost(size, part) for size, number in blocks)


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
