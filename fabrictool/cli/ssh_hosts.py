"""`top --ssh`: clusters of an inventory, or hosts as the operator's own `ssh` knows them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli.hosts import split_target
from fabrictool.cli.source import Source, find_blueprint
from fabrictool.clusters.hostpages import HostPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.connections.protocol import Connection, Endpoint
    from fabrictool.domain.inventory import Inventory


def beside_a_blueprint(source: Source) -> Source | None:
    """The source, unless no blueprint was named and none is here."""
    if source.path is not None:
        return source
    try:
        find_blueprint(None)
    except FabrictoolError:
        return None
    return source


def host_pages(names: Sequence[str], source: Source) -> list[HostPages]:
    """Of each name; no connection is made yet.

    Raises
    ------
    FabrictoolError
        FT5342 a cluster without a login node, FT9002 what is no host, FT5304, FT5343 a host that `ssh` does not know.
    """
    known = beside_a_blueprint(source)
    fabric = known.identity.fabric if known is not None else ""
    inventory = _inventory(source, known)
    return [_host(name, inventory, fabric) for name in names]


def _inventory(source: Source, known: Source | None) -> Inventory | None:
    if known is not None:
        return known.identity.inventory
    return source.inventory_alone() if source.inventory_path is not None else None


def _host(name: str, inventory: Inventory | None, fabric: str) -> HostPages:
    from fabrictool.clusters.connections.factory import connect_login, login_of

    described = inventory.clusters.get(name) if inventory is not None else None
    if inventory is None or described is None:
        return HostPages(name, partial(_by_config, _endpoint(name)), fabric=fabric)
    login_of(inventory, name)
    logins = described.login
    return HostPages(name, lambda: [connect_login(login) for login in logins], folder=described.folder, fabric=fabric)


def _endpoint(name: str) -> Endpoint:
    from fabrictool.clusters.connections.sshconfig import endpoint_by_config

    user, host, port = split_target(name)
    return endpoint_by_config(host, user, port if name.endswith(f":{port}") else None)


def _by_config(endpoint: Endpoint) -> list[Connection]:
    from fabrictool.clusters.connections.factory import connect
    from fabrictool.clusters.connections.sshconfig import config_file

    return [connect(endpoint, "openssh", ssh_config=config_file() is not None)]
