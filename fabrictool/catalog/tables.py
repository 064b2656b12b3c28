"""The tables of ``data/*.toml`` as frozen values. Reading them is pure: same package, same values.

In the files quantities are written with units, as everywhere. ``source`` of an entry names where its numbers come
from; ``sources.FIELD`` overrides it for one number. Peaks are *dense*: vendors' sparse figures are halved.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fabrictool.base.units import Bandwidth, Compute, Memory, Power

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["gpu", "npu", "cpu"]


class Interconnect(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of connection between devices, nodes or sites."""

    id: str
    bandwidth: float
    """Octets/s in one direction, per device or port."""
    adapters: str = ""
    """Folder of ``/sys/class`` in which nodes with it show their adapters; "": Linux shows it as any Ethernet."""
    source: str


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A device that computes, from its datasheet."""

    id: str
    title: str
    kind: Kind
    vendor: str
    """Who makes it, in one lower-case word; empty for processors, which are not like their makers' accelerators."""
    memory: float
    """Octets; vendors' GB are decimal, devices report up to 7 % more. Of a CPU: a nominal node, overridden by the
    partition's ``memory_per_node``."""
    memory_bandwidth: float
    """Octets/s."""
    flops: dict[str, float]
    """Precision → dense operations/s of the matrix units (of the vector units, where there are none)."""
    link: str
    """Id of the usual link between devices of a node; empty when devices of this kind stand alone."""
    link_bandwidth: float
    """Octets/s of that link in one direction; 0 when there is none."""
    link_devices: int = 0
    """Devices that this link joins, where they are those of a rack; 0: those of a node."""
    tdp_w: float
    """Watts that the vendor designs for."""
    source: str
    sources: dict[str, str] = {}


class ModelArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only language model as far as memory and time depend on it."""

    id: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of the dense feed-forward block; 0 when every layer is a mixture of experts."""
    vocab: int
    max_context: int
    """Tokens that the released configuration admits."""
    tied_embeddings: bool = False
    gated_ffn: bool = True
    """Three matrices in the feed-forward block (SwiGLU), not two."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    """Routed experts per token."""
    dense_layers: int = 0
    """Of a mixture of experts: layers in front that have a dense feed-forward block of width `ffn`."""
    expert_ffn: int = 0
    expert_bias: bool = False
    shared_expert_ffn: int = 0
    shared_expert_gate: bool = False
    """The shared expert's output is weighted by a gate of its own (Qwen)."""
    kv_rank: int = 0
    """Latent attention: width of the compressed keys and values; `head_dim` is then that of the part without
    rotary embedding. 0: plain attention."""
    query_rank: int = 0
    """Latent attention: width of the compressed query; 0: it is not compressed."""
    rope_dim: int = 0
    value_dim: int = 0
    index_heads: int = 0
    """Sparse attention's indexer: heads of width `index_dim` that choose `index_topk` tokens; 0: none."""
    index_dim: int = 0
    index_topk: int = 0
    full_attention_interval: int = 1
    """Every n-th layer keeps the keys and values of the whole context; the others a window or a fixed state."""
    sliding_window: int = 0
    """Tokens that a windowed layer looks back; 0: no layer is windowed."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_head_dim: int = 0
    linear_conv: int = 0
    """Width of the convolution before linear attention."""
    gated_query: bool = False
    """Attention output is gated by a second projection as large as the query's."""
    published_parameters: int
    """As the authors state or the released checkpoint counts them."""
    licence: str
    artifacts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    source: str

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


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A serving engine, as far as the planner must know it."""

    id: str
    title: str
    licence: str
    compute_precision: str
    """What it multiplies in, whatever weights are stored as."""
    weight_bytes: dict[str, float]
    """Precision of the variant → octets per parameter in memory."""
    default_max_num_seqs: int
    """Requests at once when the blueprint does not say."""
    token_budget: int
    """Tokens that one step computes at most, by default."""
    reserved_share: float
    """Of a device's memory: activations, graphs and communication buffers ..."""
    reserved_most: float
    """... and the octets of it that are enough on any device."""
    caches_prefixes: bool = False
    """Whether it keeps the cache of prompts' beginnings by default."""
    hands_over: bool = False
    """Whether one replica can compute prompts for another one that answers."""
    serves_adapters: bool = False
    """Whether a replica serves LoRA adapters beside its model, each by a name of its own."""
    loaders: tuple[str, ...] = ()
    """Ways to read weights that it can be told, beside its own."""
    prefill_first: bool = False
    """Whether running answers wait while it computes prompts, instead of sharing their steps."""
    layer_split: bool = False
    """Whether several devices of a replica hold some of the layers each and work one after the other."""
    started: bool = True
    """Whether we can start it; of the others we only forecast what they do."""
    program: str = ""
    """What is on the path where it is installed, and what an inventory may name by its path; "": there is none."""
    source: str
    sources: dict[str, str] = {}

    def reserved(self, device_memory: float) -> float:
        """Octets of a device that neither weights nor cache get."""
        return min(self.reserved_most, self.reserved_share * device_memory)


