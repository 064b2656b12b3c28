"""A plan for each step of some hours, so that what each leaves the next one counts.

For every step there are several whole placements to choose from: the solver's own for that step, as the step before
left it and from nothing, those of the other steps, what runs, and one for the busiest hour of each model. The best way
through them is found by dynamic programming (`planner.schedules`). The same is then tried for each model while the
others stay, and replicas that go and come back are kept where that is cheaper. As the way without a look ahead and the
one placement for the peak are among those compared, no schedule is worse than them, where they keep the limits.

Limits of a month (`planner.quotas`) are first left out. Where the schedule then uses too much, one is made that keeps
them in each step, and one for which each step has the part of them that it would use. Through all those placements, and
the first ones with fewer replicas, the best way is searched at a price on what is used, the lowest that is enough; what
that leaves is used up step by step. The best of all that keep the limits is taken.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import InfeasibleError
from fabrictool.planner.limits import DUST
from fabrictool.planner.quotas import quotas_of, shared_out, without_quotas
from fabrictool.planner.schedules import PAID, Judge
from fabrictool.planner.waiting import Others, able_to_wait, postponed
from fabrictool.planner.ways import QuotaPrice, Ways
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fabrictool.planner.loading import Lead
    from fabrictool.planner.problem import OptionKey, PlacementProblem, Solution
    from fabrictool.planner.quotas import Quota
    from fabrictool.planner.schedules import Schedule
    from fabrictool.planner.steps import Placed, Step

    Solve = Callable[[PlacementProblem], Solution]

FOR_WAYS = 0.3
"""Share of the seconds that is not for placements."""
PRICES_TRIED = 12
"""On what is used of quotas, for each thing that it may be weighed against."""


@dataclass(frozen=True, slots=True)
class HorizonSearch:
    """What a horizon is searched with."""

    current: Mapping[OptionKey, int]
    """What runs before it."""
    solve: Solve
    """Gives a problem's last solution."""
    more: Callable[[], bool]
    """No better schedule is looked for once it says no."""
    left_s: Callable[[], float]
    """Seconds for all of it."""
    lead: Lead | None = None
    placing: Callable[[], bool] = lambda: True
    """Nor are more placements, once it says no."""

    def within(self, share: float) -> HorizonSearch:
        """With that share of the seconds that are left now, of which a part is kept for the ways through placements."""
        left = self.left_s()
        if left == math.inf:
            return self
        end = left * (1.0 - share)
        placed = end + FOR_WAYS * (left - end)
        return replace(
            self,
            more=lambda: self.more() and self.left_s() > end,
            placing=lambda: self.more() and self.left_s() > placed,
        )


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


@dataclass(frozen=True, slots=True)
class _Searched:
    """A horizon, and what it was chosen with."""

    horizon: Horizon
    judge: Judge
    choices: list[list[Placed]]
    """By step."""


# Wide: what there is, what is asked, and how long it may take.
def planned(
    steps: Sequence[Step],
    current: Mapping[OptionKey, int],
    solve: Solve,
    more: Callable[[], bool] = lambda: True,
    waits: Mapping[str, int] | None = None,
    left_s: Callable[[], float] = never,
    lead: Lead | None = None,
) -> Horizon:
    """The best schedule that is found from what runs. `solve` gives a problem's last solution; no better schedule is
    looked for once `more` says no. `waits`: for how many steps a model's requests may wait, where they may; `left_s`:
    seconds for all of it; `lead`: how early a start may be and has to be.

    Raises InfeasibleError where a step has no placement.
    """
    search = HorizonSearch(current, solve, more, left_s, lead, more)
    waiting = able_to_wait(steps, waits or {})
    at_once = _within_quotas(steps, search.within(0.5 if waiting else 1.0))
    if not waiting:
        return at_once
    later = None
    while waiting and later is None and more():
        later = _later(steps, search, waiting, waits or {})
    best = replace(at_once, at_once=at_once.schedule, came=tuple(steps))
    if later is None or later[1].rank >= at_once.schedule.rank:
        return best
    return replace(best, steps=later[0], schedule=later[1], waiting=tuple(waiting))


def _without(steps: Sequence[Step], models: Iterable[str]) -> list[Step]:
    return [step.asked(dict.fromkeys(models, 0.0)) for step in steps]


