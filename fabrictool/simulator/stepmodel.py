"""How long a step takes: operators over a device's peaks, efficiencies and overheads.

A matrix product takes the smooth maximum of its arithmetic and its memory traffic; attention, collectives and launch
overheads add to it. All that is not on the datasheet is in `Factors`, which calibration fits from measurements.
Source of the form: Williams et al., "Roofline" (2009); collectives of one pass and of two: Thakur et al. (2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fabrictool.simulator.operators import Work, work
from fabrictool.simulator.steptimes import StepTimes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.catalog import Accelerator, ModelArchitecture
    from fabrictool.simulator.operators import Attention, Matmul, Parallelism

    Floats = np.ndarray[Any, np.dtype[np.float64]]

OCTETS: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.53125,
    "fp4": 0.5625,
    "mxfp4": 0.53125,
}
"""Octets of one weight, with its share of the scales: int4 in groups of 128, NVFP4 in 16, MXFP4 in 32."""
KV_OCTETS: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "fp4": 0.5625,
}
_FASTER: Mapping[str, tuple[str, ...]] = {
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "mxfp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "bf16", "fp16", "fp32"),
    "int4": ("bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp32": ("fp32", "bf16", "fp16"),
}
"""Which unit multiplies weights of a precision: the first that the device has. int4 is unpacked to 16 bits."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What datasheets do not tell. Efficiencies are shares of a peak, a tile is in tokens; the rest is seconds."""

    compute: float = 0.6
    """Of the matrix units' peak, large dense products at 16 bits."""
    narrow: float = 0.8
    """What remains of `compute` for each halving of the width below 16 bits."""
    bandwidth: float = 0.8
    """Of the memory's peak, reading 16-bit weights."""
    narrow_bandwidth: float = 0.88
    """What remains of `bandwidth` for each halving of the width below 16 bits: scales, and shorter rows. Of experts
    once: kernels on H100 read them at 0.78 of the peak at 16 bits and at 0.68 at 8, and servers lose no more at 4."""
    expert_compute: float = 0.6
    """Of `compute`, for grouped products of experts."""
    block_scale: float = 0.7
    """What remains of `expert_compute` at 8 bits, where kernels apply a scale to each block of 128 themselves; the
    units do it at 4 bits (NVFP4, MXFP4)."""
    expert_bandwidth: float = 0.8
    """Of `bandwidth`, reading experts."""
    expert_spread: float = 0.9
    """Exponent of the tokens in a step as far as they choose experts of their own; 1: independent, even routing."""
    attention_compute: float = 0.4
    """Of the 16-bit peak, prefill attention."""
    attention_bandwidth: float = 0.7
    """Of the memory's peak, reading the cache."""
    reuse: float = 1.0
    """Of the query heads that share keys and values, those beyond the first for which a decode step does not read the
    cache again. Kernels of today read it once; vLLM's of 2024 for ROCm read it for each head."""
    tile: float = 0.01
    """Tokens that a product computes in vain beside those of its step. Matrix units take 16 rows and more at once;
    processors, whose constants these are, do not."""
    link: float = 0.64
    """Of the link's peak, in all-reduces. Kernels on A100, H100, H200 and B200 reach 0.54 to 0.74."""
    exchange: float = 0.4
    """Of the link's peak, where tokens go to their experts and back."""
    kernel: float = 1.4e-6
    """For each kernel of a decode step: launch, ramp, synchronisation."""
    eager_kernel: float = 10e-6
    """Of the host, to launch one kernel of a step with prompts in it, which runs outside a captured graph. The device
    computes meanwhile, so it is felt where steps are short. From 40 µs on, mixtures that were left out came out worse
    (E2E 15.7 %, with 10 µs 13.5 %). What hosts do for decode steps (`step`, `sequence`) is added: hidden behind the
    device in the same way it made dense models worse (TPOT 10.5 %, added 8.8 %)."""
    step: float = 2e-3
    """For each step: scheduler, input preparation, sampling."""
    sequence: float = 5e-6
    """For each sequence of a step: bookkeeping, sampling, detokenisation."""
    collective: float = 5e-6
    """Latency of one all-reduce in a node, however many devices take part. Those kernels take 3 to 8 µs."""
    request: float = 10e-3
    """By which a first token comes later to its client than a step computed it: hand-over, stream set-up, first chunk.
    Later tokens make up for it: as a delay of the whole answer it would keep clients waiting who did not wait, by what
    runs with a constant number in flight show."""
    stream: float = 0.5e-3
    """More by which it comes later for each other request in flight: one front end writes all of their answers."""
    prompt_token: float = 1e-6
    """For each prompt token, outside the steps: tokenisation, block hashing."""

    def vector(self) -> Floats:
        """Natural logarithms, in the order of the fields."""
        return np.log([getattr(self, f.name) for f in fields(self)])

    @classmethod
    def of(cls, vector: Floats) -> Factors:
        return cls(*(float(x) for x in np.exp(vector)))


