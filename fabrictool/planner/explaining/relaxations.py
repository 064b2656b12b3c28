"""What would resolve a conflict: each of its rules, changed as little as is enough.

Only what makes the whole problem possible is offered. Where no single rule is enough, several minima are lowered
together, by as few replicas as possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.planner.explaining.conflict import SECONDS, Constraint, Constraints, conflict_of, possible, rules_of
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Pool, ResourceLimit
    from fabrictool.planner.situation import Situation

MOST_HINTS, MOST_RULES = 8, 12
"""Relaxations, and rules of a conflict, that are told."""
LOOSER = {
    "trust": ("{} on any provider", "remove `trust`, or name more providers"),
    "tier": ("{} on scavenger capacity as well", "tier: scavenger"),
    "spread": ("{} not spread over sites", "spread: none"),
    "nodes": ("{} on fewer nodes", "spread: none"),
}
"""What there is instead of a rule that holds or does not: in words, and what to write."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Changed rules with which the whole problem can be solved."""

    rules: tuple[Constraint, ...]
    words: str
    """What would be enough."""
    hint: str
    """What to write."""
    problem: PlacementProblem
    """With the changes."""
    devices: int = 0
    """That it takes beyond those that there are."""


def relaxations(
    rules: Constraints, conflict: Sequence[Constraint], left_s: Callable[[], float] = never
) -> list[Relaxation]:
    """Each rule of the conflict, changed as little as is enough; several minima together when none alone is.

    Those without further devices first, then the fewest. What the clock leaves no time for is left out.
    """
    enough: list[Relaxation] = []
    for rule in conflict:
        # An answer that the clock cut off says nothing.
        enough += [relaxation for relaxation in _alone(rules, rule, left_s) if left_s() > 0.0]
    enough.sort(key=lambda relaxation: relaxation.devices)
    if not enough and left_s() > 0.0:
        together = _lowered(rules, left_s)
        enough = [together] if together is not None and left_s() > 0.0 else []
    return enough


def _alone(rules: Constraints, rule: Constraint, left_s: Callable[[], float]) -> Iterator[Relaxation]:
    if left_s() <= 0.0:
        return
    problem, name = rules.with_only(rules.all), rule.subject
    need = next((need for need in problem.needs if need.model == name), None)
    pool = next((pool for pool in problem.pools if "/".join(pool.key) == name), None)
    if rule.kind in LOOSER:
        changed = rules.with_only([other for other in rules.all if other != rule])
        if possible(changed, left_s):
            words, hint = LOOSER[rule.kind]
            yield Relaxation((rule,), words.format(name), hint, changed)
    elif rule.kind == "devices" and pool is not None:
        more = _least(
            1, rules.enough, lambda n: possible(_with_pool(problem, replace(pool, nodes=pool.nodes + n)), left_s)
        )
        if more is not None:
            changed = _with_pool(problem, replace(pool, nodes=pool.nodes + more))
            devices = more * pool.devices_per_node
            words = f"{devices} more {pool.device} in {name}"
            join = f"{more} more by `fabrictool agent join TOKENFILE --idle --cluster {pool.cluster}`"
            hint = join if pool.joined else f"nodes: {pool.nodes + more}"
            yield Relaxation((rule,), words, hint, changed, devices)
    elif rule.kind == "limit":
        yield from _raised(rules, rule, left_s)
    elif need is not None:
        yield from _of_need(rules, problem, rule, need, left_s)


def _raised(rules: Constraints, rule: Constraint, left_s: Callable[[], float]) -> Iterator[Relaxation]:
    """The limit as high as the rest makes it: no placement uses less of it."""
    limit = next(limit for limit in rules.problem.limits if limit.thing == rule.subject)
    without = rules.with_only([other for other in rules.all if other != rule])
    whole = Formulation(replace(without, current={}), range(len(without.options)), whole=True)
    uses = {i: limit.used_by(option) for i, option in enumerate(without.options)}
    terms = [(column, uses[i] * weight) for i in whole.chosen if uses[i] for column, weight in whole.count(i)]
    try:
        answer = whole.program.minimise(terms, seconds=SECONDS, seed=0, left_s=left_s)
    except FabrictoolError:
        return
    if answer is None:
        return
    least = limit.used(without.options, whole.counts(answer))
    raised = replace(limit, most=least)
    words = f"{raised.words} instead of {limit.text(limit.most)}"
    changed = replace(without, limits=(*without.limits, raised))
    yield Relaxation((rule,), words, f"{limit.field}: {written(raised)}", changed)


