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


class Door:
    """Counts the connections that have not proved themselves."""

    def __init__(self) -> None:
        self._strangers: list[tuple[float, Tunnel]] = []
        """When each came."""

    def let_in(self, tunnel: Tunnel, now: float) -> None:
        """Raises ConnectionRefusedError, which closes the connection, when too many wait."""
        self._strangers = [(since, t) for since, t in self._strangers if t.peer is None and now - since < STRANGER_S]
        if len(self._strangers) >= STRANGERS_MAX:
            raise ConnectionRefusedError
        self._strangers.append((now, tunnel))
