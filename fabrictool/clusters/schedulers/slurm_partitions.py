"""One partition of Slurm → one partition of an inventory, each value with the command that it comes from; pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabrictool.base.ids import is_name
from fabrictool.base.units import Duration, Instant, Memory
from fabrictool.clusters.devices import Guess, device_named
from fabrictool.clusters.schedulers.times import parse_limit

if TYPE_CHECKING:
    from fabrictool.clusters.site_facts import Nodes, PartitionFacts, SiteFacts

_SHARE = 0.9
"""Of a node's memory that its replicas' jobs may ask for together: some of it is the system's."""
CHECK = "CHECK"
"""Begins what a person must look at."""


@dataclass(slots=True)
class Lines:
    """The text of one entry as it grows."""

    name: str
    text: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)

    def add(self, key: str, value: object, source: str = "", check: str = "") -> None:
        """``key: value  # source; CHECK: …``."""
        why = "; ".join(part for part in (source, f"{CHECK}: {check}" if check else "") if part)
        self.text.append(f"{key}: {value}" + (f"  # {why}" if why else ""))
        if check:
            self.checks.append(f"{self.name}: {key}: {check}")

    def note(self, text: str) -> None:
        """A comment on a line of its own."""
        self.text.append(f"# {text}")

    def warn(self, text: str) -> None:
        """A comment that a person must look at."""
        self.note(f"{CHECK}: {text}")
        self.checks.append(f"{self.name}: {text}")


def left_out(partition: PartitionFacts, site: SiteFacts) -> str:
    """Why a partition cannot be described; "": it can."""
    if not is_name(partition.name):
        return "a partition's name in an inventory has small letters, digits, `.`, `_` and `-` only"
    if partition.settings.get("RootOnly") == "YES":
        return "only root may use it (RootOnly=YES)"
    accounts = _list(partition.settings.get("AllowAccounts", "ALL"))
    if accounts and site.associations and not accounts & {own.account for own in site.associations}:
        return f"AllowAccounts={','.join(sorted(accounts))} names none of your accounts"
    return ""


def partition_lines(partition: PartitionFacts, site: SiteFacts) -> Lines:
    """The entry of a partition that is not left out."""
    lines = Lines(partition.name)
    chosen = _chosen(partition.kinds)
    default = "; the default partition" if partition.settings.get("Default") == "YES" else ""
    count = sum(kind.count for kind in partition.kinds)
    lines.note(f"{count} node{'s'[: count != 1]} {partition.settings.get('Nodes', '')}".rstrip() + default)
    if not partition.up:
        lines.warn("it is not up now: jobs are not accepted")
    _mixed(lines, partition, chosen)
    _devices(lines, chosen)
    away = f"; {partition.away} of the partition's nodes are away now" if partition.away else ""
    lines.add("nodes", chosen.count, f"sinfo: nodes of this kind{away}")
    lines.add("memory_per_node", Memory(chosen.memory), f"sinfo: RealMemory {chosen.memory // 2**20} MB")
    _times(lines, partition)
    if partition.settings.get("OverSubscribe") == "EXCLUSIVE":
        lines.add("whole_nodes", "true", "scontrol: OverSubscribe=EXCLUSIVE")
    _tier(lines, partition, site)
    _job(lines, partition, chosen, site)
    _reservations(lines, partition, site)
    return lines


def _chosen(kinds: tuple[Nodes, ...]) -> Nodes:
    """The kind that is described: most GPUs in all, then most nodes."""
    return max(kinds, key=lambda kind: (kind.count * sum(number for _, number in kind.gpus), kind.count, kind.memory))


def _mixed(lines: Lines, partition: PartitionFacts, chosen: Nodes) -> None:
    others = [kind for kind in partition.kinds if kind is not chosen]
    if not others:
        return
    lines.warn("nodes of several kinds; an inventory's partition has one, so these are not described:")
    for kind in others:
        lines.note(
            f"  {kind.count} nodes with {kind.cpus} CPUs, {Memory(kind.memory)}, {kind.gres or 'no GPU'}"
            + (f", features {','.join(kind.features)}" if kind.features else "")
        )


def _devices(lines: Lines, chosen: Nodes) -> None:
    if not chosen.gpus:
        source = f'sinfo: GRES "{chosen.gres}"' if chosen.gres else "sinfo: no GRES"
        lines.add("device", "cpu", source)
        return
    kind, number = max(chosen.gpus, key=lambda gpu: gpu[1])
    source = f'sinfo: GRES "{chosen.gres}"'
    named = _guess(kind, chosen)
    if not named.device:
        what = f'"{kind}": {named.why}' if kind else "GRES gives these GPUs no type"
        lines.add("device", "cpu", source, f"PLACEHOLDER: {what}; docs/reference/catalogue.md lists the ids")
        lines.note(f"devices_per_node: {number}")
        return
    word = f'"{kind}"' if kind else "the nodes' features"
    check = f"{word} may also mean {' or '.join(named.others)}" if named.others else ""
    lines.add("device", named.device, source, check)
    lines.add("devices_per_node", number, "sinfo: GRES")
    rest = [f"{count} of type {name or '(none)'}" for name, count in chosen.gpus if (name, count) != (kind, number)]
    if rest:
        lines.warn(f"its nodes have other GPUs as well, which are not described: {', '.join(rest)}")


def _guess(kind: str, chosen: Nodes) -> Guess:
    """By the type, else by the first feature that names a device."""
    if kind:
        return device_named(kind, chosen.features)
    guesses = (device_named(word, chosen.features) for word in chosen.features)
    return next((guess for guess in guesses if guess.device), Guess(""))


