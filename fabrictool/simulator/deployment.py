"""A placed fabric as a simulation: replicas with the step times of their devices, streams with the declared demand.

Base engines that merge while they answer are played as what they are under the demand: one replica, as long as it
leaves them a group, else so many replicas side by side that never merge. Of these each has the batch for which its own
memory has room, and the cache of all, so that it holds what only the group does; such a request takes one of them for
about as much device time as it would take the group.

Longer than most modules: what is wrong with a placement is said beside what is read off it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines
from fabrictool.domain.address import model_of
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.dealing import part_of, weights_for
from fabrictool.simulator.calibration import calibrations_in
from fabrictool.simulator.demanded import GroupDemand, context_of, demand_of, lengths_of, parts_of
from fabrictool.simulator.elastic import elastic, elastic_stand
from fabrictool.simulator.fleet import ReplicaSpec, Stream
from fabrictool.simulator.kernel import BLOCK
from fabrictool.simulator.mixed import MixedSteps, Part, pipeline
from fabrictool.simulator.network import HAND_LATENCY_S, hop
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.report import Hardware
from fabrictool.simulator.shared import shared
from fabrictool.simulator.slo import target_of
from fabrictool.simulator.stand import Stand, stand
from fabrictool.simulator.stepmodel import KV_OCTETS, StepModel
from fabrictool.workload.arrivals import arrivals, cv_of_part
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
    from fabrictool.simulator.steptimes import StepTimes
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
    """``MODEL/INDEX`` of each of `specs`; of engines that are played apart, the same several times."""
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
    parts: tuple[GroupDemand, ...] = ()
    """The demand by consumer group, of those that somebody here may serve; none: it is not divided."""
    shut_out: tuple[GroupDemand, ...] = ()
    """Those that nobody here may serve: they are refused at once, and no load."""

    @property
    def played(self) -> float:
        """Share of the demand that comes to these replicas."""
        return sum(part.share for part in self.parts) if self.parts else 1.0

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
        specs = list(self.specs)
        seen: set[tuple[str, str]] = set()
        for event in events:
            if event.replica not in self.replicas:
                raise InvalidInputError.of(
                    "FT2149",
                    f"there is no replica {event.replica} in this placement",
                    hint=f"it has {', '.join(dict.fromkeys(self.replicas))}",
                )
            if (event.replica, event.kind) in seen:
                raise InvalidInputError.of("FT2149", f"{event.replica} has two events `{event.kind}`")
            seen.add((event.replica, event.kind))
            befallen = [at for at, name in enumerate(self.replicas) if name == event.replica]
            for at in befallen:
                match event.kind:
                    case "up":
                        specs[at] = replace(specs[at], up=event.at)
                    case "drain":
                        specs[at] = replace(specs[at], drain=event.at)
                    case "down":
                        specs[at] = replace(specs[at], down=event.at)
        for name in dict.fromkeys(event.replica for event in events):
            spec = specs[self.replicas.index(name)]
            if not spec.up < min(spec.drain, spec.down):
                raise InvalidInputError.of("FT2149", f"{name} would end before it is up", hint="`up` comes first")
            if math.inf > spec.drain > spec.down:
                raise InvalidInputError.of("FT2149", f"{name} is down before it drains", hint="`drain` before `down`")
        return replace(self, specs=tuple(specs))


# Long: what is wrong with a model's placement is said in the order in which one would mend it.
def of_model(
    name: str,
    blueprint: Blueprint,
    inventory: Inventory,
    replicas: Sequence[ReplicaPlacement],
    calibrations: Sequence[Calibration],
    share: float = 1.0,
) -> ModelSimulation:
    """The replicas of one model of the blueprint that may serve its requests; `share` of the demand is theirs.

    `calibrations` go before the inventory's own, and those before the catalogue's.

    Raises InvalidInputError FT2141 for a model that stands nowhere or that trust lets nobody serve, FT2111 for one
    that does not fit, FT2112 for a replica of more devices than its node has, FT1411 for an unknown architecture.
    """
    wanted = blueprint.models[name]
    placed = [replica for replica in replicas if replica.model == name]
    if not placed:
        raise InvalidInputError.of("FT2141", f"{name} has no replica in this placement: there is nothing to simulate")
    trust, groups, asking = _trust(blueprint, name), consumer_groups(blueprint), parts_of(blueprint, wanted)
    # All requests of a demand that is not divided are alike: whom the gateway excludes for one it excludes for all.
    group = groups[0] if len(groups) == 1 and not asking else None
    mine = [replica for replica in placed if trust.permits(replica.provider, name, group, None)]
    if asking:
        mine = [replica for replica in mine if any(_serves(replica, part) for part in asking)]
    if not mine or (asking and not any(_is_answered(part, mine) for part in asking)):
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
    demand = wanted.demand
    rate = float(demand.rate) if demand and demand.rate is not None else 0.0
    names, specs, chosen, tokens, devices, tdp, price = [], [], [], [], [], [], []
    ways = {replica.variant: wanted.in_variant(replica.variant) for replica in mine}
    for replica in mine:
        its = ways[replica.variant]
        if wanted.companions or replica.dp > 1:
            load = share * rate * _share_of(replica, mine, asking)
            parts = _sharing_specs(wanted, architecture, blueprint, inventory, replica, calibrations, load)
            parts = parts or _merging_specs(its, architecture, inventory, replica, calibrations, load)
        else:
            receivers = [other for other in mine if other.phase == "decode"] if replica.phase == "prefill" else []
            parts = [_spec(its, architecture, inventory, replica, calibrations, receivers)]
        stages = [(inventory.clusters[s.cluster].partitions[s.partition], s.tp) for s in replica.every_stage]
        power = replica.dp * sum(tp * _watts(partition) for partition, tp in stages)
        held = [(inventory.clusters[c].partitions[p], devices) for c, p, devices in replica.blocks(inventory)]
        shares = [(partition.price, devices / partition.devices_per_node) for partition, devices in held]
        for spec, stood in parts:
            names.append(replica.replica)
            specs.append(spec)
            chosen.append(stood.calibration)
            tokens.append(stood.kv_octets)
            devices.append(replica.devices // len(parts))
            tdp.append(power / replica.devices)
            price.append(sum(part * paid.amount for paid, part in shares if paid is not None) / len(parts))
    return ModelSimulation(
        name=name,
        replicas=tuple(names),
        specs=tuple(specs),
        hardware=Hardware(tuple(devices), tuple(tdp), tuple(price)),
        target=target_of(wanted.slo),
        calibrations=tuple(chosen),
        rate=rate,
        input=lengths_of(demand.input) if demand and demand.input else Lengths("lognormal", 512, 512),
        output=lengths_of(demand.output) if demand and demand.output else Lengths("lognormal", 128, 128),
        cv=demand.cv if demand and demand.cv is not None else 1.0,
        caches_prefixes=all(engines()[its.engine].caches_prefixes for its in ways.values()),
        token_octets=tuple(tokens),
        untrusted=tuple(replica.replica for replica in placed if replica not in mine),
        parts=tuple(part for part in asking if _is_answered(part, mine)),
        shut_out=tuple(part for part in asking if not _is_answered(part, mine)),
    )


def _serves(replica: ReplicaPlacement, part: GroupDemand) -> bool:
    return part.allowed is None or replica.provider in part.allowed


def _is_answered(part: GroupDemand, mine: Sequence[ReplicaPlacement]) -> bool:
    """Whether anybody answers it whole, or a pair does."""
    phases = {replica.phase for replica in mine if _serves(replica, part)}
    return "unified" in phases or phases >= {"prefill", "decode"}


def _share_of(replica: ReplicaPlacement, mine: Sequence[ReplicaPlacement], parts: Sequence[GroupDemand]) -> float:
    """Of a model's requests, by weight."""
    share = 0.0
    for part in parts or (GroupDemand("", 1.0),):
        able = [other for other in mine if other.phase != "decode" and _serves(other, part)]
        if replica in able:
            weights = weights_for(able, part_of(able, part.group) if parts else None)
            share += part.share * weights[able.index(replica)] / sum(weights)
    return share


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
    cv = cv_of_part(simulation.cv, simulation.played) if simulation.parts else simulation.cv
    process: Process = "poisson" if cv == 1.0 else "gamma"
    times = arrivals(process, simulation.rate * simulation.played, count, rng, cv=cv)
    stream = Stream(
        times,
        simulation.input.draw(count, rng),
        simulation.output.draw(count, rng),
        models=(simulation.specs[0].model,),
    )
    return with_groups(stream, simulation.parts, rng)


