"""What fits: weights, KV cache, the longest context and the largest batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.catalog import engines
from fabrictool.simulator.operators import kv_elements_per_token, work
from fabrictool.simulator.stepmodel import KV_OCTETS, OCTETS

if TYPE_CHECKING:
    from fabrictool.catalog import Accelerator, ModelArchitecture
    from fabrictool.simulator.operators import Parallelism

USABLE = 0.9
"""Share of a device's memory that an engine takes (vLLM's ``gpu_memory_utilization``)."""
USABLE_WHEN_TIGHT = 0.97
"""What operators set when a model would not fit otherwise."""
HBM_OCTETS_PER_S = 1.5e12
REPORTED_SHARE = 1.069
"""Octets that devices with stacked memory report for each one of the vendor's figure: 81,559 MiB for 80 GB
(H100), 143,771 for 141 (H200), 183,359 for 180 (B200). Boards with in-line error correction report less."""


def reported_memory(device: Accelerator) -> float:
    """Octets that the driver of a device reports."""
    stacked = device.kind != "cpu" and device.memory_bandwidth >= HBM_OCTETS_PER_S
    return device.memory * (REPORTED_SHARE if stacked else 1.0)


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """What a running request takes beside its cache in layers that keep the whole context; in tokens of that.

    Source: hybrid caches of vLLM (``HybridKVCacheCoordinator``), whose groups of layers share one pool of blocks.
    """

    fixed: float = 0.0
    """States of linear attention."""
    windowed: float = 0.0
    """For each of its tokens that sliding windows hold ..."""
    window: int = 0
    """... of which there are so many at most."""

    def tokens(self, length: float) -> float:
        """Of a request of so many tokens."""
        return self.fixed + self.windowed * min(length, self.window)


NOTHING = RequestMemory()
STATE_OCTETS = 4.0
"""Of one element of a linear layer's state (``mamba_ssm_dtype: float32`` of Qwen3.5)."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Memory of one replica. Octets over all its devices, and tokens."""

    weights: float
    usable: float
    kv_tokens: int
    """Tokens that the cache holds; 0: the weights leave no room."""
    beside: RequestMemory = NOTHING

    @property
    def fits(self) -> bool:
        """Whether the weights fit and at least one block of cache with them."""
        return self.kv_tokens >= 16


def request_memory(model: ModelArchitecture, cut: Parallelism, kv: str) -> RequestMemory:
    """What each running request of `model` takes beside its cache of `kv` precision."""
    token = kv_elements_per_token(model, cut) * KV_OCTETS[kv]
    if not token:
        return NOTHING
    windowed = work(model, cut).windowed
    # What a sparse layer reads of the context it chooses anew for each token: all of it is kept.
    window = 0 if model.index_topk else windowed.window
    held = windowed.kv_elements * windowed.layers * cut.tp * KV_OCTETS[kv] if window else 0.0
    linear = model.layers - model.kv_layers if model.linear_key_heads else 0
    keys, values = model.linear_key_heads * model.linear_head_dim, model.linear_value_heads * model.linear_head_dim
    convolved = (2 * keys + values) * max(0, model.linear_conv - 1) * 2.0
    state = linear * (values * model.linear_head_dim * STATE_OCTETS + convolved)
    return RequestMemory(state / token, held / token, window)


def weight_octets(model: ModelArchitecture, cut: Parallelism, precision: str, octets: float | None = None) -> float:
    """Octets of all weights of one replica; embeddings and logits keep 16 bits where the others have fewer.

    `octets` of one weight as the engine holds it; None: what `precision` usually takes.
    """
    replica = work(model, cut)
    width = octets or OCTETS[precision]
    layers = sum(m.weights * (width if m.precision == "weights" else OCTETS[m.precision]) for m in replica.matmuls)
    embeddings = model.vocab * model.hidden * (1 if model.tied_embeddings else 2) * max(2.0, width)
    return layers * cut.tp * cut.dp + embeddings * cut.dp


_SLICES = {"qkv_proj": 3, "ffn_up": 2, "experts_up": 2, "shared_up": 2}
"""Matrices that engines multiply as one, though an adapter has a part for each."""


def adapter_octets(model: ModelArchitecture, cut: Parallelism, slots: int, rank: int, width: float = 2.0) -> float:
    """Octets that `slots` adapters take on all devices of a replica, whichever matrices they change.

    Engines hold room for every matrix of every layer, at a rank of their own that is not smaller
    (vLLM: ``create_lora_weights`` in ``vllm.lora.layers``); `width` is that of what they multiply in.
    """
    if not slots:
        return 0.0
    rounded = 1 << (max(rank, 8) - 1).bit_length()
    lines = sum(
        (matmul.inputs * _SLICES.get(matmul.name, 1) + matmul.outputs) * matmul.count * max(1.0, matmul.experts)
        for matmul in work(model, cut).matmuls
        if matmul.precision == "weights"
    )
    return slots * rounded * lines * width * cut.tp * cut.dp


def pooled_tokens(devices: int, base: int, usable: float, weights: float, token: float) -> float:
    """Tokens of cache that `devices` hold together, as base engines of `base` devices with all weights each.

    ``devices/base × (base × usable - weights) / token``: `usable` octets of a device, `weights` of one copy, `token` of
    a token's cache. With ``base == devices`` it is what a single engine holds. Source: Flying Serving (paper 003),
    table 2, whose maximum contexts it gives. Negative where the weights do not fit.
    """
    return devices / base * (base * usable - weights) / token


# Wide: a model, its cut and its device, and five ways in which engines differ.
def room(
    model: ModelArchitecture,
    cut: Parallelism,
    device_memory: float,
    *,
    weights: str,
    kv: str,
    octets: float | None = None,
    usable: float | None = None,
    reserved: float | None = None,
    beside: float = 0.0,
) -> ReplicaMemory:
    """Memory of a replica of `model`.

    `device_memory` octets a device; `usable` is the share that the engine takes, None: the usual 0.9, or more where
    the weights would not fit otherwise. `reserved` octets of each device are for neither; None: as many as vLLM's.
    `beside` octets on all devices together are held with the weights.
    """
    if reserved is None:
        reserved = engines()["vllm"].reserved(device_memory)
    held = weight_octets(model, cut, weights, octets) + beside
    token = kv_elements_per_token(model, cut) * KV_OCTETS[kv] * cut.dp
    for share, kept in ((USABLE if usable is None else usable, reserved), (USABLE_WHEN_TIGHT, reserved / 3)):
        usable_each = device_memory * share - kept
        total, base = cut.devices * usable_each, cut.devices // cut.dp
        tokens = int(pooled_tokens(cut.devices, base, usable_each, held / cut.dp, token / cut.dp)) if token else 1 << 40
        if tokens >= model_minimum(model) or usable is not None:
            break
    return ReplicaMemory(held, total, max(0, tokens), request_memory(model, cut, kv))


def model_minimum(model: ModelArchitecture) -> int:
    """Tokens of cache below which nobody would run it: a few requests of usual length."""
    return min(8192, model.max_context)
