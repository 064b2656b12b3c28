"""Why a placement looks as it does, in sentences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.planner.columns import LOADS
from fabrictool.planner.explaining.alternatives import choice_sentences, unused_sentences
from fabrictool.planner.explaining.prices import device_prices
from fabrictool.planner.explaining.resolving import LATE, in_parts
from fabrictool.planner.explaining.rules import rule_sentences
from fabrictool.planner.explaining.sizing import count_words, shape_sentences, shortfall_sentence
from fabrictool.planner.node_spread import is_spread
from fabrictool.planner.stages import TOLERANCE, where
from fabrictool.planner.survival import worst_loss
from fabrictool.planner.work import never

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fabrictool.domain.plan import ModelForecast
    from fabrictool.planner.explaining.resolving import Resolver
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Solution
    from fabrictool.planner.situation import Situation

WORTH_SAYING = 0.01
"""Share of a model's requests that are dropped."""
MOST_PRICES = 5
"""Partitions whose shadow prices are told, the dearest first."""


def reason_of(problem: PlacementProblem, solution: Solution, need: ModelNeed) -> str:
    """Where a model stands, and what decides the number of its replicas."""
    mine = problem.of(need.model)
    parts = [
        f"{solution.counts[i]} on {where(problem.options[i])}, {_rate(problem.options[i].capacity)} each"
        for i in mine
        if i in solution.counts
    ]
    count = sum(solution.counts.get(i, 0) for i in mine)
    sums = count_words(problem, solution, need)
    enough = sums or f"{_rate(need.rate)} demanded, planned at {LOADS[-1]:.0%} of capacity at most"
    binding = ""
    most = sum(solution.counts[i] * problem.options[i].levels[-1].rate for i in mine if i in solution.counts)
    least = min((problem.options[i].levels[-1].rate for i in mine if i in solution.counts), default=0.0)
    if count and count == need.minimum and need.rate <= most - least:
        binding = "; replicas.min decides the number"
    elif count == need.maximum:
        binding = "; replicas.max is reached"
    if count and not sums and need.rate > most * (1 + TOLERANCE):
        binding += "; more is demanded than they can serve"
    if need.spread_sites:
        binding += "; spread over sites"
    if is_spread(need):
        binding += f"; on {need.minimum} different nodes at least"
    if need.survive is not None and worst_loss(problem, need, solution.counts)[0] is None:
        binding += f"; any {need.survive} may be lost, and the rest serves all of it"
    return f"{need.model}: {'; '.join(parts) or 'no replica'}; {enough}{binding}"


def reasons(
    problem: PlacementProblem,
    solution: Solution,
    currency: str,
    expected: Sequence[ModelForecast] = (),
    left_s: Callable[[], float] = never,
) -> tuple[str, ...]:
    """One sentence for each model and what binds it, one of what it is `expected` to lack; and what one device more
    would be worth, where `left_s` leaves seconds for that.
    """
    lacks = {model.model: shortfall_sentence(model) for model in expected}
    sentences: list[str] = []
    for need in problem.needs:
        sentences += filter(None, (reason_of(problem, solution, need), lacks.get(need.model)))
    for pool in problem.pools:
        taken = sum(
            size * number * count
            for i, count in solution.counts.items()
            for (key, size), number in problem.options[i].blocks.items()
            if key == pool.key
        )
        total = pool.nodes * pool.devices_per_node
        if taken >= total:
            sentences.append(f"{pool.cluster}/{pool.partition}: all {total} {pool.device} are in use")
    return (*sentences, *_price_sentences(problem, solution, currency, left_s))


