"""What a turn of the event loop writes, sent together at the turn's end.

A write that follows each read costs more than itself: a peer that sleeps is woken for each, falls asleep again before
the next, and the processor goes to and fro between the kernel's work and ours. Of what is sent at once the first write
wakes it, and it finds the others when it is done with that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("fabrictool.gateway")
MOST_OCTETS: Final = 65_536
"""That wait for a turn's end, as much as a transport's own buffer before it says that it is full. uvloop reads a socket
again and again while there is more: without an end an engine that talks fast would fill the memory in one turn, for a
client that does not listen.
"""


def at_turns_end(call: Callable[[], None]) -> None:
    """Before the running loop waits again."""
    asyncio.get_running_loop().call_soon(call)


class Outbox:
    """Of any number of connections; to each its octets go in the order in which they were put here."""

    __slots__ = ("_due", "_octets", "_soon", "_waiting")

    def __init__(self, soon: Callable[[Callable[[], None]], None] = at_turns_end) -> None:
        """`soon` has `flush` called."""
        self._soon = soon
        self._due, self._octets = False, 0
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def put(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write it at the end of this turn, if the connection is still open then; where much waits, all of it now."""
        self._waiting.append((transport, data))
        self._octets += len(data)
        if self._octets > MOST_OCTETS:
            self.flush()
        elif not self._due:
            self._soon(self.flush)
            self._due = True

    def pass_on(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write it now, where nothing waits for the end of this turn: a token. Those of a paced stream come one a turn,
        and its end would cost more than a peer that is woken.
        """
        if self._waiting:
            self.put(transport, data)
        elif not transport.is_closing():
            transport.write(data)

    def flush(self) -> None:
        """Write all of it now. What a transport calls from inside of that must not put anything here."""
        self._due, self._octets = False, 0
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            try:
                if not transport.is_closing():
                    transport.write(data)
            except Exception:  # noqa: BLE001 - the others have nothing to do with it
                _log.exception("a connection could not be written to")
                transport.abort()

    def close(self, transport: asyncio.Transport) -> None:
        """Once what was put here is written."""
        self.flush()
        transport.close()

    def abort(self, transport: asyncio.Transport) -> None:
        """Now; what was put here before is the transport's to send or not."""
        self.flush()
        transport.abort()
