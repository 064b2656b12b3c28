"""A plan for each step of some hours, so that what each leaves the next one counts.

For every step there are several whole placements to choose from: the solver's own for that step, as the step before
left it and from nothing, those of the other steps, what runs, and one for the busiest hour of each model. What each of
them serves in each step is a linear program with its counts; the best way through them is found by dynamic
programming over unserved requests, then requests that miss their SLO, then what running, starting and stopping come
to. The same is then tried for each model while the others stay, and replicas that go and come back are kept where that
is cheaper. As the way without a look ahead and the one placement for the peak are among those compared, no schedule is
worse than them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.stages import in_order
from fabrictool.planner.waiting import able_to_wait, postponed
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.planner.problem import Option, OptionKey, PlacementProblem, Solution
    from fabrictool.planner.steps import Placed, Step

    Solve = Callable[[PlacementProblem], Solution]

MOST_TRIED = 5000
"""Placements in steps; what was found until then is the answer."""
LP_SECONDS = 60.0
DUST = 4
"""Digits of requests/s that count: less is the solver's rounding."""


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """One step of a schedule."""

    placed: Placed
    lacks: float
    """Requests/s that are not served, by their models' priorities."""
    misses: float
    """Requests/s that miss their SLO."""
    unserved: float
    """Requests/s."""
    running: float
    """In what the step is paid in."""
    switching: float
    """The same, of what starts and stops at its beginning."""
    starts: int
    stops: int

    @property
    def replicas(self) -> int:
        return sum(count for _, count in self.placed)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A placement for each step."""

    parts: tuple[PlacedStep, ...]
    seconds: float

    @property
    def unserved(self) -> float:
        """Requests of the whole horizon."""
        return math.fsum(part.unserved for part in self.parts) * self.seconds

    @property
    def misses(self) -> float:
        return math.fsum(part.misses for part in self.parts) * self.seconds

    @property
    def running(self) -> float:
        return math.fsum(part.running for part in self.parts)

    @property
    def switching(self) -> float:
        return math.fsum(part.switching for part in self.parts)

    @property
    def value(self) -> tuple[float, float, float]:
        """The less, the better, the first ones first."""
        lacks = math.fsum(part.lacks for part in self.parts) * self.seconds
        return (round(lacks, DUST), round(self.misses, DUST), round(self.running + self.switching, 6))


@dataclass(frozen=True, slots=True)
class Horizon:
    """The schedule, beside what others would come to."""

    steps: tuple[Step, ...]
    schedule: Schedule
    greedy: Schedule
    """Each step planned from what the one before left, without a look ahead."""
    peak: Schedule | None
    """One placement all the time, for each model's busiest step; None: there is none that is possible in every step."""
    at_once: Schedule | None = None
    """Where every request is served in the step in which it comes; None: none may wait."""
    came: tuple[Step, ...] = ()
    """The steps with the requests that come in them, where others are served in them."""
    waiting: tuple[str, ...] = ()
    """Models whose requests wait."""
    copied: int = 0
    """Steps for which there was no time to search: they have the placement of the step before, or that for the peak."""


def planned(
    steps: Sequence[Step],
    current: Mapping[OptionKey, int],
    solve: Solve,
    more: Callable[[], bool] = lambda: True,
    waits: Mapping[str, int] | None = None,
    left_s: Callable[[], float] = never,
) -> Horizon:
    """The best schedule that is found from what runs. `solve` gives a problem's last solution; no better schedule is
    looked for once `more` says no. `waits`: for how many steps a model's requests may wait, where they may; `left_s`:
    seconds for that.

    Raises InfeasibleError where a step has no placement.
    """
    at_once = _at_once(steps, current, solve, more)
    waiting = able_to_wait(steps, waits or {})
    if not waiting:
        return at_once
    later = None
    while waiting and later is None and more():
        later = _later(
            steps, current, waiting, waits or {}, _at_once(_without(steps, waiting), current, solve, more), left_s
        )
    best = replace(at_once, at_once=at_once.schedule, came=tuple(steps))
    if later is None or later[1].value >= at_once.schedule.value:
        return best
    return replace(best, steps=later[0], schedule=later[1], waiting=tuple(waiting))