def _price_sentences(
    problem: PlacementProblem, solution: Solution, currency: str, left_s: Callable[[], float]
) -> list[str]:
    try:
        prices = device_prices(problem, solution, left_s=left_s)
    except FabrictoolError:
        return [f"what one device more would be worth {LATE}"]
    if prices is None:
        return []
    unit = {
        "fairness": "less of the largest share that anybody lacks",
        "served": "req/s more served",
        "survived": "req/s more served after losses, all losses together",
        "slo": "req/s fewer that miss the SLO",
        "excess": "req/s less over the SLO, each by its distance",
        "quality": "req/s less behind the first variant",
        "latency": "requests less in the system on average",
        "cost": f"{currency}/h less" if currency else "less",
        "energy": "W less",
        "carbon": "g CO2e/h less",
    }[prices.stage]
    device = {pool.key: pool.device for pool in problem.pools}
    best = sorted(prices.devices.items(), key=lambda item: (-item[1], item[0]))[:MOST_PRICES]
    return [
        f"one {device[key]} more in {'/'.join(key)}: {value:.3g} {unit} (marginal, by the relaxation)"
        for key, value in best
    ]


def explanation(situation: Situation, resolver: Resolver, currency: str) -> Iterator[str]:
    """Why replicas are as wide as they are, what merging gives and costs, what rules cost and what was not chosen; for
    the latter two the problem is solved again, for as long as there is work for it.
    """
    for need in resolver.whole.needs:
        yield from shape_sentences(resolver.whole, resolver.solution, need, currency)
    yield from merging_sentences(resolver.whole, resolver.solution)
    yield from sharing_sentences(resolver.whole, resolver.solution)
    telling: tuple[Callable[[Resolver, str], Iterator[str]], ...] = (
        partial(rule_sentences, situation),
        unused_sentences,
        choice_sentences,
    )
    for part, tell in zip(in_parts(resolver.work, len(telling)), telling, strict=False):
        yield from tell(resolver.within(part), currency)


def merging_sentences(problem: PlacementProblem, solution: Solution) -> Iterator[str]:
    """Of base engines that merge: what they hold and take together, apart, and as a single engine of all devices.

    Of each model those that are placed; where none is, those with the largest capacity, if there are any.
    """
    for need in problem.needs:
        mine = [i for i in problem.of(need.model) if problem.options[i].elastic is not None]
        largest = max(mine, key=lambda i: problem.options[i].capacity, default=None)
        placed = [i for i in mine if solution.counts.get(i)]
        for i in placed or ([] if largest is None else [largest]):
            yield f"{need.model}: {_merging(problem.options[i])}"


def sharing_sentences(problem: PlacementProblem, solution: Solution) -> Iterator[str]:
    """Of placed replicas that serve companions, too: what these leave the model."""
    for need in problem.needs:
        for number in (i for i in problem.of(need.model) if solution.counts.get(i)):
            option = problem.options[number]
            its = option.shared
            if its is None:
                continue
            count = len(its.parts) - 1
            others = f"{count} other model{'s'[: count > 1]}"
            time = f"its engine serves {others}, too, and gives it {its.share:.0%} of its time"
            fits = "all at once" if its.held <= its.memory else "not all at once: they take turns in it"
            room = f"with a request each they take {its.held / 2**30:.1f} GiB of {its.memory / 2**30:.1f}, {fits}"
            where = "/".join(option.pool.key)
            rate = solution.loads.get(number, 0.0) / solution.counts[number]
            lost = [
                f"{share:.0%} of the requests for {name} are dropped, since nobody can begin them in time"
                for name, share in zip((need.model, *its.names), its.at(rate).dropped, strict=True)
                if share >= WORTH_SAYING
            ]
            room = "; ".join([room, *lost])
            yield f"{need.model} in {where}: {time} under full load, then {_rate(its.capacity)}; {room}"


def _merging(option: Option) -> str:
    its = option.elastic
    if its is None:
        return ""
    share = f", as {its.share:.1%} of the requests need" if its.share else ""
    return (
        f"{its.engines} merging engines of {option.tp}×{option.pool.device} in {'/'.join(option.pool.key)} hold"
        f" {its.tokens:,} tokens together{share}, and one of them {its.tokens // its.engines:,}; a single engine on all"
        f" {option.stage_devices} devices would hold {its.whole_tokens:,}. Apart they take {_rate(its.capacity)},"
        f" merged {_rate(its.together.capacity)}; the single engine would take {_rate(its.whole_capacity)}"
    )


def _rate(value: float) -> str:
    return f"{value:.3g} req/s"
