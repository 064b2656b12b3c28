"""The kinds of clusters, by the inventory's word for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.clusters.connections.factory import connect_login
from fabrictool.clusters.kubernetes.cluster import KubernetesCluster
from fabrictool.clusters.local import LocalCluster
from fabrictool.clusters.remote import RemoteCluster
from fabrictool.clusters.schedulers.flux import Flux
from fabrictool.clusters.schedulers.gridengine import GridEngine
from fabrictool.clusters.schedulers.lsf import Lsf
from fabrictool.clusters.schedulers.pbs import Pbs
from fabrictool.clusters.schedulers.processes import Processes
from fabrictool.clusters.schedulers.slurm import Slurm

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.clusters.protocol import Cluster
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.domain.inventory import ClusterSpec


def open_cluster(name: str, fabric: str, described: ClusterSpec, root: Path) -> Cluster:
    """`root` is where a local cluster keeps its run folders; no connection is made yet. Of a joined one, whose nodes
    are in the mesh, see `clusters.joined`.
    """
    if described.here:
        venv = described.software.python.venv
        return LocalCluster(name, root, python=f"{venv}/bin/python" if venv else "", logs=described.logs, fabric=fabric)
    if described.kind == "kubernetes":
        return KubernetesCluster(name, fabric, described)
    scheduler = scheduler_of(described.kind)
    return RemoteCluster(
        name, fabric, described, scheduler, lambda: [connect_login(login) for login in described.login]
    )


def scheduler_of(kind: str) -> Scheduler:
    every: tuple[Scheduler, ...] = (Slurm(), GridEngine(), Processes(), Pbs(), Flux(), Lsf())
    return next(scheduler for scheduler in every if scheduler.kind == kind)
