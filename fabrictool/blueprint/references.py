"""Do the names refer to something, and do the numbers make sense together? FT12xx, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import Problem
from fabrictool.blueprint.complaints import choices, meant
from fabrictool.blueprint.tree import dotted
from fabrictool.catalog import accelerators, engines, links, model, models, startable
from fabrictool.domain.inventory import UNVERIFIED

if TYPE_CHECKING:
    from collections.abc import Collection

    from fabrictool.base.errors import Place
    from fabrictool.blueprint.tree import Steps, YamlNode
    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import ClusterSpec, Inventory, Partition


def check(
    blueprint: Blueprint, inventory: Inventory, blueprint_tree: YamlNode, inventory_tree: YamlNode
) -> list[Problem]:
    """All problems and warnings of the two documents together."""
    return [
        *InventoryCheck(inventory, inventory_tree).run(),
        *BlueprintCheck(blueprint, inventory, blueprint_tree).run(),
    ]


class _Check:
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
        self.say(code, path, f"there is no {noun} `{name}`{where}", meant(name, known, f"{noun}s{where}"))
        return False


class InventoryCheck(_Check):
    """The inventory by itself."""

    def __init__(self, inventory: Inventory, tree: YamlNode) -> None:
        super().__init__(tree)
        self._inventory = inventory

    def run(self) -> list[Problem]:
        inventory = self._inventory
        for name, site in inventory.sites.items():
            self.refer("FT1201", ("sites", name, "provider"), site.provider, inventory.providers, "provider")
        for name, cluster in inventory.clusters.items():
            self._cluster(("clusters", name), cluster)
        self._links()
        self._currencies()
        return self._problems

    def _cluster(self, path: Steps, cluster: ClusterSpec) -> None:
        self.refer("FT1202", (*path, "site"), cluster.site, self._inventory.sites, "site")
        if cluster.kind == "local" and cluster.login:
            self.say(
                "FT1216", (*path, "login"), "a local cluster has no login nodes", "remove `login`, or use kind: ssh"
            )
        if cluster.kind == "kubernetes" or cluster.kubernetes is not None:
            self._kubernetes(path, cluster)
        elif cluster.kind != "local" and not cluster.login:
            hint = "add `login: [{host: …, user: …, host_keys: [ssh-ed25519 …]}]`"
            self.say("FT1217", path, f"a cluster of kind {cluster.kind} needs a login node", hint)
        if cluster.kind == "ssh" and len(cluster.login) > 1:
            hint = "describe each host as a cluster of its own"
            message = "a plain host has one login: what runs on another cannot be seen from it"
            self.say("FT1242", (*path, "login"), message, hint)
        if cluster.enabled and cluster.kind in UNVERIFIED:
            message = f"support for `{cluster.kind}` follows its documentation and was never tried on a real one"
            hint = "try one replica first, and tell us what differs"
            self.say("FT1240", (*path, "kind"), message, hint, "warning")
        software = cluster.software
        for engine, install in software.engines.items():
            below = (*path, "software", "engines", engine)
            self.refer("FT1206", below, engine, startable(), "engine")
            self._one_way(below, install.ways)
        self._one_way((*path, "software", "python"), software.python.ways)
        for name, partition in cluster.partitions.items():
            self._partition((*path, "partitions", name), partition)
            if partition.whole_nodes and cluster.kind == "local":
                hint = "remove it: replicas of a local cluster share its nodes"
                self.say(
                    "FT1239",
                    (*path, "partitions", name, "whole_nodes"),
                    "there is no scheduler here that gives whole nodes",
                    hint,
                )

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


class BlueprintCheck(_Check):
    """The blueprint against the inventory and the catalogue."""

    def __init__(self, blueprint: Blueprint, inventory: Inventory, tree: YamlNode) -> None:
        super().__init__(tree)
        self._blueprint = blueprint
        self._inventory = inventory
        clusters = {name: c for name, c in inventory.clusters.items() if c.enabled}
        self._enabled = clusters
        devices = {p.device for c in inventory.clusters.values() for p in c.partitions.values()}
        self._places = {*inventory.providers, *inventory.sites, *inventory.clusters, *devices}
        self._hosts = {
            name: inventory.sites[c.site].provider
            for name, c in inventory.clusters.items()
            if c.site in inventory.sites
        }
        self._has_engine = {name: set(c.software.engines or startable()) for name, c in inventory.clusters.items()}

    def run(self) -> list[Problem]:
        for name, wanted in self._blueprint.models.items():
            self._model(("models", name), wanted)
        for name, group in self._blueprint.trust.groups.items():
            self._group(("trust", "groups", name), group.allow)
        for name, tenant in self._blueprint.tenants.items():
            path = ("tenants", name, "group")
            self.refer("FT1208", path, tenant.group, self._blueprint.trust.groups, "group")
        self._gateway()
        self._move_price()
        return self._problems

    def _move_price(self) -> None:
        price = self._blueprint.move_price
        partitions = [p for c in self._inventory.clusters.values() for p in c.partitions.values()]
        others = sorted({p.price.currency for p in partitions if p.price is not None})
        if price is None:
            return
        if others and price.currency not in others:
            hint = "write it in the inventory's currency"
            self.say("FT1222", ("move_price",), f"{price.currency} beside {', '.join(others)}", hint)
        if "cost" not in self._blueprint.objective:
            self.say("FT1129", ("move_price",), "it is part of the cost, which `objective` does not have", "add `cost`")

    def _model(self, path: Steps, wanted: Model) -> None:
        if self.refer("FT1206", (*path, "engine"), wanted.engine, startable(), "engine"):
            self._engine(path, wanted)
        for index, provider in enumerate(wanted.trust or ()):
            self.refer("FT1201", (*path, "trust", index), provider, self._inventory.providers, "provider")
        self._trust(path, wanted)
        for key, names in (("prefer", wanted.place.prefer), ("avoid", wanted.place.avoid)):
            for index, name in enumerate(names):
                known = self._places | set(accelerators())
                self.refer("FT1210", (*path, "place", key, index), name, known, "place")
        for name in sorted(set(wanted.place.prefer) & set(wanted.place.avoid)):
            self.say("FT1223", (*path, "place"), f"`{name}` is both preferred and avoided", "keep one")
        self._architecture(path, wanted)
        self._pins(path, wanted)

    def _engine(self, path: Steps, wanted: Model) -> None:
        having = {name for name, known in self._has_engine.items() if wanted.engine in known}
        if not having:
            known = choices(set().union(*self._has_engine.values()))
            hint = f"add it to `software.engines` of a cluster, or use {known}"
            self.say("FT1212", (*path, "engine"), f"no cluster has the engine `{wanted.engine}`", hint)
        elif not having & set(self._enabled):
            message = f"all clusters with the engine `{wanted.engine}` are disabled: nothing will be placed"
            self.say("FT1212", (*path, "engine"), message, f"enable {choices(having)}", "warning")
        held = engines()[wanted.engine].weight_bytes
        if wanted.variant.precision not in held:
            message = f"{wanted.engine} does not hold weights as {wanted.variant.precision}"
            self.say(
                "FT1213", (*path, "variant", "precision"), message, meant(wanted.variant.precision, held, "one of")
            )

    def _trust(self, path: Steps, wanted: Model) -> None:
        if wanted.trust is None or any(name not in self._inventory.providers for name in wanted.trust):
            return
        if not wanted.trust:
            self.say("FT1214", (*path, "trust"), "nobody may serve this model", "name a provider, or leave `trust` out")
            return
        theirs = {name for name, provider in self._hosts.items() if provider in wanted.trust}
        providers = " or ".join(f"`{name}`" for name in wanted.trust)
        if not theirs:
            self.say("FT1214", (*path, "trust"), f"no cluster belongs to {providers}", "add a provider that has one")
        elif not theirs & set(self._enabled):
            message = f"all clusters of {providers} are disabled: nothing will be placed"
            self.say("FT1214", (*path, "trust"), message, f"enable {choices(theirs)}", "warning")

    def _architecture(self, path: Steps, wanted: Model) -> None:
        architecture = model(wanted.architecture_id)
        key = "architecture" if wanted.architecture is not None else "source"
        if architecture is None:
            known = [*models(), *(alias for entry in models().values() for alias in entry.aliases)]
            if key == "source" and not wanted.source.startswith("hf://"):
                hint = "add `architecture:` with the model id of the catalogue that these weights are of"
                self.say("FT1211", path, "the source does not say which model this is", hint)
            else:
                self.refer("FT1207", (*path, key), wanted.architecture_id, known, "catalogued model")
            return
        context = wanted.variant.context
        if context is not None and context > architecture.max_context:
            message = f"{context} is beyond what {architecture.id} was made for"
            self.say("FT1224", (*path, "variant", "context"), message, f"at most {architecture.max_context} tok")
        demand = wanted.demand
        if demand is None or demand.input is None or demand.output is None:
            return
        longest = int(context or architecture.max_context)
        mean = int(demand.input.mean) + int(demand.output.mean)
        if mean > longest:
            message = f"an average request has {mean} tok, but the context holds {longest} tok"
            self.say("FT1225", (*path, "demand"), message, "raise `variant.context`, or correct the lengths")

    def _pins(self, path: Steps, wanted: Model) -> None:
        pinned = 0
        seen: set[tuple[str, str | None]] = set()
        for index, pin in enumerate(wanted.place.pin):
            below = (*path, "place", "pin", index)
            pinned += pin.replicas
            if (pin.cluster, pin.partition) in seen:
                self.say("FT1226", below, "the same place is pinned twice", "keep one, with the number that is meant")
            seen.add((pin.cluster, pin.partition))
            if not self.refer("FT1203", (*below, "cluster"), pin.cluster, self._inventory.clusters, "cluster"):
                continue
            cluster = self._inventory.clusters[pin.cluster]
            if not cluster.enabled:
                self.say(
                    "FT1227", (*below, "cluster"), f"cluster `{pin.cluster}` is disabled", "enable it, or move the pin"
                )
            if pin.partition is not None and not self.refer(
                "FT1204", (*below, "partition"), pin.partition, cluster.partitions, "partition", f" in {pin.cluster}"
            ):
                continue
            chosen = [p for name, p in cluster.partitions.items() if pin.partition in (None, name)]
            room = sum(p.nodes * p.devices_per_node for p in chosen)
            if pin.replicas > room:
                where = pin.cluster if pin.partition is None else f"{pin.cluster}/{pin.partition}"
                message = f"{pin.replicas} replicas are pinned to {where}, which has {room} devices"
                self.say("FT1215", (*below, "replicas"), message, "a replica needs a device of its own")
        if pinned > wanted.replicas.max:
            message = f"{pinned} replicas are pinned, `replicas.max` is {wanted.replicas.max}"
            self.say("FT1228", (*path, "place", "pin"), message, "raise the maximum, or pin fewer")

    def _group(self, path: Steps, allow: tuple[str, ...]) -> None:
        for index, provider in enumerate(allow):
            self.refer("FT1201", (*path, "allow", index), provider, self._inventory.providers, "provider")
        if not allow:
            hint = "name a provider, or remove the group"
            self.say("FT1229", path, "this group allows nobody: its requests are all refused", hint, "warning")

    def _gateway(self) -> None:
        gateway = self._blueprint.gateway
        if gateway is None:
            if self._blueprint.tenants:
                hint = "add `gateway: {cluster: …, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}`"
                self.say("FT1230", ("tenants",), "there are tenants but no gateway to serve them", hint, "warning")
            return
        path: Steps = ("gateway",)
        known = self.refer("FT1203", (*path, "cluster"), gateway.cluster, self._inventory.clusters, "cluster")
        if known and gateway.cluster not in self._enabled:
            message = f"cluster `{gateway.cluster}` is disabled"
            self.say("FT1227", (*path, "cluster"), message, "enable it, or move the gateway")
        if gateway.listen == gateway.mesh and gateway.listen.port != 0:
            message = f"clients and agents cannot share {gateway.mesh}"
            self.say("FT1231", (*path, "mesh"), message, "give the mesh listener another port")
        if not self._blueprint.tenants:
            hint = "add `tenants: {me: {group: …, key: secret://env/NAME}}`"
            self.say("FT1232", path, "there is no tenant: nobody has a key for this gateway", hint, "warning")
