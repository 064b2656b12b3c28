"""The clusters of a bed, asked and steered with Slurm's own commands."""

import os
import subprocess
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tests.testbed.machine import Machine
from tests.testbed.topology import CLUSTERS, Cluster
from tests.testbed.waiting import wait_until

if TYPE_CHECKING:
    import itertools


class SlurmSide(ABC):
    """The part of a bed that speaks Slurm."""

    numbers: "itertools.count[int]"

    @abstractmethod
    def machine(self, name: str) -> Machine:
        """Of the bed."""

    def cluster(self, name: str) -> Cluster:
        return CLUSTERS[name]

    def slurm(
        self, cluster: str, *argv: str, root: bool = False, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A Slurm command on the login node, as the cluster's user; as root on the controller with root=True."""
        machine = self.machine(f"{cluster}-{'ctl' if root else 'login'}")
        return machine.run(argv, user=None if root else CLUSTERS[cluster].user, check=check, stdin=stdin)

    def node_states(self, cluster: str) -> dict[str, str]:
        """Node -> state as sinfo writes it, such as idle, mixed, down*; empty while the controller is silent."""
        done = self.slurm(cluster, "sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def wait_nodes(self, cluster: str, wanted: str, *, within_s: float = 60) -> None:
        def all_so() -> bool:
            states = self.node_states(cluster)
            return bool(states) and all(s == wanted for s in states.values())

        wait_until(f"nodes of {cluster} are not {wanted}", all_so, within_s=within_s)

    def job_state(self, cluster: str, job: str | int) -> str:
        """As scontrol says it, such as PENDING, RUNNING, COMPLETED; empty when the controller forgot the job."""
        done = self.slurm(cluster, "scontrol", "-o", "show", "job", str(job), check=False)
        words = dict(word.partition("=")[::2] for word in done.stdout.split())
        return words.get("JobState", "")

    def restart_slurmctld(self, cluster: str) -> None:
        """Stops the controller in good order and starts it again; returns when it answers."""
        machine = self.machine(f"{cluster}-ctl")
        machine.service("stop", "slurmctld")
        machine.service("start", "slurmctld")

        def answers() -> bool:
            return self.slurm(cluster, "scontrol", "ping", check=False).returncode == 0

        wait_until(f"slurmctld of {cluster} does not answer", answers, within_s=30)

    def maintenance(self, cluster: str, starts_in_s: float, duration_s: float) -> str:
        """Reserves all nodes for maintenance; returns the reservation's name. Slurm counts in whole minutes."""
        name = f"maintenance_{os.getpid()}_{next(self.numbers)}"
        start = f"starttime=now+{max(1, round(starts_in_s))}"
        length = f"duration={max(1, round(duration_s / 60))}"
        what = ["flags=maint,ignore_jobs", "nodes=ALL", "users=root"]
        self.slurm(
            cluster, "scontrol", "create", "reservation", f"reservationname={name}", start, length, *what, root=True
        )
        return name

    def end_maintenance(self, cluster: str, name: str) -> None:
        self.slurm(cluster, "scontrol", "delete", f"reservationname={name}", root=True)
