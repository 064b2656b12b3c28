"""What was not chosen: for each model the nearest option that stays empty, and other placements that are as good."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.explaining.exchanges import exchanges
from fabrictool.planner.explaining.resolving import LATE, Comparison
from fabrictool.planner.explaining.wording import more
from fabrictool.planner.formulation import INFINITY
from fabrictool.planner.stages import (
    NOUNS,
    TIE_BREAK,
    TOLERANCE,
    residual,
    stage_names,
    tolerance,
    user_stages,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from fabrictool.planner.explaining.resolving import Resolver
    from fabrictool.planner.formulation import Formulation
    from fabrictool.planner.problem import Option, PlacementProblem

MOST_MODELS = 20
"""For so many models the nearest unused option is told, those with the largest demand first."""
MOST_CHOICES, NEAR = 3, 2e-3
"""Gap at which a choice is good enough to be told, as all of them are within 1 %."""
MOST_GUESSES, MOST_EXCHANGES = 8, 100
"""That are judged: for a replica of one kind, and for choices."""
SHOWN = 5e-4
"""Of a value: less is no tenth of a percent."""
WITHIN = 0.01
"""Of each value that users feel: by no more is a choice worse than the plan."""


@dataclass(frozen=True, slots=True)
class Unused:
    """The nearest option of a model without a replica."""

    option: int
    """Of the resolver's problem."""
    stage: str
    """The first that it would make worse; "" when it would do as well."""
    worse: float
    """By how much, for each request/s there; for each replica when the model has no demand."""


def nearest_unused(resolver: Resolver) -> dict[str, Unused]:
    """Model → its nearest unused option, by the reduced costs of the relaxation, stage after stage.

    Raises FabrictoolError FT2902 when work or time is up.
    """
    problem, relaxed = resolver.problem, resolver.relaxation()
    asked = sorted(problem.needs, key=lambda need: (-need.rate, need.model))[:MOST_MODELS]
    # Each unused option with its distance in the stages so far. A fixed count cannot grow, and what is like a used
    # option in all that matters, such as the same devices elsewhere, says nothing.
    used = {_likeness(problem, problem.options[i]) for i in resolver.counts}
    candidates: dict[str, dict[int, list[float]]] = {
        need.model: {
            i: []
            for i in problem.of(need.model)
            if problem.options[i].key not in problem.fixed and _likeness(problem, problem.options[i]) not in used
        }
        for need in asked
    }
    rate = {need.model: need.rate for need in asked}
    names = [name for name in stage_names(problem) if name != TIE_BREAK and relaxed.terms(name)]
    for name in names:
        answer = resolver.relaxed(relaxed, name)
        if answer is None:
            return {}
        for model, options in candidates.items():
            for i, distances in options.items():
                if rate[model]:
                    distance = relaxed.distance(answer, i)
                else:
                    distance = min(float(answer.reduced[column]) for column, _ in relaxed.count(i))
                distances.append(distance if distance > TOLERANCE else 0.0)
        relaxed.keep(name, answer.objective + tolerance(name, answer.objective))
    nearest = {}
    for model, options in candidates.items():
        if options:
            distances, i = min((distances, i) for i, distances in options.items())
            at = next((at for at, distance in enumerate(distances) if distance), None)
            nearest[model] = Unused(i, "", 0.0) if at is None else Unused(i, names[at], distances[at])
    return nearest


def _likeness(problem: PlacementProblem, option: Option) -> Hashable:
    """What does the same for the same price, wherever it stands; where a group allows providers, these tell apart."""
    divided = any(need.parts for need in problem.needs if need.model == option.model)
    return (
        option.kind,
        option.levels,
        option.cost,
        option.power,
        option.carbon,
        option.preference,
        option.stable,
        frozenset(pool.provider for pool in option.pools) if divided else None,
    )


