"""A placed fabric as a simulation: replicas with the step times of their devices, streams with the declared demand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines
from fabrictool.domain.address import model_of
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.simulator.calibration import calibrations_in
from fabrictool.simulator.demanded import context_of, lengths_of
from fabrictool.simulator.fleet import ReplicaSpec, Stream
from fabrictool.simulator.kernel import BLOCK
from fabrictool.simulator.mixed import MixedSteps, Part, pipeline
from fabrictool.simulator.network import HAND_LATENCY_S, hop
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.report import Hardware
from fabrictool.simulator.slo import target_of
from fabrictool.simulator.stand import Stand, stand
from fabrictool.simulator.stepmodel import KV_OCTETS, StepModel
from fabrictool.workload.arrivals import arrivals
from fabrictool.workload.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.memory import ReplicaMemory
    from fabrictool.simulator.slo import LatencyTarget
    from fabrictool.workload.arrivals import Process
    from fabrictool.workload.trace import Trace

EventKind = Literal["up", "drain", "down"]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """Something that befalls a replica: ready only now (`up`), no new requests (`drain`), gone (`down`)."""

    kind: EventKind
    replica: str
    """As the placement lists it, without ``replica/``: ``MODEL/INDEX``."""
    at: float
    """Seconds from the simulation's start."""

    @property
    def model(self) -> str:
        return model_of(self.replica)