def written(limit: ResourceLimit) -> str:
    """As the limit's field is written, rounded up."""
    value = math.ceil(limit.most * limit.scale - 1e-6)
    return f"{value}" if limit.resource == "devices" else f"{value} {limit.unit}"


# Wide: a rule, whose it is, and how long it may take.
def _of_need(
    rules: Constraints, problem: PlacementProblem, rule: Constraint, need: ModelNeed, left_s: Callable[[], float]
) -> Iterator[Relaxation]:
    low, high = need.minimum, need.maximum
    if rule.kind == "min":
        least = _least(1, low, lambda n: possible(_with_need(problem, replace(need, minimum=low - n)), left_s))
        if least is not None:
            changed = _with_need(problem, replace(need, minimum=low - least))
            words = f"at least {low - least} instead of {low} replicas of {need.model}"
            yield Relaxation((rule,), words, f"replicas: {{min: {low - least}}}", changed)
    elif rule.kind == "max":
        least = _least(
            1, rules.enough, lambda n: possible(_with_need(problem, replace(need, maximum=high + n)), left_s)
        )
        if least is not None:
            changed = _with_need(problem, replace(need, maximum=high + least))
            words = f"at most {high + least} instead of {high} replicas of {need.model}"
            yield Relaxation((rule,), words, f"replicas: {{max: {high + least}}}", changed)
    elif rule.kind == "pin":
        fewer = _fewer_pinned(problem, need, rule.where, left_s)
        changed = _with_need(problem, replace(need, pins=need.pins | {rule.where: fewer or 0}))
        if fewer is not None and possible(changed, left_s):
            words = f"{fewer} instead of {need.pins[rule.where]} replicas of {need.model} pinned to {rule.place}"
            yield Relaxation((rule,), words, f"pin: {{replicas: {fewer}}}", changed)


def _fewer_pinned(
    problem: PlacementProblem, need: ModelNeed, where: tuple[str, str], left_s: Callable[[], float]
) -> int | None:
    """The largest number below the pin's with which a placement exists: fewer still may be too few for a minimum."""
    others = {place: count for place, count in need.pins.items() if place != where}
    elastic = _Fewer(_with_need(replace(problem, current={}), replace(need, pins=others)), need.model, where)
    most = elastic.most(need.pins[where], left_s)
    return most if most is not None and most < need.pins[where] else None


class _Fewer(Formulation):
    """The whole program with a column for what a place lacks of a pin."""

    def __init__(self, problem: PlacementProblem, model: str, where: tuple[str, str]) -> None:
        super().__init__(problem, range(len(problem.options)), whole=True)
        mine = (i for i in problem.of(model) if problem.options[i].pool.within(*where))
        self._there = [term for i in mine for term in self.count(i)]

    def most(self, wanted: int, left_s: Callable[[], float]) -> int | None:
        """How many can be there, up to `wanted`; None when there is no placement, or none was found in time."""
        short = self.program.column(0, wanted, whole=True)
        self.program.row(wanted, wanted, [*self._there, (short, 1.0)])
        try:
            answer = self.program.minimise([(short, 1.0)], seconds=SECONDS, seed=0, left_s=left_s)
        except FabrictoolError:
            return None
        return None if answer is None else wanted - round(answer.objective)


