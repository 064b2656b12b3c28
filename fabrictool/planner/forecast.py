"""What the placement is expected to do, with bands; and why it looks as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.canonical import tidy
from fabrictool.domain.plan import Band, Certificate, Forecast, ModelForecast, Stage
from fabrictool.planner.build import LOADS, slo_misses
from fabrictool.planner.exact import TOLERANCE
from fabrictool.planner.prices import device_prices
from fabrictool.simulator.capacity import MAX_UTILISATION, Latency, under_load

if TYPE_CHECKING:
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.planner.build import Tables
    from fabrictool.planner.problem import ModelNeed, Problem, Solution

MOST_PRICES = 5
"""Partitions whose shadow prices are told, the dearest first."""


def forecast(blueprint: Blueprint, problem: Problem, solution: Solution, tables: Tables, currency: str) -> Forecast:
    """One line a model; cost and power of everything that is placed."""
    used = [(problem.options[i], count) for i, count in sorted(solution.counts.items())]
    return Forecast(
        models=tuple(_model(blueprint, problem, solution, tables, need) for need in problem.needs),
        cost_per_hour=tidy(sum(option.cost * count for option, count in used)),
        currency=currency,
        power_w=tidy(sum(option.power * count for option, count in used)),
        basis="; ".join(sorted({option.figures.basis for option, _ in used})),
    )


def certificate(problem: Problem, solution: Solution, seed: int) -> Certificate:
    """The solver's claim, stage by stage."""
    stages = tuple(
        Stage(name=s.name, objective=s.objective, bound=s.bound, gap=_gap(s.objective, s.bound))
        for s in solution.stages
    )
    return Certificate(
        solver=solution.solver,
        seed=seed,
        optimal=solution.optimal,
        stages=stages,
        tables_sha256=problem.tables_sha256,
    )


def reasons(problem: Problem, solution: Solution, currency: str) -> tuple[str, ...]:
    """One sentence for each model and what binds it; and what one device more would be worth."""
    found = []
    for need in problem.needs:
        mine = problem.of(need.model)
        parts = [
            f"{solution.counts[i]} on {problem.options[i].pool.cluster}/{problem.options[i].pool.partition}"
            f" (tp {problem.options[i].tp}, {_rate(problem.options[i].capacity)} each)"
            for i in mine
            if i in solution.counts
        ]
        count = sum(solution.counts.get(i, 0) for i in mine)
        enough = f"{_rate(need.rate)} demanded, planned at {LOADS[-1]:.0%} of capacity at most"
        binding = ""
        if count == need.minimum and count:
            binding = "; replicas.min decides the number"
        elif count == need.maximum:
            binding = "; replicas.max is reached"
        if need.spread_sites:
            binding += "; spread over sites"
        found.append(f"{need.model}: {', '.join(parts) or 'no replica'}; {enough}{binding}")
    for pool in problem.pools:
        taken = sum(problem.options[i].tp * c for i, c in solution.counts.items() if problem.options[i].pool == pool)
        total = pool.nodes * pool.devices_per_node
        if taken >= total:
            found.append(f"{pool.cluster}/{pool.partition}: all {total} {pool.device} are in use")
    prices = device_prices(problem, solution)
    if prices is not None:
        unit = {
            "served": "req/s more served",
            "slo": "req/s less beside the SLO",
            "latency": "requests less in the system on average",
            "cost": f"{currency}/h less" if currency else "less",
            "energy": "W less",
        }[prices.stage]
        device = {pool.key: pool.device for pool in problem.pools}
        best = sorted(prices.devices.items(), key=lambda item: (-item[1], item[0]))[:MOST_PRICES]
        found += [
            f"one {device[key]} more in {'/'.join(key)}: {value:.3g} {unit} (marginal, by the relaxation)"
            for key, value in best
        ]
    return tuple(found)


def _model(
    blueprint: Blueprint, problem: Problem, solution: Solution, tables: Tables, need: ModelNeed
) -> ModelForecast:
    mine = [(problem.options[i], solution.counts[i], i) for i in problem.of(need.model) if i in solution.counts]
    demand = tables.demands[need.model]
    capacity = sum(option.capacity * count for option, count, _ in mine)
    count = sum(count for _, count, _ in mine)
    worst = Latency(*[0.0] * 7)
    bands = ((1.0, 1.0),) * 3
    for option, number, _ in mine:
        # Routing spreads load in proportion to capacity; the slowest option then decides the percentile.
        rate = need.rate * option.capacity / capacity if capacity else 0.0
        latency = under_load(option.figures, demand, rate)
        if number and latency.e2e_p95 > worst.e2e_p95:
            worst, bands = latency, option.figures.bands
    served = 1.0 if need.rate == 0 else min(1.0, MAX_UTILISATION * capacity / need.rate)
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


def _band(value: float, factors: tuple[float, float]) -> Band:
    return Band(tidy(value), tidy(value * factors[0]), tidy(value * factors[1]))


def _gap(objective: float, bound: float) -> float:
    # A stage is kept within the solver's tolerance while later ones are solved.
    inside = objective - bound <= 2 * TOLERANCE * max(1.0, abs(objective))
    return 0.0 if inside else tidy((objective - bound) / max(abs(objective), 1e-9))


def _rate(value: float) -> str:
    return f"{value:.3g} req/s"
