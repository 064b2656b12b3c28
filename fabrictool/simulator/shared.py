"""A model whose engine serves others out of the same memory: what these leave it. Source: LLM-Mesh (paper 004).

Played, not computed: `sharing` itself gives the models turns and memory in virtual time, as it does in the engine, and
requests of each come by chance at rates in proportion to what is declared. What is assumed: iterations take what the
model's own steps take; prompts and answers have their mean lengths; all replicas get alike parts of each model's
requests. A request that the engine drops, because nobody could begin it in time, counts in percentiles as one that
took `DROPPED_S`. All models are held to the same targets, so percentiles are those of the slowest of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.sharing.core import NodeSharing
from fabrictool.sharing.defaults import KEEP_ALIVE_S, TPOT_S, usual_ttft_s
from fabrictool.sharing.ledger import MemoryLedger
from fabrictool.sharing.placement import MemoryTimes, SharingOptions
from fabrictool.sharing.quantified import IterationTable
from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedRequest
from fabrictool.simulator.capacity import Latency, decode_seconds, prefill_seconds, replica
from fabrictool.simulator.demanded import demand_of
from fabrictool.simulator.shared_nodes import SharedNodeLoop
from fabrictool.simulator.stand import stand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.inventory import Partition
    from fabrictool.sharing.turns import Iteration
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.capacity import MeanWorkload, ReplicaFigures
    from fabrictool.simulator.shared_nodes import SharedRun
    from fabrictool.simulator.stand import Stand

KIND = "cpu"
LEAST, MOST = 100, 1_000
"""Requests that are played: of the model itself, as long as that makes no more than `TOGETHER` of all."""
TOGETHER = 3_000
FEWEST = 20
"""Of each model with a demand, however seldom it is asked for."""
FILLING = 0.1
"""Share of the time played in which the engine fills, and that does not count."""
DROPPED_S = 3600.0
LOAD_RATE = 2e9
"""Octets/s at which weights and caches are copied within the memory of a node: the 0.3 s that the reference engine
takes for the 0.65 GB of SmolLM2 in fp32."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """One of the models that an engine serves, as it would stand by itself."""

    stood: Stand
    figures: ReplicaFigures
    demand: MeanWorkload

    @property
    def capacity(self) -> float:
        """Requests/s that the engine takes of it alone; a prompt is an iteration of its own."""
        figures = self.figures
        return 1.0 / (figures.prefill_s + self.demand.output * figures.step_full_s / figures.max_batch)


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """What an engine of several models did under a load."""

    latency: Latency
    """Requests in the system are the model's own; the rest is the slowest model's."""
    dropped: tuple[float, ...]
    """Share of each model's requests."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A model on an engine that serves others, too. Requests/s of that model."""

    parts: tuple[SharedPart, ...]
    """The model itself, then its companions."""
    targets: tuple[float | None, float | None]
    """Seconds to the first token and for each further one, that turns go by; None: the engine's own."""
    names: tuple[str, ...]
    """Of the companions, in the order of `parts`."""
    played: dict[float, SharedLoad] = field(default_factory=dict, compare=False)

    @property
    def capacity(self) -> float:
        """Under full load of all of them, each at its declared share."""
        own = self.parts[0]
        return own.capacity * self.share

    @property
    def share(self) -> float:
        """Of the engine's time under full load, in (0, 1]."""
        own, *others = (part.demand.rate / part.capacity for part in self.parts)
        return own / (own + sum(others)) if own > 0.0 else 1.0

    @property
    def figures(self) -> ReplicaFigures:
        """As of an engine of its own, with the capacity that is the model's."""
        return replace(self.parts[0].figures, capacity=self.capacity)

    @property
    def held(self) -> float:
        """Octets that all models keep with a cache for one request each."""
        return sum(part.stood.room.weights + part.demand.context * part.stood.kv_octets for part in self.parts)

    @property
    def memory(self) -> float:
        """Octets that all models have together."""
        return self.parts[0].stood.room.usable

    def under_load(self, rate: float) -> Latency:
        """While the model gets `rate`, and the others what is theirs in proportion."""
        return self.at(rate).latency

    def slowed_at(self, rate: float) -> Stand:
        """The model by itself, with steps as slow as tokens come while others have their turns."""
        own = self.parts[0]
        times = max(1.0, self.under_load(rate).tpot_mean / own.figures.step_alone_s)
        return replace(own.stood, step=own.stood.step.slowed(times))

    def at(self, rate: float) -> SharedLoad:
        """What all of them do then; a load is played once."""
        if rate not in self.played:
            self.played[rate] = self._play(rate)
        return self.played[rate]

    def _play(self, rate: float) -> SharedLoad:
        own = self.parts[0]
        if rate <= 0.0:
            first, further = own.figures.prefill_s, own.figures.step_alone_s
            whole = first + own.demand.output * further
            return SharedLoad(Latency(0.0, 0.0, first, first, further, further, whole), (0.0,) * len(self.parts))
        others = [rate * part.demand.rate / own.demand.rate if own.demand.rate else 0.0 for part in self.parts[1:]]
        rates = [rate, *others]
        count = max(LEAST, int(MOST * rate / sum(rates)))
        until = min(count / rate, TOGETHER / sum(rates))
        requests, answers = self._requests(rates, until)
        loop = _TimedLoop(NodeSharing([self._node()], self._models(), self._options()), answers)
        loop.run(requests)
        counted = [request for request in requests if request.began >= FILLING * until]
        by_model = [[r for r in counted if r.model == str(number)] for number in range(len(self.parts))]
        seen = [_seen(some, loop, answers) for some in by_model]
        worst = np.max([figures for figures, _, _ in seen], axis=0)
        latency = Latency(rate / self.capacity, rate * seen[0][1], *map(float, worst))
        return SharedLoad(latency, tuple(dropped for _, _, dropped in seen))

    def _requests(self, rates: Sequence[float], until: float) -> tuple[list[SharedRequest], dict[int, int]]:
        """All of them by the time of their arrival, and how long their answers are."""
        rng, arrivals = random.Random(0), []
        for number, rate in enumerate(rates):
            at = rng.expovariate(rate) if rate > 0.0 else until
            mine = []
            while at < until:
                mine.append(at)
                at += rng.expovariate(rate)
            if rate > 0.0 and len(mine) < FEWEST:  # so seldom that hardly one comes: some are looked at all the same
                mine = [until * (n + 0.5) / FEWEST for n in range(FEWEST)]
            arrivals += [(at, number) for at in mine]
        requests, answers = [], {}
        for index, (at, number) in enumerate(sorted(arrivals)):
            demand = self.parts[number].demand
            prompt = max(1, round(demand.input))
            ttft, tpot = self.targets
            requests.append(SharedRequest(index, str(number), prompt, at, ttft or usual_ttft_s(prompt), tpot or TPOT_S))
            answers[index] = max(1, round(demand.output))
        return requests, answers

    def _models(self) -> list[SharedModel]:
        return [
            SharedModel(
                str(number),
                int(part.stood.room.weights),
                int(part.stood.kv_octets),
                part.demand.context,
                {KIND: _table(part)},
                part.demand.output,
            )
            for number, part in enumerate(self.parts)
        ]

    def _node(self) -> SharedNode:
        return SharedNode(0, KIND, MemoryLedger(int(self.memory)))

    def _options(self) -> SharingOptions:
        times = MemoryTimes(1 / LOAD_RATE, 1 / LOAD_RATE, 0.0, {KIND: LOAD_RATE}, 0.0)
        return SharingOptions(keep_alive_s=KEEP_ALIVE_S, idle_yield=True, kinds=(KIND,), times=times)


