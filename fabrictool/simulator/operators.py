"""What a decoder computes and moves: every operator's FLOPs and octets, before any clock is put on them.

Shapes follow the released configurations; one `Matmul` stands for one weight matrix on one device after tensor,
expert and pipeline parallelism have cut it. Mixture-of-experts layers count the experts that a batch is *expected* to
touch. Sources: Megatron-LM (arXiv 1909.08053) for the cuts; DeepSeek-V2 (arXiv 2405.04434) for latent attention;
the coverage of experts is that of ``tokens`` draws without replacement of ``k`` of ``E``: ``E·(1-(1-k/E)^tokens)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fabrictool.catalog.architecture import ModelArchitecture

Floats = np.ndarray[Any, np.dtype[np.float64]]

GROUPED_KERNELS = 6
"""Of one layer in a captured decode step: norm, projection, rotation with the cache's write, attention, its reduction
over the context's parts, output."""
LATENT_KERNELS = 10
"""The same with a norm of the compressed vectors, the second projection, and products that enter and leave the
compressed space."""
INDEXER_KERNELS = 14
"""Three projections, norm, rotations, narrowing of queries and keys, the cache's write, scores, the choice of what is
read and its index."""
LINEAR_KERNELS = 8
"""Norm, two projections, convolution, gates, the delta rule, its norm, output."""
DENSE_KERNELS = 4
"""Norm, up, gate, down."""
EXPERT_KERNELS = 9
"""Norm, router, choice, sort, padding, up and gate, activation, down, weighted sum. With 9, TPOT of models that were
left out is 13.5 % off for mixtures and 9.2 % for dense ones, and E2E 11.8 %; with 11, 14.4, 8.8 and 12.3 %."""
SHARED_KERNELS = 4
"""Up, gate, down, sum of the expert that sees all tokens."""
NARROWED = frozenset({"q_kv_down", "q_up", "qkv_proj", "o_proj", "linear_in", "linear_out", "ffn_up", "experts_up"})
"""Products before which a kernel makes the inputs as narrow as block-scaled weights. Those of the others come narrow
out of an activation, are another product's, or stay wide (latent attention's second)."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one replica is cut. ``tp × pp × dp`` devices."""

    tp: int = 1
    """Tensor parallel: every matrix is split over that many devices."""
    pp: int = 1
    """Pipeline parallel: layers are split into that many stages."""
    ep: int = 1
    """Expert parallel: experts are dealt out over that many devices (a divisor of ``tp × dp``)."""
    dp: int = 1
    """Data-parallel attention: that many groups hold whole attention layers and share the experts."""

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Matmul:
    """One weight matrix times a batch, on one device, `count` times a step."""

    name: str
    inputs: float
    outputs: float
    count: float
    experts: float = 0.0
    """Experts on this device that share the matrix' shape; 0: a dense matrix. `inputs × outputs` is one expert's."""
    chosen: float = 0.0
    """Share of experts that one token is sent to."""
    precision: str = "weights"
    """`weights`: as the variant stores them; else a precision of its own."""

    def flops(self, tokens: Floats) -> Floats:
        """Operations of one step of `tokens`."""
        return tokens * self.flops_token

    @property
    def flops_token(self) -> float:
        """Operations for one token."""
        return 2.0 * self.inputs * self.outputs * self.count * self._used

    def touched(self, tokens: Floats, spread: float = 1.0) -> Floats:
        """Weights read by one step of `tokens`; `spread` below 1: the tokens of a step like the same experts.

        With ``tokens^spread`` independent draws; 1 is the even routing that a load-balanced training aims at.
        """
        weights = self.inputs * self.outputs * self.count
        if not self.experts:
            return np.full_like(tokens, weights)
        return weights * self.experts * (1.0 - (1.0 - self.chosen) ** (tokens**spread))

    @property
    def moved_token(self) -> float:
        """Elements that go in and come out for one token."""
        return self._used * (self.inputs + self.outputs) * self.count

    @property
    def _used(self) -> float:
        """Matrices of this device that one token is multiplied with."""
        return self.experts * self.chosen if self.experts else 1.0

    @property
    def weights(self) -> float:
        return self.inputs * self.outputs * self.count * (self.experts or 1.0)