_SPEEDS = ("compute", "bandwidth", "attention_compute", "attention_bandwidth", "link")
"""Of `Factors`: what the others are shares of."""
_SECONDS = ("kernel", "eager_kernel", "step", "sequence", "collective")
"""Of `Factors`: those of the engine's steps, not of its front end."""
SMOOTH = 3.0
"""Exponent of the smooth maximum of compute and memory time. Products of 16-bit weights that were timed by themselves
(vLLM 0.14 to 0.24, TensorRT-LLM 1.0 to 1.3) come out best with 3 to 4 on H100 and H200, 2.6 on B200 and 2.2 on A100:
then they are 5 to 8 % off. Those of 8-bit weights scatter (1.8 to 3). It says what steps of 64 to 256 tokens cost."""
TWO_PASS_LATENCIES = 3.0
"""Latencies of an all-reduce in two passes, in those of one. Fitted kernels take 2 with vLLM, where it has its own, and
6 to 8 with TensorRT-LLM, which leaves large messages to NCCL; with 3 all are 11 to 18 % off."""
NODE_LATENCY_S = 12e-6
"""More for one collective that leaves the node (InfiniBand round trip and NCCL's network proxy)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and the links around it, as far as a replica feels them."""

    flops: Mapping[str, float]
    """Precision → dense operations/s."""
    bandwidth: float
    """Octets/s."""
    memory: float
    """Octets."""
    link: float
    """Octets/s to the other devices of the node, one direction."""
    per_node: int = 8
    """Devices that share that link."""
    network: float = 50e9
    """Octets/s between nodes, one direction, per device."""

    @classmethod
    def of(cls, device: Accelerator, *, per_node: int | None = None, network: float = 50e9) -> Machine:
        return cls(
            flops=device.flops,
            bandwidth=device.memory_bandwidth,
            memory=device.memory,
            link=device.link_bandwidth,
            per_node=per_node or device.link_devices or 8,
            network=network,
        )

    def peak(self, precision: str) -> tuple[float, float]:
        """(operations/s, halvings below 16 bits) of the unit that multiplies weights of `precision`."""
        for unit in _FASTER[precision]:
            if unit in self.flops:
                return self.flops[unit], math.log2(2.0 / min(2.0, OCTETS[unit] if unit != "fp4" else 0.5))
        message = f"the device cannot compute in {precision}"
        raise KeyError(message)


class Steps(Protocol):
    """Step times, whatever the devices behind them. `tokens`, `sequences`: of one step of one pipeline lane."""

    @property
    def lanes(self) -> float:
        """Micro-batches that are in flight at the same time."""

    def linear(self, tokens: Floats) -> Floats:
        """Seconds of all matrix products, norms and collectives, without the logits."""

    def logits(self, sequences: Floats) -> Floats:
        """Seconds for logits and sampling."""

    def reading(self, context: float) -> float:
        """Seconds for reading one request's cache."""

    def attending(self, tokens: float) -> float:
        """Seconds for the attention of one prompt."""

    def overhead(self) -> float:
        """Seconds of a decode step whatever it computes."""

    def launched(self, seconds: Floats) -> Floats:
        """Seconds of a step with prompts in it, whose operators take `seconds`; without logits."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding: a small model guesses the next tokens, and one step verifies all of them.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), equation 1.
    """

    tokens: int
    """Guessed for each step."""
    acceptance: float
    """Chance in [0, 1] that a guess is right where all before it were."""

    @property
    def decoded(self) -> float:
        """Tokens that a sequence gains by one step, on average: right guesses, and one that the step itself tells."""
        return float(sum(self.acceptance**n for n in range(self.tokens + 1)))