@dataclass(frozen=True, slots=True)
class ModelSimulation:
    """All that is needed to play one model's demand."""

    name: str
    replicas: tuple[str, ...]
    """``MODEL/INDEX`` of each of `specs`."""
    specs: tuple[ReplicaSpec, ...]
    hardware: Hardware
    target: LatencyTarget
    calibrations: tuple[Calibration, ...]
    rate: float
    """Requests/s declared; 0 without a demand."""
    input: Lengths
    output: Lengths
    cv: float = 1.0
    """Of the gaps between requests; 1: they come by chance."""
    caches_prefixes: bool = False
    """Whether its engine keeps the cache of prompts' beginnings by default."""
    token_octets: tuple[float, ...] = ()
    """Of the cache of one token, for each of `specs`."""
    untrusted: tuple[str, ...] = ()
    """Replicas of the placement that may not serve these requests: ``MODEL/INDEX``; not among `replicas`."""

    def with_prefixes(self, block_tokens: int) -> ModelSimulation:
        """The same, with prefix ids of so many tokens, when the engine caches prefixes and blocks of 16 fill an id."""
        if not self.caches_prefixes or block_tokens < BLOCK or block_tokens % BLOCK:
            return self
        return replace(self, specs=tuple(replace(spec, prefix_tokens=block_tokens) for spec in self.specs))

    def with_host_cache(self, octets: float) -> ModelSimulation:
        """The same with so much of the host's memory for prefixes, beside the cache of each replica."""
        if not octets:
            return self
        known = zip(self.specs, self.token_octets, strict=True)
        # A model without layers that keep the whole context has no prefix to keep.
        kept = [replace(spec, host_tokens=int(octets // token) if token else 0) for spec, token in known]
        return replace(self, specs=tuple(kept))

    def with_events(self, events: Sequence[ReplicaEvent]) -> ModelSimulation:
        """The same with replicas that come and go. Raises InvalidInputError FT2149 for what no replica lives through.

        A replica starts once and ends once: what comes back is another session.
        """
        specs = dict(zip(self.replicas, self.specs, strict=True))
        seen: set[tuple[str, str]] = set()
        for event in events:
            if event.replica not in specs:
                raise InvalidInputError.of(
                    "FT2149",
                    f"there is no replica {event.replica} in this placement",
                    hint=f"it has {', '.join(self.replicas)}",
                )
            if (event.replica, event.kind) in seen:
                raise InvalidInputError.of("FT2149", f"{event.replica} has two events `{event.kind}`")
            seen.add((event.replica, event.kind))
            spec = specs[event.replica]
            match event.kind:
                case "up":
                    spec = replace(spec, up=event.at)
                case "drain":
                    spec = replace(spec, drain=event.at)
                case "down":
                    spec = replace(spec, down=event.at)
            specs[event.replica] = spec
        for name in dict.fromkeys(event.replica for event in events):
            spec = specs[name]
            if not spec.up < min(spec.drain, spec.down):
                raise InvalidInputError.of("FT2149", f"{name} would end before it is up", hint="`up` comes first")
            if math.inf > spec.drain > spec.down:
                raise InvalidInputError.of("FT2149", f"{name} is down before it drains", hint="`drain` before `down`")
        return replace(self, specs=tuple(specs.values()))


# Long: what is wrong with a model's placement is said in the order in which one would mend it.
def of_model(
    name: str,
    blueprint: Blueprint,
    inventory: Inventory,
    replicas: Sequence[ReplicaPlacement],
    calibrations: Sequence[Calibration],
) -> ModelSimulation:
    """The replicas of one model of the blueprint that may serve its requests.

    `calibrations` go before the inventory's own, and those before the catalogue's.

    Raises InvalidInputError FT2141 for a model that stands nowhere or that trust lets nobody serve, FT2111 for one
    that does not fit, FT2112 for a replica of more devices than its node has, FT1411 for an unknown architecture.
    """
    wanted = blueprint.models[name]
    placed = [replica for replica in replicas if replica.model == name]
    if not placed:
        raise InvalidInputError.of("FT2141", f"{name} has no replica in this placement: there is nothing to simulate")
    # All requests of a demand are alike to the gateway, so whom it excludes for one it excludes for all.
    trust, groups = _trust(blueprint, name), consumer_groups(blueprint)
    group = groups[0] if len(groups) == 1 else None
    mine = [replica for replica in placed if trust.permits(replica.provider, name, group, None)]
    if not mine:
        providers = ", ".join(sorted({replica.provider for replica in placed}))
        raise InvalidInputError.of(
            "FT2141",
            f"{name} stands with {providers} only, who may not serve its requests",
            hint="widen `trust` of the model or of the consumer group, or place it elsewhere",
        )
    architecture = blueprint.architecture(wanted)
    if architecture is None:
        raise InvalidInputError.of("FT1411", f"the architecture {wanted.architecture_id!r} is not in the catalogue")
    calibrations = [*calibrations, *calibrations_in(inventory.calibrated)]
    specs, chosen, tokens, devices, tdp, price = [], [], [], [], [], []
    for replica in mine:
        receivers = [other for other in mine if other.phase == "decode"] if replica.phase == "prefill" else []
        spec, stood = _spec(wanted, architecture, inventory, replica, calibrations, receivers)
        specs.append(spec)
        chosen.append(stood.calibration)
        tokens.append(stood.kv_octets)
        devices.append(replica.devices)
        stages = [(inventory.clusters[s.cluster].partitions[s.partition], s.tp) for s in replica.every_stage]
        power = sum(tp * _watts(partition) for partition, tp in stages)
        tdp.append(power / replica.devices)
        held = [(inventory.clusters[c].partitions[p], devices) for c, p, devices in replica.blocks(inventory)]
        shares = [(partition.price, devices / partition.devices_per_node) for partition, devices in held]
        price.append(sum(share * paid.amount for paid, share in shares if paid is not None))
    demand = wanted.demand
    return ModelSimulation(
        name=name,
        replicas=tuple(replica.replica for replica in mine),
        specs=tuple(specs),
        hardware=Hardware(tuple(devices), tuple(tdp), tuple(price)),
        target=target_of(wanted.slo),
        calibrations=tuple(chosen),
        rate=float(demand.rate) if demand and demand.rate is not None else 0.0,
        input=lengths_of(demand.input) if demand and demand.input else Lengths("lognormal", 512, 512),
        output=lengths_of(demand.output) if demand and demand.output else Lengths("lognormal", 128, 128),
        cv=demand.cv if demand and demand.cv is not None else 1.0,
        caches_prefixes=engines()[wanted.engine].caches_prefixes,
        token_octets=tuple(tokens),
        untrusted=tuple(replica.replica for replica in placed if replica not in mine),
    )


def consumer_groups(blueprint: Blueprint) -> list[str]:
    """Of all tenants. A demand does not say whose requests it counts, so only a single group is known to be theirs."""
    return sorted({tenant.group for tenant in blueprint.tenants.values()})


def declared_stream(simulation: ModelSimulation, count: int, seed: int) -> Stream:
    """`count` requests after the declared demand: Poisson, or with gamma gaps where it says how uneven they are.

    Raises InvalidInputError FT2142 when none is declared.
    """
    if simulation.rate <= 0:
        raise InvalidInputError.of(
            "FT2142",
            f"{simulation.name} declares no demand",
            hint="add `demand: {rate: …, input: …, output: …}`, or give --trace or --workload",
        )
    rng = np.random.default_rng(seed)
    process: Process = "poisson" if simulation.cv == 1.0 else "gamma"
    times = arrivals(process, simulation.rate, count, rng, cv=simulation.cv)
    return Stream(
        times,
        simulation.input.draw(count, rng),
        simulation.output.draw(count, rng),
        models=(simulation.specs[0].model,),
    )


def trace_stream(trace: Trace, model_name: str) -> Stream:
    """A trace as the requests for one model, whatever it calls it."""
    return Stream(
        trace.arrival,
        np.maximum(trace.prompt, 1),
        np.maximum(trace.output, 1),
        models=(model_name,),
        chain_start=trace.chain_start,
        chain=trace.chain,
    )


def _watts(partition: Partition) -> float:
    return as_float(partition.power) / partition.devices_per_node or accelerators()[partition.device].tdp_w


def _spec(
    wanted: Model,
    architecture: ModelArchitecture,
    inventory: Inventory,
    replica: ReplicaPlacement,
    calibrations: Sequence[Calibration],
    receivers: Sequence[ReplicaPlacement],
) -> tuple[ReplicaSpec, Stand]:
    """A replica, and how its first stage stands; `receivers` are those that a prefill replica hands its caches to."""
    for stage in replica.every_stage:
        partition = inventory.clusters[stage.cluster].partitions[stage.partition]
        nodes = wanted.parallelism.tp == stage.tp and stage.tp % partition.devices_per_node == 0
        if not 1 <= stage.tp <= partition.devices_per_node and not nodes:
            raise InvalidInputError.of(
                "FT2112",
                f"{replica.replica} would stand on {stage.tp} devices;"
                f" a node of {stage.cluster}/{stage.partition} has {partition.devices_per_node}",
            )
    standing = _standing(wanted, architecture, inventory, replica, calibrations)
    if standing is None:
        raise InvalidInputError.of("FT2141", f"{wanted.engine} cannot compute on {replica.device}")
    steps, room, stood = standing
    if not room.fits:
        raise InvalidInputError.of(
            "FT2111",
            f"{replica.replica}: the weights of {wanted.architecture_id} at {wanted.variant.precision} take"
            f" {room.weights / 1e9:.0f} GB; {replica.devices} × {replica.device} have"
            f" {room.usable / 1e9:.0f} GB to use",
        )
    hand, latency = _hand(wanted, architecture, inventory, replica, receivers)
    budget = engines()[wanted.engine].token_budget
    times = steps.times(stood.max_num_seqs, budget, hand, latency)
    spec = ReplicaSpec(
        times=times,
        max_num_seqs=stood.max_num_seqs,
        token_budget=budget,
        kv_tokens=room.kv_tokens,
        beside=room.beside,
        model=wanted.architecture_id,
        provider=replica.provider,
        role=replica.phase,
        weight=replica.weight,
        lanes=max(1, round(steps.lanes)),
        prefill_first=engines()[wanted.engine].prefill_first,
        balance_steps=engines()[wanted.engine].balance_steps,
        spared=engines()[wanted.engine].cache_spared,
        frontend=stood.step.factors.request,
        frontend_stream=stood.step.factors.stream,
        frontend_token=stood.step.factors.prompt_token,
        step=steps if isinstance(steps, StepModel) else None,
    )
    return spec, stood


def _standing(
    wanted: Model,
    architecture: ModelArchitecture,
    inventory: Inventory,
    replica: ReplicaPlacement,
    calibrations: Sequence[Calibration],
) -> tuple[StepModel | MixedSteps, ReplicaMemory, Stand] | None:
    """Step times and memory of a replica, and how its first stage stands."""
    places = [inventory.clusters[s.cluster].partitions[s.partition] for s in replica.every_stage]
    if not replica.stages:
        stood = stand(wanted, architecture, places[0], replica.tp, calibrations, pp=replica.pp)
        return None if stood is None else (stood.step, stood.room, stood)
    parts = [
        stand(wanted, architecture, place, stage.tp, calibrations, part=True)
        for place, stage in zip(places, replica.stages, strict=True)
    ]
    usable = [Part.of(part) for part in parts if part is not None]
    hops = [hop(inventory, (a.cluster, a.partition), (b.cluster, b.partition)) for a, b in pairwise(replica.stages)]
    known = [way for way in hops if way is not None]
    if len(usable) < len(parts) or len(known) < len(hops):
        return None
    context = context_of(wanted, architecture)
    demand = wanted.demand
    lengths = (demand.input, demand.output) if demand is not None else ()
    means = [lengths_of(length).clipped_mean for length in lengths if length]
    steps_and_room = pipeline(usable, architecture.layers, known, context, sum(means) or float(context))
    return None if steps_and_room is None else (*steps_and_room, usable[0].stand)


def _hand(
    wanted: Model,
    architecture: ModelArchitecture,
    inventory: Inventory,
    replica: ReplicaPlacement,
    receivers: Sequence[ReplicaPlacement],
) -> tuple[float, float]:
    """(seconds a token, seconds) of a hand-over: the mean over those who may receive it."""
    ways = [hop(inventory, (replica.cluster, replica.partition), (r.cluster, r.partition)) for r in receivers]
    known = [way for way in ways if way is not None]
    if not known:
        return 0.0, 0.0
    octets = kv_elements_per_token(architecture, Parallelism()) * KV_OCTETS[wanted.handover]
    seconds = sum(octets / bandwidth for _, bandwidth in known) / len(known)
    return seconds, HAND_LATENCY_S + sum(latency for latency, _ in known) / len(known)


def _trust(blueprint: Blueprint, name: str) -> TrustPolicy:
    """Who may serve whom, as the gateway has it, of one model."""
    providers = blueprint.models[name].trust
    return TrustPolicy(
        {group: frozenset(rule.allow) for group, rule in blueprint.trust.groups.items()},
        {} if providers is None else {name: frozenset(providers)},
    )