@dataclass(frozen=True, slots=True)
class Attention:
    """Reading the cache, on one device, over all layers of one kind."""

    layers: float
    flops_pair: float
    """Operations for one (query, key) pair in one layer: all heads of the device, scores and values."""
    kv_elements: float
    """Elements of keys and values that one token leaves in one layer on this device."""
    decode_flops_pair: float
    """The same when decoding: latent attention works on the compressed cache then, with more operations."""
    window: int = 0
    """Tokens that these layers look back; 0: all."""
    group: float = 1.0
    """Query heads that share one head of keys and values; 1 for latent attention, whose kernels work on all at once."""

    def pairs(self, tokens: float) -> float:
        """(query, key) pairs of a prompt in one layer: each token looks back at all before it, or at its window."""
        inside = min(tokens, float(self.window or tokens))
        return inside * inside / 2 + (tokens - inside) * inside


@dataclass(frozen=True, slots=True)
class Work:
    """All that one step of one replica does on one of its devices. Counts are of the whole depth."""

    matmuls: tuple[Matmul, ...]
    head: Matmul
    """Logits: only for tokens that are sampled."""
    full: Attention
    windowed: Attention
    layers: int
    moe_layers: int
    elementwise: float
    """Activation elements that norms, rotary embeddings and residuals move for one token."""
    hidden: int
    chosen: int
    """Experts for one token; 0: a dense model."""
    reduced: int
    """All-reduces of one token's hidden state in a step: two a layer."""
    kernels: int
    """That one step launches, as engines fuse them: norms, products, attention, gates, sums; without collectives."""
    products: int
    """Of them those whose inputs have to be made narrow when the weights are."""


@cache
def work(model: ModelArchitecture, cut: Parallelism) -> Work:
    """The operators of `model` on one of the devices of a replica cut like `cut`; pipeline stages added up."""
    full_layers = model.kv_layers
    other = model.layers - full_layers
    linear = other if model.linear_key_heads else 0
    windowed = other - linear
    moe_layers = model.layers - model.dense_layers if model.experts else 0
    matmuls = [
        *_attention_matmuls(model, cut, full_layers + windowed),
        *_linear_matmuls(model, cut, linear),
        *_dense_ffn(model, cut, model.layers - moe_layers),
        *_experts(model, cut, moe_layers),
    ]
    elements = model.hidden * 8.0 + model.heads * model.head_dim * 4.0 / cut.tp
    return Work(
        matmuls=tuple(m for m in matmuls if m.count and m.weights),
        head=Matmul("lm_head", model.hidden, model.vocab / cut.tp, 1.0, precision="bf16"),
        full=_indexer(model, full_layers) if model.index_topk else _attention(model, cut, full_layers, 0),
        windowed=_attention(model, cut, full_layers, model.index_topk)
        if model.index_topk
        else _attention(model, cut, windowed, model.sliding_window),
        layers=model.layers,
        moe_layers=moe_layers,
        elementwise=elements * model.layers,
        hidden=model.hidden,
        chosen=model.active_experts if model.experts else 0,
        reduced=2 * model.layers,
        kernels=_attention_kernels(model) * (full_layers + windowed)
        + LINEAR_KERNELS * linear
        + DENSE_KERNELS * (model.layers - moe_layers)
        + (EXPERT_KERNELS + (SHARED_KERNELS if model.shared_expert_ffn else 0)) * moe_layers,
        products=sum(round(m.count) for m in matmuls if m.weights and m.name in NARROWED),
    )


def _attention_kernels(model: ModelArchitecture) -> int:
    if not model.kv_rank:
        return GROUPED_KERNELS
    return LATENT_KERNELS + (INDEXER_KERNELS if model.index_topk else 0)


