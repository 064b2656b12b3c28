"""What the placement is expected to do, with bands, and how good the solver proved it to be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import msgspec

from fabrictool.base.canonical import tidy
from fabrictool.domain.plan import Band, Certificate, Forecast, ModelForecast, Stage
from fabrictool.domain.specs import Phase
from fabrictool.planner.columns import after, slo_misses
from fabrictool.planner.stages import TIDYING, TOLERANCE
from fabrictool.simulator.capacity import Latency, under_load
from fabrictool.simulator.phases import prefill_under_load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.plan import Replay
    from fabrictool.planner.build import Tables
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Solution
    from fabrictool.simulator.capacity import Factors, MeanWorkload

DUST = 1e-5
"""Share of a demand below which what is not served is the solver's tolerance, which later stages may use as well."""
PHASES: tuple[Phase, ...] = get_args(Phase)


def forecast(
    blueprint: Blueprint,
    problem: PlacementProblem,
    solution: Solution,
    tables: Tables,
    currency: str,
    replays: Mapping[str, Replay],
) -> Forecast:
    """One line a model; cost and power of everything that is placed."""
    used = [(problem.options[i], count) for i, count in sorted(solution.counts.items())]
    models = [_model(blueprint, problem, solution, tables, need) for need in problem.needs]
    return Forecast(
        models=tuple(msgspec.structs.replace(model, replay=replays.get(model.model)) for model in models),
        cost_per_hour=tidy(sum(option.cost * count for option, count in used)),
        currency=currency,
        power_w=tidy(sum(option.power * count for option, count in used)),
        basis="; ".join(sorted({option.figures.basis for option, _ in used})),
    )


def certificate(problem: PlacementProblem, solution: Solution, seed: int) -> Certificate:
    """The solver's claim, stage by stage, and of the stage where it is farthest from proved."""
    import ortools  # noqa: PLC0415 - --help must not pay for it

    stages = tuple(
        Stage(name=s.name, objective=s.objective, bound=s.bound, gap=_gap(s.objective, s.bound))
        for s in solution.stages
    )
    felt = [stage for stage in stages if stage.name not in TIDYING]
    # Among equals the first after ``served``, which is 0 of 0 in any fabric that is large enough.
    worst = max([*felt[1:], *felt[:1]], key=lambda stage: stage.gap)
    return Certificate(
        solver=solution.solver,
        seed=seed,
        optimal=solution.optimal,
        stages=stages,
        tables_sha256=problem.tables_sha256,
        stage=worst.name,
        objective=worst.objective,
        bound=worst.bound,
        gap=worst.gap,
        version=ortools.__version__,
    )


def _model(
    blueprint: Blueprint, problem: PlacementProblem, solution: Solution, tables: Tables, need: ModelNeed
) -> ModelForecast:
    mine = [(problem.options[i], solution.counts[i], i) for i in problem.of(need.model) if i in solution.counts]
    room = {phase: sum(o.capacity * k for o, k, _ in mine if o.phase == phase) for phase in PHASES}
    capacity = room["unified"] + min(room["prefill"], room["decode"])
    count = sum(count for _, count, _ in mine)
    split = sum(solution.loads.get(i, 0.0) for option, _, i in mine if option.phase == "prefill")
    rates = {"unified": max(0.0, need.rate - split), "prefill": split, "decode": split}
    if not split:
        rates["unified"] = need.rate
    slowest: dict[Phase, tuple[Latency, Sequence[Factors]]] = {}
    for option, _, _ in mine:
        # Routing spreads load in proportion to capacity; the slowest option then decides the percentile.
        latency = _latency(
            option, tables.demands[need.model], rates[option.phase] * option.capacity / room[option.phase]
        )
        if option.phase not in slowest or latency.e2e_p95 > slowest[option.phase][0].e2e_p95:
            slowest[option.phase] = (latency, option.figures.bands)
    worst, bands = _slower(slowest, _moving(problem, mine), tables.demands[need.model])
    taken = sum(solution.loads.get(i, 0.0) for option, _, i in mine if option.phase != "decode")
    served = 1.0 if need.rate == 0 or taken >= need.rate * (1 - DUST) else taken / need.rate
    misses = slo_misses(blueprint.models[need.model].slo, worst) if count else ["no replica"]
    if served < 1.0:
        misses.insert(0, f"only {served:.0%} of the demand can be served")
    return ModelForecast(
        model=need.model,
        replicas=count,
        utilisation=tidy(need.rate / capacity) if capacity else 0.0,
        served=tidy(served),
        ttft_p95_s=_band(worst.ttft_p95, bands[0]),
        tpot_p95_s=_band(worst.tpot_p95, bands[1]),
        e2e_p95_s=_band(worst.e2e_p95, bands[2]),
        misses=tuple(misses),
    )


def _latency(option: Option, demand: MeanWorkload, rate: float) -> Latency:
    return (
        prefill_under_load(option.figures, rate)
        if option.phase == "prefill"
        else under_load(option.figures, demand, rate)
    )


def _slower(
    slowest: Mapping[Phase, tuple[Latency, Sequence[Factors]]], moving: float, demand: MeanWorkload
) -> tuple[Latency, Sequence[Factors]]:
    """Of those that do all and of the pairs, who take `moving` seconds between them."""
    worst = slowest.get("unified", (Latency(*[0.0] * 7), ((1.0, 1.0),) * 3))
    if "prefill" not in slowest or "decode" not in slowest:
        return worst
    (first, bands), (then, later) = slowest["prefill"], slowest["decode"]
    then = after(then, moving, demand)
    pair = replace(first, tpot_mean=then.tpot_mean, tpot_p95=then.tpot_p95, e2e_p95=first.e2e_p95 + then.e2e_p95)
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


def _band(value: float, factors: tuple[float, float]) -> Band:
    return Band(tidy(value), tidy(value * factors[0]), tidy(value * factors[1]))


def _gap(objective: float, bound: float) -> float:
    # A stage is kept within the solver's tolerance while later ones are solved.
    inside = objective - bound <= 2 * TOLERANCE * max(1.0, abs(objective))
    return 0.0 if inside else tidy((objective - bound) / max(abs(objective), 1e-9))
