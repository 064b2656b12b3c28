"""A placed fabric as a simulation: replicas with the step times of their devices, streams with the declared demand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines, links, model
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.fleet import ReplicaSpec, Stream
from fabrictool.simulator.memory import reported_memory, room
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.report import Hardware, Target
from fabrictool.simulator.stepmodel import OCTETS, Factors, Machine, StepModel
from fabrictool.workload.arrivals import arrivals
from fabrictool.workload.lengths import Lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Length, Model, Slo
    from fabrictool.domain.inventory import Inventory, Partition
    from fabrictool.domain.plan import ReplicaPlacement
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.memory import Room
    from fabrictool.workload.trace import Trace

TOKEN_BUDGET = {"vllm": 8192, "sglang": 16384, "tensorrt-llm": 8192, "llama.cpp": 2048, "reference": 512}
ON_CPU = Factors(layer=60e-6, expert_layer=60e-6, step=1e-3, sequence=50e-6, request=5e-3)
"""Interpreter and thread hand-over instead of kernel launches; nothing was measured on processors."""
_COMPUTES_IN = {"bf16": ("bf16", "fp16", "fp32"), "fp32": ("fp32",)}
"""Units that an engine can compute with, by what it computes in: never with fewer bits."""


@dataclass(frozen=True, slots=True)
class ModelSimulation:
    """All that is needed to play one model's demand."""

    name: str
    specs: tuple[ReplicaSpec, ...]
    hardware: Hardware
    target: Target
    calibrations: tuple[Calibration, ...]
    rate: float
    """Requests/s declared; 0 without a demand."""
    input: Lengths
    output: Lengths


def of_model(
    name: str,
    blueprint: Blueprint,
    inventory: Inventory,
    replicas: Sequence[ReplicaPlacement],
) -> ModelSimulation:
    """The replicas of one model of the blueprint.

    Raises InvalidInputError FT2141 for a model that stands nowhere, FT1411 for one whose architecture is not known.
    """
    wanted = blueprint.models[name]
    mine = [replica for replica in replicas if replica.model == name]
    if not mine:
        raise InvalidInputError.of("FT2141", f"{name} has no replica in this placement: there is nothing to simulate")
    specs, found, devices, tdp, price = [], [], [], [], []
    for replica in mine:
        spec, calibration = _spec(wanted, inventory, replica)
        partition = inventory.clusters[replica.cluster].partitions[replica.partition]
        specs.append(spec)
        found.append(calibration)
        devices.append(replica.tp)
        node = as_float(partition.power) / partition.devices_per_node
        tdp.append(node or accelerators()[partition.device].tdp_w)
        share = replica.tp / partition.devices_per_node
        price.append(share * partition.price.amount if partition.price else 0.0)
    demand = wanted.demand
    return ModelSimulation(
        name=name,
        specs=tuple(specs),
        hardware=Hardware(tuple(devices), tuple(tdp), tuple(price)),
        target=_target(wanted.slo),
        calibrations=tuple(found),
        rate=float(demand.rate) if demand and demand.rate is not None else 0.0,
        input=_lengths(demand.input) if demand and demand.input else Lengths("lognormal", 512, 512),
        output=_lengths(demand.output) if demand and demand.output else Lengths("lognormal", 128, 128),
    )


def declared_stream(simulation: ModelSimulation, count: int, seed: int) -> Stream:
    """`count` Poisson requests after the declared demand. Raises InvalidInputError FT2142 when none is declared."""
    if simulation.rate <= 0:
        raise InvalidInputError.of(
            "FT2142",
            f"{simulation.name} declares no demand",
            hint="add `demand: {rate: …, input: …, output: …}`, or give --trace or --workload",
        )
    rng = np.random.default_rng(seed)
    times = arrivals("poisson", simulation.rate, count, rng)
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


@dataclass(frozen=True, slots=True)
class Stand:
    """One way to run a model: on so many devices of a partition."""

    step: StepModel
    room: Room
    calibration: Calibration
    max_num_seqs: int


def stand(wanted: Model, architecture: ModelArchitecture, partition: Partition, tp: int) -> Stand | None:
    """The step times and memory of a replica; None where the engine cannot compute on the device."""
    engine = engines()[wanted.engine]
    precision = wanted.variant.precision
    weights = precision if precision in OCTETS else "int4"
    if engine.compute_precision == "fp32":
        weights = "fp32"
    device = accelerators()[partition.device]
    machine = _machine(partition)
    needed = "fp32" if weights == "fp32" else "bf16"
    if not any(unit in device.flops for unit in _COMPUTES_IN[needed]):
        return None
    cut = Parallelism(tp=tp)
    calibration = choose(shipped(), partition.device, device.vendor, wanted.engine, "online")
    factors = ON_CPU if device.kind == "cpu" and not calibration.points else calibration.factors
    octets = engine.weight_bytes[precision]
    kv = "fp32" if weights == "fp32" else "bf16"
    step = StepModel.of(architecture, machine, cut, factors, weights=weights, kv=kv, octets=octets)
    space = room(
        architecture,
        cut,
        machine.memory,
        weights=weights,
        kv=kv,
        octets=octets,
        reserved=min(3e9, 0.02 * machine.memory),
    )
    return Stand(step, space, calibration, wanted.max_num_seqs or engine.default_max_num_seqs)


def _spec(wanted: Model, inventory: Inventory, replica: ReplicaPlacement) -> tuple[ReplicaSpec, Calibration]:
    partition = inventory.clusters[replica.cluster].partitions[replica.partition]
    architecture = model(wanted.architecture_id)
    if architecture is None:
        raise InvalidInputError.of("FT1411", f"the architecture {wanted.architecture_id!r} is not in the catalogue")
    found = stand(wanted, architecture, partition, replica.tp)
    if found is None:
        raise InvalidInputError.of("FT2141", f"{wanted.engine} cannot compute on {partition.device}")
    budget = TOKEN_BUDGET.get(wanted.engine, 8192)
    context = int(wanted.variant.context or min(4096, architecture.max_context))
    spec = ReplicaSpec(
        times=found.step.times(found.max_num_seqs, budget),
        max_num_seqs=found.max_num_seqs,
        token_budget=budget,
        kv_tokens=max(found.room.kv_tokens, context + 16),
        model=wanted.architecture_id,
        provider=replica.provider,
        frontend=found.step.factors.request,
    )
    return spec, found.calibration


def _machine(partition: Partition) -> Machine:
    device = accelerators()[partition.device]
    link = links()[partition.link].bandwidth if partition.link else device.link_bandwidth
    base = Machine.of(device)
    memory = reported_memory(device)
    if device.kind == "cpu" and partition.memory_per_node is not None:
        memory = as_float(partition.memory_per_node) / partition.devices_per_node
    return Machine(base.flops, base.bandwidth, memory, link, base.per_node, base.network)


def _lengths(declared: Length) -> Lengths:
    mean, sd = float(declared.mean), float(declared.sd)
    most = int(declared.max) if declared.max is not None else 10_000_000
    return Lengths(declared.shape if sd else "fixed", mean, sd, 1, most)


def _target(slo: Slo | None) -> Target:
    """The tightest target of each metric: what one request has to meet to count as good."""

    def tightest(metric: str) -> float:
        given = [getattr(slo, f"{metric}_{p}") for p in ("p50", "p95", "p99")]
        return min((float(t) for t in given if t is not None), default=math.inf)

    return Target(tightest("ttft"), tightest("tpot"), tightest("e2e")) if slo else Target()
