"""How much of what was written to a connection its peer has not acknowledged, as far as the system says it."""

from __future__ import annotations

import fcntl
import sys
import termios
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

_SIOCOUTQ: Final = termios.TIOCOUTQ
"""Linux has the same number for both; elsewhere sockets know no such question, or refuse it."""


def unacknowledged(transport: asyncio.Transport) -> int:
    """Octets that the kernel keeps for the peer, beside those that wait in the `transport`; 0 where nobody knows.

    The transport hands them over by the megabyte, whenever a third of the kernel's room is free again: by its own
    buffer a client that takes 8 KB a second looks as if it stood still for minutes.
    """
    socket = transport.get_extra_info("socket")
    if socket is None:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(socket.fileno(), _SIOCOUTQ, b"\0\0\0\0"), sys.byteorder)
    except (OSError, ValueError):  # it is closed, or no such question is known
        return 0
