"""What the inventory promises of a node, seen there: engines fall back without a word where it does not hold."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.catalog import links
from fabrictool.clusters.checks.result import Check
from fabrictool.domain.following import SUBMITTED_WITH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.domain.inventory import ClusterSpec, Install, Partition

_INTERFACES = "_SOCKET_IFNAME"
"""How variables end that name network interfaces (NCCL, Gloo, Tensorpipe)."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing that a node must have, as `doctor-node.sh` looks for it."""

    kind: Literal["path", "program", "module", "interface", "interfaces", "adapter", "submission"]
    """`interfaces`: one whose name begins so; `adapter`: any in that folder of ``/sys/class``; `submission`: a command
    that submits nothing.
    """
    what: str
    name: str
    """Of the check."""
    hint: str

    @property
    def line(self) -> str:
        return f"{self.kind} {self.what}\n"


def promises_of(described: ClusterSpec, partition: Partition, *, weights: bool) -> list[Promise]:
    """In the order of the inventory; `weights`: its folder for them is there, as a login node sees it."""
    every = [
        *(
            promise
            for name, install in described.software.engines.items()
            for promise in _engine(described, name, install)
        ),
        *_interfaces(described),
        *_network(partition),
    ]
    if weights and described.weights is not None:
        hint = "choose a `weights` folder on a file system that compute nodes see"
        every.append(Promise("path", described.weights, "weights on a node", hint))
    return [promise for promise in every if promise.what.isprintable()]


def _engine(described: ClusterSpec, name: str, install: Install) -> Iterator[Promise]:
    label, hint = f"engine {name} on a node", "correct `software.engines` in the inventory, or have it installed there"
    if file := file_of(install):
        yield Promise("path", file, label, hint)
    if install.module is not None:
        yield Promise("module", install.module, label, hint)
    if install.container is not None:
        hint = "correct `software.runtime` in the inventory, or load its module by `environment`"
        yield Promise("program", described.software.runtime, f"{described.software.runtime} on a node", hint)


def file_of(install: Install) -> str:
    """The file that must be there; "" where none is named, as for a module or an image in a registry."""
    if install.venv is not None:
        return f"{install.venv}/bin/python"
    container = install.container if install.container is not None and install.container.startswith("/") else None
    return install.path or container or ""


def _interfaces(described: ClusterSpec) -> Iterator[Promise]:
    """NCCL takes the beginning of a name unless ``=`` is before it, and ``^`` excludes; the others take whole names."""
    hint = "engines on several nodes would take another interface, or none; `ip link` on a node lists them"
    for variable, value in sorted(described.environment.set.items()):
        if not variable.endswith(_INTERFACES) or value.startswith("^"):
            continue
        begins = variable.startswith("NCCL") and not value.startswith("=")
        for name in filter(None, value.removeprefix("=").split(",")):
            yield Promise("interfaces" if begins else "interface", name, variable, hint)


def _network(partition: Partition) -> Iterator[Promise]:
    network = links()[partition.network] if partition.network is not None else None
    if network is not None and network.adapters:
        hint = "engines would use TCP without a word: have its driver loaded, or name the network that there is"
        yield Promise("adapter", network.adapters, f"network {network.id}", hint)


def submits(argv: Sequence[str]) -> Promise:
    """Jobs can be submitted from nodes, as `argv` asks without doing it: those that follow a replica's job are."""
    hint = "remove `successors` from the partition's `job`, or have the site allow its nodes to submit"
    kept = " ".join(f'${{{name}:+{name}="${name}"}}' for name in SUBMITTED_WITH)
    return Promise("submission", f"env -i {kept} {shlex.join(argv)}", "successors from a node", hint)


def promise_checks(promises: Sequence[Promise], lines: Sequence[str]) -> list[Check]:
    """`lines`: ``there`` or ``missing``, then a promise's line."""
    seen = {line.partition(" ")[2] for line in lines if line.startswith("there ")}
    checks = []
    for promise in promises:
        there = promise.line.rstrip("\n") in seen
        text = _TEXTS[promise.kind].format(what=promise.what)
        checks.append(Check(promise.name, there, text if there else f"not so: {text}", promise.hint))
    return checks


_TEXTS = {
    "submission": "a job can be submitted from there",
    "path": "{what} is there",
    "program": "{what} is on the path",
    "module": "module {what} can be loaded",
    "interface": "there is an interface {what}",
    "interfaces": "there is an interface that begins with {what}",
    "adapter": "there is an adapter in /sys/class/{what}",
}
