"""Instances of Helix: a cluster over several regions, its machines, and which layers its authors put on each node.

Helix (Mei et al., "Serving Large Language Models over Heterogeneous GPUs and Network via Max-Flow", ASPLOS 2025) writes
them as three INI files. They are read here, and turned into documents of ours. Their ``mbps`` are megaoctets/s: the
comments of their files give 1250 of them for 10 Gbit/s.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fabrictool.base.canonical import tidy
from fabrictool.base.errors import InvalidInputError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.catalog import accelerators, links

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNITS = {"mbps": 1e6, "MilliSec": 1e-3, "GB": 1e9}
NEAR_S = 10e-3
"""Nodes with less latency between them are in one region."""
MODEL = "meta-llama/Llama-2-70b-hf"
INPUT, OUTPUT = 763, 232
"""Mean tokens of the requests that the paper sends: Azure's conversations of 2023, without those of more than ..."""
LONGEST = 2048 + 1024
"""... so many tokens of prompt and of answer."""
RATE = 4
"""Requests/s that the blueprint asks for: more than the machines can serve, since the paper measures throughput."""
SEQUENCES = 512
"""Requests in a batch at most: memory is to be the limit, not the engine's default."""


@dataclass(frozen=True, slots=True)
class HelixNode:
    """One machine, by the number that the file gives it."""

    number: int
    type: str
    """As the machine profiles name it, such as ``T4`` or ``L4x2``."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What joins two machines, in either direction."""

    between: tuple[int, int]
    bandwidth: float
    """Octets/s."""
    latency: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class HelixCluster:
    """Machines and wires. Those to the coordinator are left out: only token numbers travel there."""

    nodes: tuple[HelixNode, ...]
    wires: tuple[Wire, ...]

    @property
    def regions(self) -> tuple[tuple[HelixNode, ...], ...]:
        """Nodes that low latency joins, directly or through others; ordered by their first node."""
        region = {node.number: node.number for node in self.nodes}
        for wire in self.wires:
            if wire.latency < NEAR_S:
                old, new = sorted((region[end] for end in wire.between), reverse=True)
                region = {number: new if at == old else at for number, at in region.items()}
        return tuple(
            tuple(node for node in self.nodes if region[node.number] == at) for at in sorted(set(region.values()))
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A type of machine."""

    devices: int
    memory: float
    """Octets of all its devices."""


@dataclass(frozen=True, slots=True)
class Documents:
    """An instance in our own terms."""

    blueprint: dict[str, Any]
    inventory: dict[str, Any]
    layers: dict[str, list[list[int]]]
    """Cluster of the inventory → [first, last] layer of each of its nodes that has some."""


@dataclass(frozen=True, slots=True)
class _Value:
    text: str
    line: int


_Section = dict[str, _Value]


class _File:
    """An INI file whose complaints have a place."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.lines = name, text.splitlines()
        self.complaints: list[Complaint] = []
        self.sections: dict[str, _Section] = {}
        self.begins: dict[str, int] = {}
        section: _Section | None = None
        for number, raw in enumerate(self.lines, 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            name_, equals, value = (part.strip() for part in line.partition("="))
            if line.startswith("[") and line.endswith("]"):
                section = self.sections.setdefault(line[1:-1], {})
                self.begins.setdefault(line[1:-1], number)
            elif section is None or not equals:
                self.complain(number, f"neither a section nor KEY=VALUE: {line[:60]!r}", "[Section] stands first")
            else:
                section[name_] = _Value(value, number)

    def complain(self, line: int | None, message: str, hint: str) -> None:
        place = Place(file=self.name, line=line)
        self.complaints.append(Complaint("FT2025", message, place, hint))

    def value(self, section: str, key: str) -> _Value | None:
        value = self.sections.get(section, {}).get(key)
        if value is None:
            hint = f"write {key}= below [{section}]"
            self.complain(self.begins.get(section), f"[{section}] lacks {key}", hint)
        return value

    def number(self, section: str, key: str) -> float:
        """A positive number times a unit; NaN after a complaint."""
        written = self.value(section, key)
        if written is None:
            return math.nan
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:\s*\*\s*([A-Za-z]+))?", written.text)
        factor = UNITS.get(match[2], math.nan) if match and match[2] else 1.0
        value = float(match[1]) * factor if match else math.nan
        if not value > 0:
            hint = f"such as {key}=12.5 * UNIT, where UNIT is one of {', '.join(UNITS)}"
            self.complain(written.line, f"[{section}] {key}: {written.text[:60]!r} is not a positive number", hint)
        return value

    def finish(self) -> None:
        if self.complaints:
            raise InvalidInputError(self.complaints)


def read_cluster(name: str, text: str) -> HelixCluster:
    """Of the text of the file `name`. Raises InvalidInputError FT2025 with all that is wrong."""
    file = _File(name, text)
    count = file.number("NodeNames", "total_compute_nodes")
    nodes = []
    for section in file.sections:
        if named := re.fullmatch(r"ComputeNode-([0-9]+)", section):
            kind = file.value(section, "type")
            nodes.append(HelixNode(int(named[1]), kind.text if kind else ""))
    nodes.sort(key=lambda node: node.number)
    if not math.isnan(count) and len(nodes) != count:
        hint = "one [ComputeNode-N] a node"
        line = file.sections["NodeNames"]["total_compute_nodes"].line
        file.complain(line, f"{count:.0f} nodes are announced, and {len(nodes)} described", hint)
    known = {node.number for node in nodes}
    wires = []
    for section, begin in file.begins.items():
        if named := re.fullmatch(r"Link-([0-9]+)-([0-9]+)", section):
            ends = int(named[1]), int(named[2])
            if not set(ends) <= known:
                file.complain(begin, f"[{section}] joins a node that is not described", "one [ComputeNode-N] a node")
            wires.append(Wire(ends, file.number(section, "bandwidth"), file.number(section, "latency")))
    if not nodes and not file.complaints:
        file.complain(None, "no node is described", "one [ComputeNode-N] a node")
    file.finish()
    return HelixCluster(tuple(nodes), tuple(wires))


def read_profiles(name: str, text: str) -> dict[str, Profile]:
    """Machine type → profile. Raises InvalidInputError FT2025."""
    file = _File(name, text)
    profiles = {}
    for section in file.sections:
        if section not in ("SourceNode", "SinkNode"):
            devices = re.fullmatch(r".+x([1-9][0-9]?)", section)
            profiles[section] = Profile(int(devices[1]) if devices else 1, file.number(section, "vram_size"))
    file.finish()
    return profiles


def read_layout(name: str, text: str, cluster: HelixCluster) -> dict[int, tuple[int, int]]:
    """Node → (first, last) layer that it holds. Raises InvalidInputError FT2025."""
    file = _File(name, text)
    offset = file.value("Settings", "offset")
    shift = int(offset.text) if offset is not None and offset.text.isdecimal() else 0
    if offset is not None and not offset.text.isdecimal():
        file.complain(offset.line, f"[Settings] offset: {offset.text[:60]!r} is not a whole number", "such as offset=2")
    known = {node.number for node in cluster.nodes}
    intervals: dict[int, tuple[int, int]] = {}
    for key, value in file.sections.get("Solution", {}).items():
        named = re.fullmatch(r"compute_node_([0-9]+)", key)
        if named is None or int(named[1]) - shift not in known:
            hint = "compute_node_N, where N is the number of the node and the offset"
            file.complain(value.line, f"{key} is not a node of the cluster", hint)
            continue
        listed = re.fullmatch(r"\[\s*([0-9]+(?:\s*,\s*[0-9]+)*)\s*\]", value.text)
        numbers = [int(number) for number in listed[1].split(",")] if listed else []
        if not numbers or any(b != a + 1 for a, b in pairwise(numbers)):
            file.complain(value.line, f"{key}: these layers do not follow each other", "such as [3, 4, 5]")
            continue
        intervals[int(named[1]) - shift] = (numbers[0], numbers[-1])
    if not intervals and not file.complaints:
        file.complain(None, "no node has layers", "[Solution] with compute_node_N=[LAYERS]")
    file.finish()
    return intervals


def documents(
    cluster: HelixCluster, profiles: Mapping[str, Profile], layout: Mapping[int, tuple[int, int]]
) -> Documents:
    """A site a region, and in it a cluster for each type of machine. Raises InvalidInputError FT2026."""
    device = _devices(cluster, profiles)
    clusters: dict[str, Any] = {}
    layers: dict[str, list[list[int]]] = {}
    site_of: dict[int, str] = {}
    for at, nodes in enumerate(cluster.regions):
        site = f"region-{at}"
        site_of |= {node.number: site for node in nodes}
        network = _network(cluster, {node.number for node in nodes})
        for kind, count in Counter(node.type for node in nodes).items():
            name = f"{site}-{kind.lower()}"
            partition = {"device": device[kind], "devices_per_node": profiles[kind].devices, "nodes": count}
            clusters[name] = {
                "site": site,
                "kind": "local",
                "partitions": {"gpu": partition | ({"network": network} if network else {})},
            }
            held = [layout[node.number] for node in nodes if node.type == kind and node.number in layout]
            layers[name] = [list(interval) for interval in sorted(held)]
    inventory = {
        "apiVersion": "fabrictool/v1",
        "kind": "Inventory",
        "providers": {"cloud": {}},
        "sites": {site: {"provider": "cloud"} for site in sorted(set(site_of.values()))},
        "clusters": clusters,
        "links": _links(cluster, site_of),
    }
    return Documents(_blueprint(sum(profiles[node.type].devices for node in cluster.nodes)), inventory, layers)


def _devices(cluster: HelixCluster, profiles: Mapping[str, Profile]) -> dict[str, str]:
    """Machine type → device of the catalogue: the name's, with the memory of the profile."""
    id_of: dict[str, str] = {}
    complaints = []
    for kind in sorted({node.type for node in cluster.nodes}):
        profile = profiles.get(kind)
        family = re.sub(r"x[1-9][0-9]?$", "", kind).lower()
        memory = profile.memory / profile.devices if profile is not None else math.nan
        fitting = [
            id_
            for id_, device in accelerators().items()
            if re.fullmatch(rf"{re.escape(family)}(-.*)?", id_) and abs(device.memory / memory - 1) < 0.01
        ]
        if fitting:
            id_of[kind] = fitting[0]
            continue
        message = f"no device of the catalogue is a {kind}" if profile else f"no machine profile is called {kind}"
        hint = "docs/reference/catalogue.md lists the devices; vram_size is of all devices of a machine"
        complaints.append(Complaint("FT2026", message, Place(thing=kind), hint))
    if complaints:
        raise InvalidInputError(complaints)
    return id_of


def _network(cluster: HelixCluster, inside: set[int]) -> str:
    """The Ethernet of the catalogue that is nearest to a region's wires; none in a region of one node."""
    mean = _mean(wire.bandwidth for wire in cluster.wires if inside.issuperset(wire.between))
    ethernets = [name for name in links() if name.startswith("ethernet-")]
    return min(ethernets, key=lambda name: abs(math.log(links()[name].bandwidth / mean))) if mean else ""


def _links(cluster: HelixCluster, site_of: Mapping[int, str]) -> tuple[dict[str, Any], ...]:
    """Between two regions: the mean of the wires between their nodes."""
    between: dict[tuple[str, str], list[Wire]] = {}
    for wire in cluster.wires:
        here, there = sorted(site_of[end] for end in wire.between)
        if here != there:
            between.setdefault((here, there), []).append(wire)
    return tuple(
        {
            "between": sites,
            "bandwidth": f"{tidy(round(_mean(wire.bandwidth for wire in wires) / 1e6, 2))} MB/s",
            "latency": f"{round(1e3 * _mean(wire.latency for wire in wires))}ms",
        }
        for sites, wires in sorted(between.items())
    )


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return math.fsum(every) / len(every) if every else 0.0


def _blueprint(devices: int) -> dict[str, Any]:
    return {
        "apiVersion": "fabrictool/v1",
        "kind": "Blueprint",
        "fabric": "helix",
        "inventory": "inventory.yaml",
        "models": {
            "llama-2-70b": {
                "source": f"hf://{MODEL}",
                "engine": "vllm",
                "variant": {"precision": "fp16", "context": f"{LONGEST} tok"},
                "max_num_seqs": SEQUENCES,
                "demand": {"rate": f"{RATE} req/s", "input": f"{INPUT} tok", "output": f"{OUTPUT} tok"},
                "replicas": {"min": 0, "max": devices},
            }
        },
        "objective": ("latency",),
    }
