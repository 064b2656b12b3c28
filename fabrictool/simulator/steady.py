"""Whether a placed model keeps its SLO in the long run: a steady-state simulation that goes on until it can say.

What a few hundred requests show is mostly the filling of an empty fleet. So the first ones do not count, those that are
left are cut into batches, whose means are nearly independent, and more are played until the interval that they leave
lies on one side of every target and the 95th percentiles are sure, or until a number of requests that is the same on
every machine. What that number does not decide stays undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.simulator.deployment import declared_stream
from fabrictool.simulator.estimates import Percentile, ShareEstimate
from fabrictool.simulator.fleet import simulate
from fabrictool.simulator.slo import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.routing.protocol import RoutingPolicy
    from fabrictool.simulator.deployment import ModelSimulation
    from fabrictool.simulator.fleet import Outcome
    from fabrictool.simulator.slo import Criterion, LatencyTarget

    Bools = np.ndarray[Any, np.dtype[np.bool_]]

FIRST, GROWTH = 600, 3
"""Requests of the first run, and how many times as many the next one has."""
MARGIN = 1.1
"""Of a run that was too short to be full: so much longer than it had to be is the next, as stays grow as it fills."""
BATCHES = 16
T_95 = 2.131
"""Of Student's distribution, for the 95 % interval of so many batches' mean."""
Z_95 = 1.96
STAYS = 3.0
"""Mean stays after which a fleet that began empty counts as full."""
WARM_UP, COOL_DOWN = 0.2, 0.1
"""Shares of a run: at least so much of its beginning, and at most so much of its end, when nothing new comes, does not
count."""
LONGEST_WARM_UP = 0.5
PERCENTILE = 0.95


@dataclass(frozen=True, slots=True)
class SteadyState:
    """What a model does once its replicas are as full as they get. Seconds; shares of requests."""

    requests: int
    """Requests after the warm-up, whose latencies count."""
    estimates: tuple[ShareEstimate, ...]
    """One a criterion, the last one that of all targets together."""
    in_system: float
    means: Mapping[str, float]
    """By metric of `METRICS`; of those only that some request has: answers of one token have no time between tokens."""
    p95: Mapping[str, Percentile]
    attained: tuple[float, ...]
    """By replica: the share of its requests that keep all targets; NaN without any."""
    full: bool = True
    """False where the run ended while the fleet still filled: it is better then than later, so what is kept in it may
    not be kept for long."""

    @property
    def clear(self) -> bool:
        return all(estimate.clear for estimate in self.estimates)

    @property
    def sure(self) -> bool:
        return all(percentile.sure for percentile in self.p95.values())


def steady_state(
    simulation: ModelSimulation,
    wanted: Sequence[Criterion],
    policy: Callable[[], RoutingPolicy],
    *,
    most: int,
    seed: int,
    fill: int = 0,
) -> SteadyState:
    """Plays the declared demand, `most` requests at most in one run, or `fill` where it only is not full yet.

    Raises InvalidInputError FT2142 without a demand.
    """
    clump = max(1.0, simulation.cv**2)
    count = min(math.ceil(FIRST * clump), most)
    while True:
        outcome = simulate(simulation.specs, declared_stream(simulation, count, seed), policy())
        state, filled = _seen(outcome, wanted, len(simulation.specs), clump)
        # While it fills a fleet is better than later: what misses then will miss.
        missed = any(estimate.missed for estimate in state.estimates)
        limit = max(most, fill) if state.clear and not state.full else most
        if not (wanted or state.full):  # there is nothing to tell, and what is overloaded never is as full as it gets
            limit = min(most, FIRST * GROWTH)
        if missed or (state.clear and state.full and state.sure) or count >= limit:
            return state
        count = min(math.ceil(MARGIN * filled * count) if filled > 1.0 else GROWTH * count, limit)


def _seen(outcome: Outcome, wanted: Sequence[Criterion], replicas: int, clump: float) -> tuple[SteadyState, float]:
    """What the middle of a run shows, and how many times as long it would have to be to have a middle.

    `clump` requests come together, on average: bursts of gaps with a coefficient of variation of its square root.
    """
    arrival = outcome.arrival - outcome.arrival[0]
    span = max(float(arrival[-1]), 1e-9)
    stay = float(np.nanmean(outcome.e2e)) if np.isfinite(outcome.e2e).any() else math.inf
    begin = max(STAYS * stay, WARM_UP * span)
    chosen = (arrival >= min(begin, LONGEST_WARM_UP * span)) & (arrival <= span - min(stay, COOL_DOWN * span))
    metrics = {name: getattr(outcome, name)[chosen] for name in METRICS}
    known = {name: values[np.isfinite(values)] for name, values in metrics.items()}
    finished = np.isfinite(outcome.finish[chosen])
    estimates = [_estimate(criterion, _kept(criterion.target, metrics, finished), clump) for criterion in wanted]
    all_kept = _kept(wanted[-1].target, metrics, finished) if wanted else finished
    where = outcome.replica[chosen]
    stays = np.nan_to_num(metrics["e2e"])
    filled = begin / (LONGEST_WARM_UP * span)
    window = max(float(arrival[chosen][-1] - arrival[chosen][0]), 1e-9) if chosen.any() else 1e-9
    state = SteadyState(
        requests=int(chosen.sum()),
        estimates=tuple(estimates),
        in_system=float(stays.sum()) / window,
        means={name: float(values.mean()) for name, values in known.items() if len(values)},
        p95={name: _p95(values, clump) for name, values in known.items() if len(values)},
        attained=tuple(float(all_kept[where == r].mean()) if (where == r).any() else math.nan for r in range(replicas)),
        full=filled <= 1.0,
    )
    return state, min(filled, float(GROWTH))


def _kept(target: LatencyTarget, metrics: dict[str, Any], finished: Bools) -> Bools:
    """Which requests keep a target; an answer of one token has no time between tokens to miss."""
    in_time = (metrics["ttft"] <= target.ttft) & (metrics["e2e"] <= target.e2e)
    return np.asarray(finished & in_time & ~(metrics["tpot"] > target.tpot))


def _estimate(criterion: Criterion, kept: Bools, clump: float = 1.0) -> ShareEstimate:
    return ShareEstimate(criterion, *_share(kept, clump))


def _share(kept: Bools, clump: float) -> tuple[float, float, float]:
    """With its interval by batch means, never narrower than what as many independent bursts would leave open (Wilson):
    batches of a few bursts each look alike until a bad one comes.
    """
    if not len(kept):
        return 0.0, 0.0, 1.0
    count = len(kept) / clump
    share = float(kept.mean())
    means = [float(batch.mean()) for batch in np.array_split(kept, min(BATCHES, len(kept)))]
    half = T_95 * float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 1.0
    middle = (share + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
    reach = Z_95 / (1 + Z_95**2 / count) * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2))
    return share, min(share - half, middle - reach), max(share + half, middle + reach)


def _p95(values: Any, clump: float) -> Percentile:
    """Its interval is that of the share of requests below it, read off the values (Woodruff 1952)."""
    value = float(np.quantile(values, PERCENTILE))
    _, least, most = _share(values <= value, clump)
    low, high = np.quantile(values, [max(0.0, least), min(1.0, most)])
    return Percentile(value, min(value, float(low)), max(value, float(high)))
