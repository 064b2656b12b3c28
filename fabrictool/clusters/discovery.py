"""The inventory that describes a site, as text with comments; pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.base.units import Instant, Memory
from fabrictool.clusters.devices import device_named
from fabrictool.clusters.environment.site import OLDEST_PYTHON
from fabrictool.clusters.schedulers.slurm_partitions import CHECK, Lines, left_out, partition_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.site_facts import SiteFacts

_PLAIN = re.compile(r"[A-Za-z_~./][A-Za-z0-9_./~:@-]*")
_WORDS = frozenset(["yes", "no", "on", "off", "true", "false", "null", "y", "n", "~"])


@dataclass(frozen=True, slots=True)
class DiscoveryTarget:
    """What the operator knows of a site: names, and the way there."""

    cluster: str
    """"": the scheduler's own name."""
    site: str
    """"": the cluster's."""
    provider: str
    """"": a name to be replaced."""
    login: tuple[tuple[str, object], ...]
    """Fields of the login node, in order; lists of mappings for jump hosts."""
    kind: str = ""
    """"": ``slurm`` where there is a Slurm, ``ssh`` elsewhere."""
    folder: str = ""


@dataclass(frozen=True, slots=True)
class SiteDescription:
    """An inventory for one site."""

    cluster: str
    text: str
    """An inventory in YAML."""
    checks: tuple[str, ...]
    """What a person must look at."""


def describe(site: SiteFacts, target: DiscoveryTarget) -> SiteDescription:
    """The whole document.

    Raises
    ------
    FabrictoolError
        FT5501 when Slurm does not answer its own login node, FT5502 when it is not there or shows no partition that
        can be described.
    """
    kind = target.kind or ("slurm" if site.scheduler else "ssh")
    slurm = kind == "slurm"
    if slurm and not site.scheduler:
        message = f"{site.host} has no `sinfo` on its path"
        raise FabrictoolError.of(
            "FT5502", message, thing=f"host/{site.host}", hint="is it the login node of a Slurm cluster?"
        )
    if slurm and site.failure:
        hint = "try `sinfo` there by hand, then run the command again; `--kind ssh` if it has no Slurm of its own"
        message = f"Slurm does not answer: {site.failure}"
        raise UnreachableError.of("FT5501", message, thing=f"host/{site.host}", hint=hint, transient=True)
    entries, out = _slurm(site) if slurm else ([_host(site)], [])
    if not entries:
        message = f"no partition of {site.host} can be described: {'; '.join(out) or 'sinfo shows none'}"
        raise FabrictoolError.of(
            "FT5502", message, thing=f"host/{site.host}", hint="ask the site which partitions you may use"
        )
    named = site.config.get("ClusterName", "")
    cluster = target.cluster or _name(named if slurm else site.host) or "cluster"
    place = target.site or cluster
    checks = [check for entry in entries for check in entry.checks]
    if not target.provider:
        checks.insert(0, "providers: name the institution that runs this site; trust is granted to it")
    text = [
        f"# What {site.host} said to {site.user} on {Instant(site.now)}; look at every {CHECK}. (fabrictool discover)",
        "apiVersion: fabrictool/v1",
        "kind: Inventory",
        "providers:",
        f"  {target.provider or 'my-institution'}: {{}}" + ("" if target.provider else f"  # {CHECK}: its name"),
        "sites:",
        f"  {place}: {{provider: {target.provider or 'my-institution'}}}",
        "clusters:",
        f"  {cluster}:" + (f"  # {site.scheduler}, ClusterName={named}" if slurm else ""),
        f"    site: {place}",
        f"    kind: {kind}",
        "    login:",
        *(f"      {line}" for line in _mapping(target.login)),
        *([f"    folder: {_scalar(target.folder)}"] if target.folder else []),
        *(f"    # {line}" for line in _site_notes(site, cluster, slurm=slurm)),
        "    partitions:",
    ]
    for entry in entries:
        text += [f"      {entry.name}:", *(f"        {line}" for line in entry.text)]
    text += [f"      # {name}" for name in out]
    return SiteDescription(cluster, "\n".join(text) + "\n", tuple(checks))


