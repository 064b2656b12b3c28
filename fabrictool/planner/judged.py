"""What the replay says of a placement, and what the planner does about it: an SLO that the closed forms thought kept.

A kind of replica that falls short in the replay is not good for the load that it was given, whatever its table says. So
its attaining rate is lowered to the next level below, and the problem is solved again; the better of the two placements
stays.

What the replay leaves undecided teaches as well: the SLO comes before the cost, and what is not shown to be met does
not satisfy who asks for it. But it counts for less than what is missed: no model is made to miss for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from fabrictool.planner.consumers import may_use, providers_of
from fabrictool.planner.group_service import services
from fabrictool.planner.limits import used_up
from fabrictool.planner.moving import moves_are_used_up
from fabrictool.planner.weights import planned_rates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.plan import Forecast
    from fabrictool.planner.played import Played, PlayedLoss
    from fabrictool.planner.problem import Kind, ModelNeed, Option, PlacementProblem, Solution


@dataclass(frozen=True, slots=True)
class Lesson:
    """A kind of replica that fell short in the replay."""

    kind: Kind
    rate: float
    """Requests/s with which one of them did."""
    lack: float
    """The share of its requests that was missing, or that may be."""
    certain: bool = True
    """False where the replay left it undecided."""
    without: str = ""
    """The loss after which it did, in words; "": with all of them."""


ROUNDS = 2
"""Times that the problem is solved again."""
Again = Literal["searched", "no time", "kept", ""]
"""Whether it was; "no time": the limit on the work was used up before."""
NEARLY = 0.999
"""Of the planned rate: a level that is as high has been tried."""


def shortfall(problem: PlacementProblem, played: Mapping[str, Played]) -> tuple[float, float]:
    """Requests/s that lack to the models' SLOs, and those of models that may miss them; weighted by priority."""
    lacking = {name: max(model.short.values(), default=0.0) for name, model in played.items() if model.misses}
    doubtful = {name for name, model in played.items() if model.short and not model.misses}
    return (
        sum(need.rate * need.priority * lacking.get(need.model, 0.0) for need in problem.needs),
        sum(need.rate * need.priority for need in problem.needs if need.model in doubtful),
    )


def lessons(
    problem: PlacementProblem,
    solution: Solution,
    played: Mapping[str, Played],
    after: Mapping[str, PlayedLoss],
) -> tuple[Lesson, ...]:
    """What the replay teaches of the kinds that fall short, as they are placed and, of others, `after` the loss that
    their model is to survive; none where no other placement could do better for it.
    """
    if "slo" not in problem.objective:
        return ()
    rates = planned_rates(problem, solution)
    taught_kinds: dict[object, Lesson] = {}
    for option in problem.options:
        figures, rate = played.get(option.model), rates.get(option.key, 0.0)
        lack = 0.0 if figures is None else figures.short.get(option.key, 0.0)
        if figures is not None and lack > 0.0 and _promises(option, rate):
            former = taught_kinds.get(option.kind)
            taught_kinds[option.kind] = Lesson(
                option.kind,
                rate if former is None else min(rate, former.rate),
                lack if former is None else max(lack, former.lack),
                bool(figures.misses),
            )
    lost: dict[object, Lesson] = {}
    for option in problem.options:
        loss = after.get(option.model)
        if loss is None or not loss.played.misses or option.kind in taught_kinds:
            continue
        lack, rate = loss.played.short.get(option.key, 0.0), loss.rates.get(option.key, 0.0)
        # What keeps its SLO under no load that is left is no reserve: then there would be none.
        less = any(level.attains and level.rate < NEARLY * rate for level in option.levels)
        if lack > 0.0 and less and _promises(option, rate):
            lost[option.kind] = Lesson(option.kind, rate, lack, without=loss.loss.words)
    return tuple((taught_kinds | lost).values())


def _promises(option: Option, rate: float) -> bool:
    """Whether its table says that the SLO is kept at such a rate."""
    return any(level.attains and level.rate >= NEARLY * rate > 0.0 for level in option.levels)


def taught(problem: PlacementProblem, learned: Sequence[Lesson]) -> PlacementProblem:
    """The problem with tables that do not attain what the replay did not."""
    if not learned:
        return problem
    of_kind = {lesson.kind: lesson for lesson in learned}  # the last one is the lowest
    return replace(problem, options=tuple(_limited(option, of_kind.get(option.kind)) for option in problem.options))


def _limited(option: Option, lesson: Lesson | None) -> Option:
    if lesson is None:
        return option
    levels = tuple(
        replace(level, attains=False, excess=max(level.excess, lesson.lack))
        if level.attains and level.rate >= NEARLY * lesson.rate
        else level
        for level in option.levels
    )
    return replace(option, levels=levels)


