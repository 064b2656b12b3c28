"""What this machine really has: devices, their memory and driver, links. What cannot be read is not said."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.clusters.devices import device_named
from fabrictool.mesh.records import MAX_DEVICES_TOLD, MAX_LINKS, NodeHardware, NodeLink

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ASK_S = 20.0
"""A driver that has yet to wake its devices takes seconds to answer."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
UNKNOWN = "unknown"
_GPUS = "--query-gpu=index,uuid,name,memory.total,memory.free,driver_version"
_NVLINK = re.compile(r"Link \d+: ([0-9.]+) GB/s")
_RATE = re.compile(r"([0-9.]+) Gb/sec")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of ``nvidia-smi``."""

    index: str
    uuid: str
    name: str
    memory: int
    """Octets."""
    free: int
    driver: str


def read_hardware(environment: Mapping[str, str]) -> NodeHardware:
    """Of the GPUs that `environment` leaves to us, as ``nvidia-smi`` tells; of the processors where there is none."""
    gpus = visible(gpus_of(_said("nvidia-smi", _GPUS, "--format=csv,noheader,nounits")), environment.get(VISIBLE))
    links = [*nics_of(Path("/sys/class/net")), *infiniband_of(Path("/sys/class/infiniband"))]
    if gpus is None:
        return NodeHardware(UNKNOWN, 0, links=told(links))
    if not gpus:
        memory, free = memory_of(_text(Path("/proc/meminfo")))
        return NodeHardware("cpu", 1, memory, free=(free,), links=told(links))
    alike = [gpu for gpu in gpus if gpu.name == gpus[0].name]
    return NodeHardware(
        device_named(alike[0].name).device or alike[0].name[:60],
        len(alike),
        sum(gpu.memory for gpu in alike),
        driver=alike[0].driver[:40],
        free=tuple(gpu.free for gpu in alike[:MAX_DEVICES_TOLD]),
        links=told([*links, *nvlinks_of(_said("nvidia-smi", "nvlink", "-s"), [gpu.uuid for gpu in alike])]),
    )


def gpus_of(text: str) -> list[Gpu]:
    """Lines that cannot be read, such as a device's that is lost, are left out."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6 and fields[3].isdecimal() and fields[4].isdecimal():
            index, uuid, name, memory, free, driver = fields
            gpus.append(Gpu(index, uuid, name, int(memory) * 2**20, int(free) * 2**20, driver))
    return gpus


def visible(gpus: Sequence[Gpu], left: str | None) -> list[Gpu] | None:
    """Those that the variable `left` names by number or by the beginning of their UUID, where it is set; None: it names
    something else, such as slices.
    """
    if left is None:
        return list(gpus)
    named = [name.strip() for name in left.split(",") if name.strip()]
    matches = [
        next(
            (gpu for gpu in gpus if name == gpu.index or (name.startswith("GPU-") and gpu.uuid.startswith(name))), None
        )
        for name in named
    ]
    known = [gpu for gpu in matches if gpu is not None]
    return known if len(known) == len(named) else None


def memory_of(meminfo: str) -> tuple[int, int]:
    """Octets that the machine has, and those that could be had now without swapping."""
    kib = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", meminfo, re.MULTILINE))
    return int(kib.get("MemTotal", 0)) * 1024, int(kib.get("MemAvailable", 0)) * 1024


def nics_of(folder: Path) -> list[NodeLink]:
    """Network interfaces with a device behind them and a cable in them."""
    speeds = (_text(nic / "speed") for nic in _entries(folder) if (nic / "device").exists())
    return [NodeLink("nic", int(speed)) for speed in speeds if speed.isdecimal() and int(speed)]


def infiniband_of(folder: Path) -> list[NodeLink]:
    """Active ports, of whichever fabric."""
    ports = [port for device in _entries(folder) for port in _entries(device / "ports")]
    rates = [_RATE.match(_text(port / "rate")) for port in ports if "ACTIVE" in _text(port / "state")]
    return [NodeLink("infiniband", round(float(rate[1]) * 1000)) for rate in rates if rate is not None]


def nvlinks_of(text: str, devices: Sequence[str]) -> list[NodeLink]:
    """What ``nvidia-smi nvlink -s`` says of the devices with these UUIDs."""
    links: list[NodeLink] = []
    ours = False
    for line in text.splitlines():
        if line.startswith("GPU "):
            ours = any(device in line for device in devices)
        elif ours and (speed := _NVLINK.search(line)) is not None:
            links.append(NodeLink("nvlink", round(float(speed[1]) * 8000)))
    return links


def told(links: Iterable[NodeLink]) -> tuple[NodeLink, ...]:
    """As many kinds as a record has room for, the fastest first; alike ones are counted."""
    counted = sorted(Counter(links).items(), key=lambda entry: (-entry[0].mbit_s, entry[0].kind))
    return tuple(NodeLink(link.kind, link.mbit_s, count) for link, count in counted[:MAX_LINKS])


def _said(*command: str) -> str:
    """What a program prints; "" where it is not there, fails or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Of a file of the kernel's; "" where it says nothing, as a link without a cable does."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