@cache
def links() -> Mapping[str, Interconnect]:
    return _table("links", lambda id_, row: Interconnect(id=id_, **{**row, "bandwidth": _bandwidth(row["bandwidth"])}))


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """All accelerators by id; ``cpu`` is a small node without one."""
    return _table("accelerators", _accelerator)


@cache
def models() -> Mapping[str, ModelArchitecture]:
    """All model architectures by their Hugging Face id, without aliases."""
    return _table("models", lambda id_, row: msgspec.convert({**row, "id": id_}, ModelArchitecture))


@cache
def engines() -> Mapping[str, Engine]:
    return _table("engines", _engine)


def startable() -> Mapping[str, Engine]:
    """The engines that we can start, by id."""
    return MappingProxyType({id_: engine for id_, engine in engines().items() if engine.started})


def model(name: str) -> ModelArchitecture | None:
    """The architecture with this id or alias."""
    return _by_name().get(name)


@cache
def _by_name() -> Mapping[str, ModelArchitecture]:
    known = {alias: entry for entry in models().values() for alias in entry.aliases}
    return MappingProxyType({**known, **models()})


def _accelerator(id_: str, row: dict[str, Any]) -> Accelerator:
    link = row.pop("link", "")
    return Accelerator(
        id=id_,
        title=row["title"],
        kind=row["kind"],
        vendor="" if row["kind"] == "cpu" else _vendor(row["title"]),
        memory=float(Memory.parse(row["memory"])),
        memory_bandwidth=_bandwidth(row["memory_bandwidth"]),
        flops={precision: float(Compute.parse(text)) for precision, text in row["flops"].items()},
        link=link,
        link_bandwidth=links()[link].bandwidth if link else 0.0,
        link_devices=row.get("link_devices", 0),
        tdp_w=float(Power.parse(row["tdp"])),
        source=row["source"],
        sources=row.get("sources", {}),
    )


def _engine(id_: str, row: dict[str, Any]) -> Engine:
    return msgspec.convert({**row, "id": id_, "reserved_most": float(Memory.parse(row["reserved_most"]))}, Engine)


def _vendor(title: str) -> str:
    """The first word of a title that names a maker; a nominal device has none."""
    known = {"nvidia": "nvidia", "amd": "amd", "intel": "intel", "habana": "intel"}
    return next((known[word] for word in title.lower().split() if word in known), "")


def _bandwidth(text: str) -> float:
    return float(Bandwidth.parse(text))


def _table(name: str, make: Any) -> Mapping[str, Any]:
    text = files("fabrictool.catalog").joinpath("data", f"{name}.toml").read_text("utf-8")
    return MappingProxyType({id_: make(id_, row) for id_, row in tomllib.loads(text).items()})
