"""A model of a blueprint on devices of a partition: step times, memory, calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.units import as_float
from fabrictool.catalog import accelerators, engines, links
from fabrictool.simulator.calibration import choose_own
from fabrictool.simulator.memory import USABLE, adapter_octets, reported_memory, room
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token
from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS, Factors, Machine, StepModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.catalog import Accelerator, ModelArchitecture
    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.inventory import Partition
    from fabrictool.simulator.calibration import Calibration
    from fabrictool.simulator.memory import ReplicaMemory

ON_CPU = Factors(kernel=6e-6, step=1e-3, sequence=50e-6, request=5e-3)
"""Interpreter and thread hand-over instead of kernel launches; nothing was measured on processors."""
MATRIX_UNITS = 0.09
"""Share of a processor's nominal matrix peak in prefill: the 14 to 23 of 216 TFLOP/s that lie between the models which
meet their target and those which miss it in section 3.1 of LLM-Mesh (paper 004)."""
_COMPUTES_IN = {"bf16": ("bf16", "fp16", "fp32"), "fp32": ("fp32",)}
"""Units that an engine can compute with, by what it computes in: never with fewer bits."""


@dataclass(frozen=True, slots=True)
class Stand:
    """One way to run a model: on so many devices of a partition."""

    step: StepModel
    room: ReplicaMemory
    calibration: Calibration
    max_num_seqs: int
    kv_octets: float
    """Of the cache of one token, over all devices."""


# Wide: one way to run a model is all of this; callers have no use for it bundled.
def stand(
    wanted: Model,
    architecture: ModelArchitecture,
    partition: Partition,
    tp: int,
    calibrations: Sequence[Calibration] = (),
    pp: int = 1,
    *,
    part: bool = False,
) -> Stand | None:
    """The step times and memory of a replica of `pp` stages; None where the engine cannot compute on the device.

    `calibrations` go before those of the catalogue. A `part` is to hold some of the layers only: its memory is not
    stretched so that all of them fit.
    """
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
    cut = Parallelism(tp=tp, pp=pp)
    calibration = choose_own(calibrations, partition.device, device.vendor, wanted.engine, architecture.id, cut.devices)
    factors = factors_on(device, calibration, weights)
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
        usable=USABLE if part else None,
        reserved=engine.reserved(machine.memory),
        beside=adapter_octets(architecture, cut, len(wanted.adapters), wanted.adapter_rank, KV_OCTETS[kv]),
    )
    token = kv_elements_per_token(architecture, cut) * KV_OCTETS[kv]
    return Stand(step, space, calibration, wanted.max_num_seqs or engine.default_max_num_seqs, token)


def factors_on(device: Accelerator, calibration: Calibration, weights: str) -> Factors:
    """The calibration's factors; on a processor, for which there is none, those of processors."""
    if device.kind != "cpu" or calibration.points:
        return calibration.factors
    return ON_CPU if weights == "fp32" else replace(ON_CPU, compute=MATRIX_UNITS)


def _machine(partition: Partition) -> Machine:
    device = accelerators()[partition.device]
    link = links()[partition.link].bandwidth if partition.link else device.link_bandwidth
    base = Machine.of(device)
    memory = reported_memory(device)
    if device.kind == "cpu" and partition.memory_per_node is not None:
        memory = as_float(partition.memory_per_node) / partition.devices_per_node
    network = links()[partition.network].bandwidth if partition.network else base.network
    linked = device.link_devices or partition.devices_per_node
    return Machine(base.flops, base.bandwidth, memory, link, linked, network)
