"""Base engines that merge while they answer: what they can do together, and apart. Source: Flying Serving (paper 003).

Base engines of equal size stand side by side on a node, each with all weights and a cache of its own. As a group they
compute each step together, with the tensor parallelism of all their devices and the cache of all. What is assumed:

* A request that no base engine holds takes the group of all. Smaller groups, which would do for some, are not priced.
* So does every request while the load is at most `MERGE_SHARE` of what the group can serve (`merging.triggers`): the
  latency is the group's then. Above it, base engines answer by themselves, each its even part of the requests.
* The group and its members never compute at the same time: each request takes 1/capacity of the time of those who
  serve it, and one that needs the group also the time to form it (`SWITCH_S`). Such a request begins when those that
  base engines are working on have been answered, and others wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fabrictool.catalog import engines
from fabrictool.merging.requests import SWITCH_S
from fabrictool.merging.triggers import MERGE_SHARE
from fabrictool.simulator.capacity import replica, under_load
from fabrictool.simulator.demanded import lengths_of
from fabrictool.simulator.memory import ReplicaMemory, pooled_tokens
from fabrictool.simulator.stand import stand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.inventory import Partition
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.capacity import Latency, MeanWorkload, ReplicaFigures
    from fabrictool.simulator.stand import Stand

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Mask = np.ndarray[Any, np.dtype[np.bool_]]

QUANTILES = 100
"""Of prompts and of answers, whose sums say how many requests are long."""
SEEN_IN_P95 = 0.05
"""Share of requests from which on they count in a 95th percentile."""


@dataclass(frozen=True, slots=True)
class ElasticStand:
    """One way to run a model: on base engines that merge."""

    engines: int
    base: Stand
    """One base engine by itself."""
    group: Stand
    """All of them together; its room is that of all."""
    whole: Stand
    """What it is compared with: one engine of all their devices, which holds the weights once and never splits."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """What base engines do together and apart. Requests/s and tokens of cache."""

    engines: int
    capacity: float
    """Under load: apart, but for what needs the group."""
    tokens: int
    """That all hold together."""
    together: ReplicaFigures
    """The group, of the mean request."""
    demand: MeanWorkload
    whole_tokens: int
    whole_capacity: float
    """Of one engine of all devices."""
    share: float
    """Of requests, those that no base engine holds."""
    apart: tuple[ReplicaFigures, MeanWorkload] | None
    """One base engine, and the requests that it holds; its capacity is what the others leave it. None: it holds none of
    them."""
    long: tuple[ReplicaFigures, MeanWorkload] | None
    """The group, and the requests that need it; None: none do."""

    @property
    def figures(self) -> ReplicaFigures:
        """As of a single replica: that of the base engines apart, with the capacity and the room of all."""
        shown = self.together if self.apart is None else self.apart[0]
        return replace(shown, capacity=self.capacity, free=self.tokens, weights=self.together.weights)

    def merges_at(self, rate: float) -> bool:
        """Whether so many requests/s leave them one group."""
        return self.apart is None or rate <= MERGE_SHARE * self.together.capacity

    def under_load(self, rate: float) -> Latency:
        """Of all of them together with `rate` requests/s; the module's docstring says who answers."""
        if self.apart is None or self.merges_at(rate):
            return under_load(self.together, self.demand, rate)
        figures, short = self.apart
        mine = (1.0 - self.share) * rate / self.engines
        alone = under_load(figures, short, mine)
        if self.long is None:
            return replace(alone, in_system=self.engines * alone.in_system)
        grouped = under_load(self.long[0], self.long[1], self.share * rate)
        begins = SWITCH_S + alone.in_system / mine  # by Little's law what a request under way takes, on average
        met = self.share >= SEEN_IN_P95
        return replace(
            alone,
            in_system=self.engines * alone.in_system + grouped.in_system + self.share * rate * begins,
            ttft_mean=(1.0 - self.share) * alone.ttft_mean + self.share * (begins + grouped.ttft_mean),
            ttft_p95=max(alone.ttft_p95, begins + grouped.ttft_p95 if met else 0.0),
            tpot_mean=(1.0 - self.share) * alone.tpot_mean + self.share * grouped.tpot_mean,
            tpot_p95=max(alone.tpot_p95, grouped.tpot_p95 if met else 0.0),
            e2e_p95=max(alone.e2e_p95, begins + grouped.e2e_p95 if met else 0.0),
        )