def _slurm(site: SiteFacts) -> tuple[list[Lines], list[str]]:
    entries, out = [], []
    for partition in site.partitions:
        if why := left_out(partition, site):
            out.append(f"{partition.name} is left out: {why}")
        else:
            entries.append(partition_lines(partition, site))
    return entries, out


def _host(site: SiteFacts) -> Lines:
    """One partition: the GPUs that ``nvidia-smi`` names, else the processors."""
    lines = Lines("gpu" if site.gpus else "cpu")
    lines.note(f"{site.host}: {site.cpus} CPUs ({site.machine}); no scheduler: units are processes of {site.user}")
    if site.gpus:
        name = site.gpus[0]
        guess = device_named(name)
        check = f"may also mean {' or '.join(guess.others)}" if guess.others else ""
        if not guess.device:
            check = f"PLACEHOLDER: {guess.why}; docs/reference/catalogue.md lists the ids"
        lines.add("device", guess.device or "cpu", f'nvidia-smi: "{name}"', check)
        if guess.device:
            lines.add("devices_per_node", sum(gpu == name for gpu in site.gpus), "nvidia-smi -L")
        if set(site.gpus) != {name}:
            lines.warn(
                f"it has other GPUs as well, which are not described: {', '.join(sorted(set(site.gpus) - {name}))}"
            )
    else:
        lines.add("device", "cpu", "no nvidia-smi")
    lines.add("nodes", 1, "this machine")
    lines.add(
        "memory_per_node",
        Memory(max(site.memory // 2**30, 1) * 2**30),
        f"/proc/meminfo: {site.memory // 2**20} MiB",
    )
    return lines


def _site_notes(site: SiteFacts, cluster: str, *, slurm: bool) -> list[str]:
    notes = []
    if slurm:
        accounting = site.config.get("AccountingStorageType", "").removeprefix("accounting_storage/")
        notes.append(
            f"accounting: {accounting or 'unknown'} (scontrol)"
            + (
                "; how old jobs ended is known from their run folders only"
                if accounting in ("", "none", "filetxt")
                else ""
            )
        )
    new = [python for python in site.pythons if tuple(map(int, python[0].split("."))) >= OLDEST_PYTHON]
    if new:
        notes.append(
            f"python: {new[0][0]} at {new[0][1]}; `fabrictool bootstrap {cluster}` makes the agents' environment"
        )
    else:
        seen = f"only {site.pythons[0][0]}" if site.pythons else "none"
        notes.append(
            f"{CHECK}: Python 3.11 or newer is needed, but {seen} is on the path; a module may have it: software:"
        )
        notes.append("  {python: {module: python/3.11}}")
    return notes


def _mapping(fields: Sequence[tuple[str, object]]) -> list[str]:
    """Lines of YAML for one item of a list."""
    text: list[str] = []
    for key, value in fields:
        if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # jump hosts
            text.append(f"{key}:")
            for hop in value:
                text += [f"  {line}" for line in _mapping(hop)]
        elif isinstance(value, tuple):
            text += [f"{key}:", *(f"  - {_scalar(item)}" for item in value)]
        else:
            text.append(f"{key}: {_scalar(value)}")
    return [("- " if index == 0 else "  ") + line for index, line in enumerate(text)]


def _scalar(value: object) -> str:
    """As YAML reads it back; quoted where a plain word would be something else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    plain = isinstance(value, int) or (_PLAIN.fullmatch(text) and text.lower() not in _WORDS and not text.endswith(":"))
    return text if plain else json.dumps(text, ensure_ascii=False)


def _name(text: str) -> str:
    """The site's name, in the letters that an inventory allows; at most 63."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower().partition(".")[0]).strip("-._")[:63].rstrip("-._")
