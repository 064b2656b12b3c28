"""A loopback listener whose connections go through paramiko's channels; one thread for each."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Any

import paramiko

_CHUNK = 1 << 16
_LOOK_SECONDS = 0.2


class PortForward:
    """Listens while the context lasts, then ends its connections and its threads."""

    def __init__(self, transport: Any, host: str, port: int) -> None:
        self._transport = transport
        self._target = (host, port)
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> tuple[str, int]:
        """Host and port to connect to."""
        self._listener.settimeout(_LOOK_SECONDS)
        self._threads[0].start()
        host, port = self._listener.getsockname()
        return host, port

    def __exit__(self, *_: object) -> None:
        """Ends its connections, too."""
        self._over.set()
        self._threads[0].join()
        self._listener.close()
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                here, peer = self._listener.accept()
                thread = threading.Thread(target=self._carry, args=(here, peer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, here: socket.socket, peer: Any) -> None:
        with here, suppress(OSError, EOFError, paramiko.SSHException):
            there = self._transport.open_channel("direct-tcpip", self._target, peer, timeout=10)
            try:
                self._pump(here, there)
            finally:
                there.close()

    def _pump(self, here: socket.socket, there: Any) -> None:
        ways = {here: there, there: here}
        while ways and not self._over.is_set():
            for source in select.select(list(ways), [], [], _LOOK_SECONDS)[0]:
                data = source.recv(_CHUNK)
                if data:
                    ways[source].sendall(data)
                    continue
                ways.pop(source).shutdown(socket.SHUT_WR)
