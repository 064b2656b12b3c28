"""Can the gateways run where they shall, and can agents and other gateways reach them there?"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from itertools import combinations
from typing import TYPE_CHECKING

from fabrictool.blueprint.complaints import choices
from fabrictool.blueprint.inventory_check import ReferenceCheck

if TYPE_CHECKING:
    from fabrictool.base.errors import Problem
    from fabrictool.blueprint.tree import Steps, YamlNode
    from fabrictool.domain.blueprint import Blueprint, Gateway, OpenIdLogin
    from fabrictool.domain.inventory import ClusterSpec, Inventory
    from fabrictool.domain.specs import HostPort


@dataclass(frozen=True, slots=True)
class _Listener:
    """One address at which a gateway listens."""

    gateway: str
    path: Steps
    machine: str
    address: HostPort


class GatewayCheck(ReferenceCheck):
    """All gateways of a blueprint against the inventory, and against each other."""

    def __init__(self, blueprint: Blueprint, inventory: Inventory, tree: YamlNode) -> None:
        super().__init__(tree)
        self._blueprint = blueprint
        self._inventory = inventory
        self._enabled = {name for name, cluster in inventory.clusters.items() if cluster.enabled}

    def run(self) -> list[Problem]:
        blueprint = self._blueprint
        if blueprint.gateway is not None and blueprint.gateways:
            hint = "move it below `gateways`, such as `main: {cluster: …, listen: …, mesh: …}`, and remove `gateway`"
            self.say("FT1243", ("gateway",), "`gateways` lists gateways, too: which are meant?", hint)
            return self._problems
        if not blueprint.every_gateway:
            if blueprint.tenants:
                hint = "add `gateway: {cluster: …, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}`"
                self.say("FT1230", ("tenants",), "there are tenants but no gateway to serve them", hint, "warning")
            return self._problems
        top: Steps = ("gateways",) if blueprint.gateways else ("gateway",)
        below = {name: ("gateways", name) if blueprint.gateways else top for name in blueprint.written_gateways}
        for name, gateway in blueprint.written_gateways.items():
            self._gateway(below[name], gateway)
        self._workers(below)
        if all(gateway.listen is None for gateway in blueprint.written_gateways.values()):
            hint = "give one of them `listen`, an address for clients"
            self.say("FT1246", top, "no gateway listens for clients: nobody can ask for anything", hint)
        self._budgets(blueprint)
        self._key_apis(below)
        if not blueprint.tenants and blueprint.key_api is None:
            hint = "add `tenants: {me: {group: …, key: secret://env/NAME}}`"
            self.say("FT1232", top, "there is no tenant: nobody has a key for a gateway", hint, "warning")
        return self._problems

    def _budgets(self, blueprint: Blueprint) -> None:
        """Gateways that do not share a ledger cannot know what others have spent; and terms name models that exist."""
        stores = [there.records.database for there in blueprint.written_gateways.values() if there.listen is not None]
        shared = len(stores) < 2 or (None not in stores and len(set(stores)) == 1)
        for name, tenant in blueprint.tenants.items():
            if tenant.budget is not None and not shared:
                message = f"{len(stores)} gateways keep the budget of {name} apart: together they would overspend it"
                hint = "name one PostgreSQL database in the `records` of each of them"
                self.say("FT1247", ("tenants", name, "budget"), message, hint)
            for index, model in enumerate(tenant.models or ()):
                known = {*blueprint.models, *blueprint.bases}
                self.refer("FT1248", ("tenants", name, "models", index), model, known, "model")

    def _key_apis(self, below: dict[str, Steps]) -> None:
        """Keys that are made at one gateway are good at all that have a key API."""
        having = {name: its for name, its in self._blueprint.written_gateways.items() if its.key_api is not None}
        stores = [gateway.records.database for gateway in having.values() if gateway.listen is not None]
        for name, gateway in having.items():
            path, api = (*below[name], "key_api"), gateway.key_api
            if api is not None:
                self.refer("FT1208", (*path, "group"), api.group, self._blueprint.trust.groups, "group")
                self._login((*path, "login"), api.login)
            if gateway.listen is None:
                self.say("FT1249", path, "a gateway without `listen` has no clients, and no key API", "remove it here")
            elif api != self._blueprint.key_api:
                message = f"the key API of `{next(iter(having))}` has another key or group"
                self.say("FT1249", path, message, "write the same at all gateways that have a key API")
            elif len(stores) > 1 and (None in stores or len(set(stores)) > 1):
                message = f"{len(stores)} gateways keep the keys that they make apart: each knows its own only"
                hint = "name one PostgreSQL database in the `records` of each of them"
                self.say("FT1249", path, message, hint)

    def _login(self, path: Steps, login: OpenIdLogin | None) -> None:
        groups = self._blueprint.trust.groups
        if login is not None and login.group is not None:
            self.refer("FT1208", (*path, "group"), login.group, groups, "group")
        for name, group in login.groups.items() if login is not None else ():
            self.refer("FT1208", (*path, "groups", name), group, groups, "group")

    def _gateway(self, path: Steps, gateway: Gateway) -> None:
        if gateway.listen == gateway.mesh and gateway.listen.port != 0:
            message = f"clients and agents cannot share {gateway.mesh}"
            self.say("FT1231", (*path, "mesh"), message, "give the mesh listener another port")
        if gateway.telemetry is not None and gateway.listen is None:
            message = "a gateway without `listen` has no clients, and no requests to trace"
            self.say("FT1256", (*path, "telemetry"), message, "remove it here")
        if not self.refer("FT1203", (*path, "cluster"), gateway.cluster, self._inventory.clusters, "cluster"):
            return
        if gateway.cluster not in self._enabled:
            message = f"cluster `{gateway.cluster}` is disabled"
            self.say("FT1227", (*path, "cluster"), message, "enable it, or move the gateway")
        if self._inventory.clusters[gateway.cluster].queues:
            message = f"a gateway cannot be a job of {gateway.cluster}: its address would change with every start"
            hint = "describe a host that stays, such as the login node, as a cluster of kind `ssh`, and name that"
            self.say("FT1234", (*path, "cluster"), message, hint)
        elif self._inventory.clusters[gateway.cluster].joined:
            message = f"a gateway cannot run on {gateway.cluster}: nodes that joined are told what model to serve only"
            self.say("FT1234", (*path, "cluster"), message, "name a cluster of kind `local` or `ssh`")
        else:
            self._mesh(path, gateway)

    def _mesh(self, path: Steps, gateway: Gateway) -> None:
        """Agents and other gateways dial it: on another machine a loopback address is that machine's own."""
        if not is_own_machine(gateway.hub.host):
            return
        home = self._inventory.clusters[gateway.cluster]
        # A plain host and this machine have all of their units on one machine; nodes of a scheduler are many.
        # Nodes that joined were told by their token where the gateways are.
        joined = {name for name, cluster in self._inventory.clusters.items() if cluster.joined}
        others = self._enabled - joined - {gateway.cluster}
        away = sorted(name for name in others if not self._both_here(name, home))
        if home.kind == "kubernetes":
            away = [gateway.cluster, *away]
        if away:
            key = "mesh" if gateway.advertise is None else "advertise"
            message = f"agents on {choices(away)} cannot reach {gateway.hub}: there it is their own machine"
            hint = "write an address of the gateway's machine that they can reach, such as 10.1.2.3:8012"
            self.say("FT1233", (*path, key), message, hint)

    def _both_here(self, name: str, home: ClusterSpec) -> bool:
        return home.here and self._inventory.clusters[name].here

    def _workers(self, below: dict[str, Steps]) -> None:
        """They are gateways of their own, but for what they share."""
        paths: dict[str, Steps] = {}
        for name, gateway in self._blueprint.written_gateways.items():
            for worker, _ in gateway.each_worker(name):
                if worker in below and worker != name:
                    message = f"`{worker}` is the name of a worker of `{name}`"
                    self.say("FT1262", below[worker], message, "give it another name")
                paths[worker] = below[name]
        self._addresses(paths)

    def _addresses(self, below: dict[str, Steps]) -> None:
        """No two gateways listen at one address of a machine, or are dialled at the same one."""
        gateways = self._blueprint.every_gateway
        listeners = [
            _Listener(name, (*below[name], key), self._machine(gateway), address)
            for name, gateway in gateways.items()
            for key, address in gateway.listeners.items()
        ]
        for former, latter in combinations(listeners, 2):
            shared = former.path == latter.path and former.path[-1] == "listen"  # of workers
            apart = former.gateway == latter.gateway or former.machine != latter.machine or shared
            if not apart and _collide(former.address, latter.address):
                message = f"the gateway `{former.gateway}` listens on {former.address} of the same machine"
                self.say("FT1244", latter.path, message, "give each listener of a machine a port of its own")
        for (name, gateway), (other, second) in combinations(gateways.items(), 2):
            apart = self._machine(gateway) == self._machine(second) or is_own_machine(gateway.hub.host)
            if not apart and gateway.hub == second.hub and gateway.hub.port != 0:
                path = (*below[other], "mesh" if second.advertise is None else "advertise")
                message = f"the gateway `{name}` is reached at {gateway.hub}, too: agents would reach one of them only"
                self.say("FT1244", path, message, "write an address of each gateway's own machine")

    def _machine(self, gateway: Gateway) -> str:
        described = self._inventory.clusters.get(gateway.cluster)
        return "" if described is not None and described.here else gateway.cluster


def _collide(former: HostPort, latter: HostPort) -> bool:
    """Whether two listeners of one machine would get in each other's way; port 0 is any free one."""
    same_host = former.host == latter.host or any(_is_every(address.host) for address in (former, latter))
    return former.port == latter.port != 0 and same_host


def _is_every(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def is_own_machine(host: str) -> bool:
    """Whether `host` means, on any machine, that machine."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