def _least(low: int, high: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest number from `low` to `high` that is enough, if what is larger is enough as well."""
    if high < low or not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _with_need(problem: PlacementProblem, changed: ModelNeed) -> PlacementProblem:
    return replace(problem, needs=tuple(changed if n.model == changed.model else n for n in problem.needs))


def _with_pool(problem: PlacementProblem, changed: Pool) -> PlacementProblem:
    return replace(problem, pools=tuple(changed if pool.key == changed.key else pool for pool in problem.pools))


def _lowered(rules: Constraints, left_s: Callable[[], float]) -> Relaxation | None:
    """Minima lowered by as few replicas in all as possible.

    An elastic program: each model gets an option without devices that counts as a replica, and as few of those as
    possible are used.
    """
    problem = rules.with_only(rules.all)
    short = [need for need in problem.needs if need.minimum]
    spare = {need.model: _unreal(problem, need.model) for need in short}
    plain = [replace(option, preference=0.0) for option in problem.options]
    options = [*plain, *(option for option in spare.values() if option is not None)]
    elastic = replace(problem, options=tuple(options), current={})
    whole = Formulation(elastic, range(len(options)), whole=True)
    try:
        answer = whole.minimise("preference", seconds=SECONDS, seed=0, left_s=left_s)
    except FabrictoolError:
        return None
    if answer is None:
        return None
    lacking = {options[i].model: k for i, k in whole.counts(answer).items() if options[i].preference}
    changed = problem
    for need in short:
        changed = _with_need(changed, replace(need, minimum=need.minimum - lacking.get(need.model, 0)))
    if not lacking or not possible(changed, left_s):
        return None
    lowered = [
        (need.model, need.minimum, need.minimum - lacking[need.model]) for need in short if need.model in lacking
    ]
    words = "at least " + " and ".join(f"{now} instead of {was} replicas of {model}" for model, was, now in lowered)
    hint = ", ".join(f"{model}: {{replicas: {{min: {now}}}}}" for model, _, now in lowered)
    named = tuple(rule for rule in rules.all if rule.kind == "min" and rule.subject in lacking)
    return Relaxation(named, words, hint, changed)


def _unreal(problem: PlacementProblem, model: str) -> Option | None:
    """An option that takes no devices: its replicas stand for those that are lacking."""
    option = next((option for option in problem.options if option.model == model), None)
    if option is None:
        return None
    pool = replace(option.pool, cluster="", partition="", stable=True)
    return replace(option, pool=pool, preference=1.0, tp=1, pp=1, phase="unified", others=(), elastic=None, shared=None)


def explain_conflict(situation: Situation, left_s: Callable[[], float] = never) -> list[Complaint]:
    """FT2006 with the rules that conflict, and FT2007 with each of the least relaxations; none without a conflict, or
    where `left_s` leaves no seconds to look for it.
    """
    if left_s() <= 0.0:
        return []
    rules = rules_of(situation)
    conflict = conflict_of(rules, left_s)
    if not conflict:
        return []
    late = left_s() <= 0.0
    if late and len(conflict) > MOST_RULES:
        message = "which rules conflict was not found out in time"
        return [Complaint("FT2006", message, Place(), "give it more: --budget 2m", severity="warning")]
    named = "; ".join(rule.words for rule in conflict[:MOST_RULES])
    if len(conflict) > MOST_RULES:
        named += f"; and {len(conflict) - MOST_RULES} more"
    also = tuple(Place(thing=rule.thing) for rule in conflict[1:MOST_RULES])
    message = f"these cannot hold together: {named}" if len(conflict) > 1 else f"this cannot hold: {named}"
    hint = "relax any one of these"
    if late:
        message += " (there was no time to leave out what is not needed for that)"
        hint = "`--budget 2m` leaves time to name just those that conflict, and what would be enough"
    complaints = [Complaint("FT2006", message, Place(thing=conflict[0].thing), hint, also=also)]
    for relaxation in relaxations(rules, conflict, left_s)[:MOST_HINTS]:
        place = Place(thing=relaxation.rules[0].thing)
        words = f"enough would be: {relaxation.words}"
        complaints.append(Complaint("FT2007", words, place, relaxation.hint, severity="warning"))
    return complaints
