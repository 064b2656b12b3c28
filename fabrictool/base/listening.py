"""An address at which connections are accepted, whose sockets another process can take over while they are open.

What waits in a listening socket's queue is lost when the last process closes it, and with ``SO_REUSEPORT`` when any
does. So a successor is given the sockets themselves: both processes accept from one queue, until one of them stops.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Listening:
    """Accepts until `pause` or `close`."""

    def __init__(self, protocol: Callable[[], asyncio.Protocol], **options: Any) -> None:
        """With the `options` of asyncio's servers, such as their TLS."""
        self._protocol = protocol
        self._options = options
        self._servers: list[asyncio.Server] = []
        self.sockets: tuple[socket.socket, ...] = ()
        """Of our own, beside those that the servers close."""

    @property
    def port(self) -> int:
        bound: int = self.sockets[0].getsockname()[1]
        return bound

    async def open(self, host: str, port: int, *, shared: bool = False) -> None:
        """At each address of `host`; `shared`: with other processes of this account that say so. Raises OSError."""
        options = self._options | ({"reuse_port": True} if shared else {})
        server = await asyncio.get_running_loop().create_server(self._protocol, host, port, **options)
        self._servers = [server]
        self.sockets = tuple(_again(there) for there in server.sockets)

    async def adopt(self, sockets: Iterable[socket.socket], *, shared: bool = False) -> None:
        """At the sockets of another process. Raises OSError."""
        self.sockets = tuple(sockets)
        for own in self.sockets if shared else ():  # it may have had the address for itself
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await self.resume()

    def pause(self) -> None:
        """Accept nothing; what comes waits in the queue, or goes to whoever has the same sockets."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def resume(self) -> None:
        if not self._servers:
            loop = asyncio.get_running_loop()
            for own in self.sockets:
                self._servers.append(await loop.create_server(self._protocol, sock=_again(own), **self._options))

    def close(self) -> None:
        self.pause()
        for own in self.sockets:
            own.close()
        self.sockets = ()


def _again(there: Any) -> socket.socket:
    """Another descriptor of a socket. Its own `dup` would have it block, and with it the process that shares it."""
    return socket.socket(fileno=os.dup(there.fileno()))
