"""The placement played event by event until it is as full as it gets: what judges the closed forms that chose it.

With the blueprint's lengths, rates, bursts and routing policy, and with the weights of the plan; the same seed plays
the same. Of a model with many replicas a smaller fleet is played, with the same load on each.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from fabrictool.base.canonical import tidy
from fabrictool.base.errors import InvalidInputError
from fabrictool.base.units import Duration
from fabrictool.domain.plan import Replay
from fabrictool.planner.other_end import OtherEnd
from fabrictool.planner.played import Played
from fabrictool.planner.problem import replica_key
from fabrictool.planner.targets import in_words
from fabrictool.routing.policies import routing_policy, targets_of
from fabrictool.simulator.capacity import forecast_bands
from fabrictool.simulator.deployment import of_model
from fabrictool.simulator.slo import METRICS, criteria, spared, tightened
from fabrictool.simulator.steady import steady_state
from fabrictool.workload.arrivals import cv_of_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Placement, ReplicaPlacement
    from fabrictool.planner.problem import OptionKey
    from fabrictool.planner.weights import GroupRates
    from fabrictool.simulator.estimates import ShareEstimate
    from fabrictool.simulator.slo import Criterion
    from fabrictool.simulator.steady import SteadyState

MOST, LEAST, TOGETHER = 10_000, 2_000, 40_000
"""Requests of one run: of one model at most, at most where there are many models, and of all models about."""
MANY = 12
"""Models from which on a copy of this process plays them from their other end: each takes some 20 ms."""
FLEET = 8
"""Replicas of one model that are played together; more would only take longer."""


# Wide: what is placed where, with which loads, the seed, and of whom.
def replay(
    blueprint: Blueprint,
    inventory: Inventory,
    placement: Placement,
    rates: Mapping[OptionKey, float],
    seed: int,
    only: Iterable[str] | None = None,
    flows: GroupRates = MappingProxyType({}),
) -> dict[str, Played]:
    """By model; without those that have no demand or no replica that may serve it, and those with companions, whose
    columns are played. `rates` are of one replica each, `flows` the same by consumer group.

    Requests of groups are drawn by their shares; those that nobody may serve are no load, and do not count.
    """
    there = [
        replica
        for replica in placement.replicas
        if all(s.partition in inventory.clusters[s.cluster].partitions for s in replica.every_stage)
    ]
    alone = {name for name, wanted in blueprint.models.items() if not wanted.companions}
    models = sorted({replica.model for replica in there} & alone)
    most = max(LEAST, min(MOST, TOGETHER // max(1, len(models))))
    targets = targets_of(blueprint.latency_targets)

    def play(name: str) -> Played | None:
        every = [replica for replica in there if replica.model == name]
        mine, share = _fewer(every, rates)
        try:
            simulation = of_model(name, blueprint, inventory, mine, [], share)
            if simulation.parts:
                whole, theirs = simulation.played, flows.get(name, {})
                parts = [
                    replace(p, share=p.share * _part(mine, every, theirs.get(p.group, rates), share))
                    for p in simulation.parts
                ]
                simulation = replace(simulation, parts=tuple(parts))
                share = simulation.played / whole
            else:
                simulation = replace(simulation, rate=simulation.rate * share, cv=cv_of_part(simulation.cv, share))
            slo = blueprint.models[name].slo
            factors = spared(slo, [forecast_bands(calibration) for calibration in simulation.calibrations])
            wanted = tightened(criteria(slo), factors)
            state = steady_state(
                simulation,
                wanted,
                lambda: routing_policy(blueprint.routing.policy, random.Random(seed), targets),
                most=most,
                seed=seed,
                fill=MOST,
            )
        except InvalidInputError:  # nothing to play: no demand, or nobody whom trust lets serve it
            return None
        kinds = {replica.replica: replica_key(replica) for replica in mine}
        return _played(state, wanted, [kinds[replica] for replica in simulation.replicas], share, factors)

    names = models if only is None else sorted(set(models) & set(only))
    with OtherEnd(names, play, wanted=len(names) >= MANY) as other_end:
        played = {name: other_end.done(at) or play(name) for at, name in enumerate(names)}
    return {name: its for name, its in played.items() if its is not None}


def _fewer(
    replicas: Sequence[ReplicaPlacement], rates: Mapping[OptionKey, float]
) -> tuple[list[ReplicaPlacement], float]:
    """At most about `FLEET` of the replicas, of each kind at least one, and the share of the demand that is theirs."""
    kinds: dict[OptionKey, list[ReplicaPlacement]] = defaultdict(list)
    for replica in replicas:
        kinds[replica_key(replica)].append(replica)
    part = min(1.0, FLEET / len(replicas))
    chosen = [replica for alike in kinds.values() for replica in alike[: max(1, round(part * len(alike)))]]
    return chosen, _part(chosen, replicas, rates, len(chosen) / len(replicas))


def _part(
    some: Iterable[ReplicaPlacement],
    every: Iterable[ReplicaPlacement],
    rates: Mapping[OptionKey, float],
    otherwise: float,
) -> float:
    """Share of what all take by `rates` that some of them take; `otherwise` where that is nothing."""
    mine, whole = (
        sum(rates.get(replica_key(replica), 0.0) for replica in those if replica.phase != "decode")
        for those in (some, every)
    )
    return mine / whole if whole > 0 else otherwise


def _played(
    state: SteadyState,
    wanted: Sequence[Criterion],
    kinds: Sequence[OptionKey],
    share: float,
    factors: Sequence[float],
) -> Played:
    together = state.estimates[-1] if wanted else None
    figures = Replay(
        requests=state.requests,
        attainment=1.0 if together is None else tidy(together.share),
        low=0.0 if together is None else tidy(max(0.0, together.low)),
        high=1.0 if together is None else tidy(min(1.0, together.high)),
        in_system=tidy(state.in_system / share),
        **{f"{name}_p95_s": tidy(state.p95[name].value) if name in state.p95 else 0.0 for name in METRICS},
    )
    missed = [estimate for estimate in state.estimates if estimate.missed]
    doubtful = [] if missed else [estimate for estimate in state.estimates if not (estimate.met and state.full)]
    # What only has not been played for long enough is no fault of its load.
    open_ones = [estimate for estimate in doubtful if not estimate.met]
    least = max((estimate.criterion.share - estimate.low for estimate in open_ones), default=0.0)
    return Played(
        figures,
        state.p95,
        state.full,
        tuple(dict.fromkeys(_missed(estimate, factors) for estimate in missed)),
        tuple(dict.fromkeys(_undecided(estimate, factors, full=state.full) for estimate in doubtful)),
        _short(state, wanted, kinds, least) if missed or open_ones else {},
    )


def _missed(estimate: ShareEstimate, factors: Sequence[float]) -> str:
    # Rounded down: what is short of the target must not look as if it were not.
    seen = math.floor(estimate.share * 1000) / 10
    return f"{_limits(estimate, factors)}: {seen:g}% of requests, {estimate.criterion.share * 100:g}% are wanted"


def _undecided(estimate: ShareEstimate, factors: Sequence[float], *, full: bool) -> str:
    wanted = f"{estimate.criterion.share * 100:g}% are wanted"
    if full:
        # Rounded outwards: the target is inside, and must look so.
        low, high = math.floor(max(0.0, estimate.low) * 1000) / 10, math.ceil(min(1.0, estimate.high) * 1000) / 10
        return f"{_limits(estimate, factors)}: between {low:g}% and {high:g}% of requests, {wanted}"
    seen = math.floor(estimate.share * 1000) / 10
    return f"{_limits(estimate, factors)}: {seen:g}% of requests, but its replicas were still filling, {wanted}"


def _limits(estimate: ShareEstimate, factors: Sequence[float]) -> str:
    """The targets as they were asked for; the replay had to keep them with what is spared of the error band."""
    limits = [
        f"{metric.upper()}{in_words(factor)} within {Duration(float(f'{limit * factor:.9g}'))}"
        for metric, factor in zip(METRICS, factors, strict=True)
        if (limit := getattr(estimate.criterion.target, metric)) < math.inf
    ]
    return " and ".join(limits)


def _short(
    state: SteadyState, wanted: Sequence[Criterion], kinds: Sequence[OptionKey], least: float
) -> dict[OptionKey, float]:
    """Each kind with the share that it lacks; all of them where none lacks any by itself, then `least` at least."""
    by_kind: dict[OptionKey, list[float]] = defaultdict(list)
    for kind, attained in zip(kinds, state.attained, strict=True):
        by_kind[kind] += [] if math.isnan(attained) else [attained]
    need = wanted[-1].share
    lacks = {kind: need - sum(seen) / len(seen) for kind, seen in by_kind.items() if seen}
    short = {kind: lack for kind, lack in lacks.items() if lack > 0.0}
    # Answers of a pair are the decode replicas' work, and only those that read its prompt are known.
    pairs = any(not kind[5].startswith("unified") for kind in short)
    if short and not pairs:
        return short
    return dict.fromkeys(by_kind, max([0.0, least, *lacks.values()]) or 1.0 - need)
