"""How many strangers an agent lets wait at its listener: what they hold, its engine may need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.mesh.transport.tunnel import HELLO_SECONDS

if TYPE_CHECKING:
    from fabrictool.mesh.transport.tunnel import Tunnel

HANDSHAKE_S = 5.0
STRANGER_S = HANDSHAKE_S + HELLO_SECONDS
"""By then a connection has proved itself or is closed."""
STRANGERS_MAX = 32
"""Each costs a descriptor and some 300 KiB. The agents of a site that come at once are four."""
HUB_SHARE = STRANGERS_MAX // 4
"""Of those, as many as one hub may bring: an agent has two hubs, and one that lies must not shut the other's out."""


class Door:
    """Counts the connections that have not proved themselves."""

    def __init__(self) -> None:
        self._strangers: list[tuple[float, Tunnel, bytes]] = []
        """When each came, and by which hub."""

    def let_in(self, tunnel: Tunnel, now: float, *, by: bytes = b"") -> None:
        """Raises ConnectionRefusedError, which closes the connection, when too many wait; `by` a hub, of its own."""
        self._strangers = [
            (since, t, hub) for since, t, hub in self._strangers if t.peer is None and now - since < STRANGER_S
        ]
        brought = sum(hub == by for _, _, hub in self._strangers) if by else 0
        if len(self._strangers) >= STRANGERS_MAX or brought >= HUB_SHARE:
            raise ConnectionRefusedError
        self._strangers.append((now, tunnel, by))