def elastic_stand(
    wanted: Model,
    architecture: ModelArchitecture,
    partition: Partition,
    tp: int,
    engines_apart: int,
    calibrations: Sequence[Calibration] = (),
) -> ElasticStand | None:
    """`engines_apart` base engines of `tp` devices; None where the engine cannot compute on the device, or where a
    model keeps no context that they could pool.
    """
    devices = tp * engines_apart
    merged = engines()[wanted.engine].merged(architecture, devices)
    base = stand(wanted, merged, partition, tp, calibrations)
    group = stand(wanted, merged, partition, devices, calibrations)
    whole = stand(wanted, architecture, partition, devices, calibrations)
    if base is None or group is None or whole is None or not group.kv_octets:
        return None
    # A token's cache takes as much as in the group: blocks are of the same octets in every layout.
    room = base.room
    alone, pool = (
        max(0, int(pooled_tokens(count, tp, room.usable / tp, room.weights, group.kv_octets)))
        for count in (tp, devices)
    )
    pooled = ReplicaMemory(engines_apart * room.weights, engines_apart * room.usable, pool, group.room.beside)
    base = replace(base, room=replace(room, kv_tokens=alone))
    return ElasticStand(engines_apart, base, replace(group, room=pooled), whole)


def elastic(wanted: Model, there: ElasticStand, demand: MeanWorkload) -> Elastic | None:
    """What they do for the model's demand; None where a base engine does not hold the weights, or all together not the
    context.
    """
    base, group, whole = there.base, there.group, there.whole
    together = replica(group.step, group.room, demand, group.max_num_seqs, group.calibration)
    if not base.room.fits or not together.fits:
        return None
    prompts, answers = _lengths(wanted, demand)
    long = _is_long(prompts, answers, base.room)
    share = float(long.mean())
    apart = grouped = None
    capacity = together.capacity
    if share < 1.0:
        short = _only(demand, prompts, answers, ~long) if share else demand
        alone = replica(base.step, base.room, replace(short, context=0), base.max_num_seqs, base.calibration)
        taken = (1.0 - share) / (there.engines * alone.capacity)
        if share:
            longer = _only(demand, prompts, answers, long)
            all_of_it = replica(group.step, group.room, longer, group.max_num_seqs, group.calibration)
            taken += share * (1.0 / all_of_it.capacity + SWITCH_S)
            grouped = (all_of_it, longer)
        capacity = 1.0 / taken
        apart = (replace(alone, capacity=(1.0 - share) * capacity / there.engines), short)
    return Elastic(
        engines=there.engines,
        capacity=capacity,
        tokens=group.room.kv_tokens,
        together=together,
        demand=demand,
        whole_tokens=whole.room.kv_tokens,
        whole_capacity=replica(whole.step, whole.room, demand, whole.max_num_seqs, whole.calibration).capacity,
        share=share,
        apart=apart,
        long=grouped,
    )


def _lengths(wanted: Model, demand: MeanWorkload) -> tuple[Floats, Floats]:
    """Quantiles of prompts and of answers, at even steps; they are drawn independently of each other."""
    declared = wanted.demand
    if declared is None or declared.rate is None or declared.input is None or declared.output is None:
        return np.array([demand.input]), np.array([demand.output])
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    prompts, answers = (
        np.array([lengths.quantile(float(share)) for share in shares])
        for lengths in (lengths_of(declared.input), lengths_of(declared.output))
    )
    return prompts, answers


def _is_long(prompts: Floats, answers: Floats, room: ReplicaMemory) -> Mask:
    """(prompts, answers) Whether a request of these lengths is more than a base engine's `room` holds."""
    tokens = prompts[:, None] + answers[None, :]
    beside = room.beside.fixed + room.beside.windowed * np.minimum(tokens, room.beside.window)
    return np.asarray(tokens + beside > room.kv_tokens)


def _only(demand: MeanWorkload, prompts: Floats, answers: Floats, chosen: Mask) -> MeanWorkload:
    """`demand` with the lengths of the chosen requests only."""
    given = np.broadcast_to(prompts[:, None], chosen.shape)[chosen]
    told = np.broadcast_to(answers[None, :], chosen.shape)[chosen]
    return replace(
        demand,
        input=float(given.mean()),
        output=float(told.mean()),
        input_p95=float(np.quantile(given, 0.95)),
        output_p95=float(np.quantile(told, 0.95)),
        input_variation=float(given.std() / given.mean()),
        output_variation=float(told.std() / told.mean()),
    )