def _later(
    steps: Sequence[Step],
    search: HorizonSearch,
    waiting: list[str],
    waits: Mapping[str, int],
) -> tuple[tuple[Step, ...], Schedule] | None:
    """The steps with what is served in them, and the schedule; where nothing was found for a model in time, None, and
    `waiting` is without it.
    """
    quotas = quotas_of(steps)
    asked = list(without_quotas(steps))
    schedule: Schedule | None = _within_quotas(_without(steps, waiting), search.within(0.5)).schedule
    for at, model in enumerate(waiting):
        if schedule is None:
            waiting.clear()
            return None
        others = Others.of(schedule, search.lead)
        left_s = _share(search.left_s, len(waiting) - at)
        its = postponed(asked, others, model, waits[model], search.current, left_s)
        if its is None:
            waiting.remove(model)
            return None
        asked = [step.asked({model: rate}) for step, rate in zip(asked, its.rates, strict=True)]
        placed = [
            tuple(sorted([*(pair for pair in part.placed if pair[0][0] != model), *mine]))
            for part, mine in zip(schedule.parts, its.placed, strict=True)
        ]
        still = _without(asked, waiting[at + 1 :])
        schedule = Judge(still, search.current, lead=search.lead, waiting=waiting, quotas=quotas).schedule(placed)
    if schedule is None:
        waiting.clear()
        return None
    return tuple(asked), schedule


def _share(left_s: Callable[[], float], parts: int) -> Callable[[], float]:
    """What is left of one of so many even parts of what is left now."""
    others = left_s() * (1.0 - 1.0 / parts) if left_s() < math.inf else 0.0
    return lambda: left_s() - others


# -- limits of a month ------------------------------------------------------------------------------------------------


def _within_quotas(steps: Sequence[Step], search: HorizonSearch) -> Horizon:
    """The best schedule that is found of those that use no more of each quota in all than there is of it.

    Raises InfeasibleError where none is found, and a step has no placement with its even part of the quotas.
    """
    quotas = quotas_of(steps)
    if not quotas:
        return _at_once(steps, search).horizon
    free_steps = without_quotas(steps)
    free = _at_once(free_steps, search.within(0.4), quotas)
    every = (free.horizon.schedule, free.horizon.greedy, free.horizon.peak)
    if all(_keeps_each_step(way) for way in every if way is not None):
        return free.horizon  # the limits are in nobody's way
    refused: InfeasibleError | None = None
    strict = free
    try:
        strict = _at_once(steps, search.within(0.5), quotas)
    except InfeasibleError as error:
        refused = error
    free.judge.more = search.more  # it goes on
    shares = shared_out(steps, quotas, [part.used for part in free.horizon.schedule.parts])
    shared = _shared(shares, search.within(1.0), free.horizon)
    ways = Ways(free.judge)
    choices = [
        list(dict.fromkeys([*mine, *theirs, *shared[max(0, at - 1) : at + 2], *ways.thinned(at, part.placed)]))
        for at, (mine, theirs, part) in enumerate(
            zip(free.choices, strict.choices, free.horizon.schedule.parts, strict=True)
        )
    ]
    # What keeps the limits in each step, with what loads in it, keeps them in all.
    known = (free.horizon.schedule, strict.horizon.schedule, free.judge.schedule(shared))
    best = min((way for way in known if way is not None), key=lambda way: way.rank)
    best = ways.kept(ways.improved(_priced(free.judge, best, choices), choices))
    if refused is not None and best.over:
        raise refused
    copied = max(free.horizon.copied, strict.horizon.copied)
    return replace(strict.horizon, steps=tuple(steps), schedule=best, copied=copied)


def _keeps_each_step(way: Schedule) -> bool:
    """Whether no step uses more than its even part."""
    parts = [(quota.most / len(way.parts), at) for at, quota in enumerate(way.quotas)]
    return all(step.used[at] <= part * (1 + DUST) for step in way.parts for part, at in parts)


def _shared(steps: Sequence[Step], search: HorizonSearch, free: Horizon) -> list[Placed]:
    """A placement for each step with its part of the quotas; where it has none, the one without quotas."""
    running: Mapping[OptionKey, int] = search.current
    placements: list[Placed] = []
    for step, part in zip(steps, free.schedule.parts, strict=True):
        known = {option.key for option in step.problem.options}
        there = {key: count for key, count in running.items() if key in known}
        placed = part.placed
        if search.placing():
            try:
                placed = _solved(replace(step.problem, current=there), search.solve)
            except InfeasibleError:
                placed = part.placed
        placements.append(placed)
        running = dict(placed)
    return placements