def with_reasons(forecast: Forecast, problem: PlacementProblem, solution: Solution, again: Again) -> Forecast:
    """With what stands in the way of each model that is not shown to meet its SLO, or whose demand cannot be served."""
    needs = {need.model: need for need in problem.needs}
    models = tuple(
        msgspec.structs.replace(
            model, why=_why(problem, solution, needs[model.model], again, unserved=model.served < 1.0)
        )
        if model.slo in ("misses", "undecided") or model.served < 1.0
        else model
        for model in forecast.models
    )
    return msgspec.structs.replace(forecast, models=models)


def _why(problem: PlacementProblem, solution: Solution, need: ModelNeed, again: Again, *, unserved: bool) -> str:
    if again == "kept":
        return "it stays as it was applied; `fabrictool plan --improve` searches for better"
    mine = [problem.options[i] for i in problem.of(need.model)]
    count = sum(solution.counts.get(i, 0) for i in problem.of(need.model))
    if not mine:
        return "no partition can hold a replica"
    if count >= need.maximum:
        return f"replicas.max is {need.maximum}, and so many are placed"
    lacking = [its.flow.group for its in services(problem, need, solution) if its.flow.served < 1.0]
    if lacking:
        mine = [option for option in mine if any(may_use(group, providers_of(option)) for group in lacking)]
    if not mine:
        return "no partition that may hold a replica is with a provider that its unserved groups allow"
    if moves_are_used_up(problem, solution.counts):
        return f"`--max-moves` is {problem.max_moves}, and so many replicas start or stop"
    free = free_devices(problem, solution.counts)
    barred = _barred(problem, solution, mine, free)
    if barred:
        return barred
    if unserved:
        idle = sum(free.values())
        may = "its unserved groups may be served" if lacking else "it may stand"
        return "no device is free" if not idle else f"the {idle} free devices are not where {may}"
    if "slo" not in problem.objective and count:
        return "the objective does not name `slo`"
    able = [option for option in mine if option.levels[0].attains]
    roomy = [option for option in able if _has_room(option, free)]
    if not able:
        return "no cut on any partition that it may use meets the SLO, however small its load"
    if not roomy:
        idle = sum(free.values())
        return "no device is free" if not idle else f"the {idle} free devices are not where it may stand and meet it"
    there = ", ".join(sorted({"/".join(option.pool.key) for option in roomy})[:3])
    tried = {
        "searched": "no placement that was found there does better within the rules",
        "no time": "the search ended before a placement that uses it was found",
        "": "it was not searched again for a placement that uses it",
    }
    return f"there is room in {there}, but {tried[again]}"


def _barred(
    problem: PlacementProblem, solution: Solution, mine: Sequence[Option], free: Mapping[tuple[str, str], int]
) -> str:
    """The limits that stand in the way wherever there are devices for one more; "" where there are none, or room."""
    roomy = [option for option in mine if _has_room(option, free)]
    limits = used_up(problem, solution.counts, roomy) if problem.limits else []
    if not limits or not all(limits):
        return ""
    names = dict.fromkeys(f"{limit.name} ({limit.words})" for several in limits for limit in several)
    return f"devices are free, but no more may be used of limit {', '.join(names)}"


def free_devices(problem: PlacementProblem, counts: Mapping[int, int]) -> dict[tuple[str, str], int]:
    """Pool → devices that so many replicas leave; none of partitions of clusters that do not answer."""
    free = {pool.key: pool.nodes * pool.devices_per_node for pool in problem.pools}
    for i, count in counts.items():
        for (key, size), blocks in problem.options[i].blocks.items():
            if key in free:
                free[key] -= size * blocks * count
    return free


def _has_room(option: Option, free: Mapping[tuple[str, str], int]) -> bool:
    wanted: dict[tuple[str, str], int] = {}
    for (key, size), blocks in option.blocks.items():
        wanted[key] = wanted.get(key, 0) + size * blocks
    return all(free.get(key, 0) >= devices for key, devices in wanted.items())


def learned_sentences(learned: Sequence[Lesson]) -> tuple[str, ...]:
    """What was planned otherwise because of the replay, a sentence a kind."""
    last = {lesson.kind: lesson for lesson in learned}
    return tuple(
        f"{model}{f' as {variant}' if variant else ''}: {f'{engines} merging engines of ' if engines > 1 else ''}"
        f"{' + '.join(f'{tp}×{device}' for device, tp in stages)}"
        f" {'misses' if lesson.certain else 'is not shown to meet'} the SLO at {lesson.rate:.3g} req/s in"
        f" the replay{f' without {lesson.without}' if lesson.without else ''},"
        f" by {'' if lesson.certain else 'up to '}{lesson.lack:.1%} of its requests: planned for less there"
        for (model, _, stages, engines, variant), lesson in last.items()
    )