def _times(lines: Lines, partition: PartitionFacts) -> None:
    longest = partition.settings.get("MaxTime", "")
    seconds = parse_limit(longest)
    if seconds is None:
        lines.note(f"walltime: scontrol MaxTime={longest or 'unknown'}; jobs still need an end: write one, such as 24h")
    else:
        lines.add("walltime", Duration(seconds), f"scontrol: MaxTime={longest}")


def _tier(lines: Lines, partition: PartitionFacts, site: SiteFacts) -> None:
    mode = partition.settings.get("PreemptMode", "OFF")
    if mode in ("OFF", "DISABLED"):
        return
    kind = site.config.get("PreemptType", "")
    mine = _priority(partition)
    above = [other for other in site.partitions if _priority(other) > mine]
    above = [other for other in above if other.settings.get("Nodes") == partition.settings.get("Nodes")] or above
    names = ", ".join(other.name for other in above[:4])
    if kind.endswith("partition_prio") and above:
        source = f"scontrol: PreemptMode={mode}, PriorityTier {mine} below that of {names}"
        lines.add("tier", "scavenger", source)
    elif kind.endswith("qos"):
        lines.note(f"tier: by QOS (PreemptType={kind}, PreemptMode={mode}); if yours may be preempted: tier: scavenger")


def _priority(partition: PartitionFacts) -> int:
    text = partition.settings.get("PriorityTier", "0")
    return int(text) if text.isdecimal() else 0


def _job(lines: Lines, partition: PartitionFacts, chosen: Nodes, site: SiteFacts) -> None:
    rows: list[str] = []
    devices = sum(number for _, number in chosen.gpus)
    if devices and partition.settings.get("OverSubscribe") != "EXCLUSIVE":
        rows.append(
            f"cpus_per_device: {max(1, chosen.cpus // devices)}  # sinfo: {chosen.cpus} CPUs over {devices} GPUs"
        )
        share = int(chosen.memory * _SHARE / devices) // 2**30
        if share:
            rows.append(f"memory_per_device: {share}GiB  # {_SHARE:.0%} of the node's memory over {devices} GPUs")
    options = _options(lines, partition, chosen, site)
    rows += ["options:", *(f"  {line}" for line in options)] if options else []
    if rows:
        lines.text += ["job:", *(f"  {row}" for row in rows)]


def _options(lines: Lines, partition: PartitionFacts, chosen: Nodes, site: SiteFacts) -> list[str]:
    options = []
    allowed = _list(partition.settings.get("AllowAccounts", "ALL"))
    fitting = [own for own in site.associations if not allowed or own.account in allowed]
    fitting = [own for own in fitting if not own.partition or own.partition == partition.name] or fitting
    names = list(dict.fromkeys(own.account for own in fitting))
    enforced = site.config.get("AccountingStorageEnforce", "none")
    default = site.account or (
        "" if len({own.account for own in site.associations}) != 1 else site.associations[0].account
    )
    if names and default not in names:
        why = f"the default account {default or '(none)'} is not admitted here"
        options.append(f"account: {json.dumps(names[0])}  # sacctmgr: {why}")
    elif len(names) == 1:
        options.append(f"account: {json.dumps(names[0])}  # sacctmgr: the only one that you may use here")
    elif len(names) > 1:
        lines.note(
            f"account: jobs are charged to {default} (sacctmgr: default); you may also use {', '.join(names[1:])}"
        )
    elif not site.associations and enforced not in ("none", "0", ""):
        lines.warn(f"AccountingStorageEnforce={enforced}, and sacctmgr names no account of yours: ask the site")
    quality = _list(partition.settings.get("AllowQos", "ALL"))
    if quality:
        account = default if default in names else next(iter(names), "")
        mine = next((own for own in fitting if own.account == account), None)
        usual = mine.default_qos if mine is not None else ""
        usable = sorted(quality & {qos for own in fitting for qos in own.qos})
        if usual not in quality and usable:
            options.append(f"qos: {json.dumps(usable[0])}  # scontrol: AllowQos={','.join(sorted(quality))}")
        elif usual not in quality:
            lines.warn(f"AllowQos={','.join(sorted(quality))}, but sacctmgr grants you none of these")
    telling = [
        word
        for word in chosen.features
        if len(partition.kinds) > 1 and all(word not in kind.features for kind in partition.kinds if kind is not chosen)
    ]
    if telling:
        options.append(f"constraint: {json.dumps(telling[0])}  # sinfo: a feature that only the described nodes have")
    return options


def _reservations(lines: Lines, partition: PartitionFacts, site: SiteFacts) -> None:
    for reservation in site.reservations:
        begin, end = reservation.get("StartTime", ""), reservation.get("EndTime", "")
        flags = reservation.get("Flags", "").split(",")
        reserved = reservation.get("PartitionName", "")
        same_nodes = reservation.get("Nodes") == partition.settings.get("Nodes")
        concerned = reserved == partition.name or "ALL_NODES" in flags or same_nodes
        if not concerned or not (begin.isdecimal() and end.isdecimal()) or float(end) <= site.now:
            continue
        if "MAINT" not in flags and "IGNORE_JOBS" not in flags:
            continue
        lines.note(
            f"reservation {reservation['ReservationName']} from {Instant(float(begin))} to {Instant(float(end))} "
            "(scontrol); fabrictool asks Slurm for it, so it need not be written under `maintenance`"
        )


def _list(text: str) -> set[str]:
    """Of ``A,B``; empty for ``ALL``."""
    return set() if text.upper() in ("ALL", "", "(NULL)") else set(text.split(","))
