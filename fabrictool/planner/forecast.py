"""What the placement is expected to do, with bands."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from fabrictool.base.canonical import tidy
from fabrictool.domain.plan import Band, Forecast, GroupForecast, LimitUse, LossReplay, ModelForecast, Survival
from fabrictool.domain.specs import Phase
from fabrictool.planner.group_service import services
from fabrictool.planner.stages import TOLERANCE
from fabrictool.planner.survival import worst_loss
from fabrictool.planner.targets import slo_misses
from fabrictool.planner.uncertain import together, windows_of
from fabrictool.planner.variants import chosen_variants
from fabrictool.simulator.capacity import Latency, under_load
from fabrictool.simulator.estimates import Percentile
from fabrictool.simulator.phases import prefill_under_load
from fabrictool.simulator.slo import criteria, spared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.plan import Verdict
    from fabrictool.planner.build import Tables
    from fabrictool.planner.played import Played, PlayedLoss
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Solution
    from fabrictool.simulator.capacity import Factors, MeanWorkload

PHASES: tuple[Phase, ...] = get_args(Phase)


# Wide: what was wanted, what was chosen, and what is known of it.
def forecast(
    blueprint: Blueprint,
    problem: PlacementProblem,
    solution: Solution,
    tables: Tables,
    currency: str,
    replays: Mapping[str, Played],
    after: Mapping[str, PlayedLoss],
    seed: int = 0,
) -> Forecast:
    """One line a model; cost and power of everything that is placed."""
    used = [(problem.options[i], count) for i, count in sorted(solution.counts.items())]
    at_once = together(blueprint, problem, solution, seed)
    models = [
        _model(blueprint, problem, solution, tables, need, replays.get(need.model), after.get(need.model))
        for need in problem.needs
    ]
    return Forecast(
        models=tuple(models),
        cost_per_hour=tidy(sum(option.cost * count for option, count in used)),
        currency=currency,
        power_w=tidy(sum(option.power * count for option, count in used)),
        carbon_g_per_hour=_carbon(used),
        basis="; ".join(sorted({option.figures.basis for option, _ in used})),
        limits=_limits(problem, solution),
        held_together=msgspec.UNSET if at_once is None else at_once,
        wanted_together=msgspec.UNSET if blueprint.together is None else float(blueprint.together),
    )


def _carbon(used: Sequence[tuple[Option, int]]) -> float | msgspec.UnsetType:
    """Unknown where any of it is: a part would look like less."""
    known = all(pool.carbon_per_kwh is not None for option, _ in used for pool in option.pools)
    return tidy(sum(option.carbon * count for option, count in used)) if used and known else msgspec.UNSET


def _limits(problem: PlacementProblem, solution: Solution) -> tuple[LimitUse, ...] | msgspec.UnsetType:
    uses = tuple(
        LimitUse(
            name=limit.name,
            field=limit.field,
            whose=limit.whose,
            used=tidy(limit.used(problem.options, solution.counts) * limit.scale),
            most=tidy(limit.most * limit.scale),
            unit=limit.unit,
        )
        for limit in problem.limits
    )
    return uses or msgspec.UNSET


# Long: all that is said of one model comes from the same few figures.
def _model(
    blueprint: Blueprint,
    problem: PlacementProblem,
    solution: Solution,
    tables: Tables,
    need: ModelNeed,
    played: Played | None,
    after: PlayedLoss | None,
) -> ModelForecast:
    mine = [(problem.options[i], solution.counts[i], i) for i in problem.of(need.model) if i in solution.counts]
    room = {phase: sum(o.capacity * k for o, k, _ in mine if o.phase == phase) for phase in PHASES}
    capacity = room["unified"] + min(room["prefill"], room["decode"])
    count = sum(count for _, count, _ in mine)
    taken = sum(solution.loads.get(i, 0.0) for option, _, i in mine if option.phase != "decode")
    served = 1.0 if taken >= need.rate * (1 - TOLERANCE) else taken / need.rate
    # What cannot be served comes all the same; routing deals it out as it does the rest.
    overload = need.rate / taken if taken > 0 else 1.0
    slowest: dict[Phase, tuple[Latency, Sequence[Factors]]] = {}
    for option, number, i in mine:
        # Routing follows the planned loads; the slowest option then decides the percentile.
        rate = overload * solution.loads.get(i, 0.0) / number
        if not rate and taken > 0:
            continue  # it stands by
        latency = _latency(option, tables.demands[need.model], rate)
        if option.phase not in slowest or latency.e2e_p95 > slowest[option.phase][0].e2e_p95:
            slowest[option.phase] = (latency, option.figures.bands)
    worst, bands = _slower(slowest, _moving(problem, mine))
    model = blueprint.models[need.model]
    slo = model.slo
    factors = spared(slo, [option.figures.bands for option, _, _ in mine])
    verdict: Verdict = ""
    overruled: Verdict = ""
    judge: Literal["replay", "closed form", "turns", ""] = ""
    misses: list[str] = []
    undecided: tuple[str, ...] = ()
    if criteria(slo):
        # The replay is trusted wherever there is one: it has the lengths' spread and the routing's chance in it.
        judge = "turns" if any(option.shared for option, *_ in mine) else "closed form"
        judge = judge if played is None else "replay"
        formula = slo_misses(slo, worst, factors) if count else ["no replica"]
        misses = formula if played is None else list(played.misses)
        undecided = () if played is None else played.undecided
        verdict = "misses" if misses or served < 1.0 else "undecided" if undecided else "meets"
        overruled = "misses" if formula else "meets"
    return ModelForecast(
        model=need.model,
        replicas=count,
        utilisation=tidy(need.rate / capacity) if capacity else 0.0,
        served=tidy(served),
        ttft_p95_s=_band("ttft", worst.ttft_p95, bands[0], played),
        tpot_p95_s=_band("tpot", worst.tpot_p95, bands[1], played),
        e2e_p95_s=_band("e2e", worst.e2e_p95, bands[2], played),
        replay=None if played is None else played.figures,
        misses=tuple(misses),
        undecided=undecided,
        slo=verdict,
        judge=judge,
        survival=_survival(problem, solution, need, after),
        groups=_groups(problem, solution, need),
        variants=chosen_variants(model, [(o, k, solution.loads.get(i, 0.0)) for o, k, i in mine]) or msgspec.UNSET,
        spared=factors if criteria(slo) and slo is not None and slo.band is not None else msgspec.UNSET,
        demand=windows_of(problem, solution, need.model, model.demand) or msgspec.UNSET,
        overruled=overruled if verdict not in ("undecided", overruled) and served == 1.0 else "",
    )


def _groups(
    problem: PlacementProblem, solution: Solution, need: ModelNeed
) -> tuple[GroupForecast, ...] | msgspec.UnsetType:
    told = tuple(
        GroupForecast(
            group=service.flow.group.group,
            share=tidy(service.flow.group.share),
            served=tidy(service.flow.served),
            sent={" and ".join(sorted(place)): float(f"{part:.4g}") for place, part in service.flow.sent.items()},
            replicas=service.replicas,
            left=service.left,
        )
        for service in services(problem, need, solution)
    )
    return told or msgspec.UNSET


def _survival(
    problem: PlacementProblem, solution: Solution, need: ModelNeed, after: PlayedLoss | None
) -> Survival | None:
    if need.survive is None:
        return None
    loss, unserved = worst_loss(problem, need, solution.counts)
    shown = msgspec.UNSET if after is None else _after_loss(after)
    if loss is None:
        return Survival(need.survive, 1.0, replay=shown)
    return Survival(need.survive, tidy(1.0 - unserved / need.rate) if need.rate else 0.0, loss.words, shown)


def _after_loss(after: PlayedLoss) -> LossReplay:
    played, figures = after.played, after.played.figures
    return LossReplay(
        without=after.loss.words,
        slo="misses" if played.misses else "undecided" if played.undecided else "meets",
        attainment=figures.attainment,
        low=figures.low,
        high=figures.high,
        misses=played.misses or played.undecided,
    )


def _latency(option: Option, demand: MeanWorkload, rate: float) -> Latency:
    its = option.elastic or option.shared
    if its is not None:
        return its.under_load(rate)
    return (
        prefill_under_load(option.figures, rate)
        if option.phase == "prefill"
        else under_load(option.figures, demand, rate)
    )


def _slower(
    slowest: Mapping[Phase, tuple[Latency, Sequence[Factors]]], moving: float
) -> tuple[Latency, Sequence[Factors]]:
    """Of those that do all and of the pairs, who take `moving` seconds between them."""
    worst = slowest.get("unified", (Latency(*[0.0] * 7), ((1.0, 1.0),) * 3))
    if "prefill" not in slowest or "decode" not in slowest:
        return worst
    (first, bands), (then, later) = slowest["prefill"], slowest["decode"]
    ttft = first.ttft_mean + moving + then.ttft_mean
    pair = replace(
        then,
        ttft_mean=ttft,
        ttft_p95=ttft + math.hypot(first.ttft_p95 - first.ttft_mean, then.ttft_p95 - then.ttft_mean),
        e2e_p95=first.e2e_p95 + moving + then.e2e_p95,
    )
    return (pair, (bands[0], later[1], later[2])) if pair.e2e_p95 > worst[0].e2e_p95 else worst


def _moving(problem: PlacementProblem, mine: Sequence[tuple[Option, int, int]]) -> float:
    """Seconds of the slowest hand-over between the places of a model."""
    ways = [
        problem.transfers.get((sender.model, sender.pool.key, receiver.pool.key))
        for sender, _, _ in mine
        for receiver, _, _ in mine
        if sender.phase == "prefill" and receiver.phase == "decode"
    ]
    return max((way.seconds for way in ways if way is not None), default=0.0)


def _band(metric: str, closed: float, factors: tuple[float, float], played: Played | None) -> Band:
    """Around the replay's percentile with what chance leaves open of it; around the closed form's where no request has
    it there, and up to that where the replay ended before the replicas were full.
    """
    seen = Percentile(closed, closed, closed)
    seen = seen if played is None else played.p95.get(metric, seen)
    worse = 0.0 if played is None or played.full else closed
    value = max(seen.value, worse)
    return Band(tidy(value), tidy(seen.low * factors[0]), tidy(max(seen.high, worse) * factors[1]))
