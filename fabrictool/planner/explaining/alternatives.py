"""What was not chosen: for each model the nearest option that stays empty, and the second-best placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.explaining.wording import compared, first_difference, more
from fabrictool.planner.formulation import INFINITY, Formulation
from fabrictool.planner.stages import (
    TIE_BREAK,
    TOLERANCE,
    in_order,
    stage_names,
    tolerance,
    user_stages,
    values_of,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.planner.problem import Option, PlacementProblem, Solution

MOST_MODELS = 20
"""For so many models the nearest unused option is told, those with the largest demand first."""
FEW = 200
"""Options up to which the second-best placement is looked for."""
SECONDS = 5.0
"""For each of its stages."""


@dataclass(frozen=True, slots=True)
class Unused:
    """The nearest option of a model without a replica."""

    option: int
    stage: str
    """The first that it would make worse; "" when it would do as well."""
    worse: float
    """By how much, for each request/s there; for each replica when the model has no demand."""


def nearest_unused(problem: PlacementProblem, solution: Solution, seed: int) -> dict[str, Unused]:
    """Model → its nearest unused option, by the reduced costs of the relaxation, stage after stage."""
    relaxed = Formulation(problem, range(len(problem.options)), whole=False)
    asked = sorted(problem.needs, key=lambda need: (-need.rate, need.model))[:MOST_MODELS]
    # Each unused option with its distance in the stages so far. A fixed count cannot grow, and what is like a used
    # option in all that matters, such as the same devices elsewhere, says nothing.
    used = {_likeness(problem.options[i]) for i in solution.counts}
    candidates: dict[str, dict[int, list[float]]] = {
        need.model: {
            i: []
            for i in problem.of(need.model)
            if problem.options[i].key not in problem.fixed and _likeness(problem.options[i]) not in used
        }
        for need in asked
    }
    rate = {need.model: need.rate for need in asked}
    names = [name for name in stage_names(problem) if name != TIE_BREAK and relaxed.terms(name)]
    for name in names:
        answer = relaxed.minimise(name, seconds=60.0, seed=seed)
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


def _likeness(option: Option) -> tuple[object, ...]:
    return (
        option.model,
        option.levels,
        option.cost,
        option.power,
        option.carbon,
        option.preference,
        option.stable,
        option.phase,
    )


def runner_up(
    problem: PlacementProblem, solution: Solution, seed: int
) -> tuple[dict[int, int], dict[str, float]] | None:
    """(counts, values) of the best placement with another count of at least one option.

    None when there is no other, when there are more than `FEW` options, or when it could not be found in time.
    """
    if len(problem.options) > FEW:
        return None
    other = _Other(problem, solution.counts)
    names = [name for name in stage_names(problem) if name != TIE_BREAK]
    try:
        result = in_order(other, names, seconds=SECONDS, seed=seed)
    except FabrictoolError:
        return None
    if result is None:
        return None
    values, answer = result
    return other.counts(answer), {name: other.value(name, answer) for name in values}


def alternative_sentences(problem: PlacementProblem, solution: Solution, currency: str, seed: int) -> Iterator[str]:
    """A sentence for each model, and one for the second-best placement."""
    rate = {need.model: need.rate for need in problem.needs}
    for model, unused in nearest_unused(problem, solution, seed).items():
        there = where(problem.options[unused.option])
        if unused.stage:
            worse = more(unused.stage, unused.worse, currency)
            what = "each request/s" if rate[model] else "a replica"
            yield f"{model}: not on {there}: {what} there would mean {worse} (marginal, by the relaxation)"
        else:
            yield f"{model}: {there}: {_instead(problem, solution, unused.option, currency, seed)}"
    second = runner_up(problem, solution, seed)
    if second is not None:
        counts, values = second
        names = [*user_stages(problem), "moves", "replicas"]
        loss = compared(first_difference(problem, values_of(solution), values, names), currency)
        yield f"second best: {_differences(problem, solution.counts, counts)}: {loss}"


def _instead(problem: PlacementProblem, solution: Solution, option: int, currency: str, seed: int) -> str:
    """What one replica there would cost, in whole replicas where that can be found out soon."""
    if len(problem.options) > FEW:
        return "as good by the LP bound; whole replicas can cost more"
    return with_one_of(problem, solution, [option], currency, seed)[0]


def with_one_of(
    problem: PlacementProblem, solution: Solution, options: Sequence[int], currency: str, seed: int
) -> tuple[str, int | None]:
    """What it would cost to have at least one replica of one of these options, and of which that would be."""
    there = Formulation(problem, range(len(problem.options)), whole=True)
    there.program.row(1, INFINITY, [term for option in options for term in there.count(option)])
    names = [*user_stages(problem), "moves", "replicas"]
    try:
        result = in_order(there, names, seconds=SECONDS, seed=seed)
    except FabrictoolError:
        return "what a replica there would cost was not found out in time", None
    if result is None:
        return "the rules leave no room for a replica there", None
    counts = there.counts(result[1])
    chosen = next((option for option in options if counts.get(option)), None)
    change = first_difference(problem, values_of(solution), result[0], names)
    worse = change is not None and change[1] > 0
    return f"{'a replica there would mean ' if worse else ''}{compared(change, currency)}", chosen


def _differences(problem: PlacementProblem, chosen: Mapping[int, int], other: Mapping[int, int]) -> str:
    changes = {i: other.get(i, 0) - chosen.get(i, 0) for i in sorted({*chosen, *other})}
    words = [
        f"{problem.options[i].model} {change:+d} on {where(problem.options[i])}"
        for i, change in changes.items()
        if change
    ]
    return ", ".join(words)


class _Other(Formulation):
    """The whole program with one rule more: not these counts."""

    def __init__(self, problem: PlacementProblem, counts: Mapping[int, int]) -> None:
        super().__init__(problem, range(len(problem.options)), whole=True)
        most = {need.model: need.maximum for need in problem.needs}
        differs: list[tuple[int, float]] = []
        for i, option in enumerate(problem.options):
            count, room = counts.get(i, 0), max(most[option.model], counts.get(i, 0)) + 1
            # One of `more` and `fewer` may be 1 if the count is above, or below, what was chosen.
            more, fewer = (self.program.column(0, 1, whole=True) for _ in range(2))
            term = self.count(i)
            self.program.row(count + 1 - room, INFINITY, [*term, (more, -float(room))])
            self.program.row(-INFINITY, count - 1 + room, [*term, (fewer, float(room))])
            differs += [(more, 1.0), (fewer, 1.0)]
        self.program.row(1, INFINITY, differs)
