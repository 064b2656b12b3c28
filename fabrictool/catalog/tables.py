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
from fabrictool.catalog.architecture import ModelArchitecture

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
    shares_memory: bool = False
    """Whether a replica serves several models out of one memory."""
    loaders: tuple[str, ...] = ()
    """Ways to read weights that it can be told, beside its own."""
    prefill_first: bool = False
    """Whether running answers wait while it computes prompts, instead of sharing their steps."""
    balance_steps: int = 0
    """Decode steps that prompts wait until each group of data-parallel attention has one; 0: they do not wait."""
    cache_spared: float = 0.0
    """Share of the cache that running answers may still take which it keeps free when it admits a request."""
    layer_split: bool = False
    """Whether several devices of a replica hold some of the layers each and work one after the other."""
    pads_heads: bool = False
    """Whether engines that merge add heads of zeros, so that each device of the group has as many."""
    expert_block: int = 1
    """Rows of an expert with 8-bit weights that share a scale and stay on one device: it pads nothing."""
    started: bool = True
    """Whether we can start it; of the others we only forecast what they do."""
    program: str = ""
    """What is on the path where it is installed, and what an inventory may name by its path; "": there is none."""
    source: str
    sources: dict[str, str] = {}

    def reserved(self, device_memory: float) -> float:
        """Octets of a device that neither weights nor cache get."""
        return min(self.reserved_most, self.reserved_share * device_memory)

    def merged(self, model: ModelArchitecture, devices: int) -> ModelArchitecture:
        """The model as base engines hold it that merge on so many devices."""
        if not self.pads_heads or model.kv_rank:
            return model
        kv_heads = -(-model.kv_heads // devices) * devices
        return msgspec.structs.replace(model, heads=model.heads // model.kv_heads * kv_heads, kv_heads=kv_heads)

    def unsplittable(self, model: ModelArchitecture, tp: int, ep: int, precision: str) -> str:
        """Why it does not cut the layers of a model over `tp` devices, with its experts dealt out over `ep`; "": it
        does.
        """
        if self.layer_split or tp == 1:
            return ""
        parts = [(model.heads, 1, f"{model.heads} attention heads"), (model.ffn, 1, f"feed-forward width {model.ffn}")]
        if ep == 1:
            block = self.expert_block if precision == "fp8" else 1
            parts.append((model.expert_ffn, block, f"experts' width {model.expert_ffn}"))
        for size, block, what in parts:
            if size % (tp * block):
                whole = f" into whole blocks of {block}" if block > 1 else ""
                return f"tp {tp} does not divide the {what} of {model.id}{whole}"
        if not model.kv_rank and model.kv_heads % tp and tp % model.kv_heads:
            return f"tp {tp} neither divides nor is a multiple of the {model.kv_heads} key-value heads of {model.id}"
        return ""


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


def catalogued_ids() -> list[str]:
    """All names that `model` knows: ids, then aliases."""
    return [*models(), *(alias for entry in models().values() for alias in entry.aliases)]


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
