"""A language model as numbers: what its memory and its time follow from.

The fields of `ModelArchitecture` are written here and nowhere else: the catalogue's ``models.toml`` and a blueprint's
``architectures`` are read into them, with these bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LAYERS = 10_000
"""The deepest released models have a few hundred."""
MOST_WIDE = 1 << 24
"""Of any matrix; vocabularies have a few hundred thousand words, hidden states some ten thousand elements."""
MOST_TOKENS = 10**9
"""Of a context; the longest released one is ten million."""
ROUNDED = 0.05
"""By how much a published count may differ from that of the fields: it is rounded, or counts a vision part, too."""

Some = Annotated[int, msgspec.Meta(ge=1, le=MOST_WIDE)]
Width = Annotated[int, msgspec.Meta(ge=0, le=MOST_WIDE)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
Context = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Window = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Parameters = Annotated[int, msgspec.Meta(ge=0, le=10**16)]

ABOUT = ("id", "published_parameters", "released", "licence", "artifacts", "aliases", "source")
"""Fields that say what a model is called and where its numbers are from; the others are the numbers."""


class ModelArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only language model as far as memory and time depend on it."""

    id: str
    layers: Layers
    """Transformer blocks."""
    hidden: Some
    """Width of the hidden state between layers."""
    heads: Some
    """Query heads of the attention."""
    kv_heads: Some
    """Heads of keys and values: as many as `heads`, or fewer that are shared."""
    head_dim: Some
    """Width of a head."""
    ffn: Width
    """Inner width of the dense feed-forward block; 0 when every layer is a mixture of experts."""
    vocab: Some
    """Rows of the embedding: words of the vocabulary."""
    max_context: Context
    """Tokens that the released configuration admits."""
    tied_embeddings: bool = False
    """One matrix is both the embedding and the output."""
    gated_ffn: bool = True
    """Three matrices in the feed-forward block (SwiGLU), not two."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    output_bias: bool = False
    """The attention's output has a bias."""
    qk_norm: bool = False
    """Queries and keys are normalised."""
    experts: Width = 0
    """Routed experts of a layer; 0: no mixture of experts."""
    active_experts: Width = 0
    """Routed experts per token."""
    dense_layers: Annotated[int, msgspec.Meta(ge=0, le=MOST_LAYERS)] = 0
    """Of a mixture of experts: layers that have a dense feed-forward block of width `ffn` instead."""
    expert_ffn: Width = 0
    """Inner width of one routed expert."""
    expert_bias: bool = False
    """Routed experts and the router have biases."""
    shared_expert_ffn: Width = 0
    """Inner width of the experts that see every token, together; 0: none."""
    shared_expert_gate: bool = False
    """The shared expert's output is weighted by a gate of its own (Qwen)."""
    kv_rank: Width = 0
    """Latent attention: width of the compressed keys and values; `head_dim` is then that of the part without
    rotary embedding. 0: plain attention."""
    query_rank: Width = 0
    """Latent attention: width of the compressed query; 0: it is not compressed."""
    rope_dim: Width = 0
    """Latent attention: width of the part of a head with rotary embedding."""
    value_dim: Width = 0
    """Latent attention: width of a head's values."""
    index_heads: Width = 0
    """Sparse attention's indexer: heads of width `index_dim` that choose `index_topk` tokens; 0: none."""
    index_dim: Width = 0
    """Width of the indexer's heads."""
    index_topk: Width = 0
    """Tokens that the indexer chooses."""
    full_attention_interval: Some = 1
    """Every n-th layer keeps the keys and values of the whole context; the others a window or a fixed state."""
    sliding_window: Window = 0
    """Tokens that a windowed layer looks back; 0: no layer is windowed."""
    linear_key_heads: Width = 0
    """Linear attention: heads of keys; 0: there is none."""
    linear_value_heads: Width = 0
    """Linear attention: heads of values."""
    linear_head_dim: Width = 0
    """Linear attention: width of a head."""
    linear_conv: Width = 0
    """Width of the convolution before linear attention."""
    gated_query: bool = False
    """Attention output is gated by a second projection as large as the query's."""
    published_parameters: Parameters
    """As the authors state or the released checkpoint counts them."""
    released: str = ""
    """Precision of the released weights, where it is below 16 bits."""
    licence: str
    artifacts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str
    """Where the numbers are from."""

    @property
    def parameters(self) -> int:
        """Weights, counted from the architecture."""
        return self._fixed() + self._ffn_weights(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: without idle experts and, unless it is tied, the input
        embedding, which is only looked up.
        """
        embedding = 0 if self.tied_embeddings else self.vocab * self.hidden
        return self._fixed() - embedding + self._ffn_weights(self.active_experts)

    @property
    def kv_layers(self) -> int:
        """Layers that keep the whole context."""
        return self.layers // self.full_attention_interval

    @property
    def numbers(self) -> dict[str, int | bool]:
        """All that memory and time follow from, by field."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in ABOUT}

    def differences(self, other: ModelArchitecture) -> list[str]:
        """Each number that `other` has otherwise, as ``layers 61, not 60``: the first is the other's."""
        ours, theirs = self.numbers, other.numbers
        return [
            f"{name} {_written(theirs[name])}, not {_written(ours[name])}"
            for name in ours
            if ours[name] != theirs[name]
        ]

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(field, what it is) for fields that cannot all be true: such a model could not be computed."""
        yield from self._attention_contradictions()
        yield from self._expert_contradictions()
        counted, published = self.parameters, self.published_parameters
        if published and abs(published - counted) > ROUNDED * published:
            yield (
                "published_parameters",
                f"{published:,}, but the other fields count {counted:,}",
            )

    def _attention_contradictions(self) -> Iterator[tuple[str, str]]:
        if not self.kv_rank and self.heads % self.kv_heads:
            yield "kv_heads", f"{self.kv_heads}, which does not divide {self.heads} heads"
        latent = ("rope_dim", "value_dim")
        yield from self._together("kv_rank", latent, "latent attention")
        if self.query_rank and not self.kv_rank:
            yield "query_rank", f"{self.query_rank}, but without `kv_rank` there is no latent attention"
        yield from self._together("index_topk", ("index_heads", "index_dim"), "an indexer")
        if self.index_topk and not self.query_rank:
            yield "index_topk", f"{self.index_topk}, but an indexer reads the compressed query: it needs `query_rank`"
        linear = ("linear_value_heads", "linear_head_dim", "linear_conv")
        yield from self._together("linear_key_heads", linear, "linear attention")
        if self.full_attention_interval > 1 and not self.sliding_window and not self.linear_key_heads:
            text = "but what the other layers keep is not said: it needs `sliding_window`, or linear attention"
            yield "full_attention_interval", f"{self.full_attention_interval}, {text}"

    def _expert_contradictions(self) -> Iterator[tuple[str, str]]:
        yield from self._together("experts", ("active_experts", "expert_ffn"), "a mixture of experts")
        if self.active_experts > self.experts > 0:
            yield "active_experts", f"{self.active_experts} of {self.experts} experts"
        if self.experts and self.dense_layers > self.layers:
            yield "dense_layers", f"{self.dense_layers} of {self.layers} layers"
        of_experts = [name for name in ("dense_layers", "shared_expert_ffn") if getattr(self, name)]
        for name in of_experts if not self.experts else ():
            yield name, f"{getattr(self, name)}, but without `experts` it has no meaning"
        if not self.ffn and (not self.experts or self.dense_layers):
            yield "ffn", "0, though there are layers without experts"

    def _together(self, first: str, others: tuple[str, ...], what: str) -> Iterator[tuple[str, str]]:
        """Fields that are all there or none."""
        for name in others:
            if getattr(self, first) and not getattr(self, name):
                yield name, f"0, but {what} needs it"
            if getattr(self, name) and not getattr(self, first):
                yield name, f"{getattr(self, name)}, but {what} needs `{first}`, too"

    def _fixed(self) -> int:
        """Everything outside the feed-forward blocks."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        norms = (2 * self.layers + 1) * self.hidden
        linear = self.layers - self.kv_layers if self.linear_key_heads else 0
        return embeddings + norms + (self.layers - linear) * self._attention() + linear * self._linear_attention()

    def _attention(self) -> int:
        if self.kv_rank:
            return self._latent_attention()
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (query * (2 if self.gated_query else 1) + 2 * keys) + query * self.hidden
        weights += (query + 2 * keys) * self.qkv_bias + self.hidden * self.output_bias
        return weights + 2 * self.head_dim * self.qk_norm

    def _latent_attention(self) -> int:
        """Multi-head latent attention (DeepSeek-V2), and the indexer of its sparse form where there is one."""
        nope, rope = self.head_dim, self.rope_dim
        queries = self.heads * (nope + rope)
        weights = self.hidden * (self.kv_rank + rope) + self.kv_rank
        weights += self.kv_rank * self.heads * (nope + self.value_dim) + self.heads * self.value_dim * self.hidden
        if self.query_rank:
            weights += self.hidden * self.query_rank + self.query_rank + self.query_rank * queries
        else:
            weights += self.hidden * queries
        if self.index_heads:
            weights += self.query_rank * self.index_heads * self.index_dim
            weights += self.hidden * (self.index_dim + self.index_heads) + 2 * self.index_dim
        return weights

    def _linear_attention(self) -> int:
        """Gated DeltaNet: projections for q, k, v, output gate, decay and write strength; a short convolution."""
        keys, values = self.linear_key_heads * self.linear_head_dim, self.linear_value_heads * self.linear_head_dim
        inputs = self.hidden * (2 * keys + 2 * values + 2 * self.linear_value_heads)
        state = self.linear_conv * (2 * keys + values) + 2 * self.linear_value_heads + self.linear_head_dim
        return inputs + state + values * self.hidden

    def _ffn_weights(self, experts: int) -> int:
        """Of all layers with that many of their experts."""
        matrices = 3 if self.gated_ffn else 2
        dense = matrices * self.hidden * self.ffn
        if not self.experts:
            return self.layers * dense
        bias = ((matrices - 1) * self.expert_ffn + self.hidden) * self.expert_bias
        router = self.hidden * self.experts + self.experts * self.expert_bias
        shared = 3 * self.shared_expert_ffn * self.hidden
        shared += self.hidden * self.shared_expert_gate
        mixed = experts * (matrices * self.hidden * self.expert_ffn + bias) + router + shared
        return self.dense_layers * dense + (self.layers - self.dense_layers) * mixed


def _written(value: int | bool) -> str:
    """As YAML and TOML have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
