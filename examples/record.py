"""Writes the evidence beside the examples that `fabrictool plan --offline` reads: ``python examples/record.py``.

The clusters of the examples do not exist, so their facts are made up here, of the inventory: every partition is up, a
third of its nodes is busy, nothing of the fabric runs. They are signed as `fabrictool observe` signs, by a root that is
made for it and forgotten; its certificate lies beside the bundle.
"""

from pathlib import Path

from fabrictool.blueprint import load
from fabrictool.catalog import accelerators
from fabrictool.domain.evidence import Evidence, KeysSeen
from fabrictool.domain.observed import ClusterFacts, Queue
from fabrictool.domain.state import State
from fabrictool.mesh.identity import create_root
from fabrictool.state.bundle import sign_bundle

EXAMPLES = ("slurm-federation", "slurm-cluster", "ssh-hosts", "kubernetes-namespace")
AT = 1_793_491_200.0  # 2026-11-01T00:00:00Z
HERE = Path(__file__).parent


def queue(partition):
    memory = partition.memory_per_node or 2**39
    gpus = 0 if partition.device == "cpu" else partition.devices_per_node
    walltime = None if partition.walltime is None else float(partition.walltime)
    return Queue(
        nodes=partition.nodes, idle=partition.nodes - partition.nodes // 3, pending=partition.nodes // 2,
        longest_s=walltime, devices=gpus, device=accelerators()[partition.device].id if gpus else "", cpus=64,
        memory=int(memory),
    )  # fmt: skip


def facts(name, cluster):
    scheduler = {"slurm": "Slurm 24.05.4"}.get(cluster.kind, "")
    queues = {key: queue(partition) for key, partition in cluster.partitions.items()} if cluster.queues else {}
    return ClusterFacts(cluster=name, known=True, scheduler=scheduler, queues=queues, now=AT)


def record(folder):
    loaded = load(folder / "blueprint.yaml", environment={})
    evidence = Evidence(
        fabric=loaded.blueprint.fabric, lineage="", at=AT, host="operator.example.org",
        clusters={name: facts(name, cluster) for name, cluster in loaded.inventory.clusters.items()}, specs={},
        state=State(fabric=loaded.blueprint.fabric), keys=KeysSeen.of(loaded.blueprint, "00" * 8),
    )  # fmt: skip
    root = create_root(loaded.blueprint.fabric, now=AT - 86400)
    (folder / "observation.json").write_bytes(sign_bundle(evidence, root))
    (folder / "root.crt").write_bytes(root.chain_pem())


if __name__ == "__main__":
    for example in EXAMPLES:
        record(HERE / example)
