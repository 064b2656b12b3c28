"""The problem in each step of a horizon: demand, prices, what electricity emits and partitions, as they are by then."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import UsageError
from fabrictool.domain.hours import PIECE_S, factor_during
from fabrictool.planner.build import pools_of
from fabrictool.planner.fairness import FAIRNESS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.planner.problem import Option, OptionKey, PlacementProblem, Pool, PoolKey
    from fabrictool.planner.situation import Situation

HOUR_S = 3600.0
MOST_STEPS = 336
PaidIn = Literal["cost", "energy", "carbon"]
Placed = tuple[tuple["OptionKey", int], ...]
"""Counts by option, in order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the horizon, and the problem in it."""

    begin: float
    """Seconds since 1970."""
    seconds: float
    problem: PlacementProblem
    """With nothing running."""
    paid_in: PaidIn
    """What running comes to: money, energy in kWh, or carbon in kg of CO2 equivalent."""
    away: frozenset[PoolKey] = frozenset()
    """Under maintenance."""
    gone: Mapping[OptionKey, Option] = field(default_factory=dict)
    """Options that cannot be had in it, at their prices."""

    @property
    def rate(self) -> float:
        """Requests/s of all models."""
        return math.fsum(need.rate for need in self.problem.needs)

    @property
    def hours(self) -> float:
        return self.seconds / HOUR_S

    def price(self, option: Option) -> float:
        """Of one replica, for each hour that it runs."""
        return {"cost": option.cost, "energy": option.power / 1000.0, "carbon": option.carbon / 1000.0}[self.paid_in]

    def moving(self, price: float, seconds: float) -> float:
        """What a start or a stop comes to, of a replica at that price that holds its devices for so long outside of its
        steps; or what the blueprint's `move_price` says.
        """
        if self.paid_in == "cost" and self.problem.move_price:
            return self.problem.move_price
        return price * seconds / HOUR_S

    def asked(self, rates: Mapping[str, float]) -> Step:
        """The same with other requests/s of some models."""
        needs = tuple(replace(need, rate=rates.get(need.model, need.rate)) for need in self.problem.needs)
        return replace(self, problem=replace(self.problem, needs=needs))


def steps_of(situation: Situation, begin: float, seconds: float, number: int) -> tuple[Step, ...]:
    """The problems of a horizon: demand, prices and partitions as they are in each step.

    Raises
    ------
    UsageError
        FT2032 the steps are no such that a plan can be made for them.
    """
    if not 1 <= number <= MOST_STEPS or seconds < PIECE_S or seconds % PIECE_S:
        message = f"{number} steps of {seconds / 60:g} minutes are no horizon"
        hint = f"steps of 15 minutes or a multiple of them, {MOST_STEPS} at most, such as `--horizon 24h --step 1h`"
        raise UsageError.of("FT2032", message, hint=hint)
    base, _ = replace(situation, ends_apart=True).build()
    paid_in = _paid_in(situation, base.objective)
    base = replace(base, current={}, objective=_objective(base, paid_in))
    return tuple(_step(situation, base, begin + i * seconds, seconds, paid_in) for i in range(number))


def waits_of(situation: Situation, seconds: float) -> dict[str, int]:
    """Model → the whole steps of that length for which its requests may wait; of those that may at all."""
    demands = {name: model.demand for name, model in situation.blueprint.models.items()}
    waits = {name: int(float(its.wait) // seconds) for name, its in demands.items() if its is not None and its.wait}
    return {name: wait for name, wait in waits.items() if wait}


def _paid_in(situation: Situation, objective: Sequence[str]) -> PaidIn:
    """Carbon where that is wanted before money and energy; else money, where anything has a price."""
    if next((name for name in objective if name in ("cost", "energy", "carbon")), "") == "carbon":
        return "carbon"
    return "cost" if any(pool.price_per_node_hour for pool in pools_of(situation.inventory)) else "energy"


def _objective(problem: PlacementProblem, paid_in: PaidIn) -> tuple[str, ...]:
    """Service comes first, then what it comes to: a latency better than wanted would leave all of it running."""
    first = [name for name in problem.objective if name in (FAIRNESS, "slo", "quality")]
    return tuple(dict.fromkeys([*first, "slo", paid_in, *problem.objective]))


def _step(situation: Situation, base: PlacementProblem, begin: float, seconds: float, paid_in: PaidIn) -> Step:
    zone, models = situation.blueprint.zone, situation.blueprint.models
    end = begin + seconds
    needs = []
    away: set[PoolKey] = set()
    priced: dict[PoolKey, Pool] = {}
    for pool in pools_of(situation.inventory):
        partition = situation.inventory.clusters[pool.cluster].partitions[pool.partition]
        if any(float(window.begin) < end and float(window.end) > begin for window in partition.maintenance):
            away.add(pool.key)
        site = situation.inventory.sites[pool.site]
        price, carbon = (
            1.0 if hours is None else factor_during(hours.factors, begin, seconds, zone)
            for hours in (partition.price_hours, site.carbon_hours)
        )
        if (price, carbon) != (1.0, 1.0):
            priced[pool.key] = replace(
                pool,
                price_per_node_hour=pool.price_per_node_hour * price,
                carbon_per_kwh=None if pool.carbon_per_kwh is None else pool.carbon_per_kwh * carbon,
            )
    for need in base.needs:
        demand = models[need.model].demand
        factor = factor_during(demand.factors, begin, seconds, zone) if demand is not None and demand.factors else 1.0
        # Of a quantile the hours are part, and what waits has no windows; a step is planned for its own mean.
        by_mean = demand is not None and demand.quantile is not None and bool(demand.factors or demand.wait)
        rate = demand.mean if demand is not None and by_mean else need.rate
        pins = {place: count for place, count in need.pins.items() if not _all_away(place, base.pools, away)}
        needs.append(replace(need, rate=rate * factor, pins=pins))
    options = [_repriced(option, priced) for option in base.options]
    there = [option for option in options if not any(pool.key in away for pool in option.pools)]
    kept = {option.key for option in there}
    pools = tuple(priced.get(pool.key, pool) for pool in base.pools if pool.key not in away)
    # A window is met by the steps that it lies in.
    problem = replace(
        base,
        needs=tuple(needs),
        options=tuple(there),
        pools=pools,
        outages=(),
        fixed={key: count for key, count in base.fixed.items() if key in kept},
    )
    gone = {option.key: option for option in options if option.key not in kept}
    return Step(begin, seconds, problem, paid_in, frozenset(away), gone)


def _all_away(place: PoolKey, pools: Iterable[Pool], away: set[PoolKey]) -> bool:
    return all(pool.key in away for pool in pools if pool.within(*place))


def _repriced(option: Option, priced: Mapping[PoolKey, Pool]) -> Option:
    if not any(pool.key in priced for pool in option.pools):
        return option
    others = tuple((priced.get(pool.key, pool), tp) for pool, tp in option.others)
    return replace(option, pool=priced.get(option.pool.key, option.pool), others=others)