def with_groups(stream: Stream, parts: Sequence[GroupDemand], rng: np.random.Generator) -> Stream:
    """The same requests, each of a consumer group that is drawn by the groups' shares."""
    if not parts:
        return stream
    shares = np.array([part.share for part in parts])
    drawn = rng.choice(len(parts), len(stream.arrival), p=shares / shares.sum())
    return replace(stream, group=drawn, groups=tuple(parts))


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
        raise _too_large(wanted, replica, room)
    hand, latency = _hand(wanted, architecture, inventory, replica, receivers)
    times = steps.times(stood.max_num_seqs, engines()[wanted.engine].token_budget, hand, latency)
    spec = _played_as(wanted, replica, stood, times, room)
    step = steps if isinstance(steps, StepModel) else None
    return replace(spec, lanes=max(1, round(steps.lanes)), step=step), stood


def _merging_specs(
    wanted: Model,
    architecture: ModelArchitecture,
    inventory: Inventory,
    replica: ReplicaPlacement,
    calibrations: Sequence[Calibration],
    load: float,
) -> list[tuple[ReplicaSpec, Stand]]:
    """Base engines that get `load` requests/s together, as the module's docstring says; without any load, apart."""
    partition = inventory.clusters[replica.cluster].partitions[replica.partition]
    there = elastic_stand(wanted, architecture, partition, replica.tp, replica.dp, calibrations)
    if there is None:
        raise InvalidInputError.of("FT2141", f"{wanted.engine} cannot compute on {replica.device}")
    its = elastic(wanted, there, demand_of(wanted, architecture))
    if its is None:
        raise _too_large(wanted, replica, there.group.room)
    together = its.apart is None or (load > 0.0 and its.merges_at(load))
    stood = there.group if together else there.base
    batch = stood.max_num_seqs if together or its.apart is None else its.apart[0].max_batch
    times = stood.step.times(batch, engines()[wanted.engine].token_budget)
    spec = _played_as(wanted, replica, replace(stood, max_num_seqs=batch), times, there.group.room)
    spec = replace(spec, step=stood.step)
    if together:
        return [(spec, stood)]
    parted = {group: weight / replica.dp for group, weight in replica.group_weights.items()}
    return [(replace(spec, weight=replica.weight / replica.dp, group_weights=parted), stood)] * replica.dp


