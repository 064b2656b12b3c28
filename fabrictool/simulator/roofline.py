"""What one replica can do, from datasheets alone: memory, prefill, decode, capacity, latency under load.

A step takes as long as its slower half, arithmetic or memory traffic, plus launch overheads; tensor parallelism adds
two all-reduces a layer. Efficiencies are the usual constants for an uncalibrated device. Measured against real
systems such constants err by 20-50 % on decode and far more on TTFT (the peers err by 29-250 % there), so every figure
carries a wide band that says so. Calibration narrows it later; nothing here is fitted.

Source of the form: Williams et al., "Roofline" (2009); for serving, paper 001 §3.5 and LLM-Viewer (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COMPUTE_EFFICIENCY = 0.6
BANDWIDTH_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.6
USABLE_MEMORY = 0.9
"""Share of a device's memory for weights and KV: engines keep the rest (vLLM's default is 0.92)."""
LAYER_OVERHEAD_S = 20e-6
STEP_OVERHEAD_S = 2e-3
ALL_REDUCE_LATENCY_S = 8e-6
CPU_LAYER_OVERHEAD_S = 60e-6
"""Kernel launches on a GPU; on a CPU, the interpreter and thread hand-over of a NumPy or GGML step."""
MAX_UTILISATION = 0.9
"""No forecast promises a replica loaded beyond this: queues grow without bound near 1."""
TPOT_BAND = (0.5, 2.0)
TTFT_BAND = (0.4, 2.5)
BASIS = (
    "uncalibrated roofline: datasheet peaks at 60 % compute and 80 % bandwidth; such constants err by 20-50 % on TPOT"
    " and more on TTFT, hence bands of ×0.5-2.0 and ×0.4-2.5"
)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or CPU node, from its datasheet."""

    id: str
    memory: float
    """Octets."""
    bandwidth: float
    """Octets/s of its memory."""
    flops: float
    """Dense FLOP/s at the precision that the engine computes in."""
    link: float = 0.0
    """Octets/s between devices of a node, one direction; 0 when there is only one."""
    cpu: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer, as far as the roofline sees it."""

    parameters: float
    active_parameters: float
    """Per token: fewer than `parameters` for a mixture of experts."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    attention_layers: int | None = None
    """Layers that keep a KV cache; None: all."""

    def kv_octets_per_token(self, octets: float = 2.0) -> float:
        """2 × layers × KV heads × head size × octets: the layer count that paper 002 omits is in it."""
        layers = self.layers if self.attention_layers is None else self.attention_layers
        return 2.0 * layers * self.kv_heads * self.head_dim * octets


@dataclass(frozen=True, slots=True)
class Demand:
    """Mean lengths, in tokens, and the longest context that a replica must hold."""

    rate: float
    """Requests per second over all replicas."""
    input: float
    output: float
    context: int


@dataclass(frozen=True, slots=True)
class Replica:
    """Static figures of one replica of `tp` devices."""

    fits: bool
    weights: float
    """Octets over all its devices."""
    free: float
    """Octets left for KV."""
    max_batch: int
    """Requests of mean length that fit at once, within the engine's own limit."""
    capacity: float
    """Requests/s at `max_batch`, before the utilisation limit."""
    prefill_s: float
    """One mean prompt, alone."""
    step_alone_s: float
    """One decode step of one request."""
    step_full_s: float
    """One decode step of a full batch."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Under load, point estimates in seconds."""

    utilisation: float
    ttft_mean: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    e2e_p95: float


