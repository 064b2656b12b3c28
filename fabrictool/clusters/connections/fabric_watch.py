"""Signs of life for a library that sends keepalives and does not look whether they are answered."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import paramiko

if TYPE_CHECKING:
    from fabrictool.clusters.connections.settings import ConnectionLimits


class KeepaliveWatch:
    """Asks the other side now and then, and closes a transport that answers nothing; all that waits on it wakes."""

    def __init__(self, transport: Any, limits: ConnectionLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ssh-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Called after the transport was closed; waits for the thread."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        patience = self._limits.keepalive_s * self._limits.keepalive_count
        while not self._over.wait(self._limits.keepalive_s) and self._transport.is_active():
            answered = threading.Event()
            asker = threading.Thread(target=self._ask, args=(answered,), daemon=True)
            asker.start()
            if not answered.wait(patience):
                self._transport.close()
            asker.join()

    def _ask(self, answered: threading.Event) -> None:
        """Any answer will do: a server that does not know the request says so. Ends when the transport does."""
        with suppress(OSError, EOFError, paramiko.SSHException):
            self._transport.global_request("keepalive@openssh.com", wait=True)
        answered.set()