def unused_sentences(resolver: Resolver, currency: str) -> Iterator[str]:
    """A sentence for each model: what its nearest unused option would cost."""
    problem, late = resolver.problem, []
    rate = {need.model: need.rate for need in problem.needs}
    try:
        nearest = nearest_unused(resolver)
    except FabrictoolError:
        yield f"what a replica of each model elsewhere would cost {LATE}"
        return
    for model, unused in nearest.items():
        there = where_in(resolver, unused.option)
        if unused.stage:
            worse = more(unused.stage, unused.worse, currency)
            what = "each request/s" if rate[model] else "a replica"
            yield f"{model}: not on {there}: {what} there would mean {worse} (marginal, by the relaxation)"
        elif not resolver.is_small:
            yield f"{model}: {there}: as good by the LP bound; whole replicas can cost more"
        else:
            outcome = with_one_of(resolver, [unused.option])
            if outcome.ending == "late":
                late.append(model)
            else:
                yield f"{model}: {there}: {with_one_words(outcome, currency)}"
    if late:
        yield f"what a replica elsewhere would cost {LATE}: {', '.join(late)}"


def with_one_of(resolver: Resolver, options: Sequence[int]) -> Comparison:
    """The problem with at least one replica of one of these options of it."""
    program = resolver.program()
    program.program.row(1, INFINITY, [term for option in options for term in program.count(option)])
    return resolver.best(program, _guess(resolver, options))


def _guess(resolver: Resolver, options: Sequence[int]) -> dict[int, int] | None:
    """The first exchange for one of these options that keeps the rules; None where no soon judged one does."""
    for counts in islice(exchanges(resolver, options, INFINITY), MOST_GUESSES):
        if not resolver.work.more():
            return None
        if resolver.worth(counts) is not None:
            return counts
    return None


def with_one_words(outcome: Comparison, currency: str) -> str:
    """What it would cost to have a replica somewhere."""
    if outcome.ending == "impossible":
        return "the rules leave no room for a replica there"
    if outcome.ending == "late":
        return f"what a replica there would cost {LATE}"
    worse = outcome.change is not None and outcome.change[1] > 0
    return f"{'a replica there would mean ' if worse else ''}{outcome.words(currency)}"


def choice_sentences(resolver: Resolver, currency: str) -> Iterator[str]:
    """Other placements whose values are all within 1 % of the plan's or better; where there is none, the next best."""
    if not resolver.is_small:
        return
    others = _Others(resolver)
    try:
        for counts in others.choices():
            outcome = resolver.compared(counts, proved=True)
            changes = _differences(resolver, resolver.counts, counts)
            if outcome.change is not None and outcome.change[1] < 0:
                yield f"{changes}: {outcome.words(currency)}"
                return  # what is nearly as good as a plan that can be beaten is of no use
            yield f"as good within {WITHIN:.0%}: {changes}: {_shares(resolver, resolver.worth(counts) or {})}"
    except FabrictoolError:
        yield f"whether {'more' if others.known else 'other'} placements are as good within {WITHIN:.0%} {LATE}"
        return
    if not others.known:
        outcome = resolver.best(others.program())
        if outcome.ending == "compared":
            yield f"second best: {_differences(resolver, resolver.counts, outcome.counts)}: {outcome.words(currency)}"
        elif outcome.ending == "late":
            yield f"the second-best placement {LATE}"


def _shares(resolver: Resolver, values: Mapping[str, float]) -> str:
    """By how much each value that users feel differs, in percent of the plan's."""
    parts = []
    for name in user_stages(resolver.problem):
        was, now = resolver.values.get(name, 0.0), values.get(name, 0.0)
        if abs(now - was) > max(residual(resolver.problem, name, was), SHOWN * abs(was)):
            parts.append(f"{NOUNS[name].rstrip(',')} {now / was - 1:+.1%}")
    return ", ".join(parts) or "the same in all that counts"


def where_in(resolver: Resolver, i: int) -> str:
    """Where an option of the resolver's problem is; of alike partitions the first, and that there are others."""
    return where(resolver.problem.options[i]) + (" or alike" if len(resolver.members[i]) > 1 else "")


def _differences(resolver: Resolver, chosen: Mapping[int, int], other: Mapping[int, int]) -> str:
    return ", ".join(
        f"{resolver.problem.options[i].model} {change:+d} on {where_in(resolver, i)}"
        for i, change in _changes(chosen, other).items()
    )


