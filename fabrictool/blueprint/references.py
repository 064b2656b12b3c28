"""Do the names refer to something, and do the numbers make sense together? FT12xx, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import Problem
from fabrictool.base.plugins import ROUTING_POLICIES as PLUGINS
from fabrictool.base.plugins import plugin_names
from fabrictool.base.units import Rate
from fabrictool.blueprint.architecture_check import ArchitectureCheck, unknown_model_hint
from fabrictool.blueprint.complaints import choices, masked, meant
from fabrictool.blueprint.gateway_check import GatewayCheck
from fabrictool.blueprint.inventory_check import InventoryCheck, ReferenceCheck
from fabrictool.blueprint.tree import dotted
from fabrictool.catalog import accelerators, catalogued_ids, engines, startable
from fabrictool.domain.blueprint import ROUTING_POLICIES, staged_name

if TYPE_CHECKING:
    from fabrictool.blueprint.tree import Steps, YamlNode
    from fabrictool.catalog import ModelArchitecture
    from fabrictool.domain.blueprint import Blueprint, Model
    from fabrictool.domain.inventory import Inventory


def check(
    blueprint: Blueprint, inventory: Inventory, blueprint_tree: YamlNode, inventory_tree: YamlNode
) -> list[Problem]:
    """All problems and warnings of the two documents together."""
    return [
        *InventoryCheck(inventory, inventory_tree).run(),
        *BlueprintCheck(blueprint, inventory, blueprint_tree).run(),
    ]


class BlueprintCheck(ReferenceCheck):
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
        builds = self._blueprint.trust.builds
        for index, provider in enumerate(() if builds is None else builds.providers or ()):
            steps = ("trust", "builds", "providers", index)
            self.refer("FT1201", steps, provider, self._inventory.providers, "provider")
        for name, tenant in self._blueprint.tenants.items():
            path = ("tenants", name, "group")
            self.refer("FT1208", path, tenant.group, self._blueprint.trust.groups, "group")
        self._aliases()
        self._keys()
        self._move_price()
        self._carbon()
        self.check_limits(self._blueprint.limits, self._inventory)
        for name in sorted(set(self._blueprint.limits) & set(self._inventory.limits)):
            self.say("FT1283", ("limits", name), "the inventory has a limit of this name, too", "give it another name")
        self._routing()
        gateways = GatewayCheck(self._blueprint, self._inventory, self._tree).run()
        return [*self._problems, *ArchitectureCheck(self._blueprint.architectures, self._tree).run(), *gateways]

    def _routing(self) -> None:
        policy = self._blueprint.routing.policy
        if policy not in ROUTING_POLICIES:  # others are looked up on the disk
            known = (*ROUTING_POLICIES, *plugin_names(PLUGINS))
            self.refer("FT8003", ("routing", "policy"), policy, known, "routing policy")

    def _aliases(self) -> None:
        """One name is one model."""
        owners = {name: name for name in self._blueprint.models}
        for name, wanted in self._blueprint.models.items():
            for key, names in (("adapter", wanted.adapters), ("companion", wanted.companions)):
                for beside in names:
                    if beside in owners:
                        message = f"`{beside}` is already the name of {owners[beside]}"
                        self.say("FT1250", ("models", name, f"{key}s", beside), message, "a name leads to one model")
                    owners.setdefault(beside, f"{key} of {name}")
        for name, wanted in self._blueprint.models.items():
            for index, alias in enumerate(wanted.aliases):
                owner = owners.setdefault(alias, f"alias of {name}")
                if owner != f"alias of {name}" or alias in wanted.aliases[:index]:
                    path = ("models", name, "aliases", index)
                    message = f"`{alias}` is already the name of {owner.removeprefix('alias of ')}"
                    self.say("FT1250", path, message, "a name leads to one model: remove it")

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

    def _carbon(self) -> None:
        if "carbon" not in self._blueprint.objective:
            return
        used = {its.site for its in self._inventory.clusters.values() if its.enabled} & self._inventory.sites.keys()
        unknown = sorted(name for name in used if self._inventory.sites[name].carbon is None)
        if unknown:
            message = f"nothing says what electricity emits at {', '.join(unknown)}"
            self.say("FT1285", ("objective",), message, "write `carbon` for these sites, such as `45 g/kWh`")

    def _model(self, path: Steps, wanted: Model) -> None:
        for index, its in enumerate(wanted.each_variant.values()):
            below = (*path, "variants", index) if wanted.variants else path
            if self.refer("FT1206", (*below, "engine"), its.engine, startable(), "engine"):
                self._engine(below, its)
                self._precision((*below, *(() if wanted.variants else ("variant",)), "precision"), its)
        for index, provider in enumerate(wanted.trust or ()):
            self.refer("FT1201", (*path, "trust", index), provider, self._inventory.providers, "provider")
        for index, group in enumerate(wanted.groups or ()):
            self.refer("FT1208", (*path, "groups", index), group, self._blueprint.trust.groups, "group")
        own = [((*path, "variants", at, "source"), its.source) for at, its in enumerate(wanted.variants) if its.source]
        own += [((*path, "source"), wanted.source)] if wanted.source in wanted.sources else []
        own += [((*path, "adapters", name, "source"), its.source) for name, its in wanted.adapters.items()]
        own += [((*path, "companions", name, "source"), its.source) for name, its in wanted.companions.items()]
        for place, source in own:
            staged = staged_name(source)
            if staged is not None:
                self.refer("FT1270", place, staged[0], self._blueprint.weights, "weights")
        self._trust(path, wanted)
        self._groups(path, wanted)
        for key, names in (("prefer", wanted.place.prefer), ("avoid", wanted.place.avoid)):
            for index, name in enumerate(names):
                known = self._places | set(accelerators())
                self.refer("FT1210", (*path, "place", key, index), name, known, "place")
        for name in sorted(set(wanted.place.prefer) & set(wanted.place.avoid)):
            self.say("FT1223", (*path, "place"), f"`{name}` is both preferred and avoided", "keep one")
        self._architecture(path, wanted)
        self._pins(path, wanted)
        self._idle(path, wanted)

    def _engine(self, path: Steps, wanted: Model) -> None:
        having = {name for name, known in self._has_engine.items() if wanted.engine in known}
        if not having:
            known = choices(set().union(*self._has_engine.values()))
            hint = f"add it to `software.engines` of a cluster, or use {known}"
            self.say("FT1212", (*path, "engine"), f"no cluster has the engine `{wanted.engine}`", hint)
        elif not having & set(self._enabled):
            message = f"all clusters with the engine `{wanted.engine}` are disabled: nothing will be placed"
            self.say("FT1212", (*path, "engine"), message, f"enable {choices(having)}", "warning")
        if wanted.phases == "split" and not engines()[wanted.engine].hands_over:
            able = choices({name for name, engine in startable().items() if engine.hands_over})
            hint = f"use {able}, or leave `phases` out"
            self.say("FT1258", (*path, "phases"), f"{wanted.engine} cannot compute prompts for another replica", hint)
        loaders = engines()[wanted.engine].loaders
        if wanted.loader in ("eager", "streamer") and wanted.loader not in loaders:
            hint = f"leave `loader` out, or write {', '.join(loaders)}" if loaders else "leave `loader` out"
            self.say("FT1275", (*path, "loader"), f"{wanted.engine} cannot load weights by `{wanted.loader}`", hint)
        self._adapters(path, wanted)
        self._companions(path, wanted)

    def _precision(self, path: Steps, wanted: Model) -> None:
        held = engines()[wanted.engine].weight_bytes
        if wanted.variant.precision not in held:
            message = f"{wanted.engine} does not hold weights as {wanted.variant.precision}"
            self.say("FT1213", path, message, meant(wanted.variant.precision, held, "one of"))

    def _adapters(self, path: Steps, wanted: Model) -> None:
        if wanted.adapters and not engines()[wanted.engine].serves_adapters:
            able = choices({name for name, engine in startable().items() if engine.serves_adapters})
            self.say("FT1268", (*path, "adapters"), f"{wanted.engine} serves no adapters by name", f"use {able}")
        for name, adapter in wanted.adapters.items():
            if not adapter.source.startswith(("file://", "weights://")):
                hint = "fetch it, and write file:///FOLDER, or stage it and write weights://NAME"
                self.say("FT1269", (*path, "adapters", name, "source"), "an adapter is a folder on its site", hint)

    def _companions(self, path: Steps, wanted: Model) -> None:
        if not wanted.companions:
            return
        where = (*path, "companions")
        if not engines()[wanted.engine].shares_memory:
            able = choices({name for name, engine in startable().items() if engine.shares_memory})
            hint = f"use {able}, or make each a model of its own"
            self.say("FT1278", where, f"{wanted.engine} does not serve several models out of one memory", hint)
        cut = wanted.parallelism
        if max(cut.tp or 1, cut.pp or 1, cut.dp or 1) > 1:
            hint = "leave `parallelism` out, or make each a model of its own"
            self.say("FT1278", where, "several models share one engine on one device", hint)
        for name, its in wanted.companions.items():
            own = wanted.demand
            if its.demand is not None and (own is None or own.rate == Rate(0)):
                message = "it counts in proportion to the model's own demand, and there is none"
                self.say("FT1278", (*where, name, "demand"), message, "add `demand` to the model")
            self._companion((*where, name), wanted, wanted.companion(name))

    def _companion(self, path: Steps, wanted: Model, companion: Model) -> None:
        architecture = self._known(path, companion)
        context = wanted.variant.context
        if architecture is not None and context is not None and context > architecture.max_context:
            message = f"its engine is started with a context of {context}, which exceeds that of {architecture.id}"
            self.say("FT1224", path, message, f"at most {architecture.max_context} tok in `variant.context`")
        if architecture is not None:
            self._lengths(path, companion, architecture)

    def _groups(self, path: Steps, wanted: Model) -> None:
        """Whose parts of the demand are named."""
        shares = {} if wanted.demand is None else wanted.demand.groups or {}
        for name in shares:
            where = (*path, "demand", "groups", name)
            known = self.refer("FT1208", where, name, self._blueprint.trust.groups, "group")
            if known and wanted.groups is not None and name not in wanted.groups:
                self.say("FT1282", where, f"{name} may not ask for this model", "add it to the model's `groups`")
        for name, its in wanted.companions.items():
            if its.demand is not None and its.demand.groups is not None:
                hint = "leave them out, or make it a model of its own"
                where = (*path, "companions", name, "demand", "groups")
                self.say("FT1282", where, "a companion's requests go where its model's go", hint)

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
        architecture = self._known(path, wanted)
        if architecture is None:
            return
        for index, its in enumerate(wanted.each_variant.values()):
            own = bool(wanted.variants) and wanted.variants[index].context is not None
            below = (*path, "variants", index, "context") if own else (*path, "variant", "context")
            context = its.variant.context
            if context is not None and context > architecture.max_context:
                message = f"{context} exceeds the context length of {architecture.id}"
                self.say("FT1224", below, message, f"at most {architecture.max_context} tok")
            self._lengths(path, its, architecture)

    def _known(self, path: Steps, wanted: Model) -> ModelArchitecture | None:
        """The model's architecture; None after a complaint."""
        architecture = self._blueprint.architecture(wanted)
        key = "architecture" if wanted.architecture is not None else "source"
        if architecture is None and key == "source" and not wanted.source.startswith("hf://"):
            hint = "add `architecture:` with the model id of the catalogue that these weights are of"
            self.say("FT1211", path, "the source does not say which model this is", hint)
        elif architecture is None:
            message = f"there is no catalogued model `{wanted.architecture_id}`"
            known = [*catalogued_ids(), *self._blueprint.architectures]
            self.say("FT1207", (*path, key), message, unknown_model_hint(wanted.architecture_id, known))
        return architecture

    def _lengths(self, path: Steps, wanted: Model, architecture: ModelArchitecture) -> None:
        demand = wanted.demand
        if demand is None or demand.input is None or demand.output is None:
            return
        longest = int(wanted.variant.context or architecture.max_context)
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

    def _idle(self, path: Steps, wanted: Model) -> None:
        if wanted.replicas.idle_after is not None and wanted.replicas.min == 0 and wanted.demand is None:
            hint = "add `demand`, such as {rate: 0.1 req/s, input: 500 tok, output: 200 tok}"
            message = "with `min: 0` and no demand it gets no replica that could be started when somebody asks"
            self.say("FT1267", (*path, "replicas"), message, hint)

    def _group(self, path: Steps, allow: tuple[str, ...]) -> None:
        for index, provider in enumerate(allow):
            self.refer("FT1201", (*path, "allow", index), provider, self._inventory.providers, "provider")
        if not allow:
            hint = "name a provider, or remove the group"
            self.say("FT1229", path, "this group allows nobody: its requests are all refused", hint, "warning")

    def _keys(self) -> None:
        """Equal references are equal keys; equal keys behind different references show when they are resolved."""
        first: dict[str, Steps] = {}
        for name, tenant in self._blueprint.tenants.items():
            path, text = ("tenants", name, "key"), str(tenant.key)
            if text in first:
                message = f"{dotted(path)}: the key of `{first[text][1]}`, too: whose request it is could not be told"
                also = (masked(self.place(first[text])),)
                hint = "give each tenant a key of its own"
                self._problems.append(Problem("FT1410", message, self.place(path), hint, also=also))
            first.setdefault(text, path)