@dataclass(frozen=True, slots=True)
class StepModel:
    """One replica's step times. `tokens`, `sequences`: of one step of one attention group and pipeline lane."""

    work: Work
    machine: Machine
    cut: Parallelism
    factors: Factors
    weights: str = "bf16"
    kv: str = "bf16"
    octets: float | None = None
    """Octets of one weight as the engine holds it; None: what `weights` usually takes."""
    drafts: Drafts | None = None

    # Wide: each is a field, but for the model, whose work is the field.
    @classmethod
    def of(
        cls,
        model: ModelArchitecture,
        machine: Machine,
        cut: Parallelism,
        factors: Factors,
        *,
        weights: str = "bf16",
        kv: str = "bf16",
        octets: float | None = None,
        drafts: Drafts | None = None,
    ) -> StepModel:
        return cls(work(model, cut), machine, cut, factors, weights, kv, octets, drafts)

    def slowed(self, times: float) -> StepModel:
        """The same computation where each step takes `times` as long: somebody else has the device in between."""
        faster = {name: getattr(self.factors, name) / times for name in _SPEEDS}
        longer = {name: getattr(self.factors, name) * times for name in _SECONDS}
        return replace(self, factors=replace(self.factors, **faster, **longer))

    @property
    def lanes(self) -> int:
        return self.cut.pp * self.cut.dp

    def linear(self, tokens: Floats) -> Floats:
        """Seconds of all matrix products, norms and collectives of a step of `tokens`, without the logits."""
        return self._own(tokens) + self._experts(tokens * self.cut.dp)

    def _own(self, tokens: Floats) -> Floats:
        """What an attention group does for its own tokens."""
        total = tokens * self.work.elementwise * 2.0 / (self.machine.bandwidth * self.factors.bandwidth)
        for seconds in self._products([matmul for matmul in self.work.matmuls if not matmul.experts], tokens):
            total += seconds
        return total + self._communication(tokens)

    def _experts(self, tokens: Floats) -> Floats:
        """What all attention groups do together, for the tokens of all of them."""
        total = np.zeros_like(tokens)
        for seconds in self._products([matmul for matmul in self.work.matmuls if matmul.experts], tokens):
            total += seconds
        return total

    def logits(self, sequences: Floats) -> Floats:
        """Seconds for logits and sampling of `sequences`."""
        (head,) = self._products([self.work.head], sequences)
        return np.asarray(head + sequences * self.factors.sequence)

    @property
    def read(self) -> float:
        """Seconds for one cached token that a decode step reads, all layers that see it."""
        return self._read(self.work.full)

    def reading(self, context: float) -> float:
        """Seconds for reading the cache of one request of `context` tokens in a decode step."""
        window = self.work.windowed.window
        return context * self.read + min(context, window) * self._read(self.work.windowed)

    def attending(self, tokens: float) -> float:
        """Seconds for the attention of one prompt of `tokens`."""
        windowed = self.work.windowed.pairs(tokens) * self._pair(self.work.windowed)
        return float(self.attended(self.work.full.pairs(tokens))) + windowed

    def attended(self, pairs: Any) -> Any:
        """Seconds for so many (query, key) pairs of a prefill in layers that see the whole context."""
        return pairs * self._pair(self.work.full)

    def overhead(self) -> float:
        """Seconds of a decode step whatever it computes."""
        hops = (self.cut.pp - 1) * (self.factors.collective + NODE_LATENCY_S)
        return self.factors.step + self._kernels * self.factors.kernel + hops

    def launched(self, seconds: Floats) -> Floats:
        """Seconds of a step with prompts in it, whose operators take `seconds`: at least as many as launching takes.

        The loop's tables hide launches behind products and collectives only, not behind attention.
        """
        device = seconds + self._kernels * self.factors.kernel
        waiting = np.maximum(0.0, self._kernels * self.factors.eager_kernel - device)
        return np.asarray(seconds + waiting + self.overhead())

    @property
    def _kernels(self) -> int:
        # A kernel before a product makes its inputs narrow where weights have a scale for each block, as the 8-bit
        # weights of mixtures do. With one for the whole matrix, and at 4 bits, the kernel before it does so on its way.
        blocks = self.weights == "fp8" and self.work.moe_layers
        return self.work.kernels + (self.work.products if blocks else 0)

    @property
    def _halvings(self) -> float:
        """How often the weights' width is half of 16 bits."""
        return max(0.0, math.log2(2.0 / OCTETS[self.weights]))

    def times(self, max_num_seqs: int, token_budget: int, hand: float = 0.0, hand_latency: float = 0.0) -> StepTimes:
        """The tables that the event loop looks up; `hand` seconds move one token's cache to a decode replica.

        With drafts, a decode step's time is shared by the tokens that it decodes on average.
        """
        queries = 1 + self.drafts.tokens if self.drafts else 1
        decoded = self.drafts.decoded if self.drafts else 1.0
        most = token_budget + queries * max_num_seqs
        grid = np.unique(np.concatenate([np.arange(0, 65), np.geomspace(64, max(65, most), 60).round()]))
        sequences = np.arange(max_num_seqs + 1, dtype=float)
        lane_sequences = np.ceil(sequences / self.lanes)
        linear = self.linear(grid)
        computed = queries * lane_sequences
        decode = np.interp(computed, grid, linear) + self.logits(computed) + self.overhead()
        draft = self._drafting(lane_sequences)
        decode = (decode + draft) / decoded
        samples = np.ceil(np.arange(queries * max_num_seqs + 1, dtype=float) / self.lanes)
        every = np.arange(most + 1, dtype=float)
        alone = self.cut.dp == 1
        if alone:
            eager = self.launched(linear)
        else:
            shared = self._experts(grid * self.cut.dp)
            eager = self.launched(self._own(grid) + shared) - shared
        mixed = np.interp(every, grid, eager)
        return StepTimes(
            decode=decode,
            mixed=mixed,
            shared=np.zeros(1) if alone else np.interp(every, grid, self._experts(grid)),
            groups=self.cut.dp,
            sample=self.logits(samples),
            read=self._read(self.work.full, queries) / decoded,
            pair=self._pair(self.work.full),
            read_window=self._read(self.work.windowed, queries) / decoded,
            pair_window=self._pair(self.work.windowed),
            window=self.work.windowed.window if self.work.windowed.layers else 0,
            swap=self.swap,
            hand=hand,
            hand_latency=hand_latency,
            queries=queries,
            decoded=decoded,
            draft=draft,
        )

    def _drafting(self, sequences: Floats) -> Floats:
        """Seconds for guessing, one token after the other, by a head of one layer (multi-token prediction, EAGLE)."""
        if self.drafts is None:
            return np.zeros_like(sequences)
        layer = (self.linear(sequences) + self.work.kernels * self.factors.kernel) / self.work.layers
        return self.drafts.tokens * (layer + self.logits(sequences))

    @property
    def swap(self) -> float:
        """Seconds to move one token's cache between device and host: PCIe 4 at most, one link a device."""
        return self.work.full.kv_elements * self.work.full.layers * KV_OCTETS[self.kv] / 25e9

    def precision_of(self, matmul: Matmul) -> str:
        """In which it is multiplied."""
        return self.weights if matmul.precision == "weights" else matmul.precision

    def width_of(self, matmul: Matmul) -> float:
        """Octets of one of its weights."""
        return self.octets if self.octets and matmul.precision == "weights" else OCTETS[self.precision_of(matmul)]

    def _products(self, matmuls: Sequence[Matmul], tokens: Floats) -> Floats:
        """Seconds of each of these, which are all of experts or none is: a row each."""
        if not matmuls:
            return np.zeros((0, len(tokens)))
        # All at once: a call of NumPy takes as long as hundreds of numbers do.
        rows = [(m.flops_token, m.moved_token, self.width_of(m), *self._speeds(m), m.weights) for m in matmuls]
        flops, moved, width, speed, bandwidth, weights = np.array(rows).T[:, :, np.newaxis]
        spread = self.factors.expert_spread
        touched = np.array([m.touched(tokens, spread) for m in matmuls]) if matmuls[0].experts else weights
        arithmetic = (tokens + self.factors.tile) * flops / speed
        memory = (touched * width + tokens * moved * 2.0) / bandwidth
        return np.asarray((arithmetic**SMOOTH + memory**SMOOTH) ** (1.0 / SMOOTH))

    def _speeds(self, matmul: Matmul) -> tuple[float, float]:
        """(operations/s, octets/s) of one of its products."""
        f = self.factors
        precision = self.precision_of(matmul)
        peak, halvings = self.machine.peak(precision)
        own = matmul.precision == "weights"
        compute = f.compute * f.narrow**halvings
        narrow = min(self._halvings, 1.0) if matmul.experts else self._halvings
        bandwidth = f.bandwidth * (f.narrow_bandwidth**narrow if own else 1.0)
        if matmul.experts:
            compute, bandwidth = compute * f.expert_compute, bandwidth * f.expert_bandwidth
            compute *= f.block_scale if precision == "fp8" and halvings == 1 else 1.0
        return peak * compute, self.machine.bandwidth * bandwidth

    def _read(self, attention: Attention, queries: int = 1) -> float:
        octets = attention.kv_elements * attention.layers * KV_OCTETS[self.kv]
        octets *= 1.0 + (attention.group - 1.0) * (1.0 - self.factors.reuse)
        memory = octets / (self.machine.bandwidth * self.factors.attention_bandwidth)
        peak, _ = self.machine.peak("bf16")
        operations = queries * attention.decode_flops_pair * attention.layers
        arithmetic = operations / (peak * self.factors.attention_compute)
        return max(memory, arithmetic)

    def _pair(self, attention: Attention) -> float:
        peak, _ = self.machine.peak("bf16")
        return attention.flops_pair * attention.layers / (peak * self.factors.attention_compute)

    def _communication(self, tokens: Floats) -> Floats:
        cut, f = self.cut, self.factors
        total = np.zeros_like(tokens)
        octets = tokens * self.work.hidden * 2.0
        if cut.tp > 1:
            total += self.work.reduced * self._all_reduce(octets, cut.tp)
        if cut.dp > 1 and self.work.moe_layers:
            group = cut.tp * cut.dp
            link, latency = self._link(group)
            # A token goes once to each device that holds at least one of its experts, as wide as the weights are, and
            # comes back at 16 bits.
            others = (group - 1) * (1.0 - (1.0 - 1.0 / group) ** self.work.chosen)
            sent = tokens * self.work.hidden * (min(OCTETS[self.weights], 2.0) + 2.0) / 2.0
            total += 2 * self.work.moe_layers * (latency + sent * others / (link * f.exchange))
        if cut.pp > 1:
            total += (cut.pp - 1) * octets / (self.machine.network * f.link)
        return total

    def _all_reduce(self, octets: Floats, devices: int) -> Floats:
        """The faster of two ways: each device reads all that the others have, or its share of it and then the sums."""
        link, latency = self._link(devices)
        rate = link * self.factors.link
        once = latency + (devices - 1) * octets / rate
        twice = TWO_PASS_LATENCIES * latency + 2.0 * (devices - 1) / devices * octets / rate
        return np.asarray(np.minimum(once, twice))

    def _link(self, devices: int) -> tuple[float, float]:
        """(octets/s, latency) of a collective over so many devices; latency grows with the number of nodes."""
        latency = self.factors.collective
        if devices <= self.machine.per_node and self.machine.link > 0:
            return self.machine.link, latency
        return self.machine.network, latency + NODE_LATENCY_S * math.log2(max(2.0, devices / self.machine.per_node))
