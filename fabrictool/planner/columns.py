"""A model's columns: what a replica of it would do in each place, cut in each way; made on demand and remembered.

Longer than most modules: what keeps a model from a place is told beside what lets it stand there, cut by cut.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from fabrictool.base.canonical import tidy
from fabrictool.catalog import engines
from fabrictool.domain.plan import node_blocks
from fabrictool.engines.adapter import adapter
from fabrictool.planner.permitted import forbidden, promised, start_time
from fabrictool.planner.problem import Level, Option, Transfer
from fabrictool.planner.spots import Spots, kind_of
from fabrictool.planner.targets import slo_excess
from fabrictool.simulator.calibration import calibrations_in
from fabrictool.simulator.capacity import replica, under_loads
from fabrictool.simulator.elastic import elastic, elastic_stand
from fabrictool.simulator.mixed import Part, pipeline
from fabrictool.simulator.network import HAND_LATENCY_S, hop
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.phases import decode_only, prefill_only, prefill_under_load
from fabrictool.simulator.physics import peak_use
from fabrictool.simulator.shared import shared
from fabrictool.simulator.slo import METRICS, spared
from fabrictool.simulator.stand import stand
from fabrictool.simulator.stepmodel import KV_OCTETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.specs import Phase
    from fabrictool.planner.problem import Pool, PoolKey
    from fabrictool.simulator.capacity import MeanWorkload, ReplicaFigures
    from fabrictool.simulator.elastic import Elastic
    from fabrictool.simulator.physics import PeakUse
    from fabrictool.simulator.shared import Shared
    from fabrictool.simulator.stepmodel import Steps

    Figures = tuple[ReplicaFigures, tuple[Level, ...], float]
    """With what it does under each load, and the seconds of its start."""

L = TypeVar("L", "Elastic", "Shared")
T = TypeVar("T")

STAGES = (2, 3, 4, 6, 8, 12, 16)
"""Pipeline stages that are tried where no node holds the model: the first `PIPELINES` numbers that do."""
PIPELINES = 2
LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8)
"""Shares of a replica's capacity at which its latency is known to the planner; the last is the most that is planned:
the rest absorbs bursts."""


class Columns:
    """Of one model. Options are asked for by place and cut; None: it does not fit or must not stand there."""

    # Wide: a model, where it may stand, and what is known of it.
    def __init__(
        self,
        name: str,
        wanted: Model,
        architecture: ModelArchitecture,
        demand: MeanWorkload,
        inventory: Inventory,
        pools: Sequence[Pool],
        loads: Mapping[str, Sequence[float]],
        companions: Mapping[str, ModelArchitecture] = MappingProxyType({}),
        *,
        ends_apart: bool = False,
    ) -> None:
        """`loads` are the state's: seconds that starts took; `companions`: what its replicas serve beside it;
        `ends_apart`: what a walltime's end costs is counted elsewhere, when it comes.
        """
        self._ends_apart = ends_apart
        self._companions = companions
        self._sharing: dict[object, tuple[Shared, tuple[Level, ...], float] | None] = {}
        self._name, self._wanted, self._architecture = name, wanted, architecture
        self._demand, self._inventory, self._pools = demand, inventory, pools
        self._calibrations = calibrations_in(inventory.calibrated)
        self._moving: dict[tuple[PoolKey, Phase], float] = {}
        self._spots = Spots(name, wanted, architecture, inventory, loads)
        self._tables: dict[object, Figures | None] = {}
        self._replicas: dict[object, tuple[ReplicaFigures, Steps, float] | None] = {}
        self._unlike: dict[object, Figures | None] = {}
        self._merged: dict[object, tuple[Elastic, tuple[Level, ...], float] | None] = {}
        self._parts: dict[object, Part | None] = {}
        self._capabilities = adapter(wanted.engine).capabilities

    @property
    def _wants_merging(self) -> bool:
        """Whether the blueprint wants base engines that merge, and nothing else."""
        return (self._wanted.parallelism.dp or 1) > 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """That its replicas may be in."""
        if not self._capabilities.hands_over:
            return ("unified",)
        split: tuple[Phase, ...] = ("prefill", "decode")
        return {"unified": ("unified",), "split": split, "any": ("unified", *split)}[self._wanted.phases]

    @property
    def traits(self) -> tuple[object, ...]:
        """What its tables depend on, beside spot and cut: those of models with equal traits are equal, in a fabric."""
        its = self._wanted
        adapted, served = (len(its.adapters), its.adapter_rank), replace(self._demand, rate=0.0)
        held = (its.engine, its.variant.precision, its.max_num_seqs, *adapted, its.slo)
        return (*held, self._architecture, served)

    def share(self, other: Columns) -> None:
        """Has the tables of a model with equal traits, which were the same."""
        self._tables, self._replicas = other._tables, other._replicas

    @property
    def at_once(self) -> int:
        """Requests that the engine takes into a batch at most."""
        return self._wanted.max_num_seqs or engines()[self._wanted.engine].default_max_num_seqs

    def everywhere(self) -> Iterator[Option]:
        """All columns on its pools but mixed pipelines: inside one node, or over several where none holds it."""
        for pool in self._pools:
            for phase in self.phases:
                single = list(self._single(pool, phase, self.option))
                yield from single
                yield from self._merging(pool, phase, {option.tp: option for option in single if option.pp == 1})

    def tables(self) -> dict[object, Figures | None]:
        """Of all columns on its pools that are an engine of their own, all stages alike, for `learn`."""
        alone = not self._wants_merging and not self._companions
        for pool in self._pools if alone else ():
            for phase in self.phases:
                for _ in self._single(pool, phase, self._table):
                    pass
        return self._tables

    def learn(self, tables: Mapping[object, Figures | None]) -> None:
        """Takes what `tables` of equal columns gave."""
        self._tables.update(tables)

    def _single(self, pool: Pool, phase: Phase, of: Callable[[Pool, int, int, Phase], T | None]) -> Iterator[T]:
        """What `of` says of replicas that are a single engine: of pool, tp, pp and phase."""
        if self._wanted.parallelism.pp is not None:
            yield from self._cut(pool, self._wanted.parallelism.pp, phase, of)
            return
        inside = [of(pool, tp, 1, phase) for tp in self.degrees(pool)]
        inside_a_node = [its for its in inside if its is not None]
        yield from inside_a_node or self._across(pool, phase, of)

    def _merging(self, pool: Pool, phase: Phase, single: Mapping[int, Option]) -> Iterator[Option]:
        """Of base engines that merge, where that helps: such an engine by itself (of `single`, by its tp) does not hold
        the context, or misses the SLO under the least load, and merged it does not; or the blueprint wants it.
        """
        if phase != "unified" or pool.joined or (self._wanted.parallelism.pp or 1) > 1:
            return
        for tp in self.degrees(pool):
            alone = single.get(tp)
            if alone is not None and alone.levels[0].attains:
                continue
            for dp in self.merging_degrees(pool, tp):
                option = self.merging(pool, tp, dp)
                if option is not None and (alone is None or option.levels[0].attains):
                    yield option

    def merging_degrees(self, pool: Pool, tp: int) -> list[int]:
        """Numbers of base engines of `tp` devices each that can merge on a node; none where a single one is wanted."""
        if self._companions:
            return []
        pinned = self._wanted.parallelism.dp
        engine, precision = engines()[self._wanted.engine], self._wanted.variant.precision
        return [
            dp
            for dp in sorted(self._capabilities.live_tp_switch)
            if dp > 1 and pinned in (None, dp) and tp * dp <= pool.devices_per_node
            if not engine.unsplittable(engine.merged(self._architecture, tp * dp), tp * dp, 1, precision)
        ]

    def merging(self, pool: Pool, tp: int, dp: int) -> Option | None:
        """Replicas of `dp` base engines of `tp` devices each, on a node of a pool."""
        place = self._partition(pool)
        key = (*self._spots.at(pool).kind, tp, dp)
        if key not in self._merged:
            there = elastic_stand(self._wanted, self._architecture, place, tp, dp, self._calibrations)
            its = None if there is None else elastic(self._wanted, there, self._demand)
            share = 0.0 if there is None else there.base.room.weights / there.base.step.cut.devices
            self._merged[key] = None if its is None else self._loaded(its, share, pool)
        table = self._merged[key]
        if table is None:
            return None
        its, levels, start_s = table
        disliked = self._spots.at(pool).preference
        return Option(self._name, pool, tp, its.figures, levels, start_s, preference=disliked, elastic=its)

    def _loaded(self, its: L, weights: float, pool: Pool) -> tuple[L, tuple[Level, ...], float] | None:
        """With what it does under each load, and the seconds of its start; None where it hardly serves. `weights`:
        octets that a device loads.
        """
        start_s = self._start_time(pool, weights)
        promise = self._promised(self._partition(pool), start_s)
        levels = []
        for load in LOADS if promise else ():
            latency = its.under_load(load * its.capacity)
            factors = spared(self._wanted.slo, [its.figures.bands])
            excess = slo_excess(self._wanted.slo, latency, factors=factors)
            rate = load * its.capacity * promise
            levels.append(Level(rate, latency.in_system, excess <= 0.0, tidy(excess)))
        return (its, tuple(levels), start_s) if levels else None

    def _shared(self, pool: Pool) -> Option | None:
        """Replicas that serve the model's companions, too, on a device of a pool."""
        place = self._partition(pool)
        key = self._spots.at(pool).kind
        if key not in self._sharing:
            its = shared(self._wanted, self._architecture, self._companions, place, self._calibrations)
            share = 0.0 if its is None else its.parts[0].stood.room.weights
            self._sharing[key] = None if its is None else self._loaded(its, share, pool)
        table = self._sharing[key]
        if table is None:
            return None
        its, levels, start_s = table
        disliked = self._spots.at(pool).preference
        return Option(self._name, pool, 1, its.figures, levels, start_s, preference=disliked, shared=its)

    def _cut(self, pool: Pool, pp: int, phase: Phase, of: Callable[[Pool, int, int, Phase], T | None]) -> Iterator[T]:
        """In as many stages as the blueprint says."""
        if pp > 1 and not self._capabilities.pipeline_parallel:
            return
        every = (of(pool, tp, pp, phase) for tp in self.degrees(pool) if _nodes(pool, tp, pp) <= pool.nodes)
        yield from (its for its in every if its is not None)

    def _across(self, pool: Pool, phase: Phase, of: Callable[[Pool, int, int, Phase], T | None]) -> Iterator[T]:
        if not self._capabilities.pipeline_parallel or not self.degrees(pool):
            return
        tp = self.degrees(pool)[-1]
        numbers = (pp for pp in STAGES if _nodes(pool, tp, pp) <= pool.nodes)
        pipelines = (its for pp in numbers if (its := of(pool, tp, pp, phase)) is not None)
        yield from islice(pipelines, PIPELINES)

    def degrees(self, pool: Pool) -> Sequence[int]:
        """Tensor-parallel degrees in a pool: inside a node, or what the blueprint says; none where the model must not
        stand.
        """
        return self._spots.at(pool).degrees

    def option(self, pool: Pool, tp: int, pp: int, phase: Phase) -> Option | None:
        """Replicas of `pp` stages of `tp` devices each, all in one pool."""
        if self._wants_merging:
            return None
        if self._companions:
            return self._shared(pool) if (tp, pp, phase) == (1, 1, "unified") else None
        table = self._table(pool, tp, pp, phase)
        if table is None:
            return None
        return Option(self._name, pool, tp, *table, preference=self._spots.at(pool).preference, pp=pp, phase=phase)

    def _table(self, pool: Pool, tp: int, pp: int, phase: Phase) -> Figures | None:
        if pp > 1 and pool.joined:
            return None  # each node is told for itself what it serves
        spot, moving = self._spots.at(pool), self._hand_over(pool, phase)
        key = (*spot.kind, tp, pp, phase, moving)
        if key not in self._tables:
            alone = self._replica(spot.partition, tp, pp)
            self._tables[key] = None if alone is None else self._levels(*alone, phase, [pool], moving)
        return self._tables[key]

    def _replica(self, place: Partition, tp: int, pp: int) -> tuple[ReplicaFigures, Steps, float] | None:
        """A replica of one engine, whatever its phase, and octets of weights on each of its devices."""
        key = (*kind_of(place), tp, pp)
        if key not in self._replicas:
            there = stand(self._wanted, self._architecture, place, tp, self._calibrations, pp=pp)
            self._replicas[key] = (
                None
                if there is None
                else (
                    replica(there.step, there.room, self._demand, there.max_num_seqs, there.calibration),
                    there.step,
                    there.room.weights / there.step.cut.devices,
                )
            )
        return self._replicas[key]

    def peak_use(self, option: Option) -> PeakUse | None:
        """How near a replica that is one engine on one node comes to what its devices can do at most."""
        there = stand(
            self._wanted, self._architecture, self._partition(option.pool), option.tp, self._calibrations, pp=option.pp
        )
        return None if there is None else peak_use(there.step, option.figures, self._demand)

    def mixed(self, stages: Sequence[tuple[Pool, int]], phase: Phase) -> Option | None:
        """Replicas of unlike stages, (pool, tp) each."""
        if self._wants_merging or self._companions or any(tp not in self.degrees(pool) for pool, tp in stages):
            return None
        if len(set(stages)) == 1:
            return self.option(*stages[0], len(stages), phase)
        hops = [hop(self._inventory, a.key, b.key) for (a, _), (b, _) in pairwise(stages)]
        if any(way is None for way in hops):
            return None
        key = (*((*pool.key, tp) for pool, tp in stages), phase)
        if key not in self._unlike:
            self._unlike[key] = self._mixed(stages, phase, [way for way in hops if way is not None])
        table = self._unlike[key]
        if table is None:
            return None
        (pool, tp), *others = stages
        disliked = max(self._spots.at(pool).preference for pool, _ in stages)
        return Option(
            self._name, pool, tp, *table, preference=disliked, pp=len(stages), phase=phase, others=tuple(others)
        )

    def _mixed(
        self, stages: Sequence[tuple[Pool, int]], phase: Phase, hops: Sequence[tuple[float, float]]
    ) -> Figures | None:
        places = [self._partition(pool) for pool, _ in stages]
        parts = [self._part(place, tp) for place, (_, tp) in zip(places, stages, strict=True)]
        usable = [part for part in parts if part is not None]
        if len(usable) < len(stages):
            return None
        request = self._demand.input + self._demand.output
        cut = pipeline(usable, self._architecture.layers, hops, self._demand.context, request)
        if cut is None:
            return None
        steps, room = cut
        first = usable[0].stand
        figures = replica(steps, room, self._demand, first.max_num_seqs, first.calibration)
        share = room.weights / sum(tp for _, tp in stages)
        moving = self._hand_over(stages[0][0], phase)
        return self._levels(figures, steps, share, phase, [pool for pool, _ in stages], moving)

    def _part(self, place: Partition, tp: int) -> Part | None:
        key = (*kind_of(place), tp)
        if key not in self._parts:
            there = stand(self._wanted, self._architecture, place, tp, self._calibrations, part=True)
            self._parts[key] = None if there is None else Part.of(there)
        return self._parts[key]

    def refusals(self) -> list[str]:
        """Why no replica can stand, for each of its pools by itself, in words."""
        return [f"{pool.cluster}/{pool.partition} {self._refusal(pool)}" for pool in self._pools]

    def _refusal(self, pool: Pool) -> str:
        reasons = forbidden(self._wanted, pool, self._inventory)
        if reasons:
            return f"is not allowed: {' and '.join(reasons)}"
        degrees = self.degrees(pool)
        declared = self._wanted.parallelism.tp
        if not degrees and declared is not None:
            return f"has not {declared} devices of a node, or of whole nodes, over which its heads can be dealt out"
        if not degrees:
            return "has no number of devices in a node over which its heads can be dealt out"
        place, tp = self._partition(pool), degrees[-1]
        engines_there = self.merging_degrees(pool, tp)
        if self._wants_merging and not engines_there:
            return f"has no {self._wanted.parallelism.dp}×{tp} devices in a node over which its layers can be dealt out"
        there = stand(self._wanted, self._architecture, place, tp, self._calibrations)
        if there is None:
            return f"has devices on which {self._wanted.engine} cannot compute"
        room, on, token = there.room, f"{tp}×{pool.device}", there.kv_octets
        if engines_there:
            together = elastic_stand(self._wanted, self._architecture, place, tp, engines_there[-1], self._calibrations)
            if together is not None:
                room, token = together.group.room, together.group.kv_octets
                on = f"{engines_there[-1]} merging engines of {on}"
        lacks = room.weights + self._demand.context * token - room.usable
        if lacks <= 0 and self._companions:
            return f"holds no request of {self._demand.context} tokens of one of {', '.join(self._companions)}"
        if lacks > 0:
            return (
                f"lacks {lacks / 2**30:.1f} GiB: {room.weights / 2**30:.1f} GiB of weights and a context of"
                f" {self._demand.context} tokens, {room.usable / 2**30:.1f} GiB on {on}"
            )
        return "has a walltime that is too short to load it"

    def transfer(self, sender: Pool, receiver: Pool) -> Transfer | None:
        """What handing a mean prompt's cache over takes: alpha plus size/beta; None without a network between them, and
        between sites where the engine's two halves find each other by themselves (`gateway.rooms` says why).

        All layers, grouped-query heads as they are, at the precision that the blueprint chooses for the way
        (ThunderServe, paper 002, section 3.3, whose formula leaves out the number of layers).
        """
        way = hop(self._inventory, sender.key, receiver.key)
        apart = (sender.provider, sender.site) != (receiver.provider, receiver.site)
        if way is None or (apart and self._capabilities.pairing == "together"):
            return None
        octets = kv_elements_per_token(self._architecture, Parallelism()) * KV_OCTETS[self._wanted.handover]
        octets *= self._demand.input
        sites = sorted((sender.site, receiver.site))
        link = None if sender.site == receiver.site else (sites[0], sites[1])
        return Transfer(HAND_LATENCY_S + way[0] + octets / way[1], octets, link)

    def _hand_over(self, pool: Pool, phase: Phase) -> float:
        """Seconds of the fastest way of a cache from a pool, or to it; the first token waits for that."""
        if phase == "unified":
            return 0.0
        if (pool.key, phase) not in self._moving:
            others = [other for other in self._pools if self.degrees(other)]
            pairs = [(pool, other) if phase == "prefill" else (other, pool) for other in others]
            ways = [self.transfer(*pair) for pair in pairs]
            self._moving[pool.key, phase] = min((way.seconds for way in ways if way is not None), default=0.0)
        return self._moving[pool.key, phase]

    def _levels(
        self,
        figures: ReplicaFigures,
        step: Steps,
        weights: float,
        phase: Phase,
        pools: Sequence[Pool],
        moving: float,
    ) -> Figures | None:
        """What a replica does under each load; `weights` are octets a device, which take time to load."""
        # Each partition's walltime ends by itself, and one stage that is away is one too many.
        places = {pool.key: pool for pool in pools}.values()
        starts = [(self._partition(pool), self._start_time(pool, weights)) for pool in places]
        promise = math.prod(self._promised(place, start_s) for place, start_s in starts)
        if not figures.fits or promise <= 0.0:
            return None
        demand, slo = self._demand, self._wanted.slo
        prompt, answering = figures.prefill_s + figures.read_s, decode_only(figures, demand)
        if phase == "prefill":
            figures = prefill_only(figures, step, demand)
        elif phase == "decode":
            figures = answering
        levels, factors = [], spared(slo, [figures.bands])
        rates = [load * figures.capacity for load in LOADS]
        if phase == "prefill":
            latencies = [prefill_under_load(figures, rate) for rate in rates]
        else:
            latencies = under_loads(figures, demand, rates)
        metrics = METRICS[:1] if phase == "prefill" else METRICS
        more = {"prefill": moving + answering.first_s, "decode": prompt + moving, "unified": 0.0}[phase]
        for rate, latency in zip(rates, latencies, strict=True):
            excess = slo_excess(slo, latency, metrics, more, factors)
            levels.append(Level(rate * promise, latency.in_system, excess <= 0.0, tidy(excess)))
        return figures, tuple(levels), max(start_s for _, start_s in starts)

    def _start_time(self, pool: Pool, weights: float) -> float:
        return start_time(self._partition(pool), weights, self._spots.at(pool).start_s)

    def _promised(self, place: Partition, start_s: float) -> float:
        share = promised(place, start_s)
        return 1.0 if self._ends_apart and share else share

    def _partition(self, pool: Pool) -> Partition:
        return self._spots.at(pool).partition


def _nodes(pool: Pool, tp: int, pp: int) -> int:
    nodes, _ = node_blocks(tp, pp, pool.devices_per_node)
    return nodes
