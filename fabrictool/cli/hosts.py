"""Login nodes as the command line names them: of an inventory, or HOST:PORT; shared by `trust host` and `shell`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabrictool.base.errors import UsageError

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Endpoint
    from fabrictool.domain.inventory import Inventory

_TARGET = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?"
)


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

    endpoints: list[tuple[str, Endpoint]] = []
    for name, cluster in inventory.clusters.items() if inventory else ():
        for login in cluster.login:
            endpoint = endpoint_of(login)
            endpoints += [(name, endpoint), *((name, hop) for hop in endpoint.jumps)]
    return endpoints