def replica(
    device: Device,
    architecture: Architecture,
    demand: Demand,
    *,
    tp: int,
    weight_octets: float,
    max_num_seqs: int,
) -> Replica:
    """Figures of a replica on `tp` devices of one node; `weight_octets` per parameter as the engine holds them."""
    weights = architecture.parameters * weight_octets
    usable = tp * device.memory * USABLE_MEMORY
    kv_token = architecture.kv_octets_per_token()
    free = usable - weights
    if free < kv_token * demand.context:
        return Replica(False, weights, max(0.0, free), 0, 0.0, math.inf, math.inf, math.inf)
    tokens = demand.input + demand.output
    batch = max(1, min(max_num_seqs, int(free // (kv_token * tokens))))
    mean_context = demand.input + demand.output / 2
    alone = step_seconds(device, architecture, 1, mean_context, tp=tp, weight_octets=weight_octets)
    full = step_seconds(device, architecture, batch, mean_context, tp=tp, weight_octets=weight_octets)
    prefill = prefill_seconds(device, architecture, demand.input, tp=tp, weight_octets=weight_octets)
    capacity = 1.0 / (prefill + demand.output * full / batch)
    return Replica(True, weights, free, batch, capacity, prefill, alone, full)


def step_seconds(
    device: Device, architecture: Architecture, batch: int, context: float, *, tp: int, weight_octets: float
) -> float:
    """One decode step of `batch` requests that hold `context` tokens each."""
    arithmetic = 2.0 * architecture.active_parameters * batch / (tp * device.flops * COMPUTE_EFFICIENCY)
    read_share = min(1.0, architecture.active_parameters / architecture.parameters * batch)
    traffic = (
        architecture.parameters * read_share * weight_octets + batch * context * architecture.kv_octets_per_token()
    )
    memory = traffic / (tp * device.bandwidth * BANDWIDTH_EFFICIENCY)
    return max(arithmetic, memory) + _overheads(device, architecture, batch, tp)


def prefill_seconds(
    device: Device, architecture: Architecture, tokens: float, *, tp: int, weight_octets: float
) -> float:
    """One prompt of `tokens`: weights read once, attention quadratic in the prompt."""
    attention = 2.0 * architecture.layers * architecture.hidden * tokens * tokens
    work = 2.0 * architecture.active_parameters * tokens + attention
    arithmetic = work / (tp * device.flops * COMPUTE_EFFICIENCY)
    memory = architecture.parameters * weight_octets / (tp * device.bandwidth * BANDWIDTH_EFFICIENCY)
    return max(arithmetic, memory) + _overheads(device, architecture, tokens, tp)


def under_load(figures: Replica, demand: Demand, rate: float) -> Latency:
    """Latency of one replica that gets `rate` requests/s.

    The batch in flight follows Little's law on the decode time; the wait is that of an M/M/1 queue for prefill slots,
    and its tail exponential, so p95 = mean × ln 20. Beyond `MAX_UTILISATION` the figures of that point are returned:
    overload has no stationary latency, and the caller reports what is not served.
    """
    utilisation = rate / figures.capacity if figures.capacity > 0 else math.inf
    rho = min(utilisation, MAX_UTILISATION)
    share = rho if figures.max_batch > 1 else 1.0
    tpot = figures.step_alone_s + (figures.step_full_s - figures.step_alone_s) * share
    interference = rho * figures.prefill_s / max(1.0, demand.output) * figures.max_batch
    service = figures.prefill_s + demand.output * figures.step_full_s / figures.max_batch
    wait = rho / (1.0 - rho) * service
    ttft = figures.prefill_s + wait + tpot
    ttft_p95 = figures.prefill_s + wait * math.log(20.0) + tpot
    tpot_p95 = tpot + interference
    return Latency(
        utilisation=utilisation,
        ttft_mean=ttft,
        ttft_p95=ttft_p95,
        tpot_mean=tpot + interference / 2,
        tpot_p95=tpot_p95,
        e2e_p95=ttft_p95 + demand.output * tpot_p95,
    )


def _overheads(device: Device, architecture: Architecture, tokens: float, tp: int) -> float:
    launch = CPU_LAYER_OVERHEAD_S if device.cpu else LAYER_OVERHEAD_S
    seconds = STEP_OVERHEAD_S + architecture.layers * launch
    if tp > 1 and device.link > 0:
        octets = 2.0 * tokens * architecture.hidden * 2.0 * (tp - 1) / tp
        seconds += 2 * architecture.layers * (ALL_REDUCE_LATENCY_S + octets / (device.link * LINK_EFFICIENCY))
    return seconds