def _without(steps: Sequence[Step], models: Iterable[str]) -> list[Step]:
    return [step.asked(dict.fromkeys(models, 0.0)) for step in steps]


# Wide: what there is, what may wait, and how long that may take.
def _later(
    steps: Sequence[Step],
    current: Mapping[OptionKey, int],
    waiting: list[str],
    waits: Mapping[str, int],
    rest: Horizon,
    left_s: Callable[[], float],
) -> tuple[tuple[Step, ...], Schedule] | None:
    """The steps with what is served in them, and the schedule; where nothing was found for a model in time, None, and
    `waiting` is without it.
    """
    placed = [part.placed for part in rest.schedule.parts]
    asked = list(steps)
    for at, model in enumerate(waiting):
        its = postponed(asked, placed, model, waits[model], current, left_s() / (len(waiting) - at))
        if its is None:
            waiting.remove(model)
            return None
        asked = [step.asked({model: rate}) for step, rate in zip(asked, its.rates, strict=True)]
        placed = [
            tuple(sorted([*(pair for pair in others if pair[0][0] != model), *mine]))
            for others, mine in zip(placed, its.placed, strict=True)
        ]
    schedule = _Judge(asked, current).schedule(placed)
    if schedule is None:
        waiting.clear()
        return None
    return tuple(asked), schedule


def _at_once(
    steps: Sequence[Step], current: Mapping[OptionKey, int], solve: Solve, more: Callable[[], bool]
) -> Horizon:
    judge = _Judge(steps, current, more)
    constant = _peak(steps, solve)
    greedy: list[Placed] = []
    copied = 0
    running: Mapping[OptionKey, int] = current
    alone: dict[int, Placed] = {}
    seen: dict[tuple[int, Placed], Placed] = {}
    for at, step in enumerate(steps):
        there = {key: count for key, count in running.items() if key in judge.options[at]}
        asked = (judge.same[at], tuple(sorted(there.items())))
        if asked not in seen:
            known = [*greedy[-1:], *([constant] if constant is not None else [])]
            near = None if more() else judge.nearest(at, tuple(sorted(running.items())), known)
            copied += near is not None
            seen[asked] = near if near is not None else _solved(replace(step.problem, current=there), solve)
        greedy.append(seen[asked])
        running = dict(greedy[-1])
        if judge.same[at] not in alone and (more() or not there):
            alone[judge.same[at]] = _solved(step.problem, solve) if there else greedy[-1]
    others = [*greedy, *alone.values(), tuple(sorted((key, k) for key, k in current.items() if k))]
    candidates = list(dict.fromkeys([*others, *([constant] if constant is not None else [])]))
    simple = judge.schedule(greedy)
    if simple is None:
        raise InfeasibleError.of("FT2001", "a step of the horizon has no placement")
    peak = None if constant is None else judge.schedule([constant] * len(steps))
    judge.choosing = True
    best = judge.best([candidates] * len(steps))
    least = min((way for way in (best, simple, peak) if way is not None), key=lambda way: way.value)
    return Horizon(tuple(steps), judge.kept(judge.mixed(least, candidates)), simple, peak, copied=copied)


def _solved(problem: PlacementProblem, solve: Solve) -> Placed:
    solution = solve(replace(problem, runs_elsewhere=True))  # what starts costs that, though nothing runs yet
    options = problem.options + solution.added
    return tuple(sorted((options[i].key, count) for i, count in solution.counts.items() if count))


def _peak(steps: Sequence[Step], solve: Solve) -> Placed | None:
    """For each model's busiest step, on what is there in all; None where there is none."""
    first = min(steps, key=lambda step: len(step.problem.options))
    away = frozenset().union(*(step.away for step in steps))
    rates = {
        need.model: max(other.rate for step in steps for other in step.problem.needs if other.model == need.model)
        for need in first.problem.needs
    }
    options = tuple(o for o in first.problem.options if not any(pool.key in away for pool in o.pools))
    problem = replace(
        first.problem,
        needs=tuple(replace(need, rate=rates[need.model]) for need in first.problem.needs),
        options=options,
        pools=tuple(pool for pool in first.problem.pools if pool.key not in away),
    )
    try:
        return _solved(problem, solve)
    except InfeasibleError:
        return None