def _attention_matmuls(model: ModelArchitecture, cut: Parallelism, layers: int) -> list[Matmul]:
    query = model.heads * model.head_dim / cut.tp
    if model.kv_rank:
        rope, value = model.rope_dim, model.value_dim
        heads = model.heads / cut.tp
        down_out = (model.query_rank or 0) + model.kv_rank + rope
        up_in = model.query_rank or model.hidden
        return [
            Matmul("q_kv_down", model.hidden, down_out, layers),
            Matmul("q_up", up_in, heads * (model.head_dim + rope), layers),
            Matmul("kv_up", model.kv_rank, heads * (model.head_dim + value), layers),
            Matmul("o_proj", heads * value, model.hidden, layers),
        ]
    keys = max(1.0, model.kv_heads / cut.tp) * model.head_dim
    gate = query if model.gated_query else 0.0
    return [
        Matmul("qkv_proj", model.hidden, query + gate + 2 * keys, layers),
        Matmul("o_proj", query, model.hidden, layers),
    ]


def _linear_matmuls(model: ModelArchitecture, cut: Parallelism, layers: int) -> list[Matmul]:
    if not layers:
        return []
    keys = model.linear_key_heads * model.linear_head_dim / cut.tp
    values = model.linear_value_heads * model.linear_head_dim / cut.tp
    return [
        Matmul("linear_in", model.hidden, 2 * keys + 2 * values, layers),
        Matmul("linear_out", values, model.hidden, layers),
    ]


def _dense_ffn(model: ModelArchitecture, cut: Parallelism, layers: int) -> list[Matmul]:
    inner = model.ffn / cut.tp
    gates = 2.0 if model.gated_ffn else 1.0
    return [
        Matmul("ffn_up", model.hidden, gates * inner, layers),
        Matmul("ffn_down", inner, model.hidden, layers),
    ]


def _experts(model: ModelArchitecture, cut: Parallelism, layers: int) -> list[Matmul]:
    if not layers:
        return []
    # Experts are spread over all attention groups: those that are not dealt out whole are split like dense layers.
    split = max(1.0, cut.tp * cut.dp / cut.ep)
    inner = model.expert_ffn / split
    held = model.experts / cut.ep
    chosen = model.active_experts / model.experts
    gates = 2.0 if model.gated_ffn else 1.0
    shared = model.shared_expert_ffn / cut.tp
    return [
        Matmul("router", model.hidden, model.experts, layers, precision="bf16"),
        Matmul("experts_up", model.hidden, gates * inner, layers, held, chosen),
        Matmul("experts_down", inner, model.hidden, layers, held, chosen),
        Matmul("shared_up", model.hidden, 2 * shared, layers),
        Matmul("shared_down", shared, model.hidden, layers),
    ]


def _attention(model: ModelArchitecture, cut: Parallelism, layers: int, window: int) -> Attention:
    heads = model.heads / cut.tp
    if model.kv_rank:
        # Latent attention: the cache is one vector for all heads, so every device of a tensor group holds all of it.
        elements = float(model.kv_rank + model.rope_dim)
        prefill = 2.0 * heads * (model.head_dim + model.rope_dim + model.value_dim)
        decode = 2.0 * heads * (2 * model.kv_rank + model.rope_dim)
        return Attention(layers, prefill, elements, decode, window)
    elements = 2.0 * max(1.0, model.kv_heads / cut.tp) * model.head_dim
    pair = 4.0 * heads * model.head_dim
    return Attention(layers, pair, elements, pair, window, heads * 2.0 * model.head_dim / elements)


def _indexer(model: ModelArchitecture, layers: int) -> Attention:
    """Sparse attention: small 8-bit keys of every token are scored to choose what the attention proper reads."""
    pair = 2.0 * model.index_heads * model.index_dim
    return Attention(layers, pair, model.index_dim / 2.0, pair)


def kv_elements_per_token(model: ModelArchitecture, cut: Parallelism) -> float:
    """Elements that one cached token holds on all devices of a replica, in layers that keep the whole context."""
    attention = _attention(model, cut, model.kv_layers, 0)
    indexed = _indexer(model, model.kv_layers).kv_elements if model.index_topk else 0.0
    return (attention.kv_elements + indexed) * attention.layers * cut.tp