class _TimedLoop(SharedNodeLoop):
    """With the times of each request's first and last token."""

    def __init__(self, scheduler: NodeSharing, answers: Mapping[int, int]) -> None:
        super().__init__(scheduler, answers)
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def _end(self, turn: Iteration, now: float, outcome: SharedRun) -> None:
        given = [turn.prompt] if turn.prompt is not None else list(turn.replica.running)
        super()._end(turn, now, outcome)
        for request in given:
            self.first.setdefault(request.id, now)
            self.last[request.id] = now


def _table(part: SharedPart) -> IterationTable:
    step = part.stood.step
    return IterationTable.sampled(
        lambda tokens: prefill_seconds(step, tokens),
        lambda batch, context: decode_seconds(step, int(batch), context),
        part.demand.context,
        part.stood.max_num_seqs,
    )


def _seen(
    some: Sequence[SharedRequest], loop: _TimedLoop, answers: Mapping[int, int]
) -> tuple[tuple[float, ...], float, float]:
    """Of one model's requests: latencies in the order of `Latency`, mean seconds in the system, share dropped."""
    served = [request for request in some if request.emitted >= answers[request.id]]
    dropped = [request for request in some if request.emitted < answers[request.id]]
    if not some:
        return (0.0,) * 5, 0.0, 0.0
    first = np.array([loop.first[request.id] - request.began for request in served])
    whole = np.array([loop.last[request.id] - request.began for request in served])
    further = (whole - first) / np.array([max(1, answers[request.id] - 1) for request in served])
    lost = np.full(len(dropped), DROPPED_S)
    waited = sum(request.ttft_s for request in dropped)
    figures = (
        float(first.mean()) if served else DROPPED_S,
        float(np.quantile(np.concatenate([first, lost]), 0.95)),
        float(further.mean()) if served else 0.0,
        float(np.quantile(further, 0.95)) if served else 0.0,
        float(np.quantile(np.concatenate([whole, lost]), 0.95)),
    )
    return figures, float((whole.sum() + waited) / len(some)), len(dropped) / len(some)


# Wide: a model, those beside it, and where they stand.
def shared(
    wanted: Model,
    architecture: ModelArchitecture,
    companions: Mapping[str, ModelArchitecture],
    partition: Partition,
    calibrations: Sequence[Calibration] = (),
) -> Shared | None:
    """The model on one device of a partition with its `companions`; None where one of them does not stand there, or
    does not fit even by itself.
    """
    parts = []
    every = [(wanted, architecture), *((wanted.companion(name), its) for name, its in sorted(companions.items()))]
    for model, its in every:
        stood, demand = stand(model, its, partition, 1, calibrations), demand_of(model, its)
        if stood is None:
            return None
        figures = replica(stood.step, stood.room, demand, stood.max_num_seqs, stood.calibration)
        if not figures.fits:
            return None
        parts.append(SharedPart(stood, figures, demand))
    targets = (None, None) if wanted.slo is None else wanted.slo.held_to
    return Shared(tuple(parts), targets, tuple(sorted(companions)))
