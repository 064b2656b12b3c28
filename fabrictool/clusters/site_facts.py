"""What ``shell/discover.sh`` printed, as values; pure, so that every site's habit is a case in a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NONE = frozenset(["", "(null)", "N/A", "NONE", "none"])
_GRES = re.compile(r"(?:^|,)gpu(?::([A-Za-z0-9_.-]+?))??:(\d+)(?:\([^)]*\))?")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes of one partition."""

    count: int
    cpus: int
    memory: int
    """Octets that the scheduler gives away."""
    gres: str
    """As Slurm says it; "": none."""
    gpus: tuple[tuple[str, int], ...]
    """Types of GPUs, "" for one without a name, and how many a node has."""
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """One partition that this user sees."""

    name: str
    up: bool
    kinds: tuple[Nodes, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields of ``scontrol show partition``."""
    away: int = 0
    """Nodes that are down or drained now."""


@dataclass(frozen=True, slots=True)
class Association:
    """One account under which this user may submit."""

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """What one login node knows."""

    now: float
    host: str
    user: str
    machine: str
    """Such as ``Linux x86_64``."""
    cpus: int
    memory: int
    gpus: tuple[str, ...] = ()
    """Names of this machine's own."""
    pythons: tuple[tuple[str, str], ...] = ()
    """Version such as ``3.11`` and path, in the order in which they would be taken."""
    scheduler: str = ""
    """Such as ``slurm 22.05.8``; "": there is none."""
    failure: str = ""
    """Why the scheduler's own commands fail there."""
    partitions: tuple[PartitionFacts, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    associations: tuple[Association, ...] = ()
    account: str = ""
    """The default account."""
    reservations: tuple[Mapping[str, str], ...] = ()


def sections_of(text: str) -> dict[str, list[str]]:
    """Lines by the ``@name`` before them."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if re.fullmatch(r"@[a-z]+", line):
            lines = sections.setdefault(line[1:], [])
        elif line.strip():
            lines.append(line.strip())
    return sections


def read_site(text: str, *, thing: str) -> SiteFacts:
    """Raises FT5407 for an answer that was cut off, FT5401 for one that cannot be read."""
    sections = sections_of(text)
    if "end" not in sections or len(sections.get("host", ())) < 2 or not sections.get("now"):
        message = f"the login node's answer is incomplete: {text[-120:]!r}"
        raise FabrictoolError.of("FT5407", message, thing=thing, hint="run the command again", transient=True)
    first = {name: lines[0] for name, lines in sections.items() if lines}
    memory = re.match(r"(\d+) kB", first.get("memory", ""))
    return SiteFacts(
        now=float(sections["now"][0]),
        host=sections["host"][0],
        user=sections["host"][1],
        machine=first.get("machine", ""),
        cpus=int(first["cpus"]) if first.get("cpus", "").isdecimal() else 0,
        memory=int(memory.group(1)) * 1024 if memory else 0,
        gpus=tuple(
            re.sub(r"^GPU \d+: (.*?) \(UUID.*$", r"\1", line) for line in sections.get("gpus", ()) if "GPU " in line
        ),
        pythons=_pythons(sections.get("pythons", ())),
        scheduler=first.get("version", "slurm") if "sinfo" in sections else "",
        failure=_failure(sections),
        partitions=_partitions(sections),
        config=dict(_setting(line) for line in sections.get("config", ()) if "=" in line),
        associations=tuple(own for line in sections.get("associations", ()) if (own := _association(line))),
        account=first.get("account", ""),
        reservations=tuple(_fields(line) for line in sections.get("reservations", ()) if "ReservationName=" in line),
    )


def _failure(sections: Mapping[str, Sequence[str]]) -> str:
    if "failed" in sections:
        return " ".join(sections["failed"])[:300] or "sinfo fails"
    return "scontrol prints no partition" if "sinfo" in sections and not sections.get("partitions") else ""


def _pythons(lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pythons = [tuple(line.split(" ", 1)) for line in lines if re.match(r"\d+\.\d+ /", line)]
    return tuple((version, path) for version, path in dict.fromkeys(pythons))


def _setting(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def _fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


def _association(line: str) -> Association | None:
    parts = line.split("|")
    if len(parts) < 5 or not parts[1]:
        return None
    return Association(parts[1], parts[2], tuple(name for name in parts[3].split(",") if name), parts[4])


def _partitions(sections: Mapping[str, Sequence[str]]) -> tuple[PartitionFacts, ...]:
    settings = {fields.get("PartitionName", ""): fields for fields in map(_fields, sections.get("partitions", ()))}
    away: dict[str, int] = {}
    for line in sections.get("states", ()):
        name, count, state = [*line.split("|"), "", ""][:3]
        if re.match(r"(down|drain|drng|fail|maint|boot|unk|pow|no_resp|inval|resv)", state.lower()):
            away[name] = away.get(name, 0) + leading_number(count)
    kinds: dict[str, list[Nodes]] = {}
    up: dict[str, bool] = {}
    for line in sections.get("sinfo", ()):
        parts = line.split("|", 7)
        if len(parts) < 8:
            raise FabrictoolError.of(
                "FT5401",
                f"unexpected output of sinfo: {line[:120]!r}",
                hint="report it with the output of `sinfo --version`",
            )
        name, state, _, count, cpus, memory, gres, features = parts
        gres = "" if gres in _NONE else gres
        up[name] = state == "up"
        kinds.setdefault(name, []).append(
            Nodes(
                count=leading_number(count),
                cpus=leading_number(cpus),
                memory=leading_number(memory) * 2**20,
                gres=gres,
                gpus=tuple((kind or "", int(number)) for kind, number in _GRES.findall(gres) if int(number)),
                features=() if features in _NONE else tuple(features.split(",")),
            )
        )
    return tuple(
        PartitionFacts(name, up[name], tuple(nodes), settings.get(name, {}), away.get(name, 0))
        for name, nodes in kinds.items()
    )


def leading_number(text: str) -> int:
    """Of ``64000+`` or ``4(IDX:0-3)``; 0 when it begins otherwise."""
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 0
