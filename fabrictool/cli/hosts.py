"""Login nodes as the command line names them: of an inventory, or HOST:PORT; shared by `trust host` and `shell`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError, UsageError

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Endpoint
    from fabrictool.domain.inventory import Inventory, Login

_TARGET = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?"
)


def read_inventory(blueprint: Path | None, inventory: Path | None) -> Inventory:
    """The inventory that is given, else the one that the blueprint names; an inventory alone needs no blueprint."""
    from fabrictool.cli.fabrics import load

    if blueprint is not None or inventory is None:
        return load(blueprint, inventory).inventory
    from pydantic import ValidationError

    from fabrictool.blueprint.complaints import problems_of
    from fabrictool.blueprint.reader import read
    from fabrictool.domain.inventory import Inventory

    root = read(inventory, str(inventory))
    try:
        return Inventory.model_validate(root.data())
    except ValidationError as error:
        raise InvalidInputError(problems_of(error, root, Inventory)) from error


def login_of(inventory: Inventory, cluster: str) -> Login:
    """The first login node of a cluster.

    Raises
    ------
    UsageError
        FT5341 when there is no such cluster, FT5342 when it has no login node.
    """
    found = inventory.clusters.get(cluster)
    if found is None:
        names = ", ".join(name for name, described in inventory.clusters.items() if described.login) or "none"
        message = f"the inventory has no cluster `{cluster}`"
        raise UsageError.of("FT5341", message, hint=f"clusters with login nodes: {names}")
    if not found.login:
        message = f"the cluster `{cluster}` has no login node: it is of kind {found.kind}"
        raise UsageError.of("FT5342", message, hint="its units run on this machine")
    return found.login[0]


def split_target(text: str) -> tuple[str, str, int]:
    """``[USER@]HOST[:PORT]`` as user (may be empty), host and port.

    Raises
    ------
    UsageError
        FT9002.
    """
    match = _TARGET.fullmatch(text)
    port = int(match["port"] or 22) if match else 0
    if match is None or not 0 < port < 65536 or (match["host"] or "").startswith("-"):
        raise UsageError.of("FT9002", f"`{text}` is not HOST or HOST:PORT", hint="such as login.example.org:22")
    return match["user"] or "", match["six"] or match["host"], port


def known_endpoints(inventory: Inventory | None) -> list[tuple[str, Endpoint]]:
    """Every login node and jump host of the inventory, with the cluster that it belongs to."""
    from fabrictool.clusters.connections.factory import endpoint_of

    found: list[tuple[str, Endpoint]] = []
    for name, cluster in inventory.clusters.items() if inventory else ():
        for login in cluster.login:
            endpoint = endpoint_of(login)
            found += [(name, endpoint), *((name, hop) for hop in endpoint.jumps)]
    return found
