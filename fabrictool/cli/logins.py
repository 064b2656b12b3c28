"""The connection of verbs that a person types: `bootstrap` and `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.domain.inventory import Login


def at_keyboard(login: Login) -> Connection:
    """Fabric's; where the site wants a person, OpenSSH's own, as the inventory says."""
    from fabrictool.clusters.connections.factory import connect_login, endpoint_of, keyboard

    return connect_login(login) if login.transport == "openssh" else keyboard(endpoint_of(login))