class _Judge:
    """What placements come to in each step; alike steps and placements are looked at once."""

    def __init__(
        self, steps: Sequence[Step], current: Mapping[OptionKey, int], more: Callable[[], bool] = lambda: True
    ) -> None:
        self._steps, self._more = steps, more
        self.choosing = False
        self._first: Placed = tuple(sorted((key, k) for key, k in current.items() if k))
        self.options = [{o.key: (i, o) for i, o in enumerate(step.problem.options)} for step in steps]
        self.same = [_first_alike(steps, at) for at in range(len(steps))]
        self._services: dict[tuple[int, Placed], tuple[float, float, float] | None] = {}
        self._parts: dict[tuple[int, Placed, Placed], PlacedStep | None] = {}

    def service(self, at: int, placed: Placed) -> tuple[float, float, float] | None:
        """Requests/s that are not served, by priority; that miss their SLO; and that are not served. None where the
        placement is not possible, or is one of many to choose from and enough was tried.
        """
        key = (self.same[at], placed)
        if key not in self._services:
            if self.choosing and self.exhausted:
                return None
            self._services[key] = self._service(at, placed)
        return self._services[key]

    def _service(self, at: int, placed: Placed) -> tuple[float, float, float] | None:
        known, problem = self.options[at], self._steps[at].problem
        if any(key not in known for key, _ in placed):
            return None
        counts = {known[key][0]: count for key, count in placed}
        loads = Formulation.of_counts(problem, counts)
        answer = in_order(loads, ["served", "slo"], seconds=LP_SECONDS, seed=0)
        if answer is None:
            return None
        values, solution = answer
        unserved = math.fsum(max(0.0, need.rate - loads.rate(need.model, solution)) for need in problem.needs)
        lacks, misses = values.get("served", 0.0), values.get("slo", 0.0)
        return max(0.0, round(lacks, DUST)), max(0.0, round(misses, DUST)), round(unserved, DUST)

    def part(self, at: int, before: Placed, placed: Placed) -> PlacedStep | None:
        """One step; None where the placement is not possible."""
        key = (self.same[at], before, placed)
        if key not in self._parts:
            self._parts[key] = self._part(at, before, placed)
        return self._parts[key]

    def _part(self, at: int, before: Placed, placed: Placed) -> PlacedStep | None:
        service, step = self.service(at, placed), self._steps[at]
        if service is None:
            return None
        running = math.fsum(self._per_hour(at, key) * count for key, count in placed) * step.hours
        change = Counter(dict(placed))
        change.subtract(dict(before))
        switching = math.fsum(self._switch(at, key, n) for key, n in sorted(change.items()) if n)
        starts = sum(n for n in change.values() if n > 0)
        stops = -sum(n for n in change.values() if n < 0)
        return PlacedStep(placed, *service, running, switching, starts, stops)

    def nearest(self, at: int, before: Placed, known: Sequence[Placed]) -> Placed | None:
        """Which of these is best in that step alone; None where it allows none of them."""
        parts = [part for placed in known if (part := self.part(at, before, placed)) is not None]
        values = [((part.lacks, part.misses, part.running + part.switching), part.placed) for part in parts]
        return min(values)[1] if values else None

    def _option(self, at: int, key: OptionKey) -> Option | None:
        known = self.options[at].get(key)
        return known[1] if known is not None else self._steps[at].gone.get(key)

    def _per_hour(self, at: int, key: OptionKey) -> float:
        option = self._option(at, key)
        return 0.0 if option is None else self._steps[at].price(option)

    def _switch(self, at: int, key: OptionKey, change: int) -> float:
        option = self._option(at, key)
        return 0.0 if option is None else self._steps[at].change_price(option, change)

    def schedule(self, placements: Sequence[Placed]) -> Schedule | None:
        """None where a step does not allow its placement."""
        parts = []
        before = self._first
        for at, placed in enumerate(placements):
            part = self.part(at, before, placed)
            if part is None:
                return None
            parts.append(part)
            before = placed
        return Schedule(tuple(parts), self._steps[0].seconds)

    def best(self, choices: Sequence[Sequence[Placed]]) -> Schedule | None:
        """The best way through what each step may have; None where one may have none of it."""
        ways: dict[Placed, tuple[tuple[float, float, float], tuple[Placed, ...]]] = {self._first: ((0.0, 0.0, 0.0), ())}
        for at, step in enumerate(self._steps):
            reached: dict[Placed, tuple[tuple[float, float, float], tuple[Placed, ...]]] = {}
            for placed in choices[at]:
                for before, (value, way) in ways.items():
                    part = self.part(at, before, placed)
                    if part is None:
                        break
                    lacks, misses = part.lacks * step.seconds, part.misses * step.seconds
                    total = (
                        round(value[0] + lacks, DUST),
                        round(value[1] + misses, DUST),
                        value[2] + part.running + part.switching,
                    )
                    if placed not in reached or total < reached[placed][0]:
                        reached[placed] = (total, (*way, placed))
            ways = reached
        if not ways:
            return None
        return self.schedule(min(ways.values())[1])

    def mixed(self, schedule: Schedule, candidates: Sequence[Placed]) -> Schedule:
        """With each model in turn placed as in any of the candidates while the others stay, until that helps none."""
        models = sorted({key[0] for placed in candidates for key, _ in placed})
        unchanged = 0
        for model in itertools.cycle(models):
            if unchanged == len(models) or self.exhausted:
                break
            own = list(dict.fromkeys(tuple(pair for pair in placed if pair[0][0] == model) for placed in candidates))
            rest = [tuple(pair for pair in part.placed if pair[0][0] != model) for part in schedule.parts]
            other = self.best([[tuple(sorted((*others, *its))) for its in own] for others in rest])
            better = other is not None and other.value < schedule.value
            schedule = other if better and other is not None else schedule
            unchanged = 0 if better else unchanged + 1
        return schedule

    @property
    def exhausted(self) -> bool:
        """Whether enough was tried, by number or by the clock."""
        return len(self._services) > MOST_TRIED or not self._more()

    def kept(self, schedule: Schedule) -> Schedule:
        """With replicas that are gone for some steps left where they are, one by one, where that is better."""
        better = True
        while better and not self.exhausted:
            better = False
            for placements in self._bridged([dict(part.placed) for part in schedule.parts]):
                other = self.schedule(placements)
                if other is not None and other.value < schedule.value:
                    schedule, better = other, True
                    break
        return schedule

    def _bridged(self, counts: Sequence[Mapping[OptionKey, int]]) -> Iterable[list[Placed]]:
        """Schedules in which one kind of replica has no gap where it has one."""
        every = [dict(self._first), *counts]
        for key in sorted({key for placed in every for key in placed}):
            line = [placed.get(key, 0) for placed in every]
            for begin in range(len(line) - 2):
                if line[begin + 1] >= line[begin]:
                    continue
                level = line[begin + 1] + 1
                end = next((at for at in range(begin + 1, len(line)) if line[at] >= level), None)
                if end is None:
                    continue
                yield [
                    _with(placed, key, line[at]) if not begin < at < end else _with(placed, key, max(line[at], level))
                    for at, placed in enumerate(every)
                ][1:]


def _with(placed: Mapping[OptionKey, int], key: OptionKey, count: int) -> Placed:
    return tuple(sorted((its, number) for its, number in (dict(placed) | {key: count}).items() if number))


def different(steps: Sequence[Step]) -> int:
    """How many of the steps are like none before."""
    return len({_first_alike(steps, at) for at in range(len(steps))})


def _first_alike(steps: Sequence[Step], at: int) -> int:
    """The first step with the same demand, prices and partitions."""

    def facts(step: Step) -> object:
        return ([need.rate for need in step.problem.needs], step.problem.pools, step.away)

    mine = facts(steps[at])
    return next(i for i, step in enumerate(steps) if facts(step) == mine)