def _changes(chosen: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Option → by how many replicas it differs, where it does."""
    changes = {i: other.get(i, 0) - chosen.get(i, 0) for i in sorted({*chosen, *other})}
    return {i: change for i, change in changes.items() if change}


class _Others:
    """The whole program with rules more: not the plan, nor what was told before, nor the same dealt out otherwise."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self.known: list[Mapping[int, int]] = []
        """Counts of choices that were told: no other is to be the same."""
        problem = resolver.problem
        self._alike: dict[Hashable, list[int]] = {}
        for i, option in enumerate(problem.options):
            self._alike.setdefault(_likeness(problem, option), []).append(i)

    def choices(self) -> Iterator[dict[int, int]]:
        """Exchanges of one model's replicas first, and no two of the same model; then whatever there is.

        Raises FabrictoolError FT2902 when work or time is up.
        """
        resolver, changed = self._resolver, set[str]()
        every = range(len(resolver.problem.options))
        for counts in islice(exchanges(resolver, every, WITHIN), MOST_EXCHANGES):
            models = {resolver.problem.options[i].model for i in _changes(resolver.counts, counts)}
            if len(self.known) >= MOST_CHOICES or not resolver.work.more():
                break
            if models <= changed or not self._is_another(counts):
                continue
            values = resolver.worth(counts)
            if values is not None and all(values.get(name, 0.0) <= self._most(name) for name in values):
                changed |= models
                self.known.append(counts)
                yield counts
        while len(self.known) < MOST_CHOICES:
            nearby = self._nearby()
            if nearby is None:
                return
            self.known.append(nearby)
            yield nearby

    def _is_another(self, counts: Mapping[int, int]) -> bool:
        """Whether it is more than the plan dealt out otherwise."""
        now = self._resolver.counts
        return any(sum(counts.get(i, 0) - now.get(i, 0) for i in alike) for alike in self._alike.values())

    def _most(self, name: str) -> float:
        """What a stage may come to in a choice."""
        was = self._resolver.values.get(name, 0.0)
        return was + max(WITHIN * abs(was), residual(self._resolver.problem, name, was))

    def program(self) -> Formulation:
        """Without what is known."""
        program = self._resolver.program()
        for counts in (self._resolver.counts, *self.known):
            self._exclude(program, counts)
        return program

    def _nearby(self) -> dict[int, int] | None:
        """Counts of one that is hardly worse in anything; None where there is none.

        Raises FabrictoolError FT2902 when work or time is up.
        """
        resolver, program = self._resolver, self.program()
        terms: list[tuple[int, float]] = []
        for name in user_stages(resolver.problem):
            was = resolver.values.get(name, 0.0)
            if program.terms(name):
                program.keep(name, self._most(name))
                # All of them together, each by its share: what is lost here may be gained there.
                terms += [(column, weight / was) for column, weight in program.terms(name) if was > TOLERANCE]
        result = resolver.searched(program, terms, {}, NEAR)
        if result.values is None and result.ending != "INFEASIBLE":
            raise FabrictoolError.of("FT2902", "the solver found nothing in time")
        return None if result.values is None else program.counts(result)

    def _exclude(self, program: Formulation, counts: Mapping[int, int]) -> None:
        problem = self._resolver.problem
        most = {need.model: need.maximum for need in problem.needs}
        changes: list[tuple[int, float]] = []
        for alike in self._alike.values():
            count = sum(counts.get(i, 0) for i in alike)
            room = max(most[problem.options[alike[0]].model], count) + 1
            # One of `above` and `below` may be 1 if the count is above, or below, what was chosen.
            above, below = (program.program.column(0, 1, whole=True) for _ in range(2))
            terms = [term for i in alike for term in program.count(i)]
            program.program.row(count + 1 - room, INFINITY, [*terms, (above, -float(room))])
            program.program.row(-INFINITY, count - 1 + room, [*terms, (below, float(room))])
            changes += [(above, 1.0), (below, 1.0)]
        program.program.row(1, INFINITY, changes)
