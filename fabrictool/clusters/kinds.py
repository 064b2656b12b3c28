"""The kinds of clusters, by the inventory's word for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.clusters.local import LocalCluster
from fabrictool.clusters.remote import RemoteCluster
from fabrictool.clusters.schedulers.processes import Processes
from fabrictool.clusters.schedulers.slurm import Slurm

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.clusters.protocol import Cluster
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.domain.inventory import Cluster as Described


def open_cluster(name: str, fabric: str, described: Described, root: Path) -> Cluster:
    """`root` is where a local cluster keeps its run folders; no connection is made yet."""
    if described.kind == "local":
        venv = described.software.python.venv
        return LocalCluster(name, root, python=f"{venv}/bin/python" if venv else "")
    from fabrictool.clusters.connections.asyncssh_connection import AsyncsshConnection  # noqa: PLC0415
    from fabrictool.clusters.connections.protocol import Endpoint  # noqa: PLC0415

    connections = [
        AsyncsshConnection(
            Endpoint(
                login.host,
                login.port,
                str(login.user),
                login.host_keys,
                identity=getattr(login, "identity", None) or "",
            )
        )
        for login in described.login
    ]
    return RemoteCluster(name, fabric, described, scheduler_of(described.kind), connections)


def scheduler_of(kind: str) -> Scheduler:
    """The words of one kind of scheduler."""
    schedulers: dict[str, type[Scheduler]] = {"slurm": Slurm, "ssh": Processes}
    return schedulers[kind]()