# Wide: a replica's place, what stands there with it, and its load.
def _sharing_specs(
    wanted: Model,
    architecture: ModelArchitecture,
    blueprint: Blueprint,
    inventory: Inventory,
    replica: ReplicaPlacement,
    calibrations: Sequence[Calibration],
    load: float,
) -> list[tuple[ReplicaSpec, Stand]]:
    """A replica that gets `load` requests/s, as slow as its companions make it at theirs; only its own are played.
    Nothing where it has none.
    """
    if not wanted.companions:
        return []
    partition = inventory.clusters[replica.cluster].partitions[replica.partition]
    its = shared(wanted, architecture, blueprint.companions(wanted), partition, calibrations)
    if its is None:
        message = f"{replica.replica} and {', '.join(wanted.companions)} do not each fit a device of {replica.device}"
        raise InvalidInputError.of("FT2111", message)
    stood = its.slowed_at(load)
    times = stood.step.times(stood.max_num_seqs, engines()[wanted.engine].token_budget)
    return [(replace(_played_as(wanted, replica, stood, times, stood.room), step=stood.step), stood)]


def _too_large(wanted: Model, replica: ReplicaPlacement, room: ReplicaMemory) -> FabrictoolError:
    return InvalidInputError.of(
        "FT2111",
        f"{replica.replica}: the weights of {wanted.architecture_id} at {wanted.variant.precision} take"
        f" {room.weights / 1e9:.0f} GB; {replica.devices} × {replica.device} have"
        f" {room.usable / 1e9:.0f} GB to use",
    )


def _played_as(
    wanted: Model, replica: ReplicaPlacement, stood: Stand, times: StepTimes, room: ReplicaMemory
) -> ReplicaSpec:
    """A replica as its engine and the blueprint have it, with the cache of `room`."""
    return ReplicaSpec(
        times=times,
        max_num_seqs=stood.max_num_seqs,
        token_budget=engines()[wanted.engine].token_budget,
        kv_tokens=room.kv_tokens,
        beside=room.beside,
        model=wanted.architecture_id,
        provider=replica.provider,
        role=replica.phase,
        weight=replica.weight,
        group_weights=replica.group_weights,
        prefill_first=engines()[wanted.engine].prefill_first,
        balance_steps=engines()[wanted.engine].balance_steps,
        spared=engines()[wanted.engine].cache_spared,
        frontend=stood.step.factors.request,
        frontend_stream=stood.step.factors.stream,
        frontend_token=stood.step.factors.prompt_token,
    )


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