def _priced(judge: Judge, schedule: Schedule, choices: Sequence[Sequence[Placed]]) -> Schedule:
    """The best of this one and of ways through the choices at a price on what they use of quotas.

    The price is on what running comes to where that is enough, else on misses of the SLO, else on what losses would
    leave unserved, else on what is unserved.
    """
    ways = Ways(judge)
    for place in reversed(range(PAID + 1)):
        low, high, enough = 0.0, ways.highest(place), False
        price = QuotaPrice(place, high)
        for _ in range(PRICES_TRIED):
            if judge.exhausted:
                return schedule
            way = ways.best(choices, price)
            if way is None or (way.over and price.amount == high):
                break
            if way.over:
                low = price.amount
            else:
                enough, high = True, price.amount
                schedule = min(schedule, way, key=lambda way: way.rank)
            price = QuotaPrice(place, (low * high) ** 0.5 if low else high / 16.0)
        if enough:
            return ways.mixed(schedule, choices, QuotaPrice(place, high))
    return schedule


# -- all that is asked at once ----------------------------------------------------------------------------------------


def _at_once(steps: Sequence[Step], search: HorizonSearch, quotas: Sequence[Quota] = ()) -> _Searched:
    current, solve, more = search.current, search.solve, search.placing
    judge = Judge(steps, current, search.more, search.lead, quotas=quotas)
    constant = _peak(steps, solve)
    greedy: list[Placed] = []
    copied = 0
    running: Mapping[OptionKey, int] = current
    past = judge.first
    alone: dict[int, Placed] = {}
    seen: dict[tuple[int, Placed], Placed] = {}
    for at, step in enumerate(steps):
        there = {key: count for key, count in running.items() if key in judge.options[at]}
        asked = (judge.same[at], tuple(sorted(there.items())))
        if asked not in seen:
            known = [*greedy[-1:], *([constant] if constant is not None else [])]
            near = None if more() else judge.nearest(at, past, known)
            copied += near is not None
            seen[asked] = near if near is not None else _solved(replace(step.problem, current=there), solve)
        greedy.append(seen[asked])
        running = dict(greedy[-1])
        if (part := judge.part(at, past, greedy[-1])) is None:
            raise InfeasibleError.of("FT2001", "a step of the horizon has no placement")
        past = part[1]
        if judge.same[at] not in alone and (more() or not there):
            alone[judge.same[at]] = _solved(step.problem, solve) if there else greedy[-1]
    others = [*greedy, *alone.values(), tuple(sorted((key, k) for key, k in current.items() if k))]
    simple = judge.schedule(greedy)
    if simple is None:
        raise InfeasibleError.of("FT2001", "a step of the horizon has no placement")
    quick = _quick(judge, simple, search)
    candidates = list(dict.fromkeys([*others, *quick]))
    peak = None if constant is None else judge.schedule([constant] * len(steps))
    judge.choosing = True
    ways = Ways(judge)
    overlapping = ways.overlaps(simple)
    always = [constant] if constant is not None else []
    nearby = [
        [*greedy[max(0, at - 1) : at + 2], both, *always, *([alone[same]] if (same := judge.same[at]) in alone else [])]
        for at, both in enumerate(overlapping)
    ]
    choices = ways.chosen([candidates] * len(steps), nearby)
    best = ways.best(choices)
    schedules = (best, simple, peak, judge.schedule(overlapping))
    least = min((way for way in schedules if way is not None), key=lambda way: way.rank)
    schedule = ways.kept(ways.mixed(least, choices))
    return _Searched(Horizon(tuple(steps), schedule, simple, peak, copied=copied), judge, choices)


def _quick(judge: Judge, simple: Schedule, search: HorizonSearch) -> list[Placed]:
    """Placements for steps in which something is lost to loading, of what loads faster."""
    placements: dict[tuple[int, Placed], Placed] = {}
    before: Placed = judge.first.placed[-1]
    for at, part in enumerate(simple.parts):
        key = (judge.same[at], before)
        if part.to_loading and key not in placements and search.placing():
            with suppress(InfeasibleError):  # what loads fast enough may not be able to keep the rules
                placements[key] = _solved(judge.quick(at, dict(before), part.renewals), search.solve)
        before = part.placed
    return list(placements.values())


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
