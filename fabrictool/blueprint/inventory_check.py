"""The inventory by itself: do its names refer to something, and do its numbers make sense together? FT12xx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import Problem
from fabrictool.blueprint.complaints import meant
from fabrictool.blueprint.tree import dotted
from fabrictool.catalog import accelerators, engines, links, startable
from fabrictool.domain.inventory import TIERS, UNVERIFIED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fabrictool.base.errors import Place
    from fabrictool.blueprint.tree import Steps, YamlNode
    from fabrictool.domain.inventory import ClusterSpec, Install, Inventory, Partition
    from fabrictool.domain.limits import Limit


class ReferenceCheck:
    """Collects complaints about one tree."""

    def __init__(self, tree: YamlNode) -> None:
        self._tree = tree
        self._problems: list[Problem] = []

    def place(self, path: Steps) -> Place:
        """Of the value at `path`, or of what it would be written in."""
        node, known = self._tree.nearest(path)
        return node.place(dotted(known)) if known == path else node.key_place(dotted(known))

    def say(
        self, code: str, path: Steps, message: str, hint: str, severity: Literal["error", "warning"] = "error"
    ) -> None:
        """One complaint; the message begins with the path."""
        self._problems.append(Problem(code, f"{dotted(path)}: {message}", self.place(path), hint, severity=severity))

    def refer(self, code: str, path: Steps, name: str, known: Collection[str], noun: str, where: str = "") -> bool:
        """Complain unless `name` is known; `where` narrows the place in the message, such as `` in alpha-gpu``."""
        if name in known:
            return True
        plural = noun if noun.endswith("s") else f"{noun}s"
        self.say(code, path, f"there is no {noun} `{name}`{where}", meant(name, known, f"{plural}{where}"))
        return False

    def check_limits(self, limits: Mapping[str, Limit], inventory: Inventory) -> None:
        """Whether each is of something that there is."""
        partitions = [p for cluster in inventory.clusters.values() for p in cluster.partitions.values()]
        accounts = {p.job.account for p in partitions} - {""}
        parts: dict[str, tuple[str, Collection[str]]] = {
            "provider": ("FT1201", inventory.providers), "site": ("FT1202", inventory.sites),
            "cluster": ("FT1203", inventory.clusters), "account": ("FT1283", accounts),
        }  # fmt: skip
        for name, limit in limits.items():
            kind, part = limit.scope
            if kind:
                code, known = parts[kind]
                self.refer(code, ("limits", name, kind), part, known, kind)
            currencies = {p.price.currency for p in partitions if p.price is not None}
            if limit.cost is not None and limit.cost.currency not in currencies:
                there = f"prices are in {', '.join(sorted(currencies))}" if currencies else "no partition has a price"
                hint = "write it in the inventory's currency" if currencies else "write `price` for partitions"
                self.say("FT1283", ("limits", name, "cost"), f"{limit.cost.currency}, and {there}", hint)
            elif limit.cost is not None:
                self._unpriced(name, limit, inventory)

    def _unpriced(self, name: str, limit: Limit, inventory: Inventory) -> None:
        unpriced = [
            f"{cluster}/{partition}"
            for cluster, described in inventory.clusters.items()
            for partition, its in described.partitions.items()
            if described.enabled and its.price is None
            if (site := inventory.sites.get(described.site)) is not None
            and limit.holds(provider=site.provider, site=described.site, cluster=cluster, account=its.job.account)
        ]
        if unpriced:
            message = f"{', '.join(sorted(unpriced))}: without a price, so nothing of it counts"
            self.say("FT1284", ("limits", name, "cost"), message, "write `price`, `0 CHF/h` of what is free", "warning")


class InventoryCheck(ReferenceCheck):
    """The inventory by itself."""

    def __init__(self, inventory: Inventory, tree: YamlNode) -> None:
        super().__init__(tree)
        self._inventory = inventory

    def run(self) -> list[Problem]:
        inventory = self._inventory
        for name, site in inventory.sites.items():
            self.refer("FT1201", ("sites", name, "provider"), site.provider, inventory.providers, "provider")
            for number, label in enumerate(site.labels):
                if label in TIERS:
                    hint = "write `tier` in the partition"
                    self.say("FT1251", ("sites", name, "labels", number), f"`{label}` is a tier of partitions", hint)
        for name, cluster in inventory.clusters.items():
            self._cluster(("clusters", name), cluster)
        self._links()
        self._currencies()
        self.check_limits(self._inventory.limits, self._inventory)
        return self._problems

    def _cluster(self, path: Steps, cluster: ClusterSpec) -> None:
        self.refer("FT1202", (*path, "site"), cluster.site, self._inventory.sites, "site")
        if cluster.kind in ("local", "joined") and cluster.login:
            message = f"a {cluster.kind} cluster has no login nodes"
            self.say("FT1216", (*path, "login"), message, "remove `login`, or use kind: ssh")
        if cluster.kind == "kubernetes" or cluster.kubernetes is not None:
            self._kubernetes(path, cluster)
        elif cluster.kind not in ("local", "joined") and not cluster.login:
            hint = "add `login: [{host: …, user: …, host_keys: [ssh-ed25519 …]}]`"
            self.say("FT1217", path, f"a cluster of kind {cluster.kind} needs a login node", hint)
        if cluster.kind == "ssh" and len(cluster.login) > 1:
            hint = "describe each host as a cluster of its own"
            message = "a plain host has one login: what runs on another cannot be seen from it"
            self.say("FT1242", (*path, "login"), message, hint)
        if cluster.after_reboot is not None and cluster.kind != "ssh":
            message = f"only a plain host starts its gateways again after a reboot; this is a {cluster.kind} cluster"
            self.say("FT1245", (*path, "after_reboot"), message, "remove it, or use kind: ssh")
        if cluster.logs is not None and cluster.kind == "kubernetes":
            self.say("FT1245", (*path, "logs"), "the namespace keeps its pods' logs", "remove `logs`")
        folder = cluster.logs.folder if cluster.logs is not None else None
        if cluster.kind == "local" and folder is not None and not folder.startswith(("/", "~/")):
            hint = "write a path that begins with / or ~/"
            self.say("FT1245", (*path, "logs", "folder"), "on a local cluster a relative folder is nobody's", hint)
        self._joined(path, cluster)
        if cluster.enabled and cluster.kind in UNVERIFIED:
            message = f"support for `{cluster.kind}` follows its documentation and was never tried on a real one"
            hint = "try one replica first, and tell us what differs"
            self.say("FT1240", (*path, "kind"), message, hint, "warning")
        self._software(path, cluster)
        for name, partition in cluster.partitions.items():
            self._partition((*path, "partitions", name), partition)
            self._job((*path, "partitions", name), partition, cluster.kind)
            if partition.whole_nodes and cluster.kind == "local":
                hint = "remove it: replicas of a local cluster share its nodes"
                self.say(
                    "FT1239",
                    (*path, "partitions", name, "whole_nodes"),
                    "only a batch scheduler gives whole nodes",
                    hint,
                )

    def _job(self, path: Steps, partition: Partition, kind: str) -> None:
        job = partition.job
        ours = {
            "devices_as": job.devices_as != "gres", "step_options": job.step_options, "successors": job.successors,
        }  # fmt: skip
        for key in [key for key, given in ours.items() if given and kind != "slurm"]:
            self.say("FT1245", (*path, "job", key), f"`{key}` is for Slurm; this is a {kind} cluster", "remove it")
        if job.successors and partition.walltime is None:
            hint = "write the partition's `walltime`"
            self.say("FT1276", (*path, "job", "successors"), "no job follows one that never ends", hint)

    def _software(self, path: Steps, cluster: ClusterSpec) -> None:
        if cluster.environment.given and (cluster.here or cluster.kind in ("kubernetes", "joined")):
            message = f"what starts the units of a {cluster.kind} cluster is no job script"
            hint = "remove `environment`; engines take variables as options"
            self.say("FT1245", (*path, "environment"), message, hint)
        software = cluster.software
        for engine, install in software.engines.items():
            below = (*path, "software", "engines", engine)
            self.refer("FT1206", below, engine, startable(), "engine")
            self._one_way(below, install.ways)
            self._engine_way(below, engine, install, cluster)
        self._one_way((*path, "software", "python"), software.python.ways)

    def _joined(self, path: Steps, cluster: ClusterSpec) -> None:
        """Its nodes are told what model to serve, and nothing else."""
        if cluster.status is not None and not cluster.joined:
            message = f"the units of a {cluster.kind} cluster say themselves how they are"
            self.say("FT1245", (*path, "status"), message, "remove it, or use kind: joined")
        for key in ("logs", "egress") if cluster.joined else ():
            if getattr(cluster, key) is not None:
                message = "that is the affair of whoever lets a node join"
                self.say("FT1245", (*path, key), message, f"remove `{key}`")

    def _kubernetes(self, path: Steps, cluster: ClusterSpec) -> None:
        if cluster.kubernetes is None:
            hint = "add `kubernetes: {context: …, namespace: …}`"
            self.say("FT1241", path, "a cluster of kind kubernetes needs its context and namespace", hint)
        elif cluster.kind != "kubernetes":
            message = f"a cluster of kind {cluster.kind} is not reached by kubectl"
            self.say("FT1241", (*path, "kubernetes"), message, "remove `kubernetes`, or use kind: kubernetes")
        elif cluster.login:
            message = "a cluster of kind kubernetes has no login nodes"
            self.say("FT1241", (*path, "login"), message, "remove `login`")

    def _engine_way(self, path: Steps, engine: str, install: Install, cluster: ClusterSpec) -> None:
        """What the agents of such a cluster cannot do is refused, and not passed over."""
        way = install.ways[0] if install.ways else ""
        if way == "path" and engine in startable() and not engines()[engine].program:
            message, hint = f"{engine} is no program, but a Python package", "name its `venv`, `module` or `container`"
        elif way and cluster.joined:
            message, hint = "where engines are is the affair of whoever lets a node join", f"remove `{way}`"
        elif way in ("module", "container") and cluster.kind == "kubernetes":
            message, hint = (
                "a pod has one image, that of its agent",
                "put the engine into it: `venv`, `path` or nothing",
            )
        elif way in ("module", "container") and cluster.software.python.container is not None:
            message, hint = "agents run in a container, in which there is no other one and no module", "use `venv`"
        else:
            return
        self.say("FT1263", (*path, way), message, hint)

    def _one_way(self, path: Steps, ways: tuple[str, ...]) -> None:
        if len(ways) > 1:
            message = f"installed in {len(ways)} ways at once: {', '.join(ways)}"
            self.say("FT1218", (*path, ways[1]), message, f"keep one, such as `{ways[0]}`")

    def _partition(self, path: Steps, partition: Partition) -> None:
        if self.refer("FT1205", (*path, "device"), partition.device, accelerators(), "device"):
            accelerator = accelerators()[partition.device]
            if accelerator.kind == "cpu" and partition.memory_per_node is None:
                hint = "add `memory_per_node: 64GiB`, or what a node has"
                self.say("FT1219", path, "CPU nodes need their memory: replicas share it", hint)
        for key, name in (("link", partition.link), ("network", partition.network)):
            if name is not None:
                self.refer("FT1209", (*path, key), name, links(), "link")

    def _links(self) -> None:
        seen: dict[frozenset[str], int] = {}
        for index, link in enumerate(self._inventory.links):
            path = ("links", index, "between")
            for end, site in enumerate(link.between):
                self.refer("FT1202", (*path, end), site, self._inventory.sites, "site")
            ends = frozenset(link.between)
            if len(ends) == 1:
                self.say(
                    "FT1220", path, "a link from a site to itself", "inside a site, `network` of a partition says it"
                )
            elif ends in seen:
                also = self.place(("links", seen[ends], "between"))
                message = f"{dotted(path)}: these two sites are linked twice"
                self._problems.append(Problem("FT1221", message, self.place(path), "keep the better one", also=(also,)))
            seen.setdefault(ends, index)

    def _currencies(self) -> None:
        first: tuple[str, Steps] | None = None
        for cluster, described in self._inventory.clusters.items():
            for name, partition in described.partitions.items():
                if partition.price is None:
                    continue
                path = ("clusters", cluster, "partitions", name, "price")
                if first is None:
                    first = (partition.price.currency, path)
                elif partition.price.currency != first[0]:
                    message = f"{dotted(path)}: {partition.price.currency} beside {first[0]}"
                    hint = "write all prices in one currency: rates change, and plans must not"
                    self._problems.append(
                        Problem("FT1222", message, self.place(path), hint, also=(self.place(first[1]),))
                    )
