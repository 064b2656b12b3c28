"""From a login node of the inventory to a connection. Each SSH implementation is loaded when it is asked for."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import UsageError
from fabrictool.blueprint.secrets import resolve
from fabrictool.clusters.connections.protocol import Connection, Endpoint
from fabrictool.domain.secrets import SecretRef

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.clusters.connections.fabric_connection import FabricConnection
    from fabrictool.clusters.connections.loopthread import LoopThread
    from fabrictool.clusters.connections.settings import ConnectionLimits
    from fabrictool.domain.inventory import Inventory, Login

How = Literal["asyncssh", "openssh", "fabric"]


def connect(
    endpoint: Endpoint,
    how: How = "asyncssh",
    *,
    limits: ConnectionLimits | None = None,
    loop: LoopThread | None = None,
    control_path: str = "",
    ssh_config: bool = False,
) -> Connection:
    """A connection that is opened when it is first used.

    `loop` (asyncssh) may be shared by several; `control_path` and `ssh_config` are for openssh. Fabric is for verbs at
    a keyboard: nothing that plans or applies may ask for it.
    """
    if how == "openssh":
        from fabrictool.clusters.connections.openssh_connection import OpensshConnection  # noqa: PLC0415 - on demand

        return OpensshConnection(endpoint, limits=limits, control_path=control_path, ssh_config=ssh_config)
    if how == "fabric":
        return keyboard(endpoint, limits=limits)
    from fabrictool.clusters.connections.asyncssh_connection import AsyncsshConnection  # noqa: PLC0415 - on demand

    return AsyncsshConnection(endpoint, limits=limits, loop=loop)


def keyboard(endpoint: Endpoint, *, limits: ConnectionLimits | None = None) -> FabricConnection:
    """A connection that can give the terminal to the other side."""
    # By name: import contracts forbid that the rooms which reconcile reach Fabric, and they do reach this module.
    module = importlib.import_module("fabrictool.clusters.connections.fabric_connection")
    connection: FabricConnection = module.FabricConnection(endpoint, limits=limits)
    return connection


def connect_login(
    login: Login,
    *,
    limits: ConnectionLimits | None = None,
    loop: LoopThread | None = None,
    environment: Mapping[str, str] | None = None,
) -> Connection:
    """The connection that the inventory asks for."""
    return connect(
        endpoint_of(login, environment),
        login.transport,
        limits=limits,
        loop=loop,
        control_path=login.control_path or "",
        ssh_config=login.ssh_config,
    )


def endpoint_of(login: Login, environment: Mapping[str, str] | None = None) -> Endpoint:
    """Where a login node is; users' names that are secrets are resolved.

    Raises
    ------
    FabrictoolError
        FT140x when a user's name cannot be resolved.
    """
    user, identity = _user(login.user, environment), login.identity or ""
    jumps = tuple(
        Endpoint(hop.host, hop.port, _user(hop.user, environment) if hop.user else user, hop.host_keys, (), identity)
        for hop in login.jump
    )
    return Endpoint(login.host, login.port, user, login.host_keys, jumps, identity)


def _user(name: str | SecretRef, environment: Mapping[str, str] | None) -> str:
    return resolve(name, os.environ if environment is None else environment) if isinstance(name, SecretRef) else name


def at_keyboard(login: Login) -> Connection:
    """For verbs that a person types: Fabric's; where the site wants a person, OpenSSH's own, as the inventory says."""
    return connect_login(login) if login.transport == "openssh" else keyboard(endpoint_of(login))


def login_of(inventory: Inventory, cluster: str) -> Login:
    """The first login node of a cluster.

    Raises
    ------
    UsageError
        FT5341 when there is no such cluster, FT5342 when it has no login node.
    """
    described = inventory.clusters.get(cluster)
    if described is None:
        names = ", ".join(name for name, other in inventory.clusters.items() if other.login) or "none"
        message = f"the inventory has no cluster `{cluster}`"
        raise UsageError.of("FT5341", message, hint=f"clusters with login nodes: {names}")
    if not described.login:
        message = f"the cluster `{cluster}` has no login node: it is of kind {described.kind}"
        raise UsageError.of("FT5342", message, hint="its units run on this machine" if described.here else None)
    return described.login[0]
